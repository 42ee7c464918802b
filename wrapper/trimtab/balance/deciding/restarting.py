"""What ends the job and begins it again: another schedule, another shape, without slow nodes. Pure."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from statistics import fmean

import numpy as np

from trimtab.balance.deciding.outlook import Candidate, Outlook, best_plan, fastest, fullest, recompute_mode
from trimtab.balance.deciding.situation import Kind, Situation, kept_nodes
from trimtab.balance.deciding.words import counts_text, node_count, split_text
from trimtab.balance.layouts.equal_layers import spread
from trimtab.balance.layouts.partition import NoLayout
from trimtab.balance.pipeline.memory import stage_memory_bytes
from trimtab.balance.plan import Part, Plan, Schedule
from trimtab.protocol import Shape, even_shares

MOST_VIRTUAL = 4
"""Chunks a stage that are tried: each one more costs as many messages again, and saves less of the bubble."""


def other_schedule(outlook: Outlook) -> Candidate:
    plan = outlook.situation.plan
    if plan.layout.stages == 1:
        return Candidate(kind=Kind.SCHEDULE, obstacle="there is one stage")
    if outlook.situation.unsplit:
        return Candidate(kind=Kind.SCHEDULE, obstacle=outlook.situation.unsplit)
    found, obstacles = [], []
    for schedule, virtual, microbatches in _other_schedules(outlook.situation):
        try:
            other = _rescheduled(outlook.situation, schedule, virtual, microbatches)
        except NoLayout as error:
            obstacles.append(str(error))
            continue
        chunks = f" with {virtual} chunks a stage" if virtual > 1 else ""
        change = f"{plan.schedule} -> {schedule}{chunks}, layers {split_text(other.layout)}"
        found.append(outlook.candidate(Kind.SCHEDULE, change, other, outlook.situation.toll.restart_seconds))
    if not found:
        reason = "the ranks have no other that fits these layers and microbatches"
        return Candidate(kind=Kind.SCHEDULE, obstacle=obstacles[0] if obstacles else reason)
    best = fastest(found)
    return replace(best, doubt=_unknown_messages(outlook.situation, best.plan))


def _rescheduled(situation: Situation, schedule: Schedule, virtual: int, microbatches: tuple[int, ...]) -> Plan:
    """With the best layout of even chunks for another schedule, which takes all layers for typical ones.

    Raises NoLayout.
    """
    layout, recomputed_layers = spread(
        replace(situation.costs, layers=(_mean(situation.costs.layers),) * len(situation.costs.layers)),
        situation.memory,
        situation.hardware,
        schedule=schedule,
        stages=situation.plan.layout.stages,
        virtual=virtual,
        microbatches=max(microbatches),
    )
    return Plan(layout, schedule, microbatches, recomputed_layers)


def _other_schedules(situation: Situation) -> Iterator[tuple[Schedule, int, tuple[int, ...]]]:
    """Schedules and chunks a stage that the ranks can run, and do not, with the microbatches that they begin with."""
    plan, stages = situation.plan, situation.plan.layout.stages
    most = min(MOST_VIRTUAL, len(situation.costs.layers) // stages)
    for schedule in situation.schedules:
        try:
            microbatches = replace(plan, schedule=schedule).even_microbatches
        except ValueError:  # no whole groups for each replica
            continue
        for virtual in range(2, most + 1) if schedule is Schedule.INTERLEAVED else (1,):
            if (schedule, virtual) != (plan.schedule, plan.layout.virtual):
                yield schedule, virtual, microbatches


def _unknown_messages(situation: Situation, plan: Plan | None) -> str:
    """Why a plan with more messages than the current one cannot be trusted; empty: it can."""
    if situation.hardware.links or plan is None or plan.layout.virtual <= situation.plan.layout.virtual:
        return ""
    times = plan.layout.virtual / situation.plan.layout.virtual
    return f"{times:g} times the messages between stages, whose time is not measured: the step is at least as long"


def other_shape(outlook: Outlook) -> Candidate:
    shapes = outlook.situation.shapes
    if shapes is None:
        return Candidate(kind=Kind.REQUEUE, obstacle="what another shape would cost is not known")
    if shapes.best is None:
        return Candidate(kind=Kind.REQUEUE, obstacle="no shape on these GPUs fits into their memory")
    now, best = shapes.current.configuration, shapes.best.configuration
    if best == now:
        return Candidate(kind=Kind.REQUEUE, obstacle=f"of all shapes, {now.shape} is the fastest")
    gain_ratio = 1 - shapes.best.estimate.step_seconds / shapes.current.estimate.step_seconds
    return Candidate(
        kind=Kind.REQUEUE,
        change=f"{best}, layers {split_text(shapes.best.plan.layout)}",
        plan=shapes.best.plan,
        configuration=best,
        predicted_step_seconds=outlook.step_seconds * (1 - gain_ratio),
        gain_ratio=gain_ratio,
        cost_seconds=outlook.situation.toll.restart_seconds,
        room=fullest(shapes.best.memory_bytes, (shapes.memory_bytes,) * best.shape.pipeline),
        doubt=shapes.doubt
        or ("" if outlook.situation.hardware.links else "how fast the devices exchange is not measured"),
    )


def other_nodes(outlook: Outlook) -> Candidate:
    """With idle nodes in the place of the slow ones."""
    situation = outlook.situation
    slow = _slow_nodes(situation)
    if impossible := _no_exclusion(situation, slow):
        return Candidate(kind=Kind.EXCLUDE, obstacle=impossible)
    if situation.spare_nodes is not None and situation.spare_nodes < len(slow):
        return Candidate(kind=Kind.EXCLUDE, obstacle=f"{situation.spare_nodes} idle nodes could replace {len(slow)}")
    replaced = [place for place, nodes in situation.nodes.items() if set(nodes) & set(slow)]
    speeds = situation.hardware.speeds.copy()
    for place in replaced:
        speeds[place] = _healthy_speed(situation, slow)
    peers = replace(situation, hardware=replace(situation.hardware, speeds=speeds))
    return _best_on(peers, outlook, Kind.EXCLUDE, f"without {', '.join(slow)}, another node in its place", exclude=slow)


def fewer_nodes(outlook: Outlook) -> Candidate:
    """Without the slow nodes, the others at their usual speed: the same tensor x pipeline, fewer replicas, and the same
    global batch in more microbatches of each."""
    situation = outlook.situation
    slow = _slow_nodes(situation)
    if impossible := _no_exclusion(situation, slow):
        return Candidate(kind=Kind.FEWER, obstacle=impossible)
    nodes = len(_all_nodes(situation)) - len(slow) + (situation.spare_nodes or 0)
    if situation.fixed_nodes and not kept_nodes(situation.allocation, slow, nodes):
        return Candidate(kind=Kind.FEWER, obstacle=situation.fixed_nodes)
    fewer = _on(nodes, _healthy_speed(situation, slow), situation)
    if isinstance(fewer, str):
        return Candidate(kind=Kind.FEWER, obstacle=fewer)
    change = f"without {', '.join(slow)}, on {node_count(nodes)}: {fewer.shape}"
    if len(set(fewer.plan.microbatches)) > 1:
        change += f", microbatches {counts_text(fewer.plan.microbatches)}"
    return _best_on(fewer, outlook, Kind.FEWER, change, exclude=slow, nodes=nodes)


def _on(nodes: int, speed: float, situation: Situation) -> Situation | str:
    """The situation on so many nodes of one speed, all of whose ranks are used, or why there is none.

    Which node takes which place is Slurm's to say. Optimizer state that replicas share is shared by fewer.
    """
    plan, shape, now = situation.plan, situation.shape, len(_all_nodes(situation))
    if nodes >= now:
        return "idle nodes could replace all that are slow"
    if shape.world_size % now:
        return "its nodes have unequal numbers of ranks"
    ranks = shape.world_size // now * nodes
    replicas, unused = divmod(ranks, shape.tensor * shape.pipeline)
    if unused:
        on = f"{node_count(nodes)}, {ranks} rank{'' if ranks == 1 else 's'}"
        return f"{on}: no whole number of replicas of TP{shape.tensor} x PP{shape.pipeline}"
    multiple = plan.schedule.microbatch_multiple(plan.layout.stages)
    shards = replicas if situation.memory.shards > 1 else 1
    return replace(
        situation,
        memory=replace(situation.memory, shards=shards),
        hardware=replace(situation.hardware, speeds=np.full((replicas, shape.pipeline), speed)),
        plan=replace(plan, microbatches=even_shares(sum(plan.microbatches), replicas, multiple)),
        shape=Shape(shape.tensor, shape.pipeline, replicas),
    )


def _slow_nodes(situation: Situation) -> tuple[str, ...]:
    places = situation.fault.places if situation.fault.cause == "hardware" else ()
    return tuple(sorted({node for place in places for node in situation.nodes.get(place, ())}))


def _all_nodes(situation: Situation) -> set[str]:
    return {node for nodes in situation.nodes.values() for node in nodes}


def _no_exclusion(situation: Situation, slow: Sequence[str]) -> str:
    """Why slow nodes cannot be left out, whatever takes their place; empty: they can."""
    if situation.fault.cause != "hardware" or not situation.fault.places:
        return "no node is slow"
    if not slow:
        return "the nodes of the slow places are not known"
    left = situation.exclusions_left
    if left is not None and left < len(slow):
        return f"{left} more nodes may be left out, and {len(slow)} are slow"
    if all(set(nodes) & set(slow) for nodes in situation.nodes.values()):
        return "every place has ranks on a slow node"
    return ""


def _healthy_speed(situation: Situation, slow: Sequence[str]) -> float:
    """Of the places that have no rank on a slow node, the median."""
    kept = [situation.hardware.speeds[place] for place, nodes in situation.nodes.items() if not set(nodes) & set(slow)]
    return float(np.median(kept))


def _best_on(
    peers: Situation, outlook: Outlook, kind: Kind, change: str, exclude: tuple[str, ...], nodes: int | None = None
) -> Candidate:
    """Of the plans for other devices."""
    before, found = outlook.situation.plan.layout, []
    for plan in _plans_for(peers):
        layers = f", layers {split_text(before)} -> {split_text(plan.layout)}" if plan.layout != before else ""
        one = outlook.candidate(kind, change + layers, plan, peers.toll.restart_seconds, peers)
        found.append(replace(one, doubt=_unknown_memory(outlook.situation, peers, plan)))
    return replace(fastest(found), exclude=exclude, nodes=nodes)


def _plans_for(peers: Situation) -> Iterator[Plan]:
    """With even shares, as an attempt begins: the current layout, and the one that is best on these devices."""
    even = replace(peers.plan, microbatches=peers.plan.even_microbatches)
    yield even
    if even.layout.stages > 1 and not peers.unsplit:
        with suppress(NoLayout):
            yield best_plan(replace(peers, plan=even), recompute_mode(even))


def _unknown_memory(situation: Situation, peers: Situation, plan: Plan) -> str:
    """Why it cannot be relied on that fewer ranks have room for a plan; empty: it can, or they are not fewer."""
    if peers.shape == situation.shape or np.isfinite(situation.hardware.memory_bytes).all():
        return ""
    before = max(stage_memory_bytes(situation.costs, situation.memory, situation.plan))
    after = max(stage_memory_bytes(peers.costs, peers.memory, plan))
    if after <= before:
        return ""
    grows = f"{before / 2**30:,.1f} to {after / 2**30:,.1f} GiB"
    return f"what the fullest rank holds would grow from {grows}, and how much the devices hold is not known"


def _mean(parts: Sequence[Part]) -> Part:
    return Part(*(fmean(getattr(part, field.name) for part in parts) for field in fields(Part)))
