"""Which layers each stage should hold: the fastest slowest stage that fits, then the fewest bytes to move there. Pure.

In three searches (`cuts`), each within what the one before has found:

1. the least time that the slowest stage can have, among layouts whose stages fit into their memory;
2. with a current layout: among those within `slack_ratio` of that, the fewest moved bytes, then the fastest;
3. among those as good, the most even chunks: the least sum of their squared seconds.

The first search tries a limit just above a lower bound, and raises it until something is found: what is found below a
limit is the optimum, and a limit below which there is nothing is a proved bound. Of many layouts with several chunks a
stage a good one is looked for first (`nearby`): it narrows the searches, and is the answer where they are too large.
"""

from dataclasses import dataclass
from math import comb

import numpy as np

from trimtab.balance.layouts.cuts import ROUNDING, Allowance, Found, Goal, TooManyChoices, search, whole_window
from trimtab.balance.layouts.nearby import mean_cuts, search_nearby
from trimtab.balance.layouts.stage_costs import Cuts, Problem, Recompute, Shortage, StageCosts
from trimtab.balance.pipeline.schedules import obstacle
from trimtab.balance.plan import Costs, Hardware, ParameterMemory, Schedule
from trimtab.protocol import Layout

MOST_CHOICES = 2_000_000
"""Choices of a stage's layers that a search may look at where a stage has several chunks: about a second."""
FEW_LAYOUTS = 20_000
"""Up to so many layouts, and with one chunk a stage, all are searched at once."""
LIMIT_RATIOS = (1 + ROUNDING, 1.02, 1.1, 1.5, 3.0, np.inf)
"""Limits of the first search, each over the bound that the one before has proved."""


@dataclass(frozen=True)
class Partition:
    """A layout, and how good it is."""

    layout: Layout
    recomputed_layers: tuple[int, ...]
    """[S] of each stage, counted from its first."""
    slowest_seconds: float
    """Compute of the slowest stage for one microbatch over all its chunks, at its speed in the slowest replica."""
    bound_seconds: float
    """No layout that fits is faster; the optimum itself where that was found."""
    exact: bool
    """Whether it is proved that no layout within the slack of the optimum moves fewer bytes; without a current layout,
    that none is faster."""
    moved_bytes: float
    """What the layers take along that are on another stage now, of one rank; whole bytes."""


class NoLayout(ValueError):
    """No layout fits, or none was found: says which stage lacks most at best, how much, and the way out."""

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
    if layers < max(1, chunks - 2):
        raise NoLayout(
            f"{layers} layers over {chunks} chunks: each but the first and the last holds at least one; take fewer "
            "stages, or fewer chunks a stage"
        )
    plans = _Plans(Problem(costs, memory, hardware, schedule, stages, virtual, microbatches, recompute, current))
    bound_seconds, best, exact = plans.fastest()
    if current is not None:
        best, proved = plans.fewest_moved(best, best.second * (1 + slack_ratio) * (1 + ROUNDING))
        exact = exact and proved
    cuts = plans.most_even(best).cuts
    rows = list(enumerate(plans.rows(cuts)))
    settled = [plans.table.settle(stage, *row) for stage, row in rows]
    return Partition(
        layout=Layout(tuple(np.diff(cuts).tolist()), stages),
        recomputed_layers=tuple(int(recomputed[0]) for _, recomputed in settled),
        slowest_seconds=max(float(seconds[0]) for seconds, _ in settled),
        bound_seconds=bound_seconds,
        exact=exact,
        moved_bytes=sum(float(plans.table.arriving_bytes(stage, *row)[0]) for stage, row in rows),
    )


