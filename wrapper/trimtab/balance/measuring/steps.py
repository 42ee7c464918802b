"""From the ranks' step reports to the compute of each stage in each step."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trimtab.balance.plan import Place
from trimtab.protocol import Hello, StepReport


@dataclass(frozen=True)
class StageStep:
    """One stage of one replica in one step."""

    step: int
    replica: int
    stage: int
    forward_seconds: float
    backward_seconds: float
    microbatches: int
    tokens: int
    squared_lengths: int
    """Sum over the documents that passed of the square of their length in tokens."""
    peak_memory_bytes: int

    @property
    def compute_seconds(self) -> float:
        """Forward and backward compute together."""
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True)
class Step:
    """One optimizer step, over all ranks."""

    step: int
    time_seconds: float
    duration_seconds: float
    tokens: int
    loss: float | None
    gradient_norm: float | None
    learning_rate: float | None
    consumed_samples: int | None
    stages: tuple[StageStep, ...]

    @property
    def places(self) -> tuple[Place, ...]:
        """Of its stages, ascending."""
        return tuple((stage.replica, stage.stage) for stage in self.stages)

    @property
    def replicas(self) -> int:
        """How many have reported."""
        return len({stage.replica for stage in self.stages})

    def relative_seconds(self, loads: Sequence[float]) -> tuple[float, ...]:
        """[P] compute, in the order of `places`, over what the stage's replica had to do, [R] with 1 for the mean: what
        places are compared by."""
        return tuple(stage.compute_seconds / loads[stage.replica] for stage in self.stages)


def assemble(reports: Sequence[StepReport], ranks: Mapping[int, Hello]) -> Step:
    """One step from its ranks' reports (of one step, at least one).

    A stage is as slow as the slowest of its tensor-parallel ranks, and needs the memory of the largest; a step is
    as long as its longest rank. Tokens count once for each replica.
    """
    by_stage: dict[tuple[int, int], list[StepReport]] = defaultdict(list)
    for report in reports:
        place = ranks[report.rank]
        by_stage[place.data_rank, place.pipeline_rank].append(report)
    stages = []
    for (replica, stage), peers in sorted(by_stage.items()):
        slowest = max(peers, key=lambda peer: peer.forward_seconds + peer.backward_seconds)
        stages.append(
            StageStep(
                step=slowest.step,
                replica=replica,
                stage=stage,
                forward_seconds=slowest.forward_seconds,
                backward_seconds=slowest.backward_seconds,
                microbatches=slowest.microbatches,
                tokens=slowest.tokens,
                squared_lengths=slowest.squared_lengths,
                peak_memory_bytes=max(peer.peak_memory_bytes for peer in peers),
            )
        )
    spokesman = next((report for report in reports if report.loss is not None), reports[0])
    return Step(
        step=spokesman.step,
        time_seconds=max(report.time_seconds for report in reports),
        duration_seconds=max(report.duration_seconds for report in reports),
        tokens=sum({stage.replica: stage.tokens for stage in stages}.values()),
        loss=spokesman.loss,
        gradient_norm=spokesman.gradient_norm,
        learning_rate=spokesman.learning_rate,
        consumed_samples=spokesman.consumed_samples,
        stages=tuple(stages),
    )
