"""See a submitted job through: print what it writes until it ends, then wait for its profile."""

import time
from collections.abc import Callable
from pathlib import Path

from trimtab.report.find import Recorded, ReportError, load
from trimtab.requeue.act import patiently
from trimtab_slurm.cluster import JobState, SlurmClient

POLL_SECONDS = 0.5
PROFILE_SECONDS = 30.0
"""How long the nodes' parts of a profile are waited for after the job has ended."""


def follow(client: SlurmClient, job_id: int, show: Callable[[str], None]) -> JobState | None:
    """Hand each new piece of the job's output to `show` until the job has ended; returns its last known state.

    None when Slurm no longer knows the job.
    """
    offset, waiting_for = 0, ""
    last: JobState | None = None
    while True:
        state = patiently(lambda: client.job(job_id))  # before the output is read, so that the last read misses nothing
        last = state or last
        if state and state.stdout:
            offset = _show_new(Path(state.stdout), offset, show)
        if state is None or state.ended:
            return last
        if state.state == "PENDING" and state.reason not in (waiting_for, "None"):
            waiting_for = state.reason
            show(f"trimtab: job {job_id} waits: {waiting_for}\n")
        time.sleep(POLL_SECONDS)


def _show_new(path: Path, offset: int, show: Callable[[str], None]) -> int:
    try:
        with path.open("rb") as output:
            output.seek(offset)
            new = output.read()
    except FileNotFoundError:
        return offset
    if new:
        show(new.decode(errors="replace"))
    return offset + len(new)


def profile_of(job_id: int) -> Recorded:
    """What is recorded of a job that has just ended, once every node has given its part, or has had time enough.

    Raises ReportError when nothing is recorded.
    """
    deadline = time.monotonic() + PROFILE_SECONDS
    while True:
        late = time.monotonic() > deadline
        try:
            (recorded,) = load(str(job_id), None, None)
            if late or not recorded.summary.missing_nodes:
                return recorded
        except ReportError:
            if late:
                raise
        time.sleep(POLL_SECONDS)
