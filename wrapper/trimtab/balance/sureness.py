"""How sure a mean of a few steps is: Student's quantiles, and what a step has in common with the next. Pure."""

import math
from functools import cache

import numpy as np

from trimtab.balance.plan import Floats

MOST_CORRELATION = 0.9
"""Of a step with the next: with more, a window says next to nothing."""
_HALVINGS = 60


@cache
def student_quantile(probability: float, freedom: int) -> float:
    """What a t-distributed value stays below with this probability (0.5 or more, below 1).

    `freedom`: degrees of freedom, 1 or more. The exact distribution function for whole degrees of freedom (Abramowitz
    and Stegun, 1964, "Handbook of Mathematical Functions", 26.7.3 and 26.7.4), inverted by halving.
    """
    inside = 2 * probability - 1
    low, high = 0.0, math.pi / 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _inside(middle, freedom) < inside else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _inside(angle: float, freedom: int) -> float:
    """The probability of |t| <= sqrt(freedom) tan(angle)."""
    cosine = math.cos(angle)
    odd = freedom % 2
    total, term = 0.0, cosine if odd else 1.0
    for exponent in range(odd, freedom - 1, 2):
        total += term
        term *= (exponent + 1) / (exponent + 2) * cosine**2
    total *= math.sin(angle)
    return (angle + total) * 2 / math.pi if odd else total


def step_correlations(deviations: Floats) -> Floats:
    """[P] correlation of a step with the next, of deviations [T, P] from what is expected; NaN where none varies.

    Without the bias of its estimate from T steps, more than 3 (Marriott and Pope, 1954, "Bias in the estimation of
    autocorrelations").
    """
    count = len(deviations)
    squares = (deviations**2).sum(axis=0)
    products = (deviations[1:] * deviations[:-1]).sum(axis=0)
    found = np.divide(products, squares, out=np.full(squares.shape, np.nan), where=squares > 0)
    return np.asarray((found + 1 / count) / (1 - 3 / count))


def variance_inflation(correlation: float) -> float:
    """How many times the variance of a mean is that of independent steps, by a step's correlation with the next.

    Anticorrelation is not made use of.
    """
    kept = min(max(0.0, correlation), MOST_CORRELATION)
    return (1 + kept) / (1 - kept)
