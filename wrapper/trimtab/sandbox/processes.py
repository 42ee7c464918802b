"""Processes by identity: a process id and its start time name one process, and no later one with the same id.

Signals go through a pidfd, so that a process that ends meanwhile is never mistaken for its successor.
"""

import os
import select
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from trimtab.sandbox.config import Places

JOB_PROCESS, RECORDER = "job process", "recorder"
_PROC = Path("/proc")
_KILLED_SECONDS = 5.0
"""How long the kernel may take to end what was killed."""


@dataclass(frozen=True)
class Process:
    """One process of this machine, since it was last started."""

    name: str
    pid: int
    start_ticks: int
    """When it began, in clock ticks since the machine did."""
    boot_id: str


def identify(name: str, pid: int) -> Process | None:
    """The process that has this id now; None when there is none, or only its zombie."""
    try:
        # The command's name, in brackets, may hold anything: what follows the last bracket is regular.
        fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if fields[0] in "ZX":
        return None
    return Process(name, pid, int(fields[19]), (_PROC / "sys/kernel/random/boot_id").read_text().strip())


def alive(process: Process) -> bool:
    """Whether this very process still runs."""
    return identify(process.name, process.pid) == process


def stop(processes: Iterable[Process], grace_seconds: float) -> None:
    """End processes: SIGTERM to all, and SIGKILL to those that have not ended after `grace_seconds`."""
    _end(processes, ((signal.SIGTERM, grace_seconds), (signal.SIGKILL, _KILLED_SECONDS)))


def kill(processes: Iterable[Process]) -> None:
    """SIGKILL processes; returns when they have ended."""
    _end(processes, ((signal.SIGKILL, _KILLED_SECONDS),))


def _end(processes: Iterable[Process], signals: Iterable[tuple[signal.Signals, float]]) -> None:
    """Send each signal in turn to those that have not ended, and wait so many seconds for them to."""
    handles: dict[int, Process] = {}
    try:
        for process in processes:
            with suppress(ProcessLookupError):
                handle = os.pidfd_open(process.pid)
                handles[handle] = process
        # Looked at after it was opened: what is open now is what is killed.
        targets = {handle for handle, process in handles.items() if alive(process)}
        for number, seconds in signals:
            for handle in targets:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, number)
            targets = _wait(targets, seconds)
            if not targets:
                return
    finally:
        for handle, process in handles.items():
            os.close(handle)
            with suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)  # no zombie, where it was a child of this process


def on_nodes(places: Places, node: str = "") -> list[Process]:
    """What still runs on one node of a sandbox, or on any: processes of jobs, their keepers (slurmstepd), recorders.

    Processes of jobs are told by their environment: slurmd gives it to whatever it starts, while a shell that merely
    uses the cluster has no SLURMD_NODENAME. Keepers, whose environment 24.11 clears, are told by the directory that
    they inherit and the node's log, which they keep open; recorders, what the hooks started, by their arguments.
    """
    found = []
    for entry in _PROC.iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        # Identified first: should another process get the id meanwhile, this identity is nobody's.
        process = identify(JOB_PROCESS, int(entry.name))
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if process and _is_recorder(entry, places, node):
                found.append(replace(process, name=RECORDER))
            elif process and (_is_keeper(entry, places, node) or _is_in_job(entry, places, node)):
                found.append(process)
    return found


def _is_recorder(entry: Path, places: Places, node: str) -> bool:
    arguments = (entry / "cmdline").read_bytes().split(b"\0")
    ours = bytes(places.node_config) in arguments and any(word.startswith(b"trimtab_slurm.") for word in arguments)
    return ours and (not node or any(word.startswith(bytes(places.samplers / node) + b"/") for word in arguments))


def _is_keeper(entry: Path, places: Places, node: str) -> bool:
    if (entry / "comm").read_bytes() != b"slurmstepd\n" or (entry / "cwd").readlink() != places.directory:
        return False
    return not node or any(opened.readlink() == places.log(node) for opened in (entry / "fd").iterdir())


def _is_in_job(entry: Path, places: Places, node: str) -> bool:
    variables = (entry / "environ").read_bytes().split(b"\0")
    name = b"SLURMD_NODENAME=" + node.encode()
    return b"SLURM_CONF=" + bytes(places.slurm_conf) in variables and any(
        variable == name if node else variable.startswith(name) for variable in variables
    )


def _wait(handles: set[int], seconds: float) -> set[int]:
    """Wait until the processes behind these pidfds have ended; those that have not, in the end."""
    deadline = time.monotonic() + seconds
    waiting = set(handles)
    while waiting and (left := deadline - time.monotonic()) > 0:
        ended, _, _ = select.select(list(waiting), [], [], left)
        waiting -= set(ended)
    return waiting
