import math
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from trimtab_slurm.devices import discover
from trimtab_slurm.devices.cpu import COLUMNS, CpuSource, _rates, _Totals, task_of, task_uuid

TASK = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3"}
BUSY = "import sys, time\nwhile True: sum(range(10_000))"
IDLE = "import time; time.sleep(1000)"


@pytest.fixture
def mine(attempt):
    """The attempt, as a job of the user who runs the tests."""
    return replace(attempt, uid=os.geteuid())


@pytest.fixture
def start():
    """A function that starts Python code as a process with an environment."""
    started = []

    def run(code, environment=TASK, **options):
        process = subprocess.Popen([sys.executable, "-I", "-S", "-c", code], env=environment, **options)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("change", "task"),
    [
        ({}, 3),
        ({"SLURM_CLUSTER_NAME": "lab"}, 3),
        ({"SLURM_JOB_ID": "8"}, None),
        ({"SLURMD_NODENAME": "n2"}, None),
        ({"SLURM_CLUSTER_NAME": "other"}, None),
        ({"SLURM_STEP_ID": ""}, None),  # the batch script
        ({"SLURM_STEP_ID": "4294967291"}, None),  # likewise, where Slurm numbers it
        ({"SLURM_PROCID": "-1"}, None),
        ({"SLURM_PROCID": ""}, None),
    ],
)
def test_only_a_task_of_a_step_of_this_job_on_this_node_is_a_device(attempt, change, task):
    assert task_of(TASK | change, attempt) == task


def test_rates_are_differences_over_time():
    before, after = _Totals(10.0, 1.0, 5, 100, 1000), _Totals(12.0, 6.0, 9, 100, 3000)
    assert _rates(before, after) == {
        "utilization_cores": 2.5,
        "major_faults_per_second": 2.0,
        "read_bytes_per_second": 0.0,
        "written_bytes_per_second": 1000.0,
    }


def test_rates_are_never_negative_and_not_taken_over_no_time():
    assert set(_rates(_Totals(10.0, 9.0, 9, 9, 9), _Totals(12.0, 1.0, 1, 1, 1)).values()) == {0.0}
    assert all(math.isnan(rate) for rate in _rates(_Totals(10.0, 0, 0, 0, 0), _Totals(10.01, 1, 1, 1, 1)).values())
    unknown = _rates(_Totals(10.0, 0, 0, 0, 0), _Totals(12.0, 1.0, 1, math.nan, math.nan))
    assert unknown["utilization_cores"] == 0.5
    assert math.isnan(unknown["read_bytes_per_second"])


def test_tasks_come_and_go_with_figures_of_their_own(mine, start):
    driver = CpuSource(mine)
    assert driver.devices() == []
    busy, idle = start(BUSY), start(IDLE, TASK | {"SLURM_PROCID": "10"})
    start(BUSY, TASK | {"SLURM_STEP_ID": ""})
    time.sleep(0.3)
    for device in driver.devices():
        device.sample()
    time.sleep(0.5)
    devices = driver.devices()
    assert [device.identity.uuid for device in devices] == [task_uuid("n1", 3), task_uuid("n1", 10)]
    assert [device.identity.index for device in devices] == [3, 10]
    first, second = (device.sample() for device in devices)
    assert set(first.values) == set(COLUMNS)
    assert first.absent == {}
    assert 0 < first.values["utilization_cores"] < 1.2  # one thread, on a machine that is busy with other things
    assert second.values["utilization_cores"] < 0.05
    assert first.values["utilization_ratio"] == pytest.approx(
        first.values["utilization_cores"] / len(os.sched_getaffinity(busy.pid))
    )
    assert first.values["memory_used_bytes"] > 1e6
    assert (first.values["process_count"], first.values["thread_count"]) == (1, 1)
    busy.kill()
    busy.wait()
    assert [device.identity.index for device in driver.devices()] == [10]
    idle.kill()


def test_children_belong_to_their_task_with_a_wiped_environment_too(mine, start):
    child = f"import os, sys; os.execve(sys.executable, ['python', '-I', '-S', '-c', {IDLE!r}], {{}})"
    code = (
        f"import subprocess, sys\n"
        f"children = [subprocess.Popen([sys.executable, '-I', '-S', '-c', {child!r}]) for _ in range(2)]\n"
        f"sys.stdin.read()\n"
        f"[child.kill() for child in children]"
    )
    parent = start(code, stdin=subprocess.PIPE)
    driver = CpuSource(mine)
    _until(lambda: [device.sample().values["process_count"] for device in driver.devices()] == [3])
    parent.stdin.close()
    _until(lambda: driver.devices() == [])


def test_a_process_that_becomes_a_task_later_is_found(mine, start):
    """As slurmstepd's child does: it exists before it has the task's environment."""
    waiting = start(
        "import os, sys; sys.stdin.read(); "
        f"os.execve(sys.executable, ['python', '-I', '-S', '-c', {IDLE!r}], {TASK!r})",
        {},
        stdin=subprocess.PIPE,
    )
    driver = CpuSource(mine)
    assert driver.devices() == []
    waiting.stdin.close()
    _until(lambda: [device.identity.index for device in driver.devices()] == [3])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_another_users_process_is_no_task_whatever_its_environment_says(mine):
    users = subprocess.Popen(["/bin/sleep", "1000"], env=TASK, user=1000, group=1000, extra_groups=[])
    try:
        assert CpuSource(mine).devices() == []
        assert len(CpuSource(replace(mine, uid=1000)).devices()) == 1
    finally:
        users.kill()
        users.wait()


def test_gpus_that_no_driver_measures_are_named(mine, monkeypatch):
    monkeypatch.setitem(sys.modules, "amdsmi", None)  # as where it is not installed
    library = "/nowhere/libnvidia-ml.so.1"
    why = f'NVML: nvml_library = "{library}" in node.toml cannot be loaded'
    (note,) = discover(mine, library).notes
    assert note.startswith(f"GPU driver not found: 2 GPUs held (0, 1), not measured: {why}")
    (note,) = discover(replace(mine, gpu_variables={"CUDA_VISIBLE_DEVICES": "GPU-1"}), library).notes
    assert note.startswith(f"GPU driver not found: 1 GPU held (GPU-1), not measured: {why}")
    (note,) = discover(replace(mine, gpu_variables={"SLURM_JOB_GPUS": ""}), library).notes
    assert note.startswith("GPUs not known, not measured: SLURM_JOB_GPUS")


def test_a_job_without_gpus_asks_no_driver(mine, monkeypatch):
    for driver in ("pynvml", "amdsmi"):
        monkeypatch.setitem(sys.modules, driver, None)  # importing it raises
    found = discover(replace(mine, gpu_variables={}))
    assert [source.name for source in found.sources] == ["the job's processes"]
    assert found.notes == ()


def _until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