class _Plans:
    """The searches for one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.table = StageCosts(problem)
        chunks = problem.stages * problem.virtual
        self.window = whole_window(self.table.layers, chunks)
        self.many = problem.virtual > 1 and comb(self.table.layers + 1, chunks - 1) > FEW_LAYOUTS
        """Whether a good layout is looked for before the best."""
        self.current: list[Cuts] = []
        """The cuts of the current layout, where it has as many chunks on as many stages."""
        now = problem.current
        if now is not None and (now.stages, now.virtual) == (problem.stages, problem.virtual):
            self.current.append(np.concatenate([[0], np.cumsum(now.layers)]))

    def fastest(self) -> tuple[float, Found, bool]:
        """The bound, the layout with the fastest slowest stage, and whether that is proved. Raises NoLayout."""
        bound = _bound_seconds(self.table)
        near = self._fastest_nearby(bound * (1 + ROUNDING)) if self.many else None
        for ratio in LIMIT_RATIOS:
            goal = Goal(bound * ratio)
            if near is not None and near.second <= goal.limit_seconds:
                if near.second <= bound * (1 + ROUNDING):
                    return near.second, near, True
                goal = goal.at_least(near)
            try:
                found = self._search(goal)
            except TooManyChoices:
                if near is None:
                    raise self._no_layout(proved=False) from None
                return bound, near, False
            if found is not None:
                return found.second, found, True
            bound = goal.limit_seconds
        raise self._no_layout(proved=True)

    def _fastest_nearby(self, enough_seconds: float) -> Found | None:
        goal = Goal(np.inf)
        return self._nearby(goal, [self._mean_cuts(), *self.current], enough_seconds) or self._nearby(
            goal, [self._roomiest()], enough_seconds
        )

    def fewest_moved(self, known: Found, limit_seconds: float) -> tuple[Found, bool]:
        """The layout within a limit that moves the fewest bytes, and whether that is proved. `known` is within it."""
        goal = Goal(limit_seconds, moves=True)
        near = self._nearby(goal, [known.cuts, *self.current]) if self.many else None
        # Where the current layout itself was no answer, at least one layer has to move.
        if near is not None and near.arriving_bytes <= (self.table.smallest_bytes if self.current else 0.0):
            return near, True
        try:
            found, proved = self._search(goal.at_least(near)), True
        except TooManyChoices:
            found, proved = near, False
        return found or known, proved

    def most_even(self, known: Found) -> Found:
        """A layout as good as `known`, with the most even chunks; with several chunks a stage, of those near it."""
        goal = Goal(known.second * (1 + ROUNDING), self.problem.current is not None, True, known.arriving_bytes)
        found = self._nearby(goal, [known.cuts]) if self.many else self._search(goal)
        return found or known

    def rows(self, cuts: Cuts) -> list[tuple[Cuts, Cuts]]:
        """[S] starts and ends of each stage's chunks, [1, v] each."""
        starts, ends = (some.reshape(-1, self.table.stages).T[:, None, :] for some in (cuts[:-1], cuts[1:]))
        return list(zip(starts, ends, strict=True))

    def _search(self, goal: Goal) -> Found | None:
        return search(self.table, self.window, goal, self._allowance())

    def _allowance(self) -> Allowance:
        """With one chunk a stage no search is too large: choices grow with the square of the layers."""
        return Allowance(MOST_CHOICES if self.problem.virtual > 1 else np.inf)

    def _nearby(self, goal: Goal, seeds: list[Cuts], enough_seconds: float = -np.inf) -> Found | None:
        return search_nearby(self.table, self.window, goal, seeds, Allowance(MOST_CHOICES), enough_seconds)

    def _mean_cuts(self) -> Cuts:
        return mean_cuts(self.table, self.window)

    def _roomiest(self) -> Cuts:
        """The layout whose stage that lacks most memory lacks the least; of those looked at, where there are many."""
        shortage, goal, seeds = Shortage(self.problem), Goal(np.inf), [self._mean_cuts()]
        try:
            found = search(shortage, self.window, goal, self._allowance())
        except TooManyChoices:
            found = search_nearby(shortage, self.window, goal, seeds, Allowance(MOST_CHOICES))
        return seeds[0] if found is None else found.cuts

    def _no_layout(self, *, proved: bool) -> NoLayout:
        problem, shortage = self.problem, Shortage(self.problem)
        rows = self.rows(self._roomiest())
        lacking = [float(shortage.settle(stage, *row)[0][0]) for stage, row in enumerate(rows)]
        stage = int(np.argmax(lacking))
        starts, ends = rows[stage]
        ways = ["take smaller microbatches or more stages"]
        if problem.memory.shards == 1:
            ways.insert(0, "shard the optimizer state over the replicas (distributed optimizer)")
        if problem.recompute == "none":
            ways.insert(0, "recompute layers")
        none = "no layout fits" if proved else "found no layout that fits"
        return NoLayout(
            f"{shortage.layers} layers over {problem.stages} stages: {none}; at best stage {stage}, with "
            f"{int((ends - starts).sum())} layers, lacks {_readable(lacking[stage])} of "
            f"{_readable(problem.hardware.memory_bytes[stage])}; {', or '.join(ways)}",
            stage,
            lacking[stage],
        )


def _readable(size_bytes: float) -> str:
    """In GiB, below one in MiB."""
    return f"{size_bytes / 2**30:,.1f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:,.1f} MiB"


def _bound_seconds(table: StageCosts) -> float:
    """What the slowest stage takes at least: all work shared out without regard to layers; or every stage with as many
    layers as fit into its time if they were the cheapest ones, so that none is left over."""
    even = (table.work[-1] + table.end_seconds.sum()) / table.speeds.sum()
    cheapest = np.concatenate([[0.0], np.cumsum(np.sort(table.layer_seconds))])
    # [S, L + 1] seconds of a stage with so many of the cheapest layers.
    seconds = (cheapest + table.end_seconds[:, None]) / table.speeds[:, None]
    counted = np.sort(seconds[:, 1:], axis=None)[table.layers - 1]
    return float(max(even, counted, seconds[:, 0].max()))
