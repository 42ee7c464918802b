import math
import os
from dataclasses import replace

import h5py
import numpy as np
import pytest

from trimtab_slurm import profile
from trimtab_slurm.contents import Event, ProfileError, coverage_ratio, units
from trimtab_slurm.profile import opened, read, read_header, write


@pytest.fixture
def merge(tmp_path):
    """A function that merges the parts in the test's directory into whole.h5, and returns what was left out."""

    def merge(**unusable):
        parts = {path: read_header(path) for path in sorted(tmp_path.glob("part-*.h5"))}
        left_out = {tmp_path / name: reason for name, reason in unusable.items()}
        return profile.merge(parts, tmp_path / "whole.h5", left_out, attempt_number=2, previous="before.h5")

    return merge


@pytest.fixture
def damage_values():
    """A function that overwrites the first values of a column."""

    def overwrite(path, column):
        with h5py.File(path) as file:
            place = file[column].id.get_chunk_info(0).byte_offset
        with path.open("r+b") as damaged:
            damaged.seek(place)
            damaged.write(bytes(8))

    return overwrite


@pytest.mark.parametrize("node", ["n1", ""])
def test_what_is_written_is_read(tmp_path, make_part, assert_same, node):
    wanted = make_part(node, uuids=("GPU-b", "GPU-a", "MIG-GPU-1/0/1"))
    write(tmp_path / "x.h5", wanted)
    assert_same(read(tmp_path / "x.h5"), wanted)
    assert (tmp_path / "x.h5").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["x.h5"]


def test_the_file_is_as_it_is_documented(tmp_path, make_part):
    node = make_part().nodes[0]
    processes = {"time_seconds": np.array([1.0]), "pid": np.array([42]), "memory_used_bytes": np.array([2.0**30])}
    device = replace(node.devices[0], pci="0000:1b:00.0", processes=processes)
    write(tmp_path / "x.h5", replace(make_part(), sluid="s9KW", nodes=(replace(node, devices=(device,)),)))
    with h5py.File(tmp_path / "x.h5") as file:
        assert dict(file.attrs) == {
            "schema": 1,
            "cluster": "lab",
            "job_id": 7,
            "user": "ann",
            "sluid": "s9KW",
            "start": "2026-05-28T20:26:40+00:00",
            "start_seconds": 1_780_000_000.0,
            "end_seconds": 1_780_000_060.0,
            "restart_count": 0,
            "expected_nodes": "n1,n2",
            "missing_nodes": "n2",
        }
        device = file["nodes/n1/devices/gpu-a"]
        assert dict(device.attrs) == {
            "uuid": "gpu-a",
            "kind": "gpu",
            "model": "H100",
            "index": 0,
            "driver": "NVML 12",
            "pci": "0000:1b:00.0",
            "parent_uuid": "",
        }
        power = device["power_watts"]
        assert (power.shuffle, power.compression, power.chunks) == (True, "gzip", (61,))
        assert dict(power.attrs) == {"units": "watts", "coverage_ratio": 1.0}
        temperature = {"units": "celsius", "coverage_ratio": 0.0, "absent": "not supported"}
        assert dict(device["temperature_celsius"].attrs) == temperature
        assert {name: column[0] for name, column in device["processes"].items()} == {
            "time_seconds": 1.0,
            "pid": 42,
            "memory_used_bytes": 2.0**30,
        }
        assert device["processes/pid"].attrs["units"] == "count"
        assert file["nodes/n1/events/text"].asstr()[0] == "n1: Größe"


def test_an_opened_profile_is_what_is_read(tmp_path, make_part, assert_same):
    part = make_part(uuids=("GPU-b", "MIG-GPU-1/0/1"))
    write(tmp_path / "x.h5", part)
    with opened(tmp_path / "x.h5") as found:
        (node,), whole = found.nodes, part.nodes[0]
        for device, wanted in zip(node.devices, whole.devices, strict=True):
            assert_same(dict(device.samples), wanted.samples)
            assert (dict(device.absent), dict(device.processes)) == (wanted.absent, wanted.processes)
            assert (len(device.samples), len(device.absent)) == (3, 1)
            assert device.samples.get("fan_ratio") is device.absent.get("fan_ratio") is None


