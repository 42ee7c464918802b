"""One figure of a series that may have gaps; None where nothing of it is there. Pure."""

import numpy as np

from trimtab.report.stages import Floats


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
