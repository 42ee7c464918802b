"""Tasks as devices, for machines without a GPU: what the processes of each srun task really use.

A process belongs to a task by its environment, or, where that was wiped, by the process that started it or whose
session it is in. The batch script, and srun itself, belong to no task.
"""

import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trimtab_slurm import proc
from trimtab_slurm.attempt import Attempt
from trimtab_slurm.devices import Identity, Reading
from trimtab_slurm.proc import Stat

COLUMNS = (
    "utilization_ratio",
    "utilization_cores",
    "cpu_seconds",
    "memory_used_bytes",
    "process_count",
    "thread_count",
    "major_faults_per_second",
    "read_bytes_per_second",
    "written_bytes_per_second",
)
"""Over the time since the sample before (of the first: since the task began): cores in use (CPU seconds over wall
seconds, so 2.5 with two and a half busy cores), the same over the cores that the task may run on, page faults that had
to read from disk, bytes read from and written to storage. At the moment: CPU seconds since the task began, of what
lives or was waited for; resident memory summed over processes (pages that they share count for each); processes;
threads."""

FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Slurm numbers its own steps (batch, extern, interactive, pending) from the top."""
SETTLED_SECONDS = 10.0
"""A process of this age no longer becomes a task's: slurmstepd forks first, then changes user and environment."""
TASK_PREFIX = "cpu-"
"""What the uuid of a task begins with."""
SHORTEST_SECONDS = 0.02
"""Two clock ticks: below, a rate would be rounding error."""


def task_uuid(node: str, task: int) -> str:
    """The uuid of an srun task (SLURM_PROCID) on a node as a device."""
    return f"{TASK_PREFIX}{node}-task{task}"


class CpuSource:
    """Finds the tasks of an attempt on its node, at each look."""

    name = "the job's processes"

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._slurm_conf = os.environ.get("SLURM_CONF", "")
        self._model = _cpu_model()
        self._processes: dict[int, tuple[int, int | None]] = {}
        """pid -> its start, and its task or None."""
        self._tasks: dict[int, CpuTask] = {}

    def devices(self) -> Sequence["CpuTask"]:
        """The tasks that have a process now, by rank."""
        now, uptime = time.monotonic(), proc.seconds_since_boot()
        found: dict[int, list[Stat]] = defaultdict(list)
        for stat, task in self._look(uptime):
            found[task].append(stat)
        for rank in found.keys() - self._tasks.keys():
            self._tasks[rank] = CpuTask(self._identity(rank))
        for rank, stats in found.items():
            self._tasks[rank].seen(stats, now, uptime)
        return [self._tasks[rank] for rank in sorted(found)]

    def _look(self, uptime: float) -> list[tuple[Stat, int]]:
        """The processes of tasks. Those found before, and those that can no longer be ours, are not looked into."""
        known, self._processes = self._processes, {}
        stats = []
        for pid in (int(entry.name) for entry in proc.PROC.iterdir() if entry.name.isdigit()):
            if pid in known and known[pid][1] is None:
                self._processes[pid] = known[pid]
            elif stat := proc.read_stat(pid):
                stats.append(stat)
        members = []
        for stat in sorted(stats, key=lambda stat: stat.start_ticks):  # parents first
            start, task = known.get(stat.pid, (-1, None))
            if start != stat.start_ticks:
                task = self._task(stat)
            if task is not None:
                members.append((stat, task))
            elif uptime - stat.start_ticks / proc.TICKS_PER_SECOND < SETTLED_SECONDS:
                continue  # look again next time
            self._processes[stat.pid] = (stat.start_ticks, task)
        return members

    def _task(self, stat: Stat) -> int | None:
        try:
            owner = (proc.PROC / str(stat.pid)).stat().st_uid
        except FileNotFoundError:
            return None
        if owner != self._attempt.uid:
            return None
        task = task_of(proc.read_environment(stat.pid), self._attempt)
        if task is not None:
            return None if self._of_another_slurm(stat) else task
        for relative in (stat.parent, stat.session):
            _, task = self._processes.get(relative, (-1, None))
            if task is not None:
                return task
        return None

    def _of_another_slurm(self, stat: Stat) -> bool:
        """Whether the slurmstepd above a process was started for another slurm.conf: job ids are a cluster's own."""
        ancestor: Stat | None = stat
        while ancestor and ancestor.parent > 1:
            ancestor = proc.read_stat(ancestor.parent)
            if ancestor and ancestor.command == "slurmstepd":
                theirs = proc.read_environment(ancestor.pid).get("SLURM_CONF", "")
                return "" not in (theirs, self._slurm_conf) and theirs != self._slurm_conf
        return False

    def _identity(self, rank: int) -> Identity:
        driver = f"Linux {os.uname().release} /proc"
        return Identity(task_uuid(self._attempt.node, rank), "cpu", self._model, rank, driver, COLUMNS)


