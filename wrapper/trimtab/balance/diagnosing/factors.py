"""Why the durations of a job's operations differ: a product of four factors, told apart by what they stay with. Pure.

    duration = level[k] x intrinsic[k, c] x hardware[t, r, c] x data[k, t, r, c, m] x rest[k, t, r, c, m]

- intrinsic stays with the chunk: the same on all replicas and in all steps.
- hardware stays with the place: a stage of one replica against its peers on the others, to the end of the window.
- data goes with the microbatch: the same microbatch is long on every stage of its replica, forward and backward, and
  which one is long changes from step to step.
- the rest is what no two operations have in common.

Shapes as in `plan`, and K = 2 kinds (forward, backward), T steps. All is worked out on logarithms.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trimtab.balance.diagnosing.durations import LEAST_STEPS, Durations
from trimtab.balance.diagnosing.robust import critical, lower_median, mean, median
from trimtab.balance.plan import Floats
from trimtab.balance.sureness import MOST_CORRELATION, step_correlations, variance_inflation

NOT_SLOW = -1
"""Instead of the index of a step."""

LEAST_ANSWER = 0.1
"""What a chunk that hardly answers to data (an embedding alone) deviates by is not blown up further."""


@dataclass(frozen=True)
class Factors:
    """Durations as a product. A microbatch that a replica did not have in a step counts as 0 seconds."""

    level_seconds: Floats
    """[K] mean duration of a kind over chunks, once hardware is mended."""
    intrinsic: Floats
    """[K, C] mean 1."""
    hardware: Floats
    """[T, R, C] 1 on healthy places."""
    data: Floats
    """[K, T, R, C, M] mean 1 on each chunk."""
    rest: Floats
    """[K, T, R, C, M] mean 1 on each chunk; 0 where there was no microbatch."""
    since: npt.NDArray[np.intp]
    """[R, S] the step's index from which a place is slow; NOT_SLOW: it is not."""
    noise: Floats
    """[R, S] standard error of the logarithm of a place's slowness; NaN where that was known from elsewhere."""
    correlation: float
    """Of microbatches between chunks, within a step; NaN with one microbatch."""

    def seconds(self, *, intrinsic: bool, hardware: bool, data: bool, rest: bool) -> Floats:
        """[K, T, R, C, M] durations with the factors that are wanted; the others are mended."""
        product = np.broadcast_to(self.level_seconds[:, None, None, None, None], self.rest.shape)
        product = product * (self.rest if rest else self.rest > 0)
        if data:
            product = product * self.data
        if hardware:
            product = product * self.hardware[..., None]
        if intrinsic:
            product = product * self.intrinsic[:, None, None, :, None]
        return product


@dataclass(frozen=True)
class _Shared:
    """What microbatches have in common over the stages, in logarithms."""

    loadings: Floats
    """[K, C] how strongly each chunk answers, mean 1."""
    within: Floats
    """[T, R, M] of a microbatch within its step."""
    correlation: float
    """Mean correlation of a step's microbatches between chunks; NaN with one microbatch."""


