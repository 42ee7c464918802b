"""Where to cut a model into chunks when looking at all cuts is too much: a search near good cuts. Pure.

The cuts of two rounds of chunks at a time may move by some layers, which `cuts.search` does exactly; from whatever is
better it goes on, and where nothing is, farther. It proves nothing.
"""

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from trimtab.balance.layouts.cuts import Allowance, Found, Goal, TooManyChoices, Window, search
from trimtab.balance.layouts.stage_costs import Cuts, StageCosts

FARTHEST = 3
"""Layers by which cuts move at once, at most."""


def search_nearby(
    table: StageCosts,
    window: Window,
    goal: Goal,
    seeds: Sequence[Cuts],
    allowance: Allowance,
    enough_seconds: float = -np.inf,
) -> Found | None:
    """The best cuts near some, or one of them; None where none of those looked at serve the goal.

    The seeds themselves are looked at before their surroundings, and those until the allowance is used up. Where the
    goal is the fastest slowest stage, `enough_seconds` is as good as any.
    """
    rounds = np.arange(len(window.least)) // table.stages
    pairs = [np.isin(rounds, pair).astype(np.int64) for pair in combinations(range(table.virtual), 2)]
    best: Found | None = None
    try:
        for farthest in (0, FARTHEST):
            for cuts in seeds:
                reach = min(farthest, 1)
                while reach <= farthest:
                    windows = [window.around(cuts, reach * free) for free in (pairs if reach else pairs[:1])]
                    found = _best_in(windows, table, goal, allowance, best)
                    if found is None or found is best:
                        reach += 1
                        continue
                    best, cuts = found, found.cuts
                    if not (goal.moves or goal.even) and best.second <= enough_seconds:
                        return best
    except TooManyChoices:
        pass
    return best


def _best_in(
    windows: Sequence[Window], table: StageCosts, goal: Goal, allowance: Allowance, best: Found | None
) -> Found | None:
    for window in windows:
        found = search(table, window, goal.at_least(best), allowance)
        if found is not None and (best is None or found.score < best.score):
            best = found
    return best


def mean_cuts(table: StageCosts, window: Window) -> Cuts:
    """The fastest cuts if all layers cost the mean and memory were unlimited, chunks of a stage as equal as they can
    be: [C + 1] for the layers as they are."""
    mean = table.work[-1] / table.layers
    # [S, L] seconds of a stage with so many layers, from 1; at least as many as it has chunks.
    seconds = (mean * np.arange(1, table.layers + 1) + table.end_seconds[:, None]) / table.speeds[:, None]
    seconds[:, : table.virtual] = -np.inf
    # Layers go, one after another, to the stage that is the fastest with one more.
    taken = np.argsort(seconds, axis=None, kind="stable")[: table.layers] // table.layers
    least, more = np.divmod(np.bincount(taken, minlength=table.stages), table.virtual)
    sizes = least + (np.arange(table.virtual)[:, None] >= table.virtual - more)  # [v, S]
    before = mean * np.concatenate([[0], np.cumsum(sizes)])
    cuts = np.searchsorted(table.work, before - mean / 2)
    return np.minimum(np.maximum.accumulate(cuts - window.least) + window.least, window.most)
