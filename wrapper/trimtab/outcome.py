"""How a run ended: one sentence and one exit code, from what the ranks said and what srun returned. Pure."""

import signal
from dataclasses import dataclass, field
from enum import IntEnum

from trimtab.protocol import Done, Failed, Hello, Message, StepReport


class ExitCode(IntEnum):
    """What `trimtab run` returns."""

    TRAINED = 0
    """The last step was taken."""
    BAD_INPUT = 2
    """The job file, the allocation or the machine does not fit; nothing was started."""
    RANK_FAILED = 3
    """A rank failed or vanished while it ran."""
    NOT_STARTED = 4
    """srun could not start the ranks."""
    STOPPED = 75
    """Stopped before the last step (time limit, preemption, a signal); progress was saved, unless the job file gives no
    checkpoint directory. Requeue to go on."""


@dataclass(frozen=True)
class Outcome:
    """The end of a run."""

    exit_code: int
    sentence: str


@dataclass
class Roll:
    """Who said hello, how far each came, and who ended in which way, in the order in which it was heard."""

    steps: int
    """Steps of the whole run."""
    ranks: dict[int, Hello] = field(default_factory=dict)
    last_step: dict[int, int] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    broken: dict[int, Failed | None] = field(default_factory=dict)
    """Ranks that ended otherwise, in order; None: without a word."""

    def hear(self, rank: int, message: Message) -> None:
        """Take note of a message."""
        match message:
            case Hello():
                self.ranks[rank] = message
            case StepReport():
                self.last_step[rank] = message.step
            case Done():
                self.done.add(rank)
                self.last_step[rank] = message.step
            case Failed():
                self.broken[rank] = message

    def lose(self, rank: int) -> None:
        """Take note that a rank's connection ended."""
        if rank not in self.done:
            self.broken.setdefault(rank, None)

    def outcome(self, srun_exit_code: int, stop: signal.Signals | None) -> Outcome:
        """The end, once srun has returned.

        The culprit is the first rank that vanished without a word or raised an error of its own: those whose error is
        a broken connection only lost their peers, and those that follow were ended by srun.
        """
        if self.done and srun_exit_code == 0:  # a rank whose connection broke has come to its end all the same
            reached = max(self.last_step.values())
            if reached >= self.steps:
                return Outcome(ExitCode.TRAINED, f"trained to step {reached}")
            why = f" by {stop.name}" if stop else ""
            return Outcome(ExitCode.STOPPED, f"stopped{why} at step {reached} of {self.steps}")
        culprit = next((rank for rank, failure in self.broken.items() if not (failure and failure.peer_lost)), None)
        if stop and culprit is None:
            return Outcome(128 + stop, f"ended by {stop.name} before all ranks had saved")
        if culprit is None and self.broken:
            culprit = next(iter(self.broken))
        if culprit is not None:
            return Outcome(ExitCode.RANK_FAILED, self._blame(culprit))
        if not self.ranks:
            return Outcome(
                ExitCode.NOT_STARTED,
                f"srun ended with code {srun_exit_code} before any rank reported: see above",
            )
        return Outcome(ExitCode.RANK_FAILED, f"srun ended with code {srun_exit_code}, though no rank reported why")

    def _blame(self, rank: int) -> str:
        hello, failure = self.ranks[rank], self.broken[rank]
        name = f"rank {rank} (node {hello.node}, stage {hello.pipeline_rank}, pid {hello.pid})"
        if failure:
            return f"{name} failed: {failure.error}"
        return f"{name} vanished after step {self.last_step.get(rank, 0)}: it was killed, or its node failed"