def test_a_column_of_an_opened_profile_is_read_when_it_is_asked_for(tmp_path, make_part, damage_values):
    write(tmp_path / "x.h5", make_part())
    damage_values(tmp_path / "x.h5", "nodes/n1/devices/gpu-a/power_watts")
    with opened(tmp_path / "x.h5") as found:
        samples = found.nodes[0].devices[0].samples
        assert len(samples["time_seconds"]) == 61
    with pytest.raises(ProfileError, match=r"x\.h5 is no profile, or damaged: "), opened(tmp_path / "x.h5") as found:
        found.nodes[0].devices[0].samples["power_watts"]


@pytest.mark.parametrize("link", [h5py.SoftLink("/nodes"), h5py.ExternalLink("other.h5", "/x")])
def test_a_link_for_a_column_is_refused_and_not_followed(tmp_path, make_part, link):
    write(tmp_path / "x.h5", make_part())
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        file["nodes/n1/devices/gpu-a/fan_ratio"] = link
    for ask in (lambda samples: samples.get("fan_ratio"), dict):
        with pytest.raises(ProfileError, match=r"gpu-a/fan_ratio is a link"), opened(tmp_path / "x.h5") as found:
            ask(found.nodes[0].devices[0].samples)


def test_columns_of_different_lengths_are_refused(tmp_path, make_part):
    write(tmp_path / "x.h5", make_part())
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        device = file["nodes/n1/devices/gpu-a"]
        del device["power_watts"]
        device["power_watts"] = np.zeros(60)
    with pytest.raises(ProfileError, match=r"gpu-a: its columns are of different lengths"):
        read(tmp_path / "x.h5")


@pytest.mark.parametrize(
    ("name", "kind", "unit"),
    [
        ("time_seconds", "f", "seconds"),
        ("peak_memory_bytes", "i", "bytes"),
        ("read_bytes_per_second", "f", "bytes/second"),
        ("utilization_ratio", "f", "ratio"),
        ("sm_clock_hertz", "f", "hertz"),
        ("thread_count", "f", "count"),
        ("throttle_reasons_bits", "f", "bits"),
        ("temperature_celsius", "f", "celsius"),
        ("energy_joules", "f", "joules"),
        ("power_watts", "f", "watts"),
        ("step", "i", "count"),
        ("loss", "f", "1"),
        ("node", "U", ""),
    ],
)
def test_units_are_in_the_names(name, kind, unit):
    assert units(name, kind) == unit


def test_coverage_is_what_was_sampled_of_what_was_to_be(make_part):
    whole = make_part(end=60.0).nodes[0]
    (device,) = whole.devices

    def only(rows, **fields):
        return replace(device, samples={name: column[rows] for name, column in device.samples.items()}, **fields)

    devices = [device, only(slice(0, 60, 2)), only(slice(0)), only(slice(31, None))]
    assert [coverage_ratio(each, whole) for each in devices] == [1.0, 0.5, 0.0, 0.5]
    assert coverage_ratio(only(slice(31, None), kind="cpu"), whole) == 1.0  # a task begins when it begins
    assert math.isnan(coverage_ratio(only(slice(0), kind="cpu"), whole))
    assert coverage_ratio(device, whole, "temperature_celsius") == coverage_ratio(device, whole, "fan_ratio") == 0.0


@pytest.mark.parametrize("begun", [0.1, 0.9])
def test_a_sampler_that_did_all_it_could_covers_all_whenever_it_had_started(make_part, begun):
    """Its first sample is up to a period late, and where it was killed, the last record is the last sample."""
    node = make_part(end=59.95).nodes[0]
    seconds = np.arange(begun, 59.95)
    device = replace(node.devices[0], samples={"time_seconds": node.start_seconds + seconds})
    assert coverage_ratio(device, replace(node, end_seconds=node.start_seconds + seconds[-1])) == 1.0
    assert coverage_ratio(device, node) == 1.0


def test_a_part_shorter_than_the_period_asks_for_one_sample(make_part):
    node = make_part(end=0.4).nodes[0]
    assert len(node.devices[0].samples["time_seconds"]) == 1
    assert coverage_ratio(node.devices[0], node) == 1.0


def test_texts_that_hdf5_cannot_hold_are_written_all_the_same(tmp_path, make_part):
    node = replace(make_part().nodes[0], events=(Event(1.0, "fault", "a\0b\udc80c"),))
    write(tmp_path / "x.h5", replace(make_part(), nodes=(node,)))
    assert read(tmp_path / "x.h5").nodes[0].events[0].text == "ab?c"


