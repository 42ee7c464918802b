"""The order in which each stage of a pipeline takes its operations. Pure.

Every schedule here has one shape: a stage first runs some forwards (the warm-up), then one forward and one backward in
turn, then the backwards that are left. Where the backward is split, the weight gradients follow the input gradients by
a lag, and those that are left come last. So a schedule is the number of forwards in the warm-up, the lag, and the order
in which a stage's chunks take turns:

- GPipe (Huang et al., 2019, "GPipe", section 2.3): all forwards are warm-up.
- 1F1B (Narayanan et al., 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 2.2), and
  interleaved 1F1B (section 2.2.2): counts and order as Megatron-core has them in `pipeline_parallel/schedules.py`, with
  groups of as many microbatches as there are stages.
- ZB-H1 and ZB-H2 (Qi et al., 2023, "Zero Bubble Pipeline Parallelism", section 2): every stage holds at most S, or
  2 S - 1, microbatches, the most that the first stage of 1F1B holds, or nearly twice that.
"""

from collections.abc import Sequence
from typing import Literal

from trimtab.balance.plan import Schedule

Kind = Literal["F", "B", "W"]
"""Forward; backward, or its input gradients alone where the schedule splits it; weight gradients."""
Operation = tuple[Kind, int, int]
"""(kind, chunk, microbatch)"""

SPLITTING = frozenset({Schedule.ZERO_BUBBLE_1, Schedule.ZERO_BUBBLE_2})
"""The schedules that run input and weight gradients apart."""


def obstacle(schedule: Schedule, stages: int, virtual: int, microbatches: int) -> str | None:
    """Why a schedule cannot run in this shape, as Megatron-core would refuse it; None where it can."""
    if microbatches < 1:
        return f"{microbatches} microbatches: a step takes at least one"
    if schedule is not Schedule.INTERLEAVED:
        return f"schedule {schedule} takes one chunk a stage, not {virtual}" if virtual != 1 else None
    if microbatches < stages or microbatches % stages:
        return f"schedule {schedule} takes a multiple of {stages} microbatches, one group a stage, not {microbatches}"
    return None


def stage_orders(schedule: Schedule, stages: int, virtual: int, microbatches: int) -> list[list[Operation]]:
    """The operations of each stage, in order. Raises ValueError where there is an `obstacle`."""
    if reason := obstacle(schedule, stages, virtual, microbatches):
        raise ValueError(reason)
    return [_stage_order(schedule, stages, virtual, microbatches, stage) for stage in range(stages)]


def _stage_order(schedule: Schedule, stages: int, virtual: int, microbatches: int, stage: int) -> list[Operation]:
    chunks = range(stage, stages * virtual, stages)
    groups = [range(first, min(first + stages, microbatches)) for first in range(0, microbatches, stages)]
    forwards = [(chunk, microbatch) for group in groups for chunk in chunks for microbatch in group]
    backwards = [(chunk, microbatch) for group in groups for chunk in reversed(chunks) for microbatch in group]
    behind = stages - 1 - stage
    match schedule:
        case Schedule.GPIPE:
            return _alternate(forwards, backwards, warm_up=len(forwards))
        case Schedule.ONE_F_ONE_B:
            return _alternate(forwards, backwards, warm_up=behind)
        case Schedule.INTERLEAVED:
            return _alternate(forwards, backwards, warm_up=2 * behind + (virtual - 1) * stages)
        case Schedule.ZERO_BUBBLE_1:
            return _alternate(forwards, backwards, warm_up=behind, lag=stage)
        case Schedule.ZERO_BUBBLE_2:
            return _alternate(forwards, backwards, warm_up=2 * behind, lag=2 * stage)


def _alternate(
    forwards: Sequence[tuple[int, int]], backwards: Sequence[tuple[int, int]], *, warm_up: int, lag: int | None = None
) -> list[Operation]:
    """Warm-up, then a forward and a backward in turn; weight gradients follow `lag` backwards later, if at all."""
    order: list[Operation] = [("F", *forward) for forward in forwards[:warm_up]]
    ahead = forwards[warm_up:]
    for turn, backward in enumerate(backwards):
        if turn < len(ahead):
            order.append(("F", *ahead[turn]))
        order.append(("B", *backward))
        if lag is not None and turn >= lag:
            order.append(("W", *backwards[turn - lag]))
    if lag:
        order.extend(("W", *backward) for backward in backwards[-lag:])
    return order