def decompose(durations: Durations, known_slowness: Floats | None = None, least_ratio: float = 0.02) -> Factors:
    """Tell the four factors apart.

    `known_slowness` [R, S]: how many times as long a device takes for the same work, from elsewhere (probes, clocks);
    NaN where nothing is known. It alone tells hardware from layers where there is one replica. A place that is slower
    by less than `least_ratio` is not slow.
    """
    logs = np.log(durations.seconds)
    shared = _shared(logs)
    chunk_levels = lower_median(median(mean(logs, -1), 1), 1)  # [K, C] of the typical replica
    by_step = mean(mean(logs - chunk_levels[:, None, None, :, None], -1), 0)  # [T, R, C]
    common = _common(by_step, shared, durations.workload)  # [T, R]
    answer = shared.loadings.mean(axis=0)
    lasting, since, noise = _slow_places(by_step - common[..., None] * answer, durations.stages, least_ratio)
    if by_step.shape[1] == 1 and known_slowness is not None:
        told = np.log(known_slowness)
        known = np.nan_to_num(told, nan=0.0) >= np.log1p(least_ratio)
        lasting, since, noise = (
            np.where(known, told, lasting),
            np.where(known, 0, since),
            np.where(known, np.nan, noise),
        )
    chunk_stage = np.arange(by_step.shape[2]) % durations.stages
    slow = (np.arange(len(by_step))[:, None, None] >= since) & (since != NOT_SLOW)  # [T, R, S]
    hardware = np.exp(np.where(slow, lasting, 0.0))[:, :, chunk_stage]
    effect = (common[..., None] + shared.within)[None, :, :, None, :] * shared.loadings[:, None, None, :, None]
    return _factors(durations.seconds, hardware, np.exp(effect), since, noise, shared.correlation)


def _factors(
    seconds: Floats,
    hardware: Floats,
    data: Floats,
    since: npt.NDArray[np.intp],
    noise: Floats,
    correlation: float,
) -> Factors:
    """Scale the factors so that redistributing what is uneven keeps the work: all but hardware have a mean of 1."""
    of_replica = np.asarray(np.isfinite(seconds).any(axis=(0, 3)))  # [T, R, M]
    exists = np.broadcast_to(of_replica[None, :, :, None, :], seconds.shape)
    data = data / mean(np.where(exists, data, np.nan), (1, 2, 4), keepdims=True)
    explained = data * hardware[..., None]
    chunk_seconds = mean(seconds / explained, (1, 2, 4))  # [K, C]
    level = chunk_seconds.mean(axis=1)
    rest = seconds / (explained * chunk_seconds[:, None, None, :, None])
    rest = np.where(exists, np.where(np.isfinite(rest), rest, 1.0), 0.0)
    return Factors(level, chunk_seconds / level[:, None], hardware, data, rest, since, noise, correlation)


def _shared(logs: Floats) -> _Shared:
    """One factor that all chunks and kinds share within a step (Spearman, 1904; scores: Thomson, 1951).

    Within a step a slow place is slow for all its microbatches: with the step's mean, hardware drops out. Loadings come
    from covariances between chunks alone (between kinds, with a single chunk): what befalls one microbatch on one
    device may well last from its forward to its backward. Scores are shrunk by how well noise lets them be known.
    """
    kinds, steps, replicas, chunks, microbatches = logs.shape
    nothing = np.ones((kinds, chunks)), np.zeros((steps, replicas, microbatches))
    if microbatches < 2:
        return _Shared(*nothing, correlation=math.nan)
    centred = np.nan_to_num(logs - mean(logs, -1, keepdims=True))
    rows = np.moveaxis(centred, (0, 3), (0, 1)).reshape(kinds * chunks, -1)  # [K C, N]
    covariance = rows @ rows.T / rows.shape[1]
    deviation = np.sqrt(np.diag(covariance))
    block = np.tile(np.arange(chunks), kinds) if chunks > 1 else np.arange(kinds)
    apart = block[:, None] != block
    scale = float((np.outer(deviation, deviation) * apart).sum())
    if scale < 1e-12:  # rounding alone: microbatches of a step that are all the same were not measured one by one
        return _Shared(*nothing, correlation=math.nan)
    correlation = float((covariance * apart).sum()) / scale
    # The mean of correlated pairs is no surer than one pair: noise alone stays below this.
    if correlation <= critical(1) / np.sqrt(rows.shape[1]):
        return _Shared(*nothing, correlation)
    loadings = deviation * np.sqrt(correlation)
    for _ in range(50):
        fitted = (covariance * apart) @ loadings / np.maximum(apart @ loadings**2, 1e-30)
        loadings = (loadings + np.maximum(fitted, 0.0)) / 2
    unique = np.maximum(deviation**2 - loadings**2, 1e-4 * deviation**2 + 1e-12)
    weights = loadings / unique
    scores = (weights @ rows) / (1 + weights @ loadings)
    typical = loadings.mean()
    scores = (typical * scores).reshape(steps, replicas, microbatches)
    return _Shared((loadings / typical).reshape(kinds, chunks), scores, correlation)


