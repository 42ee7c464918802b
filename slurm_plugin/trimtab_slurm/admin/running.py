"""Which jobs are sampled on this node, and by which processes. Standard library only."""

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trimtab_slurm import directories, proc, sampler_record
from trimtab_slurm.sampler_record import SamplerRecord


@dataclass(frozen=True)
class RunningJob:
    """A job that a prolog has begun on a node, and no epilog has ended."""

    node: str
    job_id: int
    state: Path
    """The directory that its prolog made."""
    noted_seconds: float
    """When its prolog noted it; UTC, seconds since 1970."""
    sampler: SamplerRecord | None
    """None where the prolog noted none, or what it noted is gone."""

    @property
    def is_sampled(self) -> bool:
        """Whether its sampler lives."""
        return self.sampler.alive if self.sampler else bool(recorders(self.state))

    @property
    def is_of_earlier_boot(self) -> bool:
        """Whether it ended with the node: what its prolog noted is on a disk, and no epilog will come for it."""
        return not self.is_sampled and self.noted_seconds < time.time() - proc.seconds_since_boot()

    def end(self) -> None:
        """Have its sampler stop, as the epilog does: it has its profile written by itself. Raises OSError."""
        with suppress(FileNotFoundError):
            (self.state / sampler_record.NAME).unlink()
        with suppress(FileNotFoundError):
            self.state.rmdir()
        if self.sampler and (process := self.sampler.open()) is not None:
            sampler_record.stop(process)


def jobs(state_directory: Path) -> list[RunningJob]:
    """Those that prologs have noted, by node and id. Raises PermissionError: only root may look."""
    found = []
    for state in sorted(state_directory.glob("*/*")):
        if state.name.isdecimal():
            with suppress(FileNotFoundError):  # its epilog has just run
                descriptor = os.open(state, directories.DIRECTORY)
                try:
                    noted, sampler = os.fstat(descriptor).st_mtime, SamplerRecord.read(descriptor)
                    found.append(RunningJob(state.parent.name, int(state.name), state, noted, sampler))
                finally:
                    os.close(descriptor)
    return found


def recorders(path: Path) -> list[int]:
    """The process ids of all samplers and collectors that go by a node.toml, or by the state of a job."""
    found = []
    for entry in proc.PROC.iterdir():
        if entry.name.isdecimal():
            with suppress(FileNotFoundError, ProcessLookupError):
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
                if {b"trimtab_slurm.sampler", b"trimtab_slurm.collect"} & set(arguments) and bytes(path) in arguments:
                    found.append(int(entry.name))
    return found
