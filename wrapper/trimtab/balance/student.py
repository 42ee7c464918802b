"""Quantiles of Student's t distribution, for bounds that rest on a few steps."""

import math
from functools import cache

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
