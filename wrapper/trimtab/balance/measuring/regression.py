"""Two kinds of least squares: robust, where samples may be wrong; and in order, where they do not decide everything."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from trimtab.balance.plan import Floats

HUBER, TUKEY = 1.345, 4.685
"""Residuals, in units of their scale, from which a sample counts less, and not at all: each loses 5 % of efficiency
where noise is normal (Huber 1981, Robust Statistics; Beaton and Tukey 1974)."""
_ROUNDS = 20
_LEAST_SCALE = 1e-6
"""No clock is more exact; and no weight becomes so small that its sample is forgotten."""
_LEAST_SENSITIVITY = 0.1
_NOTHING = 1e-7
_LEAST_SHARE = 1e-12
"""Of the largest eigenvalue: smaller ones are those of directions that no sample tells of."""

Prediction = Callable[[Floats], tuple[Floats, Floats]]
"""Parameters [p] -> what they predict [n], and its derivative [n, p]."""


@dataclass(frozen=True)
class Fit:
    """Parameters of a robust regression, and how sure they are."""

    values: Floats
    """[p]"""
    independent: Floats
    """[p, p] Covariance if samples err each for itself (Huber 1981, 7.6)."""
    clusters: Floats
    """[c] Their names, ascending."""
    influences: Floats
    """[c, p] What each cluster moves the values by: the products' sum is their covariance if samples of a cluster err
    together (Liang and Zeger 1986)."""

    def covariance(self, contrasts: Floats) -> Floats:
        """[m, m] of contrasts [m, p] @ values: of either covariance the larger variances, and the independent's
        correlations. NaN with fewer than 3 samples more than parameters.

        The independent one is blind to errors in common, the clustered to those of what few clusters tell of.
        """
        independent = contrasts @ self.independent @ contrasts.T
        clustered = ((self.influences @ contrasts.T) ** 2).sum(axis=0)
        variances = np.maximum(np.diagonal(independent), np.finfo(float).tiny)
        growth = np.sqrt(np.maximum(1.0, clustered / variances))
        return np.asarray(growth[:, None] * independent * growth)


def fit_robust(predict: Prediction, observed: Floats, start: Floats, clusters: Floats) -> Fit:
    """Iteratively re-weighted least squares: Huber's weights, which lead to one answer from anywhere, then Tukey's.

    observed [n], start [p]; clusters [n] names what each sample was taken in: samples of one cluster may err together.
    Of parameters that the samples leave open, the step from the start is the shortest.
    """
    values = start
    for weights_of in (_huber, _tukey):
        for _ in range(_ROUNDS):
            predicted, slopes = predict(values)
            residuals = observed - predicted
            weighted = slopes * weights_of(residuals / _scale(residuals, slopes.shape[1]))[:, None]
            step = np.linalg.pinv(slopes.T @ weighted, rcond=_LEAST_SHARE, hermitian=True) @ (weighted.T @ residuals)
            values = values + step
            if np.abs(step).max() < _NOTHING:
                break
    predicted, slopes = predict(values)
    return _fit(values, observed - predicted, slopes, clusters)


def _scale(residuals: Floats, parameters: int) -> float:
    """Standard deviation of the good residuals, by their median; parameters make residuals look smaller than errors."""
    freedom = max(1, len(residuals) - parameters)
    return max(1.4826 * float(np.median(np.abs(residuals))) * float(np.sqrt(len(residuals) / freedom)), _LEAST_SCALE)


def _huber(units: Floats) -> Floats:
    return HUBER / np.maximum(np.abs(units), HUBER)


def _tukey(units: Floats) -> Floats:
    return np.maximum(1 - (units / TUKEY) ** 2, 0.0) ** 2


def _fit(values: Floats, residuals: Floats, slopes: Floats, clusters: Floats) -> Fit:
    samples, parameters = slopes.shape
    freedom = samples - int(np.linalg.matrix_rank(slopes))
    names, members = np.unique(clusters, return_inverse=True)
    if freedom < 3:
        return Fit(values, np.full((parameters, parameters), np.nan), names, np.full((len(names), parameters), np.nan))
    units = residuals / _scale(residuals, parameters)
    scores = residuals * _tukey(units)  # Tukey's psi; the sensitivity is the mean of its derivative
    inside = (units / TUKEY) ** 2
    sensitivity = float(np.mean(np.where(inside < 1, (1 - inside) * (1 - 5 * inside), 0.0)))
    bread = np.linalg.pinv(slopes.T @ slopes, rcond=_LEAST_SHARE, hermitian=True) / max(sensitivity, _LEAST_SENSITIVITY)
    independent = bread @ (slopes.T @ slopes) @ bread * float(scores @ scores) / freedom
    sums = np.zeros((len(names), parameters))
    np.add.at(sums, members, slopes * scores[:, None])
    small = len(names) / max(1, len(names) - 1)
    # Student's t of a few degrees of freedom strays further than the normal; its variance is this much larger.
    student = freedom / (freedom - 2)
    return Fit(values, independent * student, names, sums @ bread * np.sqrt(small * student))


class OrderedLeastSquares:
    """Linear equations of falling rank: each set decides what those before it left open, and nothing else.

    Right-hand sides may have several columns: a first of values, and further ones that carry the derivative of the
    solution with respect to anything that the values depend on.
    """

    def __init__(self, unknowns: int, columns: int) -> None:
        self.solution = np.zeros((unknowns, columns))
        """[unknowns, columns] Open directions are 0."""
        self.open = np.eye(unknowns)
        """[unknowns, directions] Orthonormal; what is still undecided."""

    def settle(self, rows: Floats, targets: Floats, tolerances: Floats | float = np.inf) -> None:
        """Add equations rows [n, unknowns] @ solution = targets [n, columns], solved by least squares.

        Rows are in units of their own error: a direction in which an unknown would be uncertain by more than its
        tolerance [unknowns] stays open.
        """
        if not len(rows) or not self.open.shape[1]:
            return
        left, strengths, right = np.linalg.svd(rows @ self.open)
        count = len(strengths)
        directions = self.open @ right.T
        used = strengths > _NOTHING * max(1.0, float(strengths.max()))
        with np.errstate(divide="ignore", invalid="ignore"):
            errors = np.abs(directions[:, :count]) / strengths
        used &= (errors <= np.reshape(tolerances, (-1, 1))).all(axis=0)
        remaining = left[:, :count].T @ (targets - rows @ self.solution)
        self.solution = self.solution + directions[:, :count][:, used] @ (remaining[used] / strengths[used, None])
        self.open = directions[:, ~np.pad(used, (0, right.shape[0] - count))]

    def is_open(self, unknown: int) -> bool:
        """Whether the equations so far leave an unknown undecided."""
        return bool(np.abs(self.open[unknown]).max(initial=0.0) > _NOTHING)
