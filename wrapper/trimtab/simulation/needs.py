"""What balanced stages and a small bubble need, shape by shape, and what stands in the way."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from trimtab.balance.deciding.search import Appraiser, Configuration, Outcome, Space, configurations_of
from trimtab.balance.layouts.partition import NoLayout
from trimtab.balance.plan import Plan, Schedule
from trimtab.protocol import Shape
from trimtab.simulation.compare import Comparison

LEAST_STAGE_EFFICIENCY = 0.96
MOST_BUBBLE = 0.05
"""What a balanced pipeline shall reach."""
MOST_MICROBATCHES = 512
"""Of a replica; with more nobody trains."""
MICROBATCHES = (8, 16, 32, 64, 128)
"""With which the static plan is shown."""
SCHEDULES = (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE_1)


@dataclass(frozen=True)
class Need:
    """What one shape needs under one schedule."""

    shape: Shape
    schedule: Schedule
    virtual: int
    balance_ratio: float | None
    """Of the best layout: however many the microbatches, the stage efficiency stays below it. None: nothing fits."""
    reached: Outcome | None
    """With the fewest microbatches that reach both aims; None: they are out of reach."""
    obstacle: str
    """Why they are; empty: they are not."""

    @property
    def run(self) -> str:
        """Schedule and chunks a stage."""
        return f"{self.schedule} x {self.virtual}" if self.virtual > 1 else str(self.schedule)


def needs(comparison: Comparison) -> list[Need]:
    """For each number of stages, with as many replicas as the chosen plan has, and for each schedule.

    Of interleaved schedules the one whose best layout is the most even; of those as even, that with the fewest chunks.
    """
    return list(_needs(comparison.appraiser, comparison.chosen.configuration))


def static_by_microbatches(comparison: Comparison) -> list[Outcome]:
    """The static plan with other numbers of microbatches, and so with another global batch."""
    static, appraiser = comparison.static, comparison.appraiser
    return [_with_microbatches(appraiser, static.configuration, static.plan, number) for number in MICROBATCHES]


def _with_microbatches(appraiser: Appraiser, configuration: Configuration, plan: Plan, number: int) -> Outcome:
    """So many of each replica."""
    microbatches = (number,) * configuration.shape.data
    return appraiser.appraise(
        replace(configuration, microbatches=microbatches), replace(plan, microbatches=microbatches)
    )


def _needs(appraiser: Appraiser, chosen: Configuration) -> Iterator[Need]:
    space = Space(microbatch_size=(chosen.microbatch_size,), schedules=SCHEDULES)
    same = [
        replace(one, microbatches=(MOST_MICROBATCHES // one.shape.pipeline * one.shape.pipeline,) * one.shape.data)
        for one in configurations_of(appraiser.training, appraiser.cluster, space)
        if one.shape.data == chosen.shape.data and one.shape.pipeline > 1
    ]
    for shape in sorted({one.shape for one in same}, key=lambda shape: shape.pipeline):
        for schedule in SCHEDULES:
            options = [one for one in same if one.shape == shape and one.schedule == schedule]
            if options:
                yield _need(appraiser, options)


def _need(appraiser: Appraiser, options: list[Configuration]) -> Need:
    """Options differ in nothing but their chunks."""
    plans: dict[Configuration, Plan] = {}
    for option in options:
        try:
            plans[option] = appraiser.split(option)
        except NoLayout as error:
            reason = str(error)
    first = options[0]
    if not plans:
        return Need(first.shape, first.schedule, first.virtual, None, None, reason)
    balances = {option: appraiser.balance_ratio(option, plan) for option, plan in plans.items()}
    best = max(plans, key=lambda option: (round(balances[option], 3), -option.virtual))
    found = partial(Need, best.shape, best.schedule, best.virtual, balances[best])
    if balances[best] < LEAST_STAGE_EFFICIENCY:
        return found(None, f"whole layers balance to {balances[best]:.1%} at best")

    def outcome(groups: int) -> Outcome:
        return _with_microbatches(appraiser, best, plans[best], groups * best.shape.pipeline)

    groups = range(1, MOST_MICROBATCHES // best.shape.pipeline + 1)
    fewest = bisect_left(groups, True, key=lambda count: _reaches(outcome(count)))
    if fewest == len(groups):
        return found(None, f"{MOST_MICROBATCHES:,} microbatches are too few")
    return found(outcome(groups[fewest]), "")


def _reaches(outcome: Outcome) -> bool:
    estimate = outcome.estimate
    return estimate.stage_efficiency_ratio >= LEAST_STAGE_EFFICIENCY and estimate.bubble_ratio < MOST_BUBBLE
