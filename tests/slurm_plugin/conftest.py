"""What the tests of the node side share: an attempt, a journal, the parts of profiles."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest

from trimtab_slurm.attempt import Attempt
from trimtab_slurm.profile import DeviceProfile, Event, NodeProfile, Profile, TrainingProfile

START_SECONDS = 1_780_000_000.0


@pytest.fixture
def attempt():
    return Attempt(
        cluster="lab",
        job_id=7,
        start_seconds=START_SECONDS,
        node="n1",
        user="ann",
        uid=1000,
        gid=1001,
        restart_count=0,
        expected_nodes=("n1", "n2"),
        gpu_variables={"SLURM_JOB_GPUS": "0,1"},
    )


@pytest.fixture
def open_path():
    """An empty directory that other users can enter, as they cannot pytest's own."""
    directory = Path(tempfile.mkdtemp(prefix="trimtab-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def make_part():
    """A function that makes the part of a node, or of the training where `node` is empty."""

    def make(node="n1", start=0.0, end=60.0, restart_count=0, expected=("n1", "n2"), uuids=("gpu-a",)):
        times = START_SECONDS + np.arange(start, end + 0.5)
        devices = [
            DeviceProfile(
                uuid=uuid,
                kind="gpu",
                model="H100",
                index=index,
                driver="NVML 12",
                samples={
                    "time_seconds": times,
                    "power_watts": 300.0 + np.sin(times),
                    "temperature_celsius": np.full(len(times), np.nan),
                },
                absent={"temperature_celsius": "not supported"},
            )
            for index, uuid in enumerate(uuids)
        ]
        events = (Event(START_SECONDS + start, "prolog", f"{node}: Größe"),)
        whole = NodeProfile(node, START_SECONDS + start, START_SECONDS + end, 1.0, tuple(devices), events)
        return Profile(
            cluster="lab",
            job_id=7,
            user="ann",
            start_seconds=START_SECONDS + start,
            end_seconds=START_SECONDS + end,
            restart_count=restart_count,
            expected_nodes=expected,
            nodes=(whole,) if node else (),
            training=None if node else make_training(START_SECONDS + start, START_SECONDS + end),
        )

    return make


def make_training(start, end):
    return TrainingProfile(
        start_seconds=start,
        end_seconds=end,
        attributes={"tensor": 2, "outcome": "trained", "trigger_ratio": 0.1},
        steps={"step": np.array([1, 2]), "loss": np.array([2.5, np.nan])},
        stages={"step": np.array([], dtype=np.int64), "forward_seconds": np.array([])},
        ranks={"rank": np.array([0, 1]), "node": np.array(["n1", "n2-longer"])},
        events=(),
    )


def assert_same(one, other):
    """Equal dataclasses, arrays and NaN included."""
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype or one.dtype.kind == other.dtype.kind == "U"
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_same(value, other[key])
    elif isinstance(one, tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    elif hasattr(one, "__dataclass_fields__"):
        assert_same(vars(one), vars(other))
    else:
        assert one == other


@pytest.fixture(name="assert_same")
def _assert_same():
    return assert_same
