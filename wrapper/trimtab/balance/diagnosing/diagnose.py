"""Why a job's steps take longer than they need: layers, hardware, data, or nothing that can be named. Pure.

`factors` tells apart what stays with a chunk, with a place, or goes with a microbatch; `whatif` says what each costs.
What is unexplained is what the step takes longer than its explained part alone. The cause is what costs most. It counts
from the gain on that an order must bring (`Balance.least_gain_ratio`); what is unexplained counts from the imbalance on
that would trigger (`Balance.trigger_ratio`), as noise alone costs some percent.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median_low

import numpy as np

from trimtab.balance.diagnosing.durations import Durations
from trimtab.balance.diagnosing.factors import NOT_SLOW, Factors, decompose
from trimtab.balance.diagnosing.findings import (
    DATA,
    HARDWARE,
    INTRINSIC,
    NONE,
    UNKNOWN,
    Cost,
    Diagnosis,
    SlowPlace,
    evidence,
    slow_stages,
)
from trimtab.balance.diagnosing.links import SlowLink, slow_links, typical_transfers
from trimtab.balance.diagnosing.whatif import Coalition, coalition_values, shapley
from trimtab.balance.pipeline.replay import Replays
from trimtab.balance.plan import Floats, Place
from trimtab.protocol import Balance, even_shares

_MENDABLE = (INTRINSIC, HARDWARE, DATA)
_COSTS = (*_MENDABLE, UNKNOWN)
"""What costs are given for, in order."""
LEAST_SHARE = 0.25
"""Of the slowdown that a cause has to explain where what is unexplained counts, too."""
ONE_REPLICA_CONFIDENCE = 0.5
"""Factor on the confidence where layers and hardware cannot be told apart."""
RESAMPLES = 400
"""Of the steps, for the confidence."""


def diagnose(
    durations: Durations, policy: Balance | None = None, known_slowness: Mapping[Place, float] | None = None
) -> Diagnosis:
    """Find the cause. Raises ValueError where the schedule cannot run in the shape of the durations.

    `known_slowness`: how many times as long as the typical device that of a place takes for the same work, measured
    apart from the model (by a probe, by clocks). With one replica, this alone tells hardware from layers.
    """
    policy = policy or Balance()
    replicas = durations.forward_seconds.shape[1]
    known = np.full((replicas, durations.stages), np.nan)
    for place, slowness in (known_slowness or {}).items():
        known[place] = slowness
    factors = decompose(durations, known, policy.least_gain_ratio)
    pipelines = _Pipelines(durations, factors)
    ideal_seconds = pipelines.ideal_seconds()
    links = pipelines.mend_links(policy.least_gain_ratio * ideal_seconds)
    slow = _slow_places(durations, factors)
    by_kind = _stage_seconds(factors, durations.stages)
    ratios = tuple((by_kind.sum(axis=0) / by_kind.sum(axis=0).mean()).tolist())
    across, within = _uneven_data(factors)

    noisy = pipelines.step_seconds(frozenset(), noise=True)  # [T]
    values = coalition_values(len(_MENDABLE), lambda mended: pipelines.step_seconds(mended, noise=False))
    mended_seconds = float(values[frozenset(range(len(_MENDABLE)))].mean())
    unexplained = noisy - values[frozenset()]
    costs = np.vstack([shapley(values, len(_MENDABLE)), unexplained]) / mended_seconds  # [4, T]
    spreads = (max(ratios) / median_low(ratios) - 1, slow[0].slower_ratio if slow else 0.0, across)
    scales = _Scales(policy, spreads)
    cause = scales.name(costs.mean(axis=1))
    told_apart = replicas > 1 or bool(np.isfinite(known).all())
    confidence = _confidence(costs, cause, scales)
    if cause == INTRINSIC and not told_apart:
        confidence *= ONE_REPLICA_CONFIDENCE
    places = _where(cause, replicas, ratios, slow, links)
    step_seconds = float(pipelines.measured_seconds().mean())
    found = Diagnosis(
        cause=cause,
        places=places,
        stages=tuple(sorted({stage for _, stage in places})),
        confidence=confidence,
        slowdown_ratio=step_seconds / ideal_seconds,
        shares=dict(zip(_COSTS, _shares(costs.mean(axis=1)).tolist(), strict=True)),
        evidence=(),
        causes=scales.counting(costs.mean(axis=1), cause, float(noisy.mean()) / mended_seconds),
        step_seconds=step_seconds,
        ideal_seconds=ideal_seconds,
        slow_places=slow,
        slow_links=links,
        stage_ratios=ratios,
        across_replicas_ratio=across,
        within_replica_ratio=within,
    )
    texts = evidence(found, by_kind, durations.numbers[0], replicas, factors.correlation, told_apart)
    return replace(found, evidence=tuple(texts))


@dataclass(frozen=True)
class _Scales:
    """Which costs count, and which of them is named. Costs are [4], in units of the mended step."""

    policy: Balance
    spreads: tuple[float, ...]
    """[3] how far the slowest stage, place and replica's load are from the typical ones - 1."""

    def counts(self, costs: Floats) -> list[bool]:
        """[4] what costs enough, or is as far apart as may not be: a schedule's slack may hide it for now."""
        *mendable, unexplained = costs.tolist()
        return [
            *(
                cost >= self.policy.least_gain_ratio or spread >= self.policy.clear_ratio
                for cost, spread in zip(mendable, self.spreads, strict=True)
            ),
            unexplained >= self.policy.trigger_ratio,
        ]

    def name(self, costs: Floats) -> str:
        """The cause that costs most of those that count."""
        *counts, unknown = self.counts(costs)
        counting = [index for index, count in enumerate(counts) if count]
        if counting:
            largest = max(counting, key=lambda index: costs[index])
            if not unknown or costs[largest] >= LEAST_SHARE * np.maximum(costs, 0.0).sum():
                return _MENDABLE[largest]
        return UNKNOWN if unknown else NONE

    def counting(self, costs: Floats, cause: str, step_over_mended: float) -> tuple[Cost, ...]:
        """Those that count, the named one first."""
        columns = zip(_COSTS, self.counts(costs), _shares(costs).tolist(), costs.tolist(), strict=True)
        found = [Cost(name, share, cost / step_over_mended) for name, count, share, cost in columns if count]
        return tuple(sorted(found, key=lambda each: (each.cause != cause, -each.saving_ratio)))


