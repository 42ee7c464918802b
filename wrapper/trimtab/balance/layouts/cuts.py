"""Where to cut a model into chunks: exact dynamic programming, stage by stage. Pure.

Stage s holds the chunks s, S + s, 2 S + s, ..., so its time does not follow from any one stretch of layers. But with
the first layer of each round of S chunks fixed, the stages can be settled one after another: all that the stages from s
on need to know of those before are the v layers at which their chunks begin. So a state is the v - 1 starts of the
rounds and the v fronts that the stages up to s have reached; of all ways into a state the cheapest is kept. With v = 1
that is the classic dynamic program of chains on chains (Pinar and Aykanat 2004, "Fast optimal load balancing algorithms
for 1D partitioning"). States whose remaining layers do not fit into the remaining stages' time are never made.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from trimtab.balance.layouts.stage_costs import Cuts, StageCosts
from trimtab.balance.plan import Floats

Rows = npt.NDArray[np.intp]
ROUNDING = 1e-9
"""Sums of seconds that are apart by less, relatively, are equal."""


class TooManyChoices(Exception):
    """A search would look at more choices than it is allowed."""


class Allowance:
    """How many choices of a stage's layers may still be looked at. Counts, not seconds, so that results repeat."""

    def __init__(self, choices: float) -> None:
        self.choices = choices

    def spend(self, choices: int) -> None:
        """Raises TooManyChoices where there are fewer left."""
        if choices > self.choices:
            raise TooManyChoices
        self.choices -= choices


@dataclass(frozen=True)
class Goal:
    """What a search looks for: the fewest arriving bytes (where `moves`; else all count as 0), then the fastest slowest
    stage (where `even`: the least unevenness)."""

    limit_seconds: float
    """No stage may be slower."""
    moves: bool = False
    even: bool = False
    most_arriving: float = np.inf
    """No cuts may have more arriving bytes."""

    def at_least(self, found: "Found | None") -> "Goal":
        """The goal of finding something as good."""
        if found is None:
            return self
        if self.moves or self.even:
            return replace(self, most_arriving=found.arriving_bytes)
        return replace(self, limit_seconds=found.second * (1 + ROUNDING))


@dataclass(frozen=True)
class Window:
    """Which cuts are looked at."""

    least: Cuts
    """[C + 1] first layer of each chunk, and the end."""
    most: Cuts
    """[C + 1] likewise, the last choice."""

    def around(self, cuts: Cuts, reach: Cuts) -> "Window":
        """The part of this window where each cut is at most its `reach` away from where it is."""
        return Window(np.maximum(self.least, cuts - reach), np.minimum(self.most, cuts + reach))


def whole_window(layers: int, chunks: int) -> Window:
    """All cuts: chunks between the first and the last hold at least one layer."""
    before = _least_layers_before(chunks)
    return Window(np.append(before[:-1], layers), layers - (before[-1] - before))


def _least_layers_before(chunks: int) -> Cuts:
    """[C + 1] how many layers the chunks before each hold at least."""
    least = np.ones(chunks, dtype=np.int64)
    least[[0, -1]] = 0
    return np.concatenate([[0], np.cumsum(least)])


@dataclass(frozen=True)
class Found:
    """The best cuts of a search."""

    cuts: Cuts
    """[C + 1] first layer of each chunk, and the end."""
    arriving_bytes: float
    second: float
    """Slowest stage's seconds or unevenness, whichever the search looked at."""

    @property
    def score(self) -> tuple[float, float]:
        """What the search made least."""
        return self.arriving_bytes, self.second


@dataclass(frozen=True)
class _States:
    """After some stages."""

    start: Rows
    """[N] which of the starts of rounds."""
    fronts: Cuts
    """[N, v] the first layer of each round that no stage holds yet."""
    arriving: Floats
    second: Floats
    parent: Rows
    """[N] the state before the last stage."""


def search(table: StageCosts, window: Window, goal: Goal, allowance: Allowance) -> Found | None:
    """The cuts that serve a goal best, None where none do. Raises TooManyChoices, see Allowance."""
    budgets = table.budgets(goal.limit_seconds)
    if (budgets < -ROUNDING * goal.limit_seconds).any():
        return None
    starts = _round_starts(table, window, allowance)
    zeros = np.zeros(len(starts))
    states = _States(np.arange(len(starts)), starts[:, :-1], zeros, zeros, np.arange(len(starts)))
    reached = [states]
    for stage in range(table.stages):
        rows, ends = _choices(table, window, budgets, stage, starts, states, allowance)
        states = _best_of_each(_settled(table, goal, stage, states, rows, ends))
        if not len(states.start):
            return None
        reached.append(states)
    best = np.lexsort((states.second, states.arriving))[0]
    return Found(_walk_back(reached, best), float(states.arriving[best]), float(states.second[best]))


