"""Statistics of figures with gaps (NaN) and outliers. Pure."""

from statistics import NormalDist

import numpy as np

from trimtab.balance.plan import Floats
from trimtab.balance.sureness import student_quantile

FALSE_ALARM_RATIO = 0.01
"""How often, at most, noise alone is taken for a finding, over all looks at once (Bonferroni)."""
MEDIAN_SIGMA = 1.2533
"""Standard error of a median over that of a mean."""


def critical(looks: int, freedom: int | None = None) -> float:
    """How many standard errors are more than chance in so many looks.

    An error itself is known from `freedom` differences; None: surely.
    """
    probability = 1 - FALSE_ALARM_RATIO / looks
    return NormalDist().inv_cdf(probability) if freedom is None else student_quantile(probability, freedom)


def mean(values: Floats, axis: int | tuple[int, ...] | None, keepdims: bool = False) -> Floats:
    """Over what is there; NaN where nothing is."""
    known = np.isfinite(values)
    total = np.where(known, values, 0.0).sum(axis=axis, keepdims=keepdims)
    count = known.sum(axis=axis, keepdims=keepdims)
    return np.asarray(np.where(count > 0, total / np.maximum(count, 1), np.nan))


def _ranked(values: Floats, axis: int, upper: bool) -> Floats:
    ascending = np.sort(values, axis=axis)  # NaN last
    count = np.isfinite(values).sum(axis=axis, keepdims=True)
    middle = np.maximum((count // 2) if upper else (count - 1) // 2, 0)
    return np.asarray(np.take_along_axis(ascending, middle, axis=axis).squeeze(axis))


def lower_median(values: Floats, axis: int) -> Floats:
    """The lower of the two middle values: half of the peers may be slow. NaN where nothing is there."""
    return _ranked(values, axis, upper=False)


def median(values: Floats, axis: int) -> Floats:
    """Of what is there; NaN where nothing is."""
    return np.asarray((_ranked(values, axis, upper=False) + _ranked(values, axis, upper=True)) / 2)