class CpuTask:
    """The processes of one task, as they were last seen."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self._stats: Sequence[Stat] = ()
        self._now = 0.0
        self._uptime = 0.0
        self._before: _Totals | None = None

    def seen(self, stats: Sequence[Stat], now: float, uptime: float) -> None:
        """Take note of its processes: what `sample` reads."""
        self._stats, self._now, self._uptime = stats, now, uptime

    def sample(self) -> Reading:
        """The figures since the sample before."""
        oldest = min(self._stats, key=lambda stat: stat.start_ticks)
        age = self._uptime - oldest.start_ticks / proc.TICKS_PER_SECOND
        totals = _totals(self._stats, self._now)
        before = self._before or _Totals(self._now - age, 0.0, 0, 0, 0)
        rates = _rates(before, totals)
        if totals.monotonic - before.monotonic >= SHORTEST_SECONDS:
            self._before = totals
        cores = rates.pop("utilization_cores")
        values = {
            **rates,
            "utilization_ratio": cores / _allowed_cores(oldest.pid),
            "utilization_cores": cores,
            "cpu_seconds": totals.cpu_seconds,
            "memory_used_bytes": float(sum(stat.memory_bytes for stat in self._stats)),
            "process_count": float(len(self._stats)),
            "thread_count": float(sum(stat.threads for stat in self._stats)),
        }
        absent = {}
        if math.isnan(totals.read_bytes):
            absent = dict.fromkeys(
                ("read_bytes_per_second", "written_bytes_per_second"),
                "the kernel does not let this process read /proc/PID/io",
            )
        return Reading(values, absent)


@dataclass(frozen=True)
class _Totals:
    """Sums over the living processes of a task, each with the children that it has waited for."""

    monotonic: float
    cpu_seconds: float
    major_faults: float
    read_bytes: float
    written_bytes: float


def task_of(environment: Mapping[str, str], attempt: Attempt) -> int | None:
    """The rank of the srun task that a process with this environment belongs to; None: no task of this attempt."""
    if (
        environment.get("SLURM_JOB_ID") != str(attempt.job_id)
        or environment.get("SLURMD_NODENAME") != attempt.node
        or environment.get("SLURM_CLUSTER_NAME", attempt.cluster) != attempt.cluster
    ):
        return None
    step, rank = environment.get("SLURM_STEP_ID", ""), environment.get("SLURM_PROCID", "")
    if not (re.fullmatch(r"\d{1,10}", step, re.ASCII) and re.fullmatch(r"\d{1,10}", rank, re.ASCII)):
        return None
    return int(rank) if int(step) < FIRST_SPECIAL_STEP else None


def _totals(stats: Sequence[Stat], now: float) -> _Totals:
    counted = [_io(stat.pid) for stat in stats]
    return _Totals(
        monotonic=now,
        cpu_seconds=sum(stat.cpu_seconds for stat in stats),
        major_faults=sum(stat.major_faults for stat in stats),
        read_bytes=sum(read for read, _ in counted),
        written_bytes=sum(written for _, written in counted),
    )


def _rates(before: _Totals, after: _Totals) -> dict[str, float]:
    """What was used from one moment to the next, a second.

    Sums fall when a process ends that nobody of the task waited for: what it used at last is lost, never negative.
    """
    seconds = after.monotonic - before.monotonic

    def rate(first: float, second: float) -> float:
        return math.nan if seconds < SHORTEST_SECONDS or math.isnan(second) else max(0.0, second - first) / seconds

    return {
        "utilization_cores": rate(before.cpu_seconds, after.cpu_seconds),
        "major_faults_per_second": rate(before.major_faults, after.major_faults),
        "read_bytes_per_second": rate(before.read_bytes, after.read_bytes),
        "written_bytes_per_second": rate(before.written_bytes, after.written_bytes),
    }


def _io(pid: int) -> tuple[float, float]:
    """Bytes read from and written to storage; NaN where they may not be read."""
    try:
        lines = (proc.PROC / str(pid) / "io").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0, 0.0  # it has ended since it was seen
    except PermissionError:
        return math.nan, math.nan
    values = dict(line.split(": ") for line in lines)
    return float(values["read_bytes"]), float(values["write_bytes"])


def _allowed_cores(pid: int) -> int:
    try:
        return len(os.sched_getaffinity(pid))
    except ProcessLookupError:
        return os.cpu_count() or 1


def _cpu_model() -> str:
    lines = (proc.PROC / "cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, os.uname().machine)
