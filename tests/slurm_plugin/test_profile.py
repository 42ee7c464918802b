import stat
from dataclasses import replace

import h5py
import numpy as np
import pytest

from trimtab_slurm import collect, profile
from trimtab_slurm.profile import DeviceProfile, Event, NodeProfile, Profile, ProfileError, TrainingProfile

DAY = 86400.0


def node_part(name, start, end, *, restart_count=0, job_id=7):
    moments = np.array([start, end])
    samples = {
        "time_seconds": moments,
        "utilization_ratio": np.array([np.nan, 0.5]),
        "memory_used_bytes": moments * 0 + 3,
    }
    device = DeviceProfile(
        f"cpu-{name}-task0", "cpu", "a model", 0, "procfs", samples, {"memory_used_bytes": "no reason"}
    )
    node = NodeProfile(name, start, end, 1.0, (device,), (Event(start, "prolog", "sampling began ☃"),))
    return Profile("c", job_id, "u", start, end, restart_count, ("n1", "n2"), (node,), None)


def training_part(start, end, *, restart_count=0):
    steps = {"step": np.array([1, 2]), "loss": np.array([9.0, np.nan])}
    ranks = {"rank": np.array([0]), "node": np.array(["n1"]), "device": np.array(["cpu-n1-task0"])}
    training = TrainingProfile(
        start, end, {"tensor": 2, "outcome": "trained", "trigger_ratio": 0.1}, steps, {}, ranks, ()
    )
    return Profile("c", 7, "u", start, end, restart_count, ("n1", "n2"), (), training)


@pytest.mark.parametrize("written", [node_part("n1", 1.0, 5.0), training_part(2.0, 4.0)], ids=["node", "training"])
def test_a_profile_is_read_as_it_was_written(tmp_path, written):
    path = tmp_path / "p.h5"
    profile.write(path, written)
    found = profile.read(path)
    if written.nodes:
        (device,) = found.nodes[0].devices
        (original,) = written.nodes[0].devices
        assert device.samples.keys() == original.samples.keys()
        for name, column in original.samples.items():
            np.testing.assert_array_equal(device.samples[name], column)
        assert replace(device, samples={}) == replace(original, samples={})
        assert found.nodes[0].events == written.nodes[0].events
    else:
        assert found.training.attributes == written.training.attributes
        np.testing.assert_array_equal(found.training.steps["loss"], [9.0, np.nan])
        assert found.training.ranks["device"].tolist() == ["cpu-n1-task0"]
    assert replace(found, nodes=(), training=None) == replace(written, nodes=(), training=None)


def test_columns_say_their_unit_and_devices_their_coverage(tmp_path):
    profile.write(tmp_path / "p.h5", node_part("n1", 0.0, 4.0))
    with h5py.File(tmp_path / "p.h5") as file:
        device = file["nodes/n1/devices/cpu-n1-task0"]
        assert device["memory_used_bytes"].attrs["units"] == "bytes"
        assert device["utilization_ratio"].attrs["units"] == "ratio"
        assert device.attrs["coverage_ratio"] == 0.5  # two samples where four were due
        assert list(file.attrs["missing_nodes"]) == ["n2"]


def test_a_profile_is_its_owners_alone_and_nothing_else_is_left(tmp_path):
    profile.write(tmp_path / "p.h5", node_part("n1", 0.0, 4.0))
    assert stat.S_IMODE((tmp_path / "p.h5").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["p.h5"]


def test_what_is_no_profile_is_named(tmp_path):
    path = tmp_path / "p.h5"
    with pytest.raises(ProfileError, match="does not exist"):
        profile.read(path)
    path.write_bytes(b"not HDF5")
    with pytest.raises(ProfileError, match="is no profile, or damaged"):
        profile.read(path)
    profile.write(path, node_part("n1", 0.0, 4.0))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ProfileError, match="is no profile, or damaged"):
        profile.read(path)
    path.write_bytes(whole)
    with h5py.File(path, "a") as file:
        file.attrs["schema"] = 99
    with pytest.raises(ProfileError, match="install a newer one"):
        profile.read(path)


def test_parts_of_one_attempt_are_told_from_a_requeue_and_from_a_recycled_id():
    first = [node_part("n1", 0.0, 50.0), node_part("n2", 60.0 - 15, 50.0), training_part(5.0, 49.0)]
    requeued = [node_part("n1", 60.0, 99.0, restart_count=1), training_part(62.0, 98.0, restart_count=1)]
    recycled = [node_part("n1", 9 * DAY, 9 * DAY + 50), node_part("n2", 9 * DAY + 1, 9 * DAY + 50)]
    groups = collect.group_attempts([*recycled, *requeued, *first])
    assert [len(group) for group in groups] == [3, 2, 2]
    assert [group[0].start_seconds for group in groups] == [0.0, 60.0, 9 * DAY]


def test_collecting_merges_parts_once_and_again(tmp_path):
    (tmp_path / "parts").mkdir()
    for name, part in {
        "n1": node_part("n1", 100.0, 150.0),
        "n2": node_part("n2", 101.0, 151.0),
        "training": training_part(105.0, 149.0),
        "later": node_part("n1", 200.0, 250.0, restart_count=1),
    }.items():
        profile.write(tmp_path / "parts" / f"{name}.h5", part)
    first, second = collect.collect_job(tmp_path)
    assert first.name == "19700101T000140Z.h5"
    merged = profile.read(first)
    assert [node.node for node in merged.nodes] == ["n1", "n2"]
    assert merged.training is not None
    assert (merged.end_seconds, merged.missing_nodes) == (151.0, ())
    assert profile.read(second).missing_nodes == ("n2",)
    assert collect.collect_job(tmp_path) == [first, second]
