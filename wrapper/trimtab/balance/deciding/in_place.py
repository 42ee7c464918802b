"""What the ranks do between two steps: move layers, move microbatches, recompute more or less. Pure."""

import heapq
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from trimtab.balance.deciding.outlook import Candidate, Outlook, best_plan, fastest, recompute_mode
from trimtab.balance.deciding.situation import Kind, Situation
from trimtab.balance.deciding.words import counts_text, split_text
from trimtab.balance.layouts.partition import NoLayout
from trimtab.balance.pipeline.estimate import estimate
from trimtab.balance.pipeline.memory import stage_memory_bytes
from trimtab.balance.plan import Plan
from trimtab.protocol import Layout


def layers(outlook: Outlook) -> Candidate:
    plan = outlook.situation.plan
    if plan.layout.stages == 1:
        return Candidate(kind=Kind.LAYERS, obstacle="there is one stage")
    if outlook.situation.unsplit:
        return Candidate(kind=Kind.LAYERS, obstacle=outlook.situation.unsplit)
    try:
        better = best_plan(outlook.situation, recompute_mode(plan))
    except NoLayout as error:
        return Candidate(kind=Kind.LAYERS, obstacle=str(error))
    if better.layout == plan.layout:
        return Candidate(kind=Kind.LAYERS, obstacle=_best_already(outlook.situation))
    change = f"layers {split_text(plan.layout)} -> {split_text(better.layout)}"
    return outlook.candidate(Kind.LAYERS, change, better, _seconds(outlook.situation, better.layout))


def _best_already(situation: Situation) -> str:
    """Why no layer is moved: of n equal ones, one is 1/n of a stage's work, too much for a small slowness."""
    text = f"{split_text(situation.plan.layout)} is the best split of whole layers"
    if situation.fault.cause != "hardware" or not situation.fault.places:
        return text
    held = max(len(situation.plan.layout.stage_layers(stage)) for _, stage in situation.fault.places)
    if not held:  # embedding or head alone
        return text
    return f"{text}: with {held} on a slow stage, moving one helps only if it is slower than {1 + 1 / held:.2f} times"


def microbatches(outlook: Outlook) -> Candidate:
    plan = outlook.situation.plan
    if len(plan.microbatches) == 1:
        return Candidate(kind=Kind.MICROBATCHES, obstacle="there is one replica")
    shares = balanced_microbatches(outlook.situation)
    if shares == plan.microbatches:
        return Candidate(kind=Kind.MICROBATCHES, obstacle="the replicas' shares are the best whole ones already")
    change = f"microbatches {counts_text(plan.microbatches)} -> {counts_text(shares)}"
    seconds = _seconds(outlook.situation, plan.layout)
    return outlook.candidate(Kind.MICROBATCHES, change, replace(plan, microbatches=shares), seconds)


def balanced_microbatches(situation: Situation) -> tuple[int, ...]:
    """[R] shares with the same sum under which the slowest replica is done first.

    A pipeline's time grows linearly with its microbatches, which two simulations of each replica give. One by one,
    each microbatch goes to the replica that is done first with it: the optimum, as no replica's time falls with more.
    The interleaved schedule takes as many at once as there are stages.
    """
    plan, stages = situation.plan, situation.plan.layout.stages
    unit = plan.schedule.microbatch_multiple(stages)
    few, many = (_pipeline_seconds(situation, count) for count in (2 * stages, 4 * stages))
    slope = [(more - less) / (2 * stages) for less, more in zip(few, many, strict=True)]
    shares = [unit] * len(plan.microbatches)

    def done_seconds(replica: int) -> float:
        return few[replica] + slope[replica] * (shares[replica] + unit - 2 * stages)

    waiting = [(done_seconds(replica), replica) for replica in range(len(shares))]
    heapq.heapify(waiting)
    for _ in range(sum(plan.microbatches) // unit - len(shares)):
        _, replica = waiting[0]
        shares[replica] += unit
        heapq.heapreplace(waiting, (done_seconds(replica), replica))
    return tuple(shares)


def _pipeline_seconds(situation: Situation, microbatches: int) -> list[float]:
    """[R] of each replica's pipeline with so many microbatches."""
    plan = replace(situation.plan, microbatches=(microbatches,) * len(situation.plan.microbatches))
    estimated = estimate(situation.costs, situation.memory, plan, situation.hardware)
    return [simulation.duration_seconds for simulation in estimated.simulations]


def recompute(outlook: Outlook) -> Candidate:
    situation = outlook.situation
    plan = situation.plan
    if any(plan.recomputed_layers) and not np.isfinite(situation.hardware.memory_bytes).all():
        return Candidate(kind=Kind.RECOMPUTE, obstacle="the devices' memory is not known: less of it may not fit")
    found = []
    for other in _other_recomputations(outlook):
        layers = f", layers {split_text(other.layout)}" if other.layout != plan.layout else ""
        change = (
            f"recomputed layers {counts_text(plan.recomputed_layers)} -> {counts_text(other.recomputed_layers)}{layers}"
        )
        found.append(outlook.candidate(Kind.RECOMPUTE, change, other, _seconds(situation, other.layout)))
    if found:
        return fastest(found)
    if any(plan.recomputed_layers):
        return Candidate(kind=Kind.RECOMPUTE, obstacle="no less of it fits the memory")
    return Candidate(kind=Kind.RECOMPUTE, obstacle="nothing is recomputed, and no better layout needs it")


def _other_recomputations(outlook: Outlook) -> Iterator[Plan]:
    """The least that fits the current layout, and the layout that recomputing where it must be makes room for."""
    plan = outlook.situation.plan
    least = _least_recomputed(outlook.situation)
    if least is not None and least != plan.recomputed_layers:
        yield replace(plan, recomputed_layers=least)
    try:
        roomy = best_plan(outlook.situation, "fit")
    except NoLayout:
        return
    if roomy.recomputed_layers != plan.recomputed_layers and roomy.layout != plan.layout:
        yield roomy


def _least_recomputed(situation: Situation) -> tuple[int, ...] | None:
    """[S] the fewest recomputed layers of each stage with which it fits; None where one does not even with all."""
    plan, stages = situation.plan, range(situation.plan.layout.stages)
    held = [len(plan.layout.stage_layers(stage)) for stage in stages]
    least: dict[int, int] = {}
    for count in range(max(held) + 1):
        tried = replace(plan, recomputed_layers=tuple(min(count, most) for most in held))
        needed = stage_memory_bytes(situation.costs, situation.memory, tried)
        for stage in stages:
            if needed[stage] <= situation.hardware.memory_bytes[stage]:
                least.setdefault(stage, tried.recomputed_layers[stage])
    return tuple(least[stage] for stage in stages) if len(least) == len(held) else None


def _seconds(situation: Situation, layout: Layout) -> float:
    """Of a change in place that leads to a layout."""
    ways = zip(situation.costs.layers, situation.plan.layout.owners, layout.owners, strict=True)
    parameters = sum(layer.parameters for layer, before, after in ways if before != after)
    moved_bytes = parameters * situation.memory.moved_bytes
    return situation.toll.reshape_seconds + moved_bytes / situation.toll.moved_bytes_per_second
