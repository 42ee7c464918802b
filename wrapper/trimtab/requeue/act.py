"""Asking Slurm for the next attempt: the thin shell over the client.

Of a requeue, the order is requeue, then update. A requeued job waits at least until its batch script has ended, which
is this process, so no attempt can begin before the update; and if this process is killed between the two, the job
merely runs once more as it was. A hold in between would be for ever.

Every round looks at the job first and does the one thing that is missing, so that what was done without an answer is
not done twice: Slurm's SIGTERM ends the very command that requeues, and slurmctld may be restarted meanwhile.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from trimtab.requeue.exclusions import infeasible
from trimtab.wording import plural
from trimtab_slurm.cluster import JobState, SlurmClient, SlurmError, SlurmSilent

PATIENCE_SECONDS = 300.0
"""How long Slurm may be away. The ranks have saved, and the nodes wait for it."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.25, 10.0
RUNNING = ("RUNNING", "SIGNALING", "RESIZING", "SUSPENDED")
_WAITING = ("PENDING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")

_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Requeued:
    """What came of asking."""

    done: bool
    """Whether the job begins again: if not, the batch script's exit code is the job's."""
    told: str
    """What Slurm was asked for, or why it was not or did not: follows "requeued: " or "not requeued: "."""


def requeue(
    client: SlurmClient,
    job: JobState,
    *,
    excluded: Sequence[str],
    nodes: int | None,
    patience_seconds: float = PATIENCE_SECONDS,
    sleep: Callable[[float], None] = time.sleep,
) -> Requeued:
    """Have a job begin again, on `nodes` nodes (None: as before) and without those of `excluded`, the user's own
    included; called from within its batch script.

    `job` is as its current attempt began. Slurm's SIGTERM reaches this process meanwhile, and what it has started:
    have it ignored.
    """
    asking = _Asking(client, job, tuple(excluded), nodes)
    try:
        return patiently(asking.to_the_end, patience_seconds=patience_seconds, sleep=sleep)
    except SlurmSilent as error:
        return asking.result(f"Slurm does not answer: {error}")
    except SlurmError as error:
        return asking.result(str(error))


def give_back(client: SlurmClient, job: JobState, nodes: Sequence[str]) -> None:
    """Let a running job go on with some of its nodes alone, the first among them. Raises SlurmError."""

    def ask() -> None:
        now = client.job(job.job_id)
        if now is None or now.state not in RUNNING:
            raise SlurmError(f"job {job.job_id} is {now.state if now else 'no longer known'}")
        if set(now.nodes) != set(nodes):
            client.shrink(job, nodes)

    patiently(ask)


def patiently(
    ask: Callable[[], _Answer],
    *,
    patience_seconds: float = PATIENCE_SECONDS,
    sleep: Callable[[float], None] = time.sleep,
) -> _Answer:
    """Slurm's answer, asked again for as long as it may be away. Raises its last SlurmSilent after that."""
    deadline = time.monotonic() + patience_seconds
    pause = FIRST_PAUSE_SECONDS
    while True:
        try:
            return ask()
        except SlurmSilent:
            if time.monotonic() + pause > deadline:
                raise
        sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


class _Asking:
    """One requeue, in steps that can be repeated."""

    def __init__(self, client: SlurmClient, job: JobState, excluded: tuple[str, ...], nodes: int | None) -> None:
        self._client, self._job = client, job
        self._excluded, self._nodes = excluded, nodes
        self._complaints: list[str] = []
        self._checked = self._updated = False
        self.requeued = False

    def to_the_end(self) -> Requeued:
        """Do all that is missing."""
        while True:
            if result := self.once():
                return result

    def once(self) -> Requeued | None:
        """Look, and do the one thing that is missing; a result when nothing is."""
        job, now = self._job, self._client.job(self._job.job_id)
        if now is None or now.user != job.user:
            return self.result(f"Slurm no longer knows job {job.job_id}")
        self.requeued = is_requeued(now, job)
        if not self.requeued and (obstacle := why_not(now)):
            return self.result(obstacle)
        if not self._checked:
            self._check()
        if not self.requeued:
            self._client.requeue(job)
            self.requeued = True
        elif now.state not in _WAITING:
            return self.result("the next attempt has begun already")
        elif not self._updated:
            if self._nodes is None and set(self._excluded) == set(now.excluded_nodes):
                return self.result()
            self._client.update(job, excluded=self._excluded, nodes=self._nodes)
            self._updated = True
        elif self._nodes is not None and now.tasks != self._nodes:
            # A number of tasks was asked for, which does not follow: with it, Slurm could hold the job for ever.
            self._client.update(job, nodes=len(job.nodes))
            self._nodes = None
            self._complaints.append(_fixed(f"--ntasks={now.tasks}"))
        else:
            return self.result()
        return None

    def result(self, *more: str) -> Requeued:
        """As things stand."""
        if not self.requeued:
            return Requeued(False, "; ".join(more))
        asked = []
        if self._updated and self._nodes is not None:
            asked.append(f"on {plural(self._nodes, 'node')}")
        if self._updated and self._excluded:
            asked.append(f"without {', '.join(self._excluded)}")
        return Requeued(True, "; ".join([" ".join(asked) or "as it was", *self._complaints, *more]))

    def _check(self) -> None:
        """Drop from the request what Slurm would take without a word, and then hold the job for ever."""
        job, partition = self._job, self._client.nodes(self._job.partition)
        if fixed := fixed_nodes(job):
            if self._nodes not in (None, len(job.nodes)):
                self._complaints.append(fixed)
            self._nodes = None
        if obstacle := infeasible(job, partition, self._excluded, self._nodes or len(job.nodes)):
            self._complaints.append(obstacle)
            self._excluded, self._nodes = job.excluded_nodes, None
        self._checked = True


def fixed_nodes(job: JobState) -> str:
    """Why a running job's number of nodes stays as it is; empty: it may change."""
    if job.tasks_per_node:
        return _fixed("--ntasks-per-node")
    return _fixed(f"--ntasks={job.tasks}") if job.tasks != len(job.nodes) else ""


def _fixed(option: str) -> str:
    return f"its number of nodes stays: {option} fixes it, which sbatch need not be told"


def why_not(now: JobState) -> str:
    """Why a job that has not been requeued must not be, or cannot; empty: it can."""
    return unsuitable(now) or ending(now)


def unsuitable(job: JobState) -> str:
    """Why a job is none to be requeued, as it was submitted; empty: it is one."""
    if job.heterogeneous:
        return "it is a component of a heterogeneous job, which is requeued as a whole or not at all"
    if not job.requeueable:
        return "it was submitted with --no-requeue, or the site's JobRequeue=0 says so: sbatch --requeue allows it"
    return ""


def is_requeued(now: JobState, job: JobState) -> bool:
    """Whether a job that was once `job` is to begin again already."""
    # It waits, though it runs: slurmctld was restarted, and has forgotten that it had begun.
    return now.restart_count > job.restart_count or now.state == "PENDING"


def ending(now: JobState) -> str:
    """Why Slurm is ending a job for good, as far as can be seen; empty: it is not."""
    if now.state in RUNNING or (now.state in ("COMPLETING", "TIMEOUT") and now.reason == "TimeLimit"):
        return ""
    return f"Slurm is ending it, and not for its time limit, so it was cancelled or has failed ({now.state})"