def _shares(costs: Floats) -> Floats:
    """[4] of each in the whole; what would save nothing has none."""
    positive = np.maximum(costs, 0.0)
    total = positive.sum()
    return positive / total if total > 1e-9 else np.zeros_like(positive)


def _confidence(costs: Floats, cause: str, scales: _Scales) -> float:
    """From what each cause costs in each step, [4, T]: see Diagnosis."""
    random = np.random.default_rng(0)  # the same figures give the same answer
    steps = costs.shape[1]
    # In blocks, as what is noise in one step often lasts into the next (Politis and Romano, 1992, "A circular block
    # resampling procedure for stationary data").
    block = round(steps ** (1 / 3))
    begins = random.integers(steps, size=(RESAMPLES, math.ceil(steps / block), 1))
    drawn = ((begins + np.arange(block)) % steps).reshape(RESAMPLES, -1)[:, :steps]
    resampled = costs[:, drawn].mean(axis=2)
    agreeing = float(np.mean([scales.name(each) == cause for each in resampled.T]))
    if cause == NONE:
        return agreeing
    shares = _shares(costs.mean(axis=1))
    # What is unexplained is no rival of a cause that can be mended: it comes on top, and stays.
    rivals = _COSTS if cause == UNKNOWN else _MENDABLE
    own = shares[_COSTS.index(cause)]
    next_largest = max(shares[_COSTS.index(rival)] for rival in rivals if rival != cause)
    # Nothing costs anything where a schedule's slack hides a stage that is apart: then the others are no less likely.
    return agreeing * float(own / (own + next_largest) if own > 0 else 0.5)


