"""Which jobs are sampled on this node, and by which processes. Standard library only."""

import os
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
    sampler: SamplerRecord | None
    """None where the prolog noted none."""

    @property
    def is_sampled(self) -> bool:
        """Whether its sampler lives."""
        return self.sampler is not None and self.sampler.alive

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
                    found.append(RunningJob(state.parent.name, int(state.name), state, SamplerRecord.read(descriptor)))
                finally:
                    os.close(descriptor)
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
