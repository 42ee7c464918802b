"""The hooks under a real slurmd: jobs get their profiles, nodes stay in service."""

import os
import sys
import time

import pytest

from trimtab_slurm.cluster import CommandLineClient
from trimtab_slurm.profile import read

pytestmark = pytest.mark.slurm

TASK = (
    "import os, time\n"
    "end = time.monotonic() + 3\n"
    "while time.monotonic() < end:\n"
    '    sum(range(10_000)) if os.environ["SLURM_PROCID"] == "0" else time.sleep(0.1)\n'
)


@pytest.fixture
def finished(sandbox):
    """A function that runs a batch script on two nodes, and returns its profiles once they are all there."""
    client = CommandLineClient(sandbox.environment)

    def run(script, attempts=1):
        options = ["--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", "--output=/dev/null"]
        job_id = client.submit(f"#!/bin/sh\n{script}\n", options)
        directory = sandbox.directory / "profiles" / "sandbox" / str(job_id)

        def complete():
            paths = sorted(directory.glob("*.h5"))
            found = [read(path) for path in paths]
            return len(found) == attempts and not any(profile.missing_nodes for profile in found) and found

        return _until(complete)

    yield run
    _until(lambda: set(client.node_states().values()) == {"IDLE"})


def test_a_job_on_two_nodes_has_one_profile_with_the_figures_of_every_task(finished):
    (profile,) = finished(f"srun {sys.executable} -S -c '{TASK}'")
    assert profile.expected_nodes == ("n1", "n2")
    assert profile.user == os.environ.get("USER", "root")
    devices = {device.uuid: device.samples for node in profile.nodes for device in node.devices}
    assert list(devices) == ["cpu-n1-task0", "cpu-n1-task1", "cpu-n2-task2", "cpu-n2-task3"]
    assert all(len(samples["time_seconds"]) >= 2 for samples in devices.values())
    busy = devices.pop("cpu-n1-task0")["cpu_seconds"][-1]
    assert busy > 5 * max(samples["cpu_seconds"][-1] for samples in devices.values())
    for node in profile.nodes:
        assert [event.kind for event in node.events] == ["prolog", "sampler", "fault", "epilog", "sampler"]
        assert node.events[3].text == "job exit code 0:0"


def test_each_attempt_of_a_requeued_job_has_its_own_profile(finished):
    first, second = finished(
        'srun sleep 1; [ -n "$SLURM_RESTART_COUNT" ] || { scontrol requeue $SLURM_JOB_ID; sleep 60; }', attempts=2
    )
    assert (first.restart_count, second.restart_count) == (0, 1)
    assert first.end_seconds < second.start_seconds


def test_a_node_that_is_given_back_keeps_its_place_in_the_profile(finished, tmp_path):
    # scontrol writes two files where it is called.
    script = f"cd {tmp_path}; srun sleep 1; scontrol update JobId=$SLURM_JOB_ID NodeList=n1; sleep 5"
    (profile,) = finished(script)
    assert profile.expected_nodes == ("n1", "n2")
    n1, n2 = profile.nodes
    assert n2.end_seconds + 3 < n1.end_seconds
    assert [event.kind for event in n2.events] == ["prolog", "sampler", "fault", "epilog", "sampler"]


def _until(condition, seconds=90.0):
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return result
