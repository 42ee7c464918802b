"""Which process samples an attempt: noted by its prolog in the attempt's state directory. Standard library only."""

import json
import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trimtab_slurm import proc
from trimtab_slurm.attempt import Attempt

NAME = "sampler.json"
"""Of the file, in the state directory of each job."""


@dataclass(frozen=True)
class SamplerRecord:
    """The sampler of an attempt, and what tells the attempt from others of the job."""

    pid: int
    start_ticks: int
    journal: Path
    restart_count: int
    uid: int

    @classmethod
    def of(cls, pid: int, path: Path, attempt: Attempt) -> "SamplerRecord":
        stat = proc.read_stat(pid)
        return cls(pid, stat.start_ticks if stat else -1, path, attempt.restart_count, attempt.uid)

    @classmethod
    def read(cls, state: int) -> "SamplerRecord | None":
        """The record in a state directory; None where it was not written, or not whole."""
        try:
            descriptor = os.open(NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=state)
            with os.fdopen(descriptor, encoding="utf-8") as file:
                values = json.load(file)
            return cls(**{**values, "journal": Path(values["journal"])})
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None

    def write(self, state: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(NAME, flags, 0o600, dir_fd=state)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({**vars(self), "journal": str(self.journal)}, file)

    @staticmethod
    def remove(state: int) -> None:
        os.unlink(NAME, dir_fd=state)

    def open(self) -> int | None:
        """A descriptor of this very process; None where it is gone."""
        try:
            process = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        # Looked at after it was opened: what is open now is what is told, whoever may get its id.
        if self.alive:
            return process
        os.close(process)
        return None

    @property
    def alive(self) -> bool:
        """Whether this very process still runs."""
        stat = proc.read_stat(self.pid)
        return stat is not None and stat.start_ticks == self.start_ticks


def stop(process: int) -> None:
    """Tell an open sampler to take its last sample, and let go of it."""
    with suppress(ProcessLookupError):  # it has just ended by itself
        signal.pidfd_send_signal(process, signal.SIGTERM)
    os.close(process)
