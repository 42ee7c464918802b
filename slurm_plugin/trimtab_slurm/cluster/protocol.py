"""What is asked of Slurm, and what is known then: the protocol that both clients keep to."""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

_ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "RECONFIG_FAIL", "REVOKED", "TIMEOUT"),
)
_SERVING = {"ALLOCATED", "BLOCKED", "COMPLETING", "IDLE", "MIXED", "PLANNED"}
"""Words of a node's state that keep it from no job: all others (DOWN, DRAIN, MAINT, POWERED_DOWN, ...) do, or may."""


class SlurmError(RuntimeError):
    """Slurm refused, or could not be asked: says which command, and what it answered."""


class SlurmSilent(SlurmError):
    """No answer came: Slurm may have done what it was asked or not, and asking again can help."""


@dataclass(frozen=True)
class JobState:
    """What Slurm knows of a job."""

    job_id: int
    state: str
    """As Slurm spells it: PENDING, RUNNING, COMPLETING, COMPLETED, FAILED, ..."""
    reason: str
    """Why it waits, or why it ended; "None" when there is nothing to say."""
    exit_code: int
    """Of the batch script; 128 + n when signal n ended it, as shells count; 1 where Slurm knows no more than that it
    did not complete (cancelled before it began, out of time, its node lost)."""
    signal: int
    """The signal that ended the batch script, or 0."""
    nodes: tuple[str, ...]
    """Empty before the job has started."""
    batch_node: str
    """Where the batch script runs; empty before the job has started."""
    start_seconds: float | None
    """UTC, seconds since 1970, of the current attempt; None before it has started."""
    end_seconds: float | None
    """UTC, seconds since 1970: when the time limit ends the current attempt, or when it has ended. None before it has
    started, and where there is no limit."""
    restart_count: int
    stdout: str
    """Path of the job's output; empty when it has none (srun)."""
    working_directory: str
    user: str
    partition: str
    """While it waits, there may be several, with commas between them."""
    required_nodes: tuple[str, ...]
    """Those that the job asked for by name."""
    excluded_nodes: tuple[str, ...]
    """Those that the job shall not get."""
    constraint: str
    """Features that its nodes must have, as it wrote them: "a100&nvlink"; empty: none."""
    least_nodes: int
    """How many it waits for at least; of a job that has started, how many it has."""
    most_nodes: int
    tasks: int
    """As many as its nodes, unless it asked for a number of tasks."""
    tasks_per_node: int
    """0 when it asked for none."""
    requeueable: bool
    """False with --no-requeue, and on a site with JobRequeue=0 without --requeue."""
    array_job_id: int | None
    """Of an array's task, the array."""
    array_task_id: int | None
    """Of an array's task; None for several that still wait as one."""
    heterogeneous: bool
    """Whether it is a component of a heterogeneous job."""

    @property
    def ended(self) -> bool:
        """Whether nothing of this attempt runs any more."""
        return self.state in _ENDED

    @property
    def name(self) -> str:
        """What names this job and no other: an array's last task has the array's own id, which means all its tasks."""
        if self.array_task_id is None:
            return str(self.job_id)
        return f"{self.array_job_id}_{self.array_task_id}"


@dataclass(frozen=True)
class Node:
    """What Slurm knows of a node."""

    name: str
    state: str
    """As Slurm spells it: IDLE, MIXED, IDLE+DRAIN, DOWN*, ... (*: it does not respond)."""
    partitions: tuple[str, ...]
    features: tuple[str, ...]
    """The active ones."""
    cpus: int
    memory_megabytes: int
    gpus: int

    @property
    def words(self) -> frozenset[str]:
        """The state's parts, without the signs that may follow: IDLE, DRAIN, ..."""
        return frozenset(re.findall(r"[A-Z_]+", self.state))

    @property
    def usable(self) -> bool:
        """Whether jobs can run on it, now or when those that do have ended."""
        return "*" not in self.state and self.words <= _SERVING

    @property
    def idle(self) -> bool:
        """Whether it could take a job at once."""
        return "*" not in self.state and self.words == {"IDLE"}

    def has_all_of(self, other: "Node") -> bool:
        """Whether it has no less of anything than another: what fits there fits here."""
        return self.cpus >= other.cpus and self.memory_megabytes >= other.memory_megabytes and self.gpus >= other.gpus


class SlurmClient(Protocol):
    """What the wrapper asks of Slurm. Every method raises SlurmError when Slurm refuses, SlurmSilent when no answer
    comes."""

    def submit(self, script: str, arguments: Sequence[str] = (), *, test_only: bool = False) -> int:
        """Submit the text of a batch script, and return its job id.

        `arguments` are sbatch's and override the script's. With `test_only` Slurm merely checks the request; the id
        is then the one that the job would have got.
        """

    def job(self, job_id: int) -> JobState | None:
        """The state of a job; None when Slurm does not know it (any more)."""

    def cancel(self, job_id: int) -> None:
        """End a job as scancel does: SIGTERM, then SIGKILL after the site's KillWait. One that is gone is no error."""

    def signal_steps(self, job: JobState, name: str, number: signal.Signals) -> None:
        """Send a signal to all tasks of a job's steps of a name (srun's --job-name). None of that name is no error."""

    def requeue(self, job: JobState) -> None:
        """End a running job, its batch script with SIGTERM and after KillWait with SIGKILL, and have it wait again.

        Of an array's tasks this one alone. A job that waits already is no error. Slurm requeues a cancelled one just as
        well: look before.
        """

    def update(self, job: JobState, *, excluded: Sequence[str] | None = None, nodes: int | None = None) -> None:
        """Change what a job that waits asks for: all nodes that it shall not get, and how many it shall get.

        None leaves things as they are. What cannot be satisfied, Slurm may accept all the same, and then hold the job
        for ever (BadConstraints).
        """

    def shrink(self, job: JobState, nodes: Sequence[str]) -> None:
        """Keep these nodes of a running job, the batch script's among them, and give the others back."""

    def nodes(self, partition: str = "") -> tuple[Node, ...]:
        """All nodes, or those of a partition."""

    def node_address(self, node: str) -> str:
        """The address at which other nodes reach this one."""

    def version(self) -> str:
        """The version of Slurm, such as "22.05.8"."""


def ending(state: str, code: int, number: int) -> tuple[int, int]:
    """Exit code and signal of a JobState, from the state and what Slurm keeps of the batch script's end."""
    if number:
        code = 128 + number
    elif state in _ENDED and state != "COMPLETED":
        code = code or 1
    return code, number
