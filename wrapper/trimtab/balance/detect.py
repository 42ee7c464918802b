"""How far apart the stages are."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from trimtab.balance.steps import StageStep


@dataclass(frozen=True)
class Imbalance:
    """How far the slowest stage is from the median one."""

    ratio: float
    """Slowest stage over median stage - 1."""
    replica: int
    stage: int
    """The slowest."""


def imbalance_ratio(seconds: Sequence[float]) -> float:
    """Slowest stage over median stage - 1, from the compute of each stage (at least one, positive)."""
    return max(seconds) / median(seconds) - 1


def imbalance(stages: Iterable[StageStep]) -> Imbalance | None:
    """The imbalance over a window of steps: each stage counts with its median over the window.

    None with fewer than two stages, or where no compute was measured: nothing can be apart.
    """
    seconds: dict[tuple[int, int], list[float]] = defaultdict(list)
    for stage in stages:
        seconds[stage.replica, stage.stage].append(stage.compute_seconds)
    typical = {place: median(values) for place, values in seconds.items()}
    if len(typical) < 2 or median(typical.values()) <= 0:
        return None
    replica, stage_rank = max(typical, key=lambda place: typical[place])
    return Imbalance(imbalance_ratio(list(typical.values())), replica, stage_rank)
