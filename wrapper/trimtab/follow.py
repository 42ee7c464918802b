"""See a submitted job through: print what it writes until it ends, then wait for its profile."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path

from trimtab.report.find import Recorded, ReportError, load
from trimtab.requeue.act import patiently
from trimtab_slurm.cluster import JobState, SlurmClient

POLL_SECONDS = 0.5
"""Between two looks at a file."""
SOON_SECONDS, SELDOM_SECONDS = 2.0, 10.0
"""Between two questions to Slurm: where its answer may have changed, and otherwise."""
LIVELY_SECONDS = 30.0
"""How long after a change another one is likely."""
PROFILE_SECONDS = 30.0
"""How long the nodes' parts of a profile are waited for after the job has ended."""


class Left(Exception):
    """Ctrl-C: the job goes on unfollowed; says how to see it, and how to end it."""

    def __init__(self, job_id: int, output: str) -> None:
        seen = (
            f"`tail -f {output}` shows what it writes" if output else f"`scontrol show job {job_id}` names its output"
        )
        super().__init__(
            f"job {job_id} goes on without you: {seen}, `trimtab report {job_id}` says how it went, `scancel {job_id}` "
            "ends it"
        )


@dataclass
class Pace:
    """When Slurm is asked: a controller has more to do than to answer all who follow a job. Times on one clock.

    Every SOON_SECONDS within LIVELY_SECONDS of a change of the job's state, later every SELDOM_SECONDS; and once when
    the output has been still for twice as long as it was before, which may be the job's end.
    """

    _asked_seconds: float = -inf
    _changed_seconds: float = -inf
    _wrote_seconds: float = -inf
    _rest_seconds: float = SELDOM_SECONDS
    _state: str = ""

    def due(self, now: float) -> bool:
        """Whether to ask."""
        lively = now - self._changed_seconds < LIVELY_SECONDS
        if now - self._asked_seconds >= (SOON_SECONDS if lively else SELDOM_SECONDS):
            return True
        return self._asked_seconds < self._wrote_seconds + self._rest_seconds <= now

    def answered(self, now: float, state: str) -> None:
        """Slurm has said in which state the job is."""
        self._asked_seconds = now
        if state != self._state:
            self._state, self._changed_seconds = state, now

    def wrote(self, now: float) -> None:
        """The job has written something."""
        self._rest_seconds = min(max(2 * (now - self._wrote_seconds), SOON_SECONDS), SELDOM_SECONDS)
        self._wrote_seconds = now


def follow(client: SlurmClient, job_id: int, show: Callable[[str], None]) -> JobState | None:
    """Hand each new piece of the job's output to `show` until the job has ended; returns its last known state.

    None when Slurm no longer knows the job. Raises Left on Ctrl-C.
    """
    pace, offset, waiting_for = Pace(), 0, ""
    last: JobState | None = None
    try:
        while True:
            ended = False
            if pace.due(time.monotonic()):  # before the output is read, so that the last read misses nothing
                state = patiently(lambda: client.job(job_id))
                pace.answered(time.monotonic(), state.state if state else "")
                ended, last = state is None or state.ended, state or last
            if last and last.stdout:
                read = _show_new(Path(last.stdout), offset, show)
                if read > offset:
                    offset = read
                    pace.wrote(time.monotonic())
            if ended:
                return last
            if last and last.state == "PENDING" and last.reason not in (waiting_for, "None"):
                waiting_for = last.reason
                show(f"trimtab: job {job_id} waits: {_why(last)}\n")
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        raise Left(job_id, last.stdout if last else "") from None


def _why(waiting: JobState) -> str:
    if waiting.reason == "BeginTime" and waiting.restart_count:
        return "BeginTime: Slurm lets a requeued job rest (cred_expire, 120 s by default) before it begins again"
    return waiting.reason


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


def never_began(ended: JobState) -> str:
    """Of a job that has ended: that no attempt of it has begun; empty: one has."""
    if ended.start_seconds is not None or ended.restart_count:
        return ""
    how = "was cancelled" if ended.state == "CANCELLED" else f"has ended ({ended.state})"
    return f"job {ended.job_id} {how} before it began: there is nothing to report"


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