class _Pipelines:
    """The job's steps as they would be with some causes mended."""

    def __init__(self, durations: Durations, factors: Factors) -> None:
        _, replicas, chunks, _ = durations.forward_seconds.shape
        of_shape = durations.schedule, durations.stages, chunks
        self._replays = Replays(*of_shape, durations.passes)
        # Shifted shares are a remedy at work: what they make up for costs what it would with those of the beginning.
        multiple = durations.schedule.microbatch_multiple(durations.stages)
        self._even = Replays(*of_shape, even_shares(sum(durations.passes), replicas, multiple))
        self._crossings = 2 * max(durations.passes) * chunks // durations.stages
        self._durations, self._factors = durations, factors
        measured = durations.transfer_seconds
        self._transfer = np.zeros((replicas, durations.stages)) if measured is None else typical_transfers(measured)
        self._mended_transfer = self._transfer.copy()

    def mend_links(self, least_seconds: float) -> tuple[SlowLink, ...]:
        """Count the links that cost more than that in a step as slow hardware."""
        if self._durations.transfer_seconds is None:
            return ()
        found = slow_links(self._durations.transfer_seconds, self._crossings, least_seconds)
        for link in found:
            self._mended_transfer[link.place] = link.peers_seconds
        return found

    def measured_seconds(self) -> Floats:
        """[T] nothing mended, each replica with its own share of the microbatches."""
        forward, backward = self._factors.seconds(intrinsic=True, hardware=True, data=True, rest=True)
        return self._longest(self._replays, forward, backward, self._transfer)

    def step_seconds(self, mended: Coalition, *, noise: bool) -> Floats:
        """[T] with even shares and the causes of these indices mended, with or without what is unexplained."""
        names = {_MENDABLE[index] for index in mended}
        forward, backward = self._factors.seconds(
            intrinsic=INTRINSIC not in names,
            hardware=HARDWARE not in names,
            data=DATA not in names,
            rest=noise,
        )
        transfer = self._mended_transfer if HARDWARE in names else self._transfer
        return self._longest(self._even, forward, backward, transfer)

    def ideal_seconds(self) -> float:
        """Every computation takes the mean of its kind over the job, every transfer the median."""
        exists = self._factors.rest[0] > 0
        forward, backward = (
            np.where(exists, np.nanmean(seconds), 0.0)
            for seconds in (self._durations.forward_seconds, self._durations.backward_seconds)
        )
        used = self._transfer[self._transfer > 0]
        transfer = np.where(self._transfer > 0, np.median(used) if len(used) else 0.0, 0.0)
        return float(self._longest(self._even, forward, backward, transfer).mean())

    def _longest(self, replays: Replays, forward: Floats, backward: Floats, transfer: Floats) -> Floats:
        pipelines = replays.duration_seconds(forward, backward, transfer)
        return np.asarray(pipelines.max(axis=1) + self._durations.overhead_seconds)


def _slow_places(durations: Durations, factors: Factors) -> tuple[SlowPlace, ...]:
    """The slowest first."""
    last = factors.hardware[-1, :, : durations.stages]
    errors = last * factors.noise
    found = [
        SlowPlace(
            place=(replica, stage),
            slower_ratio=float(last[replica, stage] - 1),
            error_ratio=float(errors[replica, stage]) if np.isfinite(errors[replica, stage]) else None,
            since_step=durations.numbers[factors.since[replica, stage]],
        )
        for replica, stage in np.argwhere(factors.since != NOT_SLOW).tolist()
    ]
    return tuple(sorted(found, key=lambda slow: -slow.slower_ratio))


def _stage_seconds(factors: Factors, stages: int) -> Floats:
    """[K, S] of a typical microbatch, hardware mended."""
    chunk_seconds = factors.intrinsic * factors.level_seconds[:, None]
    return np.asarray(chunk_seconds.reshape(len(chunk_seconds), -1, stages).sum(axis=1))


def _where(
    cause: str, replicas: int, ratios: tuple[float, ...], slow: tuple[SlowPlace, ...], links: tuple[SlowLink, ...]
) -> tuple[Place, ...]:
    """The places of a cause; a link counts with both its ends."""
    if cause == INTRINSIC:
        return tuple((replica, stage) for stage in slow_stages(ratios) for replica in range(replicas))
    if cause != HARDWARE:
        return ()
    ends = [(link.place[0], (link.place[1] + end) % len(ratios)) for link in links for end in (0, 1)]
    return tuple(dict.fromkeys([*(each.place for each in slow), *ends]))


def _uneven_data(factors: Factors) -> tuple[float, float]:
    """Between replicas, inside replicas: see Diagnosis."""
    exists = factors.rest[0, :, :, 0] > 0  # [T, R, M]
    work = np.where(exists, factors.data.mean(axis=(0, 3)), 0.0)
    replica_work = work.sum(axis=-1)
    across = replica_work.max(axis=1) / replica_work.mean(axis=1) - 1
    count = np.maximum(exists.sum(axis=-1), 1)
    within = work.max(axis=-1) * count / np.maximum(replica_work, 1e-30) - 1
    return float(across.mean()), float(within[exists.any(axis=-1)].mean())