def _settled(table: StageCosts, goal: Goal, stage: int, states: _States, rows: Rows, ends: Cuts) -> _States:
    """The states that choices for a stage lead to, of those within the goal's limits."""
    fronts, arriving, second = states.fronts[rows], states.arriving[rows], states.second[rows]
    if goal.moves:
        arriving = arriving + table.arriving_bytes(stage, fronts, ends)
    seconds, _ = table.settle(stage, fronts, ends)
    kept = np.isfinite(seconds) & (seconds <= goal.limit_seconds) & (arriving <= goal.most_arriving)
    second = second + table.unevenness(stage, fronts, ends) if goal.even else np.maximum(second, seconds)
    return _States(states.start[rows[kept]], ends[kept], arriving[kept], second[kept], rows[kept])


def _spread(least: Cuts, most: Cuts, allowance: Allowance) -> tuple[Rows, Cuts]:
    """All numbers from least to most of each row: the rows they belong to, and the numbers."""
    counts = np.maximum(most - least + 1, 0)
    total = int(counts.sum())
    allowance.spend(total)
    rows = np.repeat(np.arange(len(counts)), counts)
    firsts = np.cumsum(counts) - counts
    return rows, np.arange(total) - np.repeat(firsts - least, counts)


def _round_starts(table: StageCosts, window: Window, allowance: Allowance) -> Cuts:
    """[G, v + 1] every choice of the first layers of the rounds, and the end."""
    before = _least_layers_before(table.stages * table.virtual)
    starts = np.zeros((1, 1), dtype=np.int64)
    for chunk in range(table.stages, table.stages * table.virtual + 1, table.stages):
        least = np.maximum(starts[:, -1] + before[chunk] - before[chunk - table.stages], window.least[chunk])
        rows, begin = _spread(least, np.full_like(least, window.most[chunk]), allowance)
        starts = np.column_stack([starts[rows], begin])
    return starts


def _choices(
    table: StageCosts, window: Window, budgets: Floats, stage: int, starts: Cuts, states: _States, allowance: Allowance
) -> tuple[Rows, Cuts]:
    """Every choice of layers for a stage that its time and the stages after it allow: [N] state, and [N, v] ends."""
    before = _least_layers_before(table.stages * table.virtual)
    total, after = table.work[-1], budgets[stage + 1 :].sum()
    tolerance = ROUNDING * total
    rows = np.arange(len(states.start))
    ends = np.zeros((len(rows), 0), dtype=np.int64)
    done = (table.work[states.fronts] - table.work[starts[states.start, :-1]]).sum(axis=1)
    budget = np.full(len(rows), budgets[stage])
    for turn in range(table.virtual):
        chunk = turn * table.stages + stage
        front, end_of_round = states.fronts[rows, turn], starts[states.start[rows], turn + 1]
        work = table.work[front]
        least = np.maximum(front + before[chunk + 1] - before[chunk], window.least[chunk + 1])
        ahead = before[(turn + 1) * table.stages] - before[chunk + 1]
        most = np.minimum(end_of_round - ahead, window.most[chunk + 1])
        most = np.minimum(most, np.searchsorted(table.work, work + budget + tolerance, side="right") - 1)
        if stage == table.stages - 1:
            least = np.maximum(least, end_of_round)
        if turn == table.virtual - 1 and np.isfinite(after + budgets[stage]):
            left = total - done[rows] - (budgets[stage] - budget) - after
            least = np.maximum(least, np.searchsorted(table.work, work + left - tolerance))
        kept, end = _spread(least, most, allowance)
        rows, ends = rows[kept], np.column_stack([ends[kept], end])
        budget = budget[kept] - (table.work[end] - work[kept])
    return rows, ends


def _best_of_each(choices: _States) -> _States:
    """Of the choices that lead to the same state, the best; the first where several are."""
    order = np.lexsort((choices.second, choices.arriving, *choices.fronts.T, choices.start))
    key = np.column_stack([choices.start, choices.fronts])[order]
    first = np.ones(len(order), dtype=np.bool_)
    first[1:] = (key[1:] != key[:-1]).any(axis=1)
    best = order[first]
    return _States(
        choices.start[best], choices.fronts[best], choices.arriving[best], choices.second[best], choices.parent[best]
    )


def _walk_back(reached: list[_States], state: np.intp) -> Cuts:
    """[C + 1] the cuts that led to a state after the last stage."""
    fronts = []
    for states in reversed(reached):
        fronts.append(states.fronts[state])
        state = states.parent[state]
    # [v, S] the first layers of the chunks, then the end.
    return np.append(np.array(fronts[:0:-1]).T.ravel(), fronts[0][-1])
