"""Which samplers and collectors run on this node. Standard library only."""

import json
import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trimtab_slurm import proc
from trimtab_slurm.hooks import SAMPLER_RECORD


@dataclass(frozen=True)
class RunningSampler:
    """A job that a prolog has begun on a node, and no epilog has ended."""

    node: str
    job_id: int
    state: Path
    """The directory that its prolog made."""
    pid: int
    """Its sampler; 0 where the prolog noted none."""
    start_ticks: int

    @property
    def alive(self) -> bool:
        """Whether this very process still runs."""
        stat = proc.read_stat(self.pid) if self.pid else None
        return stat is not None and stat.start_ticks == self.start_ticks

    def end(self) -> None:
        """Tell it to stop, as the epilog does: it has its profile written by itself. Raises OSError."""
        with suppress(FileNotFoundError):
            (self.state / SAMPLER_RECORD).unlink()
        with suppress(FileNotFoundError):
            self.state.rmdir()
        if self.alive:
            os.kill(self.pid, signal.SIGTERM)


def samplers(state_directory: Path) -> list[RunningSampler]:
    """Those that prologs have noted, by node and job. Raises PermissionError: only root may look."""
    found = []
    for state in sorted(state_directory.glob("*/*")):
        if state.name.isdecimal():
            pid, start_ticks = _process(state / SAMPLER_RECORD)
            found.append(RunningSampler(state.parent.name, int(state.name), state, pid, start_ticks))
    return found


def recorders(config: Path) -> list[int]:
    """The process ids of all samplers and collectors that go by a node.toml."""
    found = []
    for entry in proc.PROC.iterdir():
        if entry.name.isdecimal():
            with suppress(FileNotFoundError, ProcessLookupError):
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
                if {b"trimtab_slurm.sampler", b"trimtab_slurm.collect"} & set(arguments) and bytes(config) in arguments:
                    found.append(int(entry.name))
    return found


def _process(record: Path) -> tuple[int, int]:
    try:
        values = json.loads(record.read_text(encoding="utf-8"))
        return int(values["pid"]), int(values["start_ticks"])
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return 0, -1
