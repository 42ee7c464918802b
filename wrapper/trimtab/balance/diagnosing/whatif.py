"""How long a step would take if some causes of unevenness were mended, and what each cause costs by that. Pure.

The causes multiply: a duration is its ideal times one factor for each cause, and mending a cause drops its factor. What
a cause costs depends on what else is mended (a slow stage hides the slowness of its neighbours), so each gets its
Shapley value: its saving, averaged over all orders in which the causes could be mended (Shapley, 1953, "A Value for
n-Person Games"). The costs add up to what mending everything saves, in whatever order they are looked at.
"""

from collections.abc import Callable, Sequence
from itertools import combinations
from math import comb

import numpy as np

from trimtab.balance.pipeline.simulate import simulate
from trimtab.balance.plan import Floats, Schedule

Coalition = frozenset[int]
"""Which causes are mended, by their place in the list of causes."""


class Replay:
    """One pipeline's schedule, run with many sets of durations at once.

    A schedule fixes the order of each stage's operations, whatever they take: so one simulation gives an order in which
    every operation comes after those that it waits for, and all steps and replicas go through it together. Equal to
    `simulate` for each of them, but that transfers do not queue behind one another.
    """

    def __init__(self, schedule: Schedule, stages: int, chunks: int, microbatches: int) -> None:
        """Raises ValueError where the schedule cannot run in this shape."""
        operations = simulate(schedule, stages, np.ones((chunks, microbatches)), 1.0, 0.0).operations
        order = np.argsort(operations.start_seconds, kind="stable")
        columns = (operations.kind == "F", operations.chunk, operations.microbatch)
        self._program = list(zip(*(column[order].tolist() for column in columns), strict=True))
        self._stages, self._chunks = stages, chunks

    def duration_seconds(self, forward_seconds: Floats, backward_seconds: Floats, transfer_seconds: Floats) -> Floats:
        """[...] until the last operation ends, from durations [..., C, M] and transfers [..., S], which broadcast.

        M may be 1: all microbatches take the same. Link s takes its transfer to bring something from stage s to stage
        (s + 1) % S, or back.
        """
        forward, backward = (
            np.ascontiguousarray(np.moveaxis(seconds, (-2, -1), (0, 1)))
            for seconds in (forward_seconds, backward_seconds)
        )
        last = forward.shape[1] - 1
        batch = forward.shape[2:]
        transfer = np.moveaxis(np.broadcast_to(transfer_seconds, (*batch, self._stages)), -1, 0)
        clocks = [np.zeros(batch) for _ in range(self._stages)]
        there: dict[tuple[int, int], Floats] = {}  # when the input of a forward is there
        back: dict[tuple[int, int], Floats] = {}  # and of a backward
        for is_forward, chunk, microbatch in self._program:
            stage, cell = chunk % self._stages, (chunk, min(microbatch, last))
            arrived = (there if is_forward else back).pop((chunk, microbatch), 0.0)
            end = np.maximum(clocks[stage], arrived) + (forward if is_forward else backward)[cell]
            clocks[stage] = end
            if is_forward and chunk + 1 < self._chunks:
                there[chunk + 1, microbatch] = end + transfer[stage]
            elif is_forward:
                back[chunk, microbatch] = end
            elif chunk > 0:
                back[chunk - 1, microbatch] = end + transfer[(stage - 1) % self._stages]
        return np.asarray(np.max(clocks, axis=0))


def coalition_values(causes: int, value: Callable[[Coalition], Floats]) -> dict[Coalition, Floats]:
    """The value of every set of mended causes."""
    return {
        frozenset(mended): value(frozenset(mended))
        for size in range(causes + 1)
        for mended in combinations(range(causes), size)
    }


def shapley(values: dict[Coalition, Floats], causes: int) -> Floats:
    """[causes, ...] what mending each takes off the value, averaged over all orders of mending."""
    return np.array([_saving(values, causes, cause) for cause in range(causes)])


def _saving(values: dict[Coalition, Floats], causes: int, cause: int) -> Floats:
    before: Sequence[Coalition] = [mended for mended in values if cause not in mended]
    weights = [1 / (causes * comb(causes - 1, len(mended))) for mended in before]
    savings = [values[mended] - values[mended | {cause}] for mended in before]
    return np.asarray(np.tensordot(weights, savings, axes=1))