def _common(by_step: Floats, shared: _Shared, workload: Floats | None) -> Floats:
    """[T, R] what the chunks of a replica have in common in a step, and is data.

    What the known workload explains; beyond it, what the chunks share, but for what stays with a replica and is more
    than the variation from step to step lets one expect: that is slow hardware under all its stages.
    """
    answer = np.maximum(shared.loadings.mean(axis=0), LEAST_ANSWER)  # [C]
    explained = _explained(lower_median(by_step / answer, -1), workload)
    answers = by_step / answer - explained[..., None]
    if by_step.shape[2] > 1:
        return explained + _agreed(answers)
    # A single chunk agrees with no other, but where its microbatches' forward and backward agree, its steps are data.
    alone = np.nan_to_num(answers[..., 0])
    return explained + (alone - alone.mean(axis=0) if shared.within.any() else 0.0)


def _agreed(answers: Floats) -> Floats:
    """[T, R] what several chunks share, from [T, R, C], shrunk by how well their differences let it be known.

    The lower median over chunks: a slow place makes chunks of its replica longer, never shorter.
    """
    steps, replicas, chunks = answers.shape
    common = np.nan_to_num(lower_median(answers, -1))
    stays = common.mean(axis=0)  # [R]
    changes = common - stays
    differences = answers - common[..., None]
    own = float(np.nan_to_num(mean((differences - median(differences, 0)) ** 2, None)))
    varying = float((changes**2).mean())
    if varying <= 0:
        return np.zeros_like(common)
    kept = max(0.0, 1 - (np.pi / 2) * own / chunks / varying)
    # Against a typical replica, step by step: loads of the same step depend on one another.
    typical = int(np.abs(stays - lower_median(stays, 0)).argmin())
    error = (common - common[:, [typical]]).std(axis=0, ddof=1) / np.sqrt(steps)
    lasting = stays - stays[typical] > critical(replicas * replicas, steps - 1) * error
    return np.asarray(kept * (changes + np.where(lasting, stays[typical], stays)))


def _explained(common: Floats, workload: Floats | None) -> Floats:
    """[T, R] what the known workload explains of what chunks have in common, by least squares on logarithms."""
    nothing = np.zeros(common.shape)
    if workload is None:
        return nothing
    with np.errstate(divide="ignore", invalid="ignore"):
        columns = np.log(workload.reshape(common.size, -1))
    known = np.isfinite(common.ravel()) & np.isfinite(columns).all(axis=1)
    if known.sum() <= 2 * columns.shape[1] + 1:
        return nothing
    columns = columns - columns[known].mean(axis=0)
    columns = columns[:, columns[known].std(axis=0) > 1e-9]
    design = np.column_stack([np.ones(int(known.sum())), columns[known]])
    slopes = np.linalg.lstsq(design, common.ravel()[known], rcond=None)[0][1:]
    return np.where(known, np.nan_to_num(columns) @ slopes, 0.0).reshape(common.shape)


@dataclass(frozen=True)
class _Onsets:
    """For each place, [R, S]: since which step it is the slowest, by how much, and how sure that is."""

    step: npt.NDArray[np.intp]
    slowness: Floats
    """Mean deviation from its peers since then."""
    error: Floats
    lasting: npt.NDArray[np.bool_]
    """Whether it is beyond chance, and still so at the end."""


