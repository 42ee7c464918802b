"""How long each stage takes and how fast each of its replicas is, from samples of steps: the first of two regressions.

For one stage, over its replicas, layouts and steps:

    log seconds of a microbatch = log cost of the stage under a layout - log speed of the replica + log workload + noise

The workload of a microbatch, beside the typical one of all samples, is load x (1 + share x excess): the load its
tokens, the excess its squared lengths over its load, less 1, and the share that of attention in the stage's time, which
is estimated along. Adding the same to all speeds and costs changes nothing: the typical replica has speed 1.
"""

from dataclasses import dataclass

import numpy as np

from trimtab.balance.measuring.regression import fit_robust
from trimtab.balance.measuring.samples import Samples
from trimtab.balance.plan import Floats

_LEAST_VARIATION = 0.2
"""Root sum of squares of the excess, beside what replicas and layouts explain, from which attention's share is
estimated: at 5 % noise its error is then 0.25."""
_LEAST_LOAD = 0.1
_VARIED = 0.05
"""Range of the excess from which it is worth a word that it was not accounted for."""


def usable(samples: Samples) -> Samples:
    """Those with times and work, of places that also report under the newest layout of their stage.

    Of other places, nothing tells how their speed compares: they may never have run what the others run now.
    """
    seconds = np.stack([samples.forward_seconds, samples.backward_seconds])
    good = np.all(np.isfinite(seconds) & (seconds > 0), axis=0)
    for counts in samples.microbatches, samples.tokens:
        known = counts > 0
        if np.any(known & good):
            good &= known
    samples = samples.select(good)
    newest = {stage: samples.layout[samples.stage == stage].max() for stage in set(samples.stage.tolist())}
    places = list(zip(samples.replica.tolist(), samples.stage.tolist(), strict=True))
    present = {place for place, layout in zip(places, samples.layout, strict=True) if layout == newest[place[1]]}
    return samples.select(np.array([place in present for place in places], dtype=bool))


@dataclass(frozen=True)
class Workload:
    """What the microbatches of each sample were, beside the typical one."""

    microbatches: Floats
    """[N] 1 where not known."""
    load: Floats
    """[N] Tokens of a microbatch over those of the typical one."""
    excess: Floats
    """[N] Squared lengths likewise, over the load, - 1: what attention has to do more than its tokens say."""
    tokens: float
    squared_lengths: float


def workload(samples: Samples) -> Workload:
    """The typical microbatch has the median tokens and the median squared lengths of all samples."""
    microbatches = np.where(samples.microbatches > 0, samples.microbatches, 1.0)
    tokens, squares = samples.tokens / microbatches, samples.squared_lengths / microbatches
    has_tokens, has_lengths = bool(np.all(tokens > 0)), bool(np.all(squares > 0))
    typical_tokens = float(np.median(tokens)) if has_tokens else np.nan
    typical_squares = float(np.median(squares)) if has_lengths else np.nan
    load = tokens / typical_tokens if has_tokens else np.ones(len(tokens))
    excess = squares / typical_squares / load - 1 if has_lengths else np.zeros(len(tokens))
    return Workload(microbatches, load, excess, typical_tokens, typical_squares)


@dataclass(frozen=True)
class StageSeconds:
    """One stage over its replicas."""

    stage: int
    layouts: tuple[int, ...]
    """[K] Under which it was measured."""
    log_seconds: Floats
    """[2K] Forward and backward under each, on the typical replica."""
    covariance: Floats
    """[2K, 2K]"""
    steps: Floats
    """[T] Measured, ascending."""
    influences: Floats
    """[T, 2K] What each step moves the seconds by: noise of a step is often that of other stages, too."""
    log_speeds: Floats
    """[R] Beside the typical replica; NaN where absent."""
    speed_variances: Floats
    lengths_open: bool
    """Whether squared lengths vary, but not apart from the replicas."""

    @property
    def replicas(self) -> int:
        """Number of replicas measured."""
        return int(np.isfinite(self.log_speeds).sum())


def measure_stage(samples: Samples, work: Workload, stage: int, replicas: int) -> StageSeconds:
    """Seconds of a stage under each layout, and the speeds of its replicas."""
    at = np.flatnonzero(samples.stage == stage)
    layouts, layout = np.unique(samples.layout[at], return_inverse=True)
    present, replica = np.unique(samples.replica[at], return_inverse=True)
    # Two observations a sample, forward and backward, that share the speed of the replica.
    direction = np.repeat([0, 1], len(at))
    seconds = np.concatenate([samples.forward_seconds[at], samples.backward_seconds[at]])
    observed = np.log(seconds / np.tile(work.microbatches[at] * work.load[at], 2))
    cell = 2 * np.tile(layout, 2) + direction
    cells = np.eye(2 * len(layouts))[cell]  # [2N, 2K]
    plain = np.hstack([cells, -np.eye(len(present))[np.tile(replica, 2)]])
    excess = np.tile(work.excess[at], 2)
    varies = bool(np.linalg.norm(excess - plain @ np.linalg.lstsq(plain, excess, rcond=None)[0]) > _LEAST_VARIATION)
    first = plain.shape[1]

    def predict(values: Floats) -> tuple[Floats, Floats]:
        if not varies:
            return plain @ values, plain
        load = np.maximum(1 + excess * values[first], _LEAST_LOAD)
        return plain @ values[:first] + np.log(load), np.column_stack([plain, excess / load])

    medians = np.array([np.median(observed[cell == each]) for each in range(cells.shape[1])])
    slower = observed - medians[cell]
    slowness = [np.median(slower[np.tile(replica, 2) == each]) for each in range(len(present))]
    start = np.concatenate([medians, np.negative(slowness), np.zeros(int(varies))])
    fit = fit_robust(predict, observed, start, np.tile(samples.step[at], 2))
    speeds = slice(cells.shape[1], first)
    typical = _typical(fit.values[speeds], fit.covariance(np.eye(len(start)))[speeds, speeds])
    contrasts = np.eye(first, len(start))  # adding to all speeds and seconds alike changes nothing: the typical is 0
    contrasts[:, speeds] -= typical
    values, covariance = contrasts @ fit.values, fit.covariance(contrasts)
    log_speeds, variances = np.full((2, replicas), np.nan)
    log_speeds[present], variances[present] = values[speeds], np.diagonal(covariance)[speeds]
    return StageSeconds(
        stage=int(stage),
        layouts=tuple(layouts.tolist()),
        log_seconds=values[: cells.shape[1]],
        covariance=covariance[: cells.shape[1], : cells.shape[1]],
        steps=fit.clusters,
        influences=fit.influences @ contrasts[: cells.shape[1]].T,
        log_speeds=log_speeds,
        speed_variances=variances,
        lengths_open=not varies and float(np.ptp(excess)) > _VARIED,
    )


def _typical(log_speeds: Floats, covariance: Floats) -> Floats:
    """Weights [r] whose mean is the typical replica: those that agree with the median, of an even number the faster."""
    middle = np.argsort(-log_speeds, kind="stable")[(len(log_speeds) - 1) // 2]
    variances = np.diagonal(covariance)
    apart = variances + variances[middle] - 2 * covariance[middle]
    error = np.sqrt(np.maximum(np.nan_to_num(apart), 0.0))
    agrees = np.abs(log_speeds - log_speeds[middle]) <= np.maximum(2 * error, 1e-6)
    return np.asarray(agrees / agrees.sum())
