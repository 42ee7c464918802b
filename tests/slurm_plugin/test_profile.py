import h5py
import numpy as np
import pytest

from trimtab_slurm import profile
from trimtab_slurm.profile import Event, ProfileError, coverage_ratio, merge, read, read_header, units, write


@pytest.mark.parametrize("node", ["n1", ""])
def test_what_is_written_is_read(tmp_path, make_part, assert_same, node):
    wanted = make_part(node, uuids=("GPU-b", "GPU-a", "MIG-GPU-1/0/1"))
    write(tmp_path / "x.h5", wanted)
    assert_same(read(tmp_path / "x.h5"), wanted)
    assert (tmp_path / "x.h5").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["x.h5"]


def test_the_file_is_as_it_is_documented(tmp_path, make_part):
    write(tmp_path / "x.h5", make_part())
    with h5py.File(tmp_path / "x.h5") as file:
        assert dict(file.attrs) == {
            "schema": 1,
            "cluster": "lab",
            "job_id": 7,
            "user": "ann",
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
            "absent": '{"temperature_celsius": "not supported"}',
            "coverage_ratio": 1.0,
        }
        power = device["power_watts"]
        assert (power.attrs["units"], power.shuffle, power.compression, power.chunks) == ("watts", True, "gzip", (61,))
        assert file["nodes/n1/events/text"].asstr()[0] == "n1: Größe"


@pytest.mark.parametrize(
    ("name", "kind", "unit"),
    [
        ("time_seconds", "f", "seconds"),
        ("peak_memory_bytes", "i", "bytes"),
        ("read_bytes_per_second", "f", "bytes/second"),
        ("utilization_ratio", "f", "ratio"),
        ("sm_clock_hertz", "f", "hertz"),
        ("thread_count", "f", "count"),
        ("step", "i", "count"),
        ("loss", "f", "1"),
        ("node", "U", ""),
    ],
)
def test_units_are_in_the_names(name, kind, unit):
    assert units(name, kind) == unit


def test_coverage_is_what_was_sampled_of_what_was_to_be(make_part):
    whole = make_part(end=59.0).nodes[0]
    (device,) = whole.devices
    half = profile.replace(device, samples={name: column[::2] for name, column in device.samples.items()})
    none = profile.replace(device, samples={name: column[:0] for name, column in device.samples.items()})
    late = profile.replace(device, samples={name: column[30:] for name, column in device.samples.items()})
    assert [coverage_ratio(each, whole) for each in (device, half, none, late)] == [1.0, 0.5, 0.0, 0.5]
    assert coverage_ratio(profile.replace(late, kind="cpu"), whole) == 1.0  # a task begins when it begins


def test_texts_that_hdf5_cannot_hold_are_written_all_the_same(tmp_path, make_part):
    node = profile.replace(make_part().nodes[0], events=(Event(1.0, "fault", "a\0b\udc80c"),))
    write(tmp_path / "x.h5", profile.replace(make_part(), nodes=(node,)))
    assert read(tmp_path / "x.h5").nodes[0].events[0].text == "ab?c"


def test_a_failed_write_leaves_the_file_before_it(tmp_path, make_part, assert_same):
    write(tmp_path / "x.h5", make_part())
    broken = profile.replace(make_part(""), cluster="other")
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


def test_merging_keeps_every_part_as_it_is(tmp_path, make_part, assert_same):
    parts = {name: make_part(name, start) for name, start in [("n2", 2.0), ("n1", 1.0), ("", 5.0)]}
    for name, part in parts.items():
        write(tmp_path / f"part-{name}.h5", part)
    merge(sorted(tmp_path.iterdir()), tmp_path / "whole.h5")
    whole = read(tmp_path / "whole.h5")
    assert whole.start_seconds == parts["n1"].start_seconds
    assert whole.end_seconds == parts["n1"].end_seconds
    assert whole.missing_nodes == ()
    assert_same(whole.nodes, (parts["n1"].nodes[0], parts["n2"].nodes[0]))
    assert_same(whole.training, parts[""].training)


def test_two_parts_of_one_node_are_joined_in_time(tmp_path, make_part):
    for name, part in [
        ("a", make_part("n1", 40.0, 60.0, uuids=("gpu-a", "gpu-new"))),
        ("b", make_part("n1", 0.0, 30.0)),
    ]:
        write(tmp_path / f"{name}.h5", part)
    merge([tmp_path / "a.h5", tmp_path / "b.h5"], tmp_path / "whole.h5")
    (node,) = read(tmp_path / "whole.h5").nodes
    first, second = node.devices
    assert (first.uuid, second.uuid) == ("gpu-a", "gpu-new")
    seconds = first.samples["time_seconds"] - node.start_seconds
    assert seconds.tolist() == [*range(31), *range(40, 61)]
    assert len(second.samples["power_watts"]) == 21
    assert len(node.events) == 2
    assert first.absent == {"temperature_celsius": "not supported"}


def test_the_same_parts_merge_into_the_same_bytes(tmp_path, make_part):
    for name in ("n1", "n2", ""):
        write(tmp_path / f"part-{name}.h5", make_part(name))
    parts = sorted(tmp_path.iterdir())
    merge(parts, tmp_path / "one.h5")
    merge(parts[::-1], tmp_path / "two.h5")
    assert (tmp_path / "one.h5").read_bytes() == (tmp_path / "two.h5").read_bytes()


def test_a_merge_does_not_begin_with_a_damaged_part(tmp_path, make_part):
    write(tmp_path / "a.h5", make_part())
    (tmp_path / "b.h5").write_bytes((tmp_path / "a.h5").read_bytes()[:-100])
    with pytest.raises(ProfileError, match=r"b\.h5"):
        merge([tmp_path / "a.h5", tmp_path / "b.h5"], tmp_path / "whole.h5")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.h5", "b.h5"]
