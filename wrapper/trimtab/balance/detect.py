"""Whether the stages are lastingly apart: windows of steps, a bound on the imbalance in each, and a watch over them.

Shapes: T steps, P places.

In a window, each step's compute is taken relative to that of its middle places: what slows a whole step does not count.
A place counts with its trimmed mean over the window, and imbalance is the slowest place over the median one - 1. The
bounds are the trimmed mean's (Tukey and McLaughlin, 1963: Student's t with the Winsorized deviation), widened by the
correlation of a step with the next.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trimtab.balance.plan import Floats, Place
from trimtab.balance.sureness import step_correlations, student_quantile, variance_inflation
from trimtab.protocol import Balance

WARM_UP_STEPS = 5
"""Steps that do not count at first, and after each change: they pay for memory, compilation and caches."""
LEAST_STEPS = 5
"""Steps after these that anything is said of."""
_ERROR_RATIO = 0.05
"""How often a bound may be wrong."""
_TRIMMED_RATIO = 0.1
"""Share of the steps left out at each end, but at least one: a single outlier never counts."""


@dataclass(frozen=True)
class Imbalance:
    """How far the places were apart over some steps."""

    first_step: int
    last_step: int
    place: Place
    """The slowest."""
    ratio: float
    """Slowest place over median place - 1."""
    lower_ratio: float
    """With 95 % confidence it is above this; minus infinity where the steps are too few to say."""
    upper_ratio: float
    """With 95 % confidence it is below this."""


def imbalance_ratio(seconds: Sequence[float] | Floats) -> float:
    """Slowest place over median place - 1, from the compute of each place (at least one, positive)."""
    return float(np.max(seconds) / np.median(seconds) - 1)


def imbalance(compute_seconds: Floats, steps: Sequence[int], places: Sequence[Place]) -> Imbalance | None:
    """The imbalance over some steps, from [T, P]. Steps that are not whole (see `is_whole`) do not count.

    None with fewer than two places, or without a whole step: nothing can be said.
    """
    whole = [index for index, row in enumerate(compute_seconds) if is_whole(row)]
    if len(places) < 2 or not whole:
        return None
    return _weighed(compute_seconds[whole], [steps[index] for index in whole], places)


def is_whole(seconds: Sequence[float] | Floats) -> bool:
    """Whether every place has reported, and has computed: [P] finite and positive."""
    return all(0 < value < math.inf for value in seconds)


def _weighed(rows: Floats, steps: Sequence[int], places: Sequence[Place]) -> Imbalance:
    """The imbalance over whole steps, at least one."""
    typical, error, freedom = _trimmed_mean(rows / _reference(rows))
    lower, upper = np.full_like(typical, -np.inf), np.full_like(typical, np.inf)
    if freedom:
        # The slowest of P is looked at because it is the slowest: all P lower bounds have to hold at once (Bonferroni).
        # The upper bound needs no such care: whichever place is truly the slowest, its own has to hold alone.
        lower = typical - student_quantile(1 - _ERROR_RATIO / len(places), freedom) * error
        upper = typical + student_quantile(1 - _ERROR_RATIO, freedom) * error
    middle = np.median(typical)
    return Imbalance(
        first_step=steps[0],
        last_step=steps[-1],
        place=places[int(np.argmax(typical))],
        ratio=imbalance_ratio(typical),
        lower_ratio=float(lower.max() / middle - 1),
        upper_ratio=float(upper.max() / middle - 1),
    )


def _reference(rows: Floats) -> Floats:
    """[T, 1] what each step's compute is taken relative to: the mean of the places in the middle.

    These are the same places in all steps, so that their noise shows in the error of what is compared with them; of
    many places it is the middle half, whose mean is steady.
    """
    places = rows.shape[1]
    beside = max(places // 4, int(places > 2))
    order = np.argsort(np.median(rows / rows.mean(axis=1, keepdims=True), axis=0))
    return np.asarray(rows[:, order[beside : places - beside]].mean(axis=1, keepdims=True))


def _trimmed_mean(values: Floats) -> tuple[Floats, Floats, int]:
    """Of [T, P] over T: the trimmed mean [P], its standard error [P], and the degrees of freedom of that.

    With none of these the error is not known: NaN.
    """
    count = len(values)
    trimmed = min(max(1, int(count * _TRIMMED_RATIO)), (count - 1) // 2)
    freedom = count - 2 * trimmed - 1
    ordered = np.sort(values, axis=0)
    mean = ordered[trimmed : count - trimmed].mean(axis=0)
    if freedom < 1:
        return mean, np.full_like(mean, np.nan), 0
    winsorized = np.clip(values, ordered[trimmed], ordered[count - 1 - trimmed])
    deviations = winsorized - winsorized.mean(axis=0)
    variance = (deviations**2).sum(axis=0) / (count - 1) / (1 - 2 * trimmed / count) ** 2
    return mean, np.sqrt(variance / count * _inflation(deviations)), freedom


def _inflation(deviations: Floats) -> float:
    """How many times the variance of a mean is that of independent steps, by what the places have in common."""
    found = step_correlations(deviations)
    varies = np.isfinite(found)
    return variance_inflation(float(found[varies].mean())) if varies.any() else 1.0


@dataclass(frozen=True)
class Watch:
    """What is known of a run after some steps: begin with `Watch(places, policy)`, and go on with `observe`."""

    places: tuple[Place, ...]
    policy: Balance
    setting: Hashable = None
    """What the steps ran under."""
    since_step: int | None = None
    """The first step of the windows by which the places are apart; None: they are not."""
    last_step: int | None = None
    skip: int = WARM_UP_STEPS
    """Steps that are still to be left out."""
    steps: tuple[int, ...] = ()
    """Of the window that has begun."""
    rows: tuple[tuple[float, ...], ...] = ()
    """Compute of these steps, [P] each."""
    above: tuple[Imbalance, ...] = ()
    """The latest windows, as many on end as are above the trigger."""

    @property
    def triggered(self) -> bool:
        """Whether the places are lastingly apart."""
        return self.since_step is not None


def observe(
    watch: Watch, step: int, compute_seconds: Sequence[float] | Floats, setting: Hashable = None
) -> tuple[Watch, Imbalance | None]:
    """The watch after one more step, [P], and the imbalance over the window that it completed, if it did.

    It triggers when the lower bound is above the policy's trigger in as many windows on end as the policy says, and
    clears when the upper bound of a window is below the policy's clear ratio; in between it stays as it is. Windows
    follow one another without overlap.

    `setting` is what the step ran under (its layout, its batch): windows do not mix two, and with another one all
    begins anew. A step that is not whole is left out; where a window's worth of them is missing, or steps go back, as
    after a resume, windows begin anew.
    """
    policy = watch.policy
    if setting != watch.setting:
        watch = Watch(watch.places, policy, setting)
    if len(watch.places) < 2 or not is_whole(compute_seconds):
        return watch, None
    if watch.last_step is not None and not 0 < step - watch.last_step <= policy.window_steps:
        watch = Watch(watch.places, policy, setting, watch.since_step)
    watch = replace(watch, last_step=step)
    if watch.skip:
        return replace(watch, skip=watch.skip - 1), None
    watch = replace(watch, steps=(*watch.steps, step), rows=(*watch.rows, tuple(compute_seconds)))
    if len(watch.steps) < policy.window_steps:
        return watch, None
    window = _weighed(np.array(watch.rows), watch.steps, watch.places)
    return _judged(replace(watch, steps=(), rows=()), window), window


def _judged(watch: Watch, window: Imbalance) -> Watch:
    """The watch after one more window."""
    policy = watch.policy
    if watch.triggered:
        return replace(watch, since_step=None) if window.upper_ratio < policy.clear_ratio else watch
    above = (*watch.above, window) if window.lower_ratio > policy.trigger_ratio else ()
    if len(above) == policy.trigger_windows:
        return replace(watch, since_step=above[0].first_step, above=())
    return replace(watch, above=above)


@dataclass(frozen=True)
class Finding:
    """The places were lastingly apart."""

    since_step: int
    """The first step of the windows that showed it."""
    found_step: int
    """The step at which they had."""
    ended_step: int | None
    """The step at which they were level again, or ran under another setting; None: neither in this record."""
    imbalance: Imbalance
    """Over the window that ended at `found_step`."""


@dataclass(frozen=True)
class Detection:
    """What a record of steps shows."""

    windows: tuple[Imbalance, ...]
    findings: tuple[Finding, ...]

    @property
    def triggered(self) -> bool:
        """Whether the places are apart at the end of the record."""
        return self.since_step is not None

    @property
    def since_step(self) -> int | None:
        """Since when they are; None: they are not."""
        last = self.findings[-1] if self.findings else None
        return last.since_step if last and last.ended_step is None else None

    @property
    def place(self) -> Place | None:
        """The slowest place in the last window; None without a window."""
        return self.windows[-1].place if self.windows else None

    @property
    def ratio(self) -> float | None:
        """The imbalance in the last window."""
        return self.windows[-1].ratio if self.windows else None

    @property
    def lower_ratio(self) -> float | None:
        """Its lower bound."""
        return self.windows[-1].lower_ratio if self.windows else None


def detect(
    compute_seconds: Floats,
    steps: Sequence[int],
    places: Sequence[Place],
    policy: Balance,
    settings: Sequence[Hashable] | None = None,
) -> Detection:
    """What a watch over a whole record sees: compute [T, P] of steps [T], NaN where a report is missing.

    `settings` [T]: see `observe`; the same for all steps where it is not given.
    """
    watch = Watch(tuple(places), policy)
    windows: list[Imbalance] = []
    findings: list[Finding] = []
    ran_under = [None] * len(steps) if settings is None else settings
    for step, row, setting in zip(map(int, steps), compute_seconds.tolist(), ran_under, strict=True):
        before, (watch, window) = watch, observe(watch, step, row, setting)
        if before.triggered and watch.since_step != before.since_step:
            findings[-1] = replace(findings[-1], ended_step=step)
        if window is None:
            continue
        windows.append(window)
        if watch.since_step is not None and not before.triggered:
            findings.append(Finding(watch.since_step, step, None, window))
    return Detection(tuple(windows), tuple(findings))
