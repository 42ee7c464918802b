"""How a run ended: one sentence and one exit code, from what the ranks said and what srun returned. Pure."""

import signal
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from trimtab.hanging import Suspicion
from trimtab.protocol import Done, Failed, Hello, Message, StepReport


class ExitCode(IntEnum):
    """What `trimtab run` returns."""

    TRAINED = 0
    """The last step was taken."""
    BAD_INPUT = 2
    """The job file, its data or checkpoints, the allocation or the machine does not fit: found before anything was
    started, or by the ranks. Another attempt would meet the same."""
    RANK_FAILED = 3
    """A rank failed or vanished while it ran."""
    NOT_STARTED = 4
    """srun could not start the ranks."""
    HUNG = 5
    """The ranks took no step for too long, and were ended."""
    STOPPED = 75
    """Stopped before the last step (time limit, preemption, a signal); progress was saved, unless the job file gives no
    checkpoint directory. Requeue to go on."""


class Why(StrEnum):
    """What ended a run, as far as it matters for whether to begin again."""

    TRAINED = "trained"
    TIME_LIMIT = "time limit"
    """Slurm's warning before it."""
    PREEMPTED = "preempted"
    """Slurm told the ranks, and not yet the batch script: it will want the nodes."""
    RESHAPE = "another shape"
    """The wrapper stopped it to begin again in a better one."""
    ENDED = "ended from outside"
    """scancel, a preemption without grace, Ctrl-C: whoever did so decides what comes next."""
    BAD_INPUT = "bad input"
    """The ranks found that what they were given does not fit."""
    FAILED = "failed"
    HUNG = "hung"
    NOT_STARTED = "not started"


@dataclass(frozen=True)
class Outcome:
    """The end of a run."""

    exit_code: int
    sentence: str
    why: Why
    cause: str = ""
    """Of a failure: what two attempts have in common that fail for the same reason."""
    node: str = ""
    """Of ranks that vanished or hung: where. What ranks raise themselves is the job's own, and no node's."""
    lost_node: bool = False
    """Whether that node is lost as a whole, by all signs."""


@dataclass(frozen=True)
class Stop:
    """Why the ranks were told to save and stop."""

    why: Why
    reason: str
    """Follows "stopped": "by SIGUSR1"."""
    exit_code: int = ExitCode.RANK_FAILED
    """Of a run that did not save: 128 + n after signal n."""

    @classmethod
    def by_signal(cls, number: signal.Signals) -> "Stop":
        """After a signal. Slurm sends SIGUSR1 before the time limit, as our scripts ask it to."""
        why = Why.TIME_LIMIT if number is signal.SIGUSR1 else Why.ENDED
        return cls(why, f"by {number.name}", 128 + number)

    @classmethod
    def by_preemption(cls) -> "Stop":
        """After a SIGTERM that reached the ranks alone."""
        return cls(Why.PREEMPTED, "by SIGTERM to its ranks", 128 + signal.SIGTERM)


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
                if self.broken.get(rank, message) is None:
                    del self.broken[rank]  # only its connection broke: it has come back
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

    def outcome(self, srun_exit_code: int, stop: Stop | None, hung: Suspicion | None = None) -> Outcome:
        """The end, once srun has returned. `hung`: the ranks were ended for it.

        Where a rank found the input at fault it is that, whatever else went on. Else the culprit is the first rank that
        vanished without a word or raised an error of its own: those whose error is a broken connection only lost their
        peers, and those that follow were ended by srun.
        """
        if self.done and srun_exit_code == 0:  # a rank whose connection broke has come to its end all the same
            reached = max(self.last_step.values())
            if reached >= self.steps:
                return Outcome(ExitCode.TRAINED, f"trained to step {reached}", Why.TRAINED)
            why = f" {stop.reason}" if stop else ""
            sentence = f"stopped{why} at step {reached} of {self.steps}"
            return Outcome(ExitCode.STOPPED, sentence, stop.why if stop else Why.ENDED)
        refusal = next((failure for failure in self.broken.values() if failure and failure.bad_input), None)
        if refusal is not None:
            finder = f"rank {refusal.rank} on node {self.ranks[refusal.rank].node}"
            sentence = f"bad input, found by {finder}: {refusal.error}"
            return Outcome(ExitCode.BAD_INPUT, sentence, Why.BAD_INPUT, cause=refusal.error)
        if hung is not None:
            return self._hung(hung)
        culprit = next((rank for rank, failure in self.broken.items() if not (failure and failure.peer_lost)), None)
        if stop and culprit is None:
            return Outcome(stop.exit_code, f"ended {stop.reason} before all ranks had saved", stop.why)
        if culprit is None and self.broken:
            culprit = next(iter(self.broken))
        if culprit is not None:
            return self._blame(culprit)
        if not self.ranks:
            sentence = f"srun ended with code {srun_exit_code} before any rank reported: see above"
            return Outcome(ExitCode.NOT_STARTED, sentence, Why.NOT_STARTED, cause=sentence)
        sentence = f"srun ended with code {srun_exit_code}, though no rank reported why"
        return Outcome(ExitCode.RANK_FAILED, sentence, Why.FAILED, cause=sentence)

    def _blame(self, rank: int) -> Outcome:
        hello, failure = self.ranks[rank], self.broken[rank]
        name = f"rank {rank} (node {hello.node}, stage {hello.pipeline_rank}, pid {hello.pid})"
        if failure:
            return Outcome(ExitCode.RANK_FAILED, f"{name} failed: {failure.error}", Why.FAILED, failure.error)
        step = self.last_step.get(rank, 0)
        return Outcome(
            ExitCode.RANK_FAILED,
            f"{name} vanished after step {step}: it was killed, or its node failed",
            Why.FAILED,
            cause=f"a rank vanished on node {hello.node}",
            node=hello.node,
            lost_node=self._lost(hello.node),
        )

    def _lost(self, node: str) -> bool:
        """Whether all ranks of a node vanished without a word before any other did, which srun ends too.

        Of a single rank it cannot be told whether it was killed or its node.
        """
        there = {rank for rank, hello in self.ranks.items() if hello.node == node}
        silent = [rank for rank, failure in self.broken.items() if failure is None]
        return 1 < len(there) < len(self.ranks) and set(silent[: len(there)]) == there

    def _hung(self, suspicion: Suspicion) -> Outcome:
        nodes = {self.ranks[rank].node for rank in suspicion.ranks}
        return Outcome(
            ExitCode.HUNG,
            f"no step after step {max(self.last_step.values(), default=0)}: {suspicion.sentence}",
            Why.HUNG,
            cause=f"the ranks hung: {', '.join(sorted(nodes)) or 'nobody stands out'}",
            node=nodes.pop() if len(nodes) == 1 else "",
        )