def _slow_places(apart: Floats, stages: int, least_ratio: float) -> tuple[Floats, npt.NDArray[np.intp], Floats]:
    """[R, S] how much slower than its peers each place is (logarithm), since which step, and the standard error.

    `apart` [T, R, C] is what a place's duration deviates by once data is taken out. With one replica the only peers of
    a place are its own other steps: what became slow is seen, what always was is not.
    """
    steps, replicas, chunks = apart.shape
    by_stage = mean(apart.reshape(steps, replicas, chunks // stages, stages), 2)  # [T, R, S]
    if replicas > 1:
        level, level_variance = lower_median(median(by_stage, 0), 0), np.pi / 2 / replicas
    else:  # as it began, or as it mostly is: in units of a mean of all steps, a median of a quarter of them varies so
        begun = by_stage[: max(LEAST_STEPS, steps // 4), 0]
        level, level_variance = np.fmin(lower_median(begun, 0), lower_median(by_stage[:, 0], 0)), 4 * np.pi / 2
    series = by_stage - level
    squares = np.diff(series, axis=0) ** 2
    # A change of the mean is one difference between neighbours: the largest counts as the next. The level has an error.
    next_largest = np.sort(np.where(np.isfinite(squares), squares, 0.0), axis=0)[-2]
    deviation = np.sqrt(np.nan_to_num(mean(np.minimum(squares, next_largest), 0)) / 2)  # [R, S]
    sigma = np.maximum(np.maximum(deviation, median(deviation.ravel(), 0)), 1e-9) * np.sqrt(1 + level_variance)
    found = _onsets(series, sigma)
    correlation = _correlation(series, found)
    # Differences between neighbours hide what these have in common: first their variance is the whole one again.
    found = _onsets(series, sigma * np.sqrt(variance_inflation(correlation) / (1 - correlation)))
    slow = found.lasting & (found.slowness >= np.log1p(least_ratio))
    return found.slowness, np.where(slow, found.step, NOT_SLOW), found.error


def _onsets(series: Floats, sigma: Floats) -> _Onsets:
    """Of deviations [T, R, S] whose steps have the standard error `sigma` [R, S].

    The onset is the likeliest single change of the mean (Hinkley, 1970), the first step unless another one is clearly
    likelier. What has fallen by half or more since is over.
    """
    steps = len(series)
    after = np.cumsum(np.nan_to_num(series)[::-1], axis=0)[::-1]
    count = np.maximum(np.cumsum(np.isfinite(series)[::-1], axis=0)[::-1], 1)
    surprise = np.maximum(after / np.sqrt(count) / sigma, 0.0)  # [T, R, S]
    surprise[1 - LEAST_STEPS :] = 0.0  # what is new in the last steps may yet go
    least = critical(surprise.size, steps - 1)
    onset = np.where(surprise.max(axis=0) ** 2 - surprise[0] ** 2 > least**2, surprise.argmax(axis=0), 0)
    strongest, total, left = (np.take_along_axis(each, onset[None], 0)[0] for each in (surprise, after, count))
    slowness = total / left
    tail = after / count  # [T, R, S] the mean from each step on
    with np.errstate(divide="ignore", invalid="ignore"):
        fall = (slowness - tail) / (sigma * np.sqrt(1 / count - 1 / left))
    later = np.arange(steps)[:, None, None]
    over = (later > onset) & (later <= steps - LEAST_STEPS) & (tail < slowness / 2) & (fall > least)
    return _Onsets(onset, slowness, sigma / np.sqrt(left), (strongest > least) & ~over.any(axis=0))


def _correlation(series: Floats, found: _Onsets) -> float:
    """Of a step's noise with the next one's, in the typical place; its change at the onset is no noise."""
    steps = len(series)
    if steps <= LEAST_STEPS:
        return 0.0
    since = np.arange(steps)[:, None, None] >= found.step
    level = np.where(since, mean(np.where(since, series, np.nan), 0), mean(np.where(since, np.nan, series), 0))
    deviations = np.nan_to_num(series - level).reshape(steps, -1)
    found_correlation = float(lower_median(step_correlations(deviations), 0))
    return min(max(0.0, found_correlation), MOST_CORRELATION) if np.isfinite(found_correlation) else 0.0
