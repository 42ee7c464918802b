"""Linux's own record of a process, /proc/PID: its stat line and its environment. Standard library only."""

import os
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
PROC = Path("/proc")


@dataclass(frozen=True)
class Stat:
    """What /proc/PID/stat says of one process. Source: proc_pid_stat(5)."""

    pid: int
    command: str
    state: str
    parent: int
    session: int
    start_ticks: int
    """When it began, in clock ticks after boot: with the pid, it names one process and no later one."""
    cpu_seconds: float
    """User and system time, of its children too once they have been waited for."""
    major_faults: int
    """Page faults that had to read from disk, of its children too once they have been waited for."""
    threads: int
    memory_bytes: int
    """Resident set, shared pages included."""


def read_stat(pid: int) -> Stat | None:
    """The process with this id; None where there is none that lives (a zombie does not)."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command is in brackets and may hold anything, brackets and spaces too.
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    if fields[0] in "ZX":
        return None
    return Stat(
        pid=pid,
        command=head.partition("(")[2],
        state=fields[0],
        parent=int(fields[1]),
        session=int(fields[3]),
        start_ticks=int(fields[19]),
        cpu_seconds=sum(map(int, fields[11:15])) / TICKS_PER_SECOND,
        major_faults=int(fields[9]) + int(fields[10]),
        threads=int(fields[17]),
        memory_bytes=int(fields[21]) * PAGE_BYTES,
    )


def read_environment(pid: int) -> dict[str, str]:
    """The environment that a process was started with; empty where it is gone or may not be read."""
    try:
        content = (PROC / str(pid) / "environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return {}
    pairs = (os.fsdecode(entry).partition("=") for entry in content.split(b"\0") if entry)
    return {name: value for name, _, value in pairs}


def seconds_since_boot() -> float:
    """The clock that `Stat.start_ticks` counts by."""
    return float((PROC / "uptime").read_text().split()[0])
