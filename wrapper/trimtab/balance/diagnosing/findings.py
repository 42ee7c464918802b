"""What a diagnosis says: which cause, where, what it costs, and the findings that it rests on, in words. Pure."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median_low

from trimtab.balance.diagnosing.links import SlowLink
from trimtab.balance.diagnosing.robust import lower_median
from trimtab.balance.plan import Floats, Place

INTRINSIC, HARDWARE, DATA, UNKNOWN, NONE = CAUSES = ("intrinsic", "hardware", "data", "unknown", "none")


@dataclass(frozen=True)
class Evidence:
    """A finding that the diagnosis rests on."""

    kind: str
    """stage, place, link, data, level, unexplained, limit (what could not be told); of a profile also node, probe,
    device."""
    text: str


@dataclass(frozen=True)
class SlowPlace:
    """A stage of one replica that takes longer than its peers for the same work."""

    place: Place
    slower_ratio: float
    """Its time over its peers' - 1."""
    error_ratio: float | None
    """Standard error of that; None where it was measured apart from the model (by a probe, by a clock)."""
    since_step: int
    """Where it began: the first step of the window, or a later one."""


@dataclass(frozen=True)
class Cost:
    """What a cause costs."""

    cause: str
    share: float
    """Of the whole slowdown."""
    saving_ratio: float
    """Of the step's time, that mending it saves (its Shapley value)."""


@dataclass(frozen=True)
class Diagnosis:
    """Which cause, where, how sure, and why."""

    cause: str
    """intrinsic, hardware, data; unknown: slow, and no cause found; none: level, and nothing is slow."""
    places: tuple[Place, ...]
    """Where it is, the slowest first; empty for what is nowhere in particular."""
    stages: tuple[int, ...]
    """Of these places."""
    confidence: float
    """0 to 1: how often resampled steps give the same answer, times its share over that and the next cause's; unknown
    is none of these where another is named."""
    slowdown_ratio: float
    """Step time over the ideal one, both simulated; ideal: every computation takes the mean of its kind over the job,
    every transfer the median. It may be below 1: early stages have slack, so work spread evenly over stages is not the
    fastest where microbatches are few; and those that fill and drain the pipeline may happen to be short."""
    shares: Mapping[str, float]
    """Of intrinsic, hardware, data and unknown in what mending all of them saves; they add up to 1, or are all 0."""
    evidence: tuple[Evidence, ...]
    causes: tuple[Cost, ...]
    """Those that count, the named one first, then by cost."""
    step_seconds: float
    """Simulated, from what was measured."""
    ideal_seconds: float
    slow_places: tuple[SlowPlace, ...]
    """The slowest first, whatever the cause."""
    slow_links: tuple[SlowLink, ...]
    stage_ratios: tuple[float, ...]
    """[S] compute of each stage over the mean stage's, hardware mended."""
    across_replicas_ratio: float
    """Work of a step's most loaded replica over the mean replica's - 1: uneven data between replicas."""
    within_replica_ratio: float
    """A replica's longest microbatch over its mean one - 1: uneven data inside replicas."""

    @property
    def secondary(self) -> str | None:
        """The cause that counts next."""
        return self.causes[1].cause if len(self.causes) > 1 else None


def evidence(
    found: Diagnosis, by_kind: Floats, first_step: int, replicas: int, correlation: float, told_apart: bool
) -> Iterator[Evidence]:
    """What the durations themselves say, the named cause's first. `by_kind` is [K, S], seconds of a stage."""
    by_cause = {
        INTRINSIC: list(_of_stages(found, replicas, by_kind)),
        HARDWARE: [*_of_places(found, replicas, first_step), *_of_links(found)],
        DATA: list(_of_data(found, correlation)),
    }
    order = sorted(by_cause, key=lambda cause: (cause != found.cause, -found.shares[cause]))
    for cause in order:
        if cause == found.cause or any(cost.cause == cause for cost in found.causes):
            yield from by_cause[cause]
    yield from _of_the_rest(found)
    if not told_apart:
        yield Evidence(
            "limit",
            "with one replica and no measure of the devices themselves, slow hardware looks like long layers: a probe "
            "tells them apart",
        )


