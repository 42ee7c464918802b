"""Layers that are all alike over the stages: how many each holds, spread evenly over its chunks. Pure.

Where layers cost the same, only how many a stage holds counts for its time. So the best layout is a search over counts
alone, in milliseconds, where `partition`, that knows any layers, takes seconds for many chunks. And the chunks come out
even, while its optimum may well have one of a layer beside one of ten, over which a pipeline stumbles.
"""

import math
from bisect import bisect_left

import numpy as np

from trimtab.balance.layouts.partition import NoLayout
from trimtab.balance.layouts.stage_costs import Cuts, Problem, StageCosts
from trimtab.balance.plan import Costs, Floats, Hardware, ParameterMemory, Schedule
from trimtab.protocol import Layout


def spread(
    costs: Costs,
    memory: ParameterMemory,
    hardware: Hardware,
    *,
    schedule: Schedule,
    stages: int,
    virtual: int,
    microbatches: int,
) -> tuple[Layout, tuple[int, ...]]:
    """The layout with the fastest slowest stage, and how many layers each stage has to recompute to fit.

    Only the first layer's costs are looked at. Raises NoLayout where none fits.
    """
    layers = len(costs.layers)
    table = StageCosts(
        Problem(costs, memory, hardware, schedule, stages, virtual, microbatches, recompute="fit", current=None)
    )
    # Recomputing everything costs a third: no stage takes more than twice its share to relieve the others.
    share = math.ceil(2 * layers * table.speeds.max() / table.speeds.sum()) + virtual
    sizes = _even_sizes(min(share, layers), virtual)
    ends = np.cumsum(sizes, axis=1)
    rows = [table.settle(stage, ends - sizes, ends) for stage in range(stages)]
    seconds = np.array([row[0] for row in rows])  # [S, N] of each stage with so many layers
    for stage in range(stages):
        # A chunk between the first and the last of all holds at least one layer.
        least = virtual - (stage == stages - 1) - (virtual == 1 and stage == 0)
        seconds[stage, : max(0, least)] = -np.inf
    counts = _fastest_counts(seconds, layers)
    if counts is None:
        raise NoLayout(
            f"no layout of {layers} layers over {stages} stages fits, whatever is recomputed; take smaller "
            "microbatches, more GPUs for each replica, or fewer chunks"
        )
    layout = Layout(tuple(sizes[counts].T.ravel().tolist()), stages)
    return layout, tuple(int(rows[stage][1][count]) for stage, count in enumerate(counts))


def _even_sizes(most: int, virtual: int) -> Cuts:
    """[N, virtual] so many layers over the chunks of a stage; the first chunks take one more."""
    least, more = np.divmod(np.arange(most + 1)[:, None], virtual)
    sizes: Cuts = least + (np.arange(virtual) < more)
    return sizes


def _fastest_counts(seconds: Floats, layers: int) -> Cuts | None:
    """[S] how many layers each stage holds; None where they fit nowhere. -inf in `seconds`: it must hold more."""
    least = (seconds == -np.inf).sum(axis=1)
    if least.sum() > layers:
        return None

    stages = np.arange(len(seconds))

    def most(limit: float) -> Cuts:
        counts: Cuts = np.maximum(np.count_nonzero(seconds <= limit, axis=1) - 1, 0)
        return counts

    def enough(limit: float) -> bool:
        counts = most(limit)
        return bool(counts.sum() >= layers and (counts >= least).all() and (seconds[stages, counts] <= limit).all())

    limits = np.unique(seconds[np.isfinite(seconds)])
    first = bisect_left(limits, True, key=enough)
    if first == len(limits):
        return None
    counts = most(limits[first])
    for _ in range(counts.sum() - layers):  # those that the slowest stage can spare
        held = np.where(counts > least, seconds[stages, counts], -np.inf)
        counts[held.argmax()] -= 1
    return counts
