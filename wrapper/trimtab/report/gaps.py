"""Series that may have gaps: one figure of them, None where nothing is there, and the gaps themselves. Pure."""

from itertools import pairwise

import numpy as np

from trimtab.report.stages import Floats
from trimtab_slurm.contents import Column


def finite(values: Floats) -> Floats:
    """The values that are there."""
    return values[np.isfinite(values)]


def median(values: Floats) -> float | None:
    """Their median."""
    return float(np.median(known)) if len(known := finite(values)) else None


def mean(values: Floats) -> float | None:
    """Their mean."""
    return float(known.mean()) if len(known := finite(values)) else None


def most(values: Floats) -> float | None:
    """The largest."""
    return float(known.max()) if len(known := finite(values)) else None


def missing_spans(numbers: Column) -> list[tuple[int, int]]:
    """First and last of what lacks between whole numbers, which ascend."""
    return [(before + 1, after - 1) for before, after in pairwise(numbers.tolist()) if after > before + 1]
