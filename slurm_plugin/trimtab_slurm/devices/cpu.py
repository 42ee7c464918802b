"""The processes of each task of a job: what can be measured of it on a machine without a GPU.

Figures are of the processes, from /proc; they are labelled `cpu`, and no GPU's.
"""

import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from trimtab_slurm.attempt import Attempt
from trimtab_slurm.devices import DeviceGone


def task_uuid(node: str, task: int) -> str:
    """The name under which the processes of a task count as a device; `task` is its SLURM_PROCID."""
    return f"cpu-{node}-task{task}"


@dataclass
class TaskDevice:
    """One task's processes."""

    uuid: str
    index: int
    cores: int
    """Cores that the task was given."""
    model: str
    kind: str = "cpu"
    driver: str = "procfs"
    columns: Sequence[str] = (
        "utilization_ratio",
        "cpu_seconds",
        "memory_used_bytes",
        "threads_count",
        "read_bytes",
        "written_bytes",
    )
    processes: dict[int, psutil.Process] = field(default_factory=dict)
    _cpu_seconds: dict[int, float] = field(default_factory=dict)
    _total_seconds: float = 0.0
    _sampled_seconds: float = math.nan

    def sample(self) -> Sequence[float]:
        """utilization_ratio is of the task's cores since the sample before; cpu_seconds is the sum since its start."""
        now, before = time.monotonic(), self._total_seconds
        memory, threads, read, written = 0.0, 0, 0.0, 0.0
        for pid, process in list(self.processes.items()):
            try:
                with process.oneshot():
                    times = process.cpu_times()
                    seconds = times.user + times.system
                    memory += process.memory_info().rss
                    threads += process.num_threads()
                    io = process.io_counters()
            except psutil.Error:
                del self.processes[pid]
                self._cpu_seconds.pop(pid, None)
                continue
            self._total_seconds += seconds - self._cpu_seconds.get(pid, 0.0)
            self._cpu_seconds[pid] = seconds
            read, written = read + io.read_bytes, written + io.write_bytes
        if not self.processes:
            raise DeviceGone("its processes have ended")
        elapsed = now - self._sampled_seconds
        self._sampled_seconds = now
        utilization = (self._total_seconds - before) / elapsed / self.cores if elapsed > 0 else math.nan
        return utilization, self._total_seconds, memory, float(threads), read, written


class TaskFinder:
    """Finds the tasks of an attempt as they come: processes of its user that Slurm started as a task of this node."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._model = _cpu_model()
        self._seen: set[tuple[int, float]] = set()
        self._devices: dict[int, TaskDevice] = {}

    def new_devices(self) -> Iterator[TaskDevice]:
        """Devices that were not there at the last call; new processes of known tasks join their device."""
        for process in psutil.process_iter():
            identity = (process.pid, process.create_time())
            if identity in self._seen:
                continue
            self._seen.add(identity)
            try:
                if process.uids().real != self._attempt.uid:
                    continue
                environment = process.environ()
            except (psutil.Error, OSError):
                continue
            task = self._task(environment)
            if task is None:
                continue
            known = task in self._devices
            device = self._devices.setdefault(task, self._device(task, environment))
            device.processes[process.pid] = process
            if not known:
                yield device

    def _task(self, environment: dict[str, str]) -> int | None:
        """The task that a process belongs to; the batch script, and what Slurm forks for a task, are none."""
        mine = (
            environment.get("SLURM_JOB_ID") == str(self._attempt.job_id)
            and environment.get("SLURMD_NODENAME") == self._attempt.node
            and {"SLURM_STEP_NODELIST", "SLURM_TASK_PID"} <= environment.keys()
        )
        task = environment.get("SLURM_PROCID", "")
        return int(task) if mine and task.isdecimal() else None

    def _device(self, task: int, environment: dict[str, str]) -> TaskDevice:
        cores = environment.get("SLURM_CPUS_PER_TASK", "1")
        return TaskDevice(
            uuid=task_uuid(self._attempt.node, task),
            index=task,
            cores=max(1, int(cores)) if cores.isdecimal() else 1,
            model=self._model,
        )


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return os.uname().machine
