"""Which layers each stage should hold: the fastest slowest stage that fits, then the fewest bytes to move there. Pure.

In three searches (`cuts`), each within what the one before has found:

1. the least time that the slowest stage can have, among layouts whose stages fit into their memory;
2. with a current layout: among those within `slack_ratio` of that, the fewest moved bytes, then the fastest;
3. among those as good, the most even chunks: the least sum of their squared seconds.

The first search tries a limit just above a lower bound, and raises it until something is found: what is found below a
limit is the optimum, and a limit below which there is nothing is a proved bound. With several chunks a stage the
search may be too large; then cuts near a good layout are searched, and around what that finds, until nothing is gained.
"""

from dataclasses import dataclass

import numpy as np

from trimtab.balance.cuts import ROUNDING, Found, TooManyStates, search, whole_window
from trimtab.balance.plan import Costs, Hardware, ParameterMemory, Schedule
from trimtab.balance.schedules import obstacle
from trimtab.balance.stage_costs import Cuts, Problem, Recompute, Shortage, StageCosts
from trimtab.protocol import Layout

MOST_CHOICES = 2_000_000
"""Choices of a stage's layers that one search may look at: about a second."""
LIMIT_RATIOS = (1 + ROUNDING, 1.02, 1.1, 1.5, 3.0, np.inf)
"""Limits of the first search, over its lower bound."""


@dataclass(frozen=True)
class Partition:
    """A layout, and how good it is."""

    layout: Layout
    recomputed_layers: tuple[int, ...]
    """[S] of each stage, counted from its first."""
    slowest_seconds: float
    """Compute of the slowest stage for one microbatch over all its chunks, at its speed in the slowest replica."""
    bound_seconds: float
    """No layout that fits is faster; the optimum where that was found."""
    exact: bool
    """Whether it is proved that no layout within the slack of the optimum moves fewer bytes; without a current layout,
    that none is faster."""
    moved_bytes: float
    """What the layers take along that are on another stage now."""


class NoLayout(ValueError):
    """No layout fits, or none was found: names the stage that lacks most, by how much, and the way out."""

    def __init__(self, reason: str, stage: int | None = None, lacking_bytes: float = 0.0) -> None:
        super().__init__(reason)
        self.stage, self.lacking_bytes = stage, lacking_bytes


def partition(
    costs: Costs,
    memory: ParameterMemory,
    hardware: Hardware,
    *,
    schedule: Schedule,
    stages: int,
    virtual: int = 1,
    microbatches: int,
    recompute: Recompute = "none",
    current: Layout | None = None,
    slack_ratio: float = 0.01,
) -> Partition:
    """The best layout of the layers of `costs` over stages x virtual chunks.

    `microbatches` are those of the replica with the most. Chunks between the first and the last hold at least one
    layer; the first may hold the embedding alone, the last the head alone. `current` is the layout to come from.
    Raises NoLayout where no layout fits, ValueError where the schedule cannot run so or the shapes differ.
    """
    layers, chunks = len(costs.layers), stages * virtual
    if reason := obstacle(schedule, stages, virtual, microbatches):
        raise ValueError(reason)
    if hardware.speeds.shape[1] != stages or len(hardware.memory_bytes) != stages:
        raise ValueError(f"speeds {hardware.speeds.shape}, memory of {len(hardware.memory_bytes)} for {stages} stages")
    if current is not None and sum(current.layers) != layers:
        raise ValueError(f"the current layout has {sum(current.layers)} layers, the model {layers}")
    if layers < chunks - 2:
        raise NoLayout(
            f"{layers} layers over {chunks} chunks: each but the first and the last holds at least one; take fewer "
            "stages or virtual stages"
        )
    plans = _Plans(Problem(costs, memory, hardware, schedule, stages, virtual, microbatches, recompute, current))
    bound_seconds, best, exact = plans.fastest()
    if current is not None:
        best, proved = plans.best(best, best.second * (1 + slack_ratio), moves=True)
        exact = exact and proved
    best, _ = plans.best(best, best.second, moves=current is not None, even=True)
    slowest, recomputed = plans.settle(best.cuts)
    return Partition(
        layout=Layout(tuple(np.diff(best.cuts).tolist()), stages),
        recomputed_layers=recomputed,
        slowest_seconds=slowest,
        bound_seconds=bound_seconds,
        exact=exact,
        moved_bytes=best.arriving_bytes,
    )