def test_a_failed_write_leaves_the_file_before_it(tmp_path, make_part, assert_same):
    write(tmp_path / "x.h5", make_part())
    broken = replace(make_part(""), cluster="other")
    broken.training.steps["x"] = np.array([object()])
    with pytest.raises(TypeError):
        write(tmp_path / "x.h5", broken)
    assert_same(read(tmp_path / "x.h5"), make_part())
    assert [path.name for path in tmp_path.iterdir()] == ["x.h5"]


def test_what_is_no_profile_is_refused_by_name(tmp_path, make_part):
    path = tmp_path / "x.h5"
    with pytest.raises(ProfileError, match=r"x\.h5 does not exist"):
        read(path)
    path.write_text("no")
    with pytest.raises(ProfileError, match=r"x\.h5 is no profile, or damaged: it does not begin"):
        read(path)
    with h5py.File(path, "w"):
        pass
    with pytest.raises(ProfileError, match=r"x\.h5 is no profile, or damaged: it has no schema"):
        read(path)
    with h5py.File(path, "w") as file:
        file.attrs["schema"] = 99
    with pytest.raises(ProfileError, match=r"x\.h5 has schema 99, this trimtab reads up to 1"):
        read_header(path)


def test_a_file_cut_off_anywhere_is_refused_by_name(tmp_path, make_part):
    write(tmp_path / "x.h5", make_part())
    content = (tmp_path / "x.h5").read_bytes()
    for size in range(8, len(content), 997):
        (tmp_path / "cut.h5").write_bytes(content[:size])
        with pytest.raises(ProfileError, match=r"cut\.h5 is no profile, or damaged: "):
            read(tmp_path / "cut.h5")


def test_figures_of_few_values_are_not_shuffled_and_counters_are(tmp_path, make_part):
    rows = np.arange(3000)
    samples = {
        "time_seconds": 1.78e9 + rows,
        "utilization_ratio": np.random.default_rng(1).choice([0.97, 0.98, 1.0], 3000),
        "energy_joules": 987654.321 + 612.345 * rows,
    }
    node = make_part(end=3000.0).nodes[0]
    device = replace(node.devices[0], samples=samples, absent={})
    write(tmp_path / "x.h5", replace(make_part(), nodes=(replace(node, devices=(device,)),)))
    with h5py.File(tmp_path / "x.h5") as file:
        group = file["nodes/n1/devices/gpu-a"]
        assert {name: column.shuffle for name, column in group.items()} == {
            "time_seconds": True,
            "utilization_ratio": False,
            "energy_joules": True,
        }
        for name, column in group.items():  # without loss
            np.testing.assert_array_equal(column[:], samples[name])


def test_merging_keeps_every_part_as_it_is(tmp_path, make_part, assert_same, merge):
    parts = {name: make_part(name, start) for name, start in [("n2", 2.0), ("n1", 1.0), ("", 5.0)]}
    for name, part in parts.items():
        write(tmp_path / f"part-{name}.h5", part)
    assert merge() == {}
    whole = read(tmp_path / "whole.h5")
    assert whole.start_seconds == parts["n1"].start_seconds
    assert whole.end_seconds == parts["n1"].end_seconds
    assert whole.missing_nodes == ()
    assert (whole.attempt_number, whole.previous, whole.events) == (2, "before.h5", ())
    assert_same(whole.nodes, (parts["n1"].nodes[0], parts["n2"].nodes[0]))
    assert_same(whole.training, parts[""].training)


def test_all_trainings_of_an_attempt_are_kept_in_the_order_of_their_start(tmp_path, make_part, assert_same, merge):
    parts = [make_part("", start, start + 1) for start in range(12)]
    for place, part in enumerate(parts):
        write(tmp_path / f"part-{-place}.h5", part)
    write(tmp_path / "part-n1.h5", make_part())
    assert merge() == {}
    whole = read(tmp_path / "whole.h5")
    *earlier, last = [part.training for part in parts]
    assert_same(whole.training, last)
    assert_same(whole.earlier_trainings, tuple(earlier))
    with h5py.File(tmp_path / "whole.h5") as file:
        assert set(file["earlier_trainings"]) == {str(number) for number in range(1, 12)}
        assert file["earlier_trainings/2"].keys() == file["training"].keys()
    write(tmp_path / "again.h5", whole)
    assert_same(read(tmp_path / "again.h5"), whole)