def _of_stages(found: Diagnosis, replicas: int, by_kind: Floats) -> Iterator[Evidence]:
    alike = f", on all {replicas} replicas alike" if replicas > 1 else ""
    forward, backward = (by_kind / lower_median(by_kind, 1)[:, None]).tolist()
    for stage in slow_stages(found.stage_ratios):
        yield Evidence(
            "stage",
            f"stage {stage} takes {found.stage_ratios[stage] / median_low(found.stage_ratios) - 1:.1%} longer than "
            f"the {'other' if len(found.stage_ratios) == 2 else 'typical'} one (forward {forward[stage] - 1:+.0%}, "
            f"backward {backward[stage] - 1:+.0%}){alike}",
        )


def slow_stages(ratios: tuple[float, ...]) -> list[int]:
    """The slowest, and those that are at least half as far from the typical stage; the slowest first.

    Typical is the lower median: of two stages, the slow one is no measure of itself.
    """
    excess = [ratio / median_low(ratios) - 1 for ratio in ratios]
    most = max(excess)
    slow = [stage for stage, each in enumerate(excess) if each > 0 and each >= most / 2]
    return sorted(slow, key=lambda stage: -excess[stage])


def _of_places(found: Diagnosis, replicas: int, first_step: int) -> Iterator[Evidence]:
    for slow in found.slow_places:
        replica, stage = slow.place
        text = f"stage {stage} of replica {replica} takes {slow.slower_ratio:.1%} longer than "
        if slow.error_ratio is None:
            yield Evidence("place", f"{text}its layers alone do, by what is known of its devices")
            continue
        peers = "the same stage of the other replicas" if replicas > 1 else "before"
        when = "in all steps" if slow.since_step == first_step else f"since step {slow.since_step}"
        yield Evidence("place", f"{text}{peers} (standard error {slow.error_ratio:.1%}), {when}")
    slow_places = {slow.place for slow in found.slow_places}
    stages = range(len(found.stage_ratios))
    for replica in sorted({replica for replica, _ in slow_places}) if len(stages) > 1 else ():
        if all((replica, stage) in slow_places for stage in stages):
            yield Evidence(
                "limit",
                f"all stages of replica {replica} are slow: by slow devices under all of them, or, where its work was "
                "not measured, by more of it in every step",
            )


def _of_links(found: Diagnosis) -> Iterator[Evidence]:
    for link in found.slow_links:
        replica, stage = link.place
        yield Evidence(
            "link",
            f"the link on from stage {stage} of replica {replica} takes {link.seconds * 1000:,.1f} ms, its peers "
            f"{link.peers_seconds * 1000:,.1f} ms, waiting excluded",
        )


def _of_data(found: Diagnosis, correlation: float) -> Iterator[Evidence]:
    if not math.isnan(correlation):
        yield Evidence(
            "data",
            "the same microbatches are long on every stage, forward and backward: their times within a step correlate "
            f"by {correlation:.3f}",
        )
    text = f"the most loaded replica of a step has {found.across_replicas_ratio:.1%} more work than the mean one"
    if found.within_replica_ratio > 0:
        text += f"; the longest microbatch of a replica takes {found.within_replica_ratio:.1%} longer than its mean one"
    yield Evidence("data", text)


def _of_the_rest(found: Diagnosis) -> Iterator[Evidence]:
    slowdown = found.slowdown_ratio - 1
    if found.cause == NONE:
        takes = f"{slowdown:.1%} longer than level ones" if slowdown > 0 else "no longer than level ones"
        yield Evidence("level", f"no cause costs enough to be named; in all, steps take {takes}")
    elif found.shares[UNKNOWN] >= 0.01:
        yield Evidence(
            "unexplained",
            f"{found.shares[UNKNOWN]:.0%} of the slowdown is noise that no stage, place or microbatch explains",
        )
