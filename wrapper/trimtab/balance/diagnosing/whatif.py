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

from trimtab.balance.plan import Floats

Coalition = frozenset[int]
"""Which causes are mended, by their place in the list of causes."""


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