def test_an_attempt_of_one_training_has_no_earlier_ones(tmp_path, make_part, merge):
    write(tmp_path / "part-.h5", make_part(""))
    merge()
    with h5py.File(tmp_path / "whole.h5") as file:
        assert set(file) == {"events", "nodes", "training"}
    assert read(tmp_path / "whole.h5").earlier_trainings == ()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_damaged_training_costs_only_itself(tmp_path, make_part, assert_same, merge, damage_values, place):
    parts = [make_part("", start) for start in (0.0, 10.0, 20.0)]
    for number, part in enumerate(parts):
        write(tmp_path / f"part-{number}.h5", part)
    damage_values(tmp_path / f"part-{place}.h5", "training/steps/loss")
    assert [path.name for path in merge()] == [f"part-{place}.h5"]
    whole = read(tmp_path / "whole.h5")
    first, last = (part.training for number, part in enumerate(parts) if number != place)
    assert_same((whole.earlier_trainings, whole.training), ((first,), last))


@pytest.mark.parametrize("name", ["nodes", "training", "earlier_trainings"])
def test_values_where_a_group_should_be_are_refused(tmp_path, make_part, name):
    write(tmp_path / "x.h5", make_part())
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        file.pop(name, None)
        file[name] = np.array([b"1", b"2"])
        file[name].attrs.update({"start_seconds": 0.0, "end_seconds": 1.0})
    with pytest.raises(ProfileError, match=rf"x\.h5 is no profile, or damaged: /{name} is no group"):
        read(tmp_path / "x.h5")


@pytest.mark.parametrize("name", ["probes", "settings", "orders", "checkpoints"])
def test_files_of_versions_that_lacked_a_table_have_an_empty_one(tmp_path, make_part, name):
    part = make_part("")
    write(tmp_path / "older.h5", replace(part, training=replace(part.training, **{name: {}})))
    with h5py.File(tmp_path / "older.h5") as file:
        assert name not in file["training"]
    assert getattr(read(tmp_path / "older.h5").training, name) == {}


def test_the_figures_of_orders_carry_their_units(tmp_path, make_part):
    write(tmp_path / "x.h5", make_part(""))
    with h5py.File(tmp_path / "x.h5") as file:
        training = file["training"]
        assert training["orders/moved_bytes"].attrs["units"] == "bytes"
        assert training["orders/number"].attrs["units"] == "count"
        assert training["settings/layout"].attrs["units"] == ""
        assert training["checkpoints/duration_seconds"].attrs["units"] == "seconds"


def test_two_parts_of_one_node_are_joined_in_time(tmp_path, make_part, merge):
    def with_process(part, seconds, pid):
        node = part.nodes[0]
        table = {"time_seconds": np.array([seconds]), "pid": np.array([pid]), "memory_used_bytes": np.array([1.0])}
        first = replace(node.devices[0], processes=table)
        return replace(part, nodes=(replace(node, devices=(first, *node.devices[1:])),))

    write(tmp_path / "part-a.h5", with_process(make_part("n1", 40.0, 60.0, uuids=("gpu-a", "gpu-new")), 50.0, 2))
    write(tmp_path / "part-b.h5", with_process(make_part("n1", 0.0, 30.0), 20.0, 1))
    merge()
    (node,) = read(tmp_path / "whole.h5").nodes
    first, second = node.devices
    assert (first.uuid, second.uuid) == ("gpu-a", "gpu-new")
    seconds = first.samples["time_seconds"] - node.start_seconds
    assert seconds.tolist() == [*range(31), *range(40, 61)]
    assert first.processes["pid"].tolist() == [1, 2]
    assert len(second.samples["power_watts"]) == 21
    assert len(node.events) == 2
    assert first.absent == {"temperature_celsius": "not supported"}


def test_a_figure_that_one_of_two_parts_has_is_nan_in_the_others_rows(tmp_path, make_part, merge):
    part = make_part("n1", 40.0, 60.0)
    device = part.nodes[0].devices[0]
    device.samples["sm_active_ratio"] = np.full(21, 0.5, dtype=np.float32)
    write(tmp_path / "part-a.h5", part)
    write(tmp_path / "part-b.h5", make_part("n1", 0.0, 30.0))
    merge()
    column = read(tmp_path / "whole.h5").nodes[0].devices[0].samples["sm_active_ratio"]
    assert column.dtype == np.float32
    np.testing.assert_array_equal(column, [*[np.nan] * 31, *[0.5] * 21])


