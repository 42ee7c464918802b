"""What outlives an attempt of a job. Values only.

A chain belongs to a run, that is to its checkpoint directory: a job that is submitted anew with the same directory
continues it. What limits a job from going on by itself counts for that job alone.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, replace

from trimtab.balance.deciding.ledger import Given
from trimtab.protocol import Batch, Job, Parallel, Setting, Shape, job_to_json


@dataclass(frozen=True)
class Attempt:
    """One run of a job's batch script, from when it began."""

    job_id: int
    restart_count: int
    started_seconds: float
    """UTC, seconds since 1970, as all times here."""
    nodes: tuple[str, ...]
    shape: Shape
    setting: Setting
    """As it began."""
    first_step: int | None = None
    """The first step that it took; None: none."""
    last_step: int | None = None
    first_step_seconds: float | None = None
    """When the first step ended."""
    last_step_seconds: float | None = None
    ended_seconds: float | None = None
    """None: it runs, or was killed before it could say."""
    exit_code: int | None = None
    cause: str = ""
    """What ended it, in words that are the same whenever it is the same."""
    why: str = ""
    """The same at length."""
    node: str = ""
    """Where ranks vanished or hung; empty: none did, or it is not known."""
    requeued: bool = False
    """Whether it had itself requeued: Slurm's own requeues, after a preemption or a lost node, are not counted."""


@dataclass(frozen=True)
class Exclusion:
    """A node that was found slow or faulty."""

    node: str
    reason: str
    since_seconds: float


@dataclass(frozen=True)
class Wanted:
    """What the next attempt shall run."""

    job: str
    """`fingerprint` of the job file that it was worked out for."""
    nodes: int
    """How many."""
    parallel: Parallel
    batch: Batch
    setting: Setting
    """What the ranks shall begin with."""
    reason: str


@dataclass(frozen=True)
class Chain:
    """The attempts of a run, and what they leave to the next."""

    attempts: tuple[Attempt, ...] = ()
    """Oldest first; the last may be running."""
    exclusions: tuple[Exclusion, ...] = ()
    """Oldest first."""
    asked: tuple[str, ...] = ()
    """Nodes that Slurm was last asked to leave out for the chain's sake: those of the job's list that are not here are
    the user's own."""
    wanted: Wanted | None = None
    orders: tuple[Given, ...] = ()
    """The last ones that were given: the next attempt measures what they have brought, and repeats none that failed."""
    job: str = ""
    """The job file as the last attempt read it, as JSON; empty: not known."""

    def begun(self, attempt: Attempt) -> "Chain":
        """With an attempt that begins. Of a job submitted anew, no list was asked for yet."""
        same_job = bool(self.of(attempt.job_id))
        return replace(self, attempts=(*self.attempts, attempt), asked=self.asked if same_job else ())

    def updated(self, attempt: Attempt) -> "Chain":
        """With the last attempt as it is now."""
        return replace(self, attempts=(*self.attempts[:-1], attempt))

    def of(self, job_id: int) -> tuple[Attempt, ...]:
        """The attempts of one job, without those of earlier ones in the same directory."""
        return tuple(attempt for attempt in self.attempts if attempt.job_id == job_id)

    @property
    def restart_seconds(self) -> float | None:
        """What the last restart took, from the last step before it to the first one after it; None: not measured.

        That of a job: until a user has submitted another one, days may pass.
        """
        for before, after in reversed(list(zip(self.attempts, self.attempts[1:], strict=False))):
            if before.job_id != after.job_id:
                continue
            if before.last_step_seconds is not None and after.first_step_seconds is not None:
                return after.first_step_seconds - before.last_step_seconds
        return None


def changed_keys(before: str, now: Job) -> tuple[str, ...]:
    """What a job file says otherwise than `before`, its JSON (empty: not known): "batch.global_batch_size 8 -> 4"."""
    new = json.loads(job_to_json(now))
    old = json.loads(before) if before else new
    return tuple(
        f"{section}.{key} {old[section][key]} -> {value}"
        for section, values in new.items()
        for key, value in values.items()
        if old.get(section, {}).get(key, value) != value
    )


def fingerprint(job: Job) -> str:
    """The same for job files that ask for the same model in the same shape: a plan for another one is void."""
    parts = {"model": asdict(job.model), "parallel": asdict(job.parallel), "batch": asdict(job.batch)}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