class _Plans:
    """The searches for one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.table = StageCosts(problem)
        self.window = whole_window(self.table.layers, problem.stages * problem.virtual)

    def fastest(self) -> tuple[float, Found, bool]:
        """The bound, the layout with the fastest slowest stage, and whether that is proved. Raises NoLayout."""
        bound = _bound_seconds(self.table)
        for ratio in LIMIT_RATIOS:
            try:
                found = search(self.table, self.window, bound * ratio, most_choices=MOST_CHOICES)
            except TooManyStates:
                near = self._near(self._seeds(bound), np.inf)
                if near is None:
                    raise self._no_layout() from None
                return bound, near, near.second <= bound * (1 + ROUNDING)
            if found is not None:
                return found.second, found, True
            bound *= ratio
        raise self._no_layout()

    def best(self, known: Found, limit_seconds: float, *, moves: bool, even: bool = False) -> tuple[Found, bool]:
        """The best layout within a limit that `known` is within, and whether that is proved."""
        limit_seconds *= 1 + ROUNDING
        try:
            found = search(self.table, self.window, limit_seconds, moves=moves, even=even, most_choices=MOST_CHOICES)
            proved = True
        except TooManyStates:
            found, proved = self._near([known.cuts, *self._current()], limit_seconds, moves=moves, even=even), False
        if found is None:
            raise AssertionError("a layout within the limit is known")
        return found, proved

    def settle(self, cuts: Cuts) -> tuple[float, tuple[int, ...]]:
        """The slowest stage's seconds, and how many layers each stage recomputes."""
        seconds, recomputed = [], []
        for stage, (starts, ends) in enumerate(self._chunks_of_stages(cuts)):
            one, count = self.table.settle(stage, starts, ends)
            seconds.append(float(one[0]))
            recomputed.append(int(count[0]))
        return max(seconds), tuple(recomputed)

    def _near(
        self, seeds: list[Cuts], limit_seconds: float, *, moves: bool = False, even: bool = False
    ) -> Found | None:
        """The best layout near some: from the best so far to the best whose cuts are within reach, farther and farther.

        The first seed alone is looked at before its surroundings, which may be too many.
        """
        best: Found | None = None
        for cuts in seeds:
            reach = 0
            while reach <= self.table.layers:
                window = self.window.around(cuts, reach)
                try:
                    found = search(
                        self.table, window, limit_seconds, moves=moves, even=even, most_choices=MOST_CHOICES // 8
                    )
                except TooManyStates:
                    break
                if found is None or (best is not None and found.score >= best.score):
                    reach += 1
                else:
                    best, cuts, reach = found, found.cuts, max(reach, 1)
        return best

    def _seeds(self, bound_seconds: float) -> list[Cuts]:
        """Where to begin: every chunk its share of the time of the bound, and the current layout."""
        table, window = self.table, self.window
        shares = np.tile(np.maximum(table.budgets(bound_seconds), 0.0), table.virtual)
        before = np.concatenate([[0.0], np.cumsum(shares)])
        cuts = np.searchsorted(table.work, before / before[-1] * table.work[-1])
        # At least so many layers before each cut, and after it.
        cuts = np.maximum.accumulate(cuts - window.least) + window.least
        return [np.minimum(cuts, window.most), *self._current()]

    def _current(self) -> list[Cuts]:
        current = self.problem.current
        if current is None or (current.stages, current.virtual) != (self.table.stages, self.table.virtual):
            return []
        return [np.concatenate([[0], np.cumsum(current.layers)])]

    def _chunks_of_stages(self, cuts: Cuts) -> list[tuple[Cuts, Cuts]]:
        """[S] first layers and ends of each stage's chunks, one row each."""
        by_round = cuts[:-1].reshape(-1, self.table.stages), cuts[1:].reshape(-1, self.table.stages)
        return [(starts[None, :], ends[None, :]) for starts, ends in zip(*(table.T for table in by_round), strict=True)]

    def _no_layout(self) -> NoLayout:
        """What the layout lacks that lacks least."""
        problem, stages = self.problem, self.table.stages
        lack = Shortage(problem)
        try:
            found = search(lack, self.window, np.inf, most_choices=MOST_CHOICES)
        except TooManyStates:
            found = None
        cuts = self._seeds(_bound_seconds(self.table))[0] if found is None else found.cuts
        lacking = [float(lack.settle(stage, *rows)[0][0]) for stage, rows in enumerate(self._chunks_of_stages(cuts))]
        stage = int(np.argmax(lacking))
        layers = sum(int((ends - starts).sum()) for starts, ends in self._chunks_of_stages(cuts)[stage : stage + 1])
        ways = [
            *(["recompute layers"] if problem.recompute == "none" else []),
            *(
                ["shard the optimizer state over the replicas (distributed optimizer)"]
                if problem.memory.shards == 1
                else []
            ),
            "take smaller microbatches or more stages",
        ]
        return NoLayout(
            f"no layout of {self.table.layers} layers over {stages} stages fits: at best stage {stage}, with {layers} "
            f"layers, lacks {lacking[stage]:.4g} of {problem.hardware.memory_bytes[stage]:.4g} bytes; "
            + ", or ".join(ways),
            stage,
            lacking[stage],
        )


def _bound_seconds(table: StageCosts) -> float:
    """What the slowest stage takes at least: all work shared out without regard to layers; or every stage with as many
    layers as fit into its time if they were the cheapest ones, so that none is left over."""
    even = (table.work[-1] + table.end_seconds.sum()) / table.speeds.sum()
    cheapest = np.concatenate([[0.0], np.cumsum(np.sort(table.layer_seconds))])
    # [S, L + 1] seconds of a stage with so many of the cheapest layers.
    seconds = (cheapest + table.end_seconds[:, None]) / table.speeds[:, None]
    counted = np.sort(seconds[:, 1:], axis=None)[table.layers - 1] if table.layers else 0.0
    return float(max(even, counted, seconds[:, 0].max()))