def test_the_same_parts_merge_into_the_same_bytes(tmp_path, make_part):
    for name in ("n1", "n2", ""):
        write(tmp_path / f"part-{name}.h5", make_part(name))
    headers = [(path, read_header(path)) for path in sorted(tmp_path.iterdir())]
    profile.merge(dict(headers), tmp_path / "one.h5", {}, 1, "")
    profile.merge(dict(headers[::-1]), tmp_path / "two.h5", {}, 1, "")
    assert (tmp_path / "one.h5").read_bytes() == (tmp_path / "two.h5").read_bytes()


@pytest.fixture
def damage():
    """A function that overwrites bytes of a file with zeros, from where it holds a text on."""

    def overwrite(path, text, length):
        content = path.read_bytes()
        place = content.index(text)
        path.write_bytes(content[:place] + bytes(length) + content[place + length :])

    return overwrite


def test_a_part_damaged_within_is_left_out_and_named_and_the_rest_is_merged(
    tmp_path, make_part, assert_same, merge, damage
):
    for name in ("n1", "n2"):
        write(tmp_path / f"part-{name}.h5", make_part(name))
    damage(tmp_path / "part-n2.h5", b"gpu-a", 400)  # where its device's columns are listed
    assert read_header(tmp_path / "part-n2.h5").nodes == ("n2",)
    left_out = merge()
    assert [path.name for path in left_out] == ["part-n2.h5"]
    whole = read(tmp_path / "whole.h5")
    assert whole.missing_nodes == ("n2",)
    assert_same(whole.nodes, make_part("n1").nodes)
    (event,) = whole.events
    assert (event.kind, event.time_seconds) == ("part", whole.end_seconds)
    assert event.text.startswith(f"left out: {tmp_path}/part-n2.h5 is no profile, or damaged: ")
    # A part that is written anew has another id, and is seen to be missing.
    assert {part.partition("@")[0] for part in read_header(tmp_path / "whole.h5").parts} == {"part-n1.h5", "part-n2.h5"}


def test_a_part_whose_values_are_damaged_is_left_out_before_it_spoils_the_file(
    tmp_path, make_part, merge, damage_values
):
    for name in ("n1", "n2", ""):
        write(tmp_path / f"part-{name}.h5", make_part(name))
    damage_values(tmp_path / "part-n2.h5", "nodes/n2/devices/gpu-a/power_watts")
    damage_values(tmp_path / "part-.h5", "training/steps/loss")
    assert sorted(path.name for path in merge()) == ["part-.h5", "part-n2.h5"]
    whole = read(tmp_path / "whole.h5")
    assert ([node.node for node in whole.nodes], whole.training) == (["n1"], None)
    assert len(whole.events) == 2


def test_of_two_parts_of_a_node_the_damaged_one_costs_only_itself(tmp_path, make_part, merge, damage):
    write(tmp_path / "part-a.h5", make_part("n1", 0.0, 30.0))
    write(tmp_path / "part-b.h5", make_part("n1", 40.0, 60.0))
    damage(tmp_path / "part-b.h5", b"gpu-a", 400)
    assert [path.name for path in merge()] == ["part-b.h5"]
    (node,) = read(tmp_path / "whole.h5").nodes
    assert len(node.devices[0].samples["time_seconds"]) == 31


def test_a_part_that_cannot_be_read_at_all_is_named_too(tmp_path, make_part, merge):
    write(tmp_path / "part-n1.h5", make_part())
    (tmp_path / "torn").touch()
    merge(torn="torn is damaged")
    assert [event.text for event in read(tmp_path / "whole.h5").events] == ["left out: torn is damaged"]
    assert {part.partition("@")[0] for part in read_header(tmp_path / "whole.h5").parts} == {"part-n1.h5", "torn"}


def test_a_merge_that_cannot_be_written_leaves_the_file_before_it(tmp_path, make_part, merge, monkeypatch):
    write(tmp_path / "part-n1.h5", make_part())
    (tmp_path / "whole.h5").write_text("old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        merge()
    assert (tmp_path / "whole.h5").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part-n1.h5", "whole.h5"]
