"""What could be done about a pipeline: the best of each kind, its step time by simulation, and what it costs. Pure.

One candidate of each kind, possible or not, in the order of `Kind`. Whether any is worth it is for `decide`.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import groupby
from statistics import fmean

import numpy as np

from trimtab.balance.deciding.search import Configuration
from trimtab.balance.deciding.situation import Kind, Situation
from trimtab.balance.layouts.equal_layers import spread
from trimtab.balance.layouts.partition import NoLayout, partition
from trimtab.balance.layouts.stage_costs import Recompute
from trimtab.balance.pipeline.estimate import Estimate, estimate
from trimtab.balance.pipeline.memory import stage_memory_bytes
from trimtab.balance.pipeline.schedules import obstacle
from trimtab.balance.plan import Hardware, Part, Plan, Schedule
from trimtab.protocol import Layout

MOST_VIRTUAL = 4
"""Chunks a stage that are tried: each one more costs as many messages again, and saves less of the bubble."""
MOST_CHUNKS_IN_WORDS = 8
"""Of a layout that is told chunk by chunk."""


@dataclass(frozen=True)
class Room:
    """The memory of the stage that is the fullest: what a rank of it needs, and may hold at most."""

    stage: int
    needed_bytes: float
    held_bytes: float
    """Infinite: not known."""

    def __str__(self) -> str:
        return f"stage {self.stage} needs {self.needed_bytes / 2**30:,.1f} of {self.held_bytes / 2**30:,.1f} GiB"


def fullest(needed_bytes: Iterable[float], held_bytes: Iterable[float]) -> Room:
    """Of the stages [S]; where none has a limit, the one that needs most."""
    rooms = (Room(stage, *each) for stage, each in enumerate(zip(needed_bytes, held_bytes, strict=True)))
    return max(rooms, key=lambda room: (room.needed_bytes / room.held_bytes, room.needed_bytes))


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One thing that could be done. A figure that there is none of is None."""

    kind: Kind
    change: str = ""
    """What would be different, readable: "layers 4|4 -> 5|3"."""
    plan: Plan | None = None
    """What would run."""
    configuration: Configuration | None = None
    """Shape and batch, where the shape is another."""
    exclude: tuple[str, ...] = ()
    """Nodes that would be left out."""
    predicted_step_seconds: float | None = None
    """As long as the measured step, less the gain."""
    gain_ratio: float | None = None
    """Share of the step's time that it saves, by the predictions for this plan and for the current one."""
    cost_seconds: float | None = None
    fits: bool = True
    """Whether it is within the memory of each stage."""
    room: Room | None = None
    """How much of that its fullest stage takes."""
    obstacle: str = ""
    """Why it cannot be done; empty: it can."""
    doubt: str = ""
    """Why the prediction cannot be relied on; empty: it can."""


def candidates(situation: Situation) -> tuple[Candidate, ...]:
    """The best of each kind."""
    outlook = Outlook(situation)
    return (
        outlook.candidate(Kind.NOTHING, "all stays as it is", situation.plan, 0.0),
        _layers(outlook),
        _microbatches(outlook),
        _recompute(outlook),
        _schedule(outlook),
        _repack(outlook),
        _requeue(outlook),
        _exclude(outlook),
    )


class Outlook:
    """Plans in one situation, predicted against the same prediction for the current one."""

    def __init__(self, situation: Situation) -> None:
        self.situation = situation
        self._current_seconds = self._estimate(situation.plan, situation.hardware).step_seconds
        self.step_seconds = situation.step_seconds or self._current_seconds

    def candidate(
        self, kind: Kind, change: str, plan: Plan, cost_seconds: float, hardware: Hardware | None = None
    ) -> Candidate:
        """With what its plan would bring, on other hardware than the current where it says so."""
        estimated = self._estimate(plan, hardware or self.situation.hardware)
        gain_ratio = 1 - estimated.step_seconds / self._current_seconds
        return Candidate(
            kind=kind,
            change=change,
            plan=plan,
            predicted_step_seconds=self.step_seconds * (1 - gain_ratio),
            gain_ratio=gain_ratio,
            cost_seconds=cost_seconds,
            fits=estimated.fits,
            room=fullest(estimated.peak_memory_bytes.tolist(), self.situation.hardware.memory_bytes),
        )

    def in_place_seconds(self, layout: Layout) -> float:
        """Of a change in place that leads to a layout."""
        situation = self.situation
        ways = zip(situation.costs.layers, situation.plan.layout.owners, layout.owners, strict=True)
        parameters = sum(layer.parameters for layer, before, after in ways if before != after)
        moved_bytes = parameters * situation.memory.moved_bytes
        return situation.toll.reshape_seconds + moved_bytes / situation.toll.moved_bytes_per_second

    def best_plan(self, recompute: Recompute, hardware: Hardware | None = None) -> Plan:
        """With the best layout for the current schedule. Raises NoLayout."""
        situation, plan = self.situation, self.situation.plan
        found = partition(
            situation.costs,
            situation.memory,
            hardware or situation.hardware,
            schedule=plan.schedule,
            stages=plan.layout.stages,
            virtual=plan.layout.virtual,
            microbatches=max(plan.microbatches),
            recompute=recompute,
            current=plan.layout,
        )
        return replace(plan, layout=found.layout, recomputed_layers=found.recomputed_layers)

    def rescheduled(self, schedule: Schedule, virtual: int) -> Plan:
        """With the best layout of even chunks for another schedule, which takes all layers for typical ones.

        Raises NoLayout.
        """
        situation, plan = self.situation, self.situation.plan
        layout, recomputed_layers = spread(
            replace(situation.costs, layers=(_mean(situation.costs.layers),) * len(situation.costs.layers)),
            situation.memory,
            situation.hardware,
            schedule=schedule,
            stages=plan.layout.stages,
            virtual=virtual,
            microbatches=max(plan.microbatches),
        )
        return replace(plan, layout=layout, schedule=schedule, recomputed_layers=recomputed_layers)

    def _estimate(self, plan: Plan, hardware: Hardware) -> Estimate:
        return estimate(self.situation.costs, self.situation.memory, plan, hardware)


def fastest(found: Sequence[Candidate]) -> Candidate:
    """The one with the shortest step of those that fit; where none does, the shortest of all."""
    return min(found, key=lambda candidate: (not candidate.fits, candidate.predicted_step_seconds))


def _layers(outlook: Outlook) -> Candidate:
    plan = outlook.situation.plan
    if plan.layout.stages == 1:
        return Candidate(kind=Kind.LAYERS, obstacle="there is one stage")
    if outlook.situation.unsplit:
        return Candidate(kind=Kind.LAYERS, obstacle=outlook.situation.unsplit)
    try:
        better = outlook.best_plan(_recompute_mode(plan))
    except NoLayout as error:
        return Candidate(kind=Kind.LAYERS, obstacle=str(error))
    if better.layout == plan.layout:
        return Candidate(kind=Kind.LAYERS, obstacle=_best_already(outlook.situation))
    change = f"layers {split_text(plan.layout)} -> {split_text(better.layout)}"
    return outlook.candidate(Kind.LAYERS, change, better, outlook.in_place_seconds(better.layout))


def _best_already(situation: Situation) -> str:
    """Why no layer is moved: of n equal ones, one is 1/n of a stage's work, too much for a small slowness."""
    text = f"{split_text(situation.plan.layout)} is the best split of whole layers"
    if situation.fault.cause != "hardware" or not situation.fault.places:
        return text
    held = max(len(situation.plan.layout.stage_layers(stage)) for _, stage in situation.fault.places)
    if not held:  # embedding or head alone
        return text
    return f"{text}: with {held} on a slow stage, moving one helps only if it is slower than {1 + 1 / held:.2f} times"


def _recompute_mode(plan: Plan) -> Recompute:
    """What a plan does about recomputation, as `partition` takes it."""
    if not any(plan.recomputed_layers):
        return "none"
    held = tuple(len(plan.layout.stage_layers(stage)) for stage in range(plan.layout.stages))
    return "full" if plan.recomputed_layers == held else "fit"


def _microbatches(outlook: Outlook) -> Candidate:
    plan = outlook.situation.plan
    if len(plan.microbatches) == 1:
        return Candidate(kind=Kind.MICROBATCHES, obstacle="there is one replica")
    shares = balanced_microbatches(outlook.situation)
    if shares == plan.microbatches:
        return Candidate(kind=Kind.MICROBATCHES, obstacle="the replicas' shares are the best whole ones already")
    change = f"microbatches {_counts(plan.microbatches)} -> {_counts(shares)}"
    seconds = outlook.in_place_seconds(plan.layout)
    return outlook.candidate(Kind.MICROBATCHES, change, replace(plan, microbatches=shares), seconds)


def balanced_microbatches(situation: Situation) -> tuple[int, ...]:
    """[R] shares with the same sum under which the slowest replica is done first.

    A pipeline's time grows linearly with its microbatches, which two simulations of each replica give. One by one,
    each microbatch goes to the replica that is done first with it: the optimum, as no replica's time falls with more.
    The interleaved schedule takes as many at once as there are stages.
    """
    plan, stages = situation.plan, situation.plan.layout.stages
    unit = stages if plan.schedule is Schedule.INTERLEAVED else 1
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


def _recompute(outlook: Outlook) -> Candidate:
    situation = outlook.situation
    plan = situation.plan
    if any(plan.recomputed_layers) and not np.isfinite(situation.hardware.memory_bytes).all():
        return Candidate(kind=Kind.RECOMPUTE, obstacle="the devices' memory is not known: less of it may not fit")
    found = []
    for other in _other_recomputations(outlook):
        layers = f", layers {split_text(other.layout)}" if other.layout != plan.layout else ""
        change = f"recomputed layers {_counts(plan.recomputed_layers)} -> {_counts(other.recomputed_layers)}{layers}"
        found.append(outlook.candidate(Kind.RECOMPUTE, change, other, outlook.in_place_seconds(other.layout)))
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
        roomy = outlook.best_plan("fit")
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


def _schedule(outlook: Outlook) -> Candidate:
    plan = outlook.situation.plan
    if plan.layout.stages == 1:
        return Candidate(kind=Kind.SCHEDULE, obstacle="there is one stage")
    if outlook.situation.unsplit:
        return Candidate(kind=Kind.SCHEDULE, obstacle=outlook.situation.unsplit)
    found, obstacles = [], []
    for schedule, virtual in _other_schedules(outlook.situation):
        try:
            other = outlook.rescheduled(schedule, virtual)
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


def _other_schedules(situation: Situation) -> Iterator[tuple[Schedule, int]]:
    """Schedules and chunks a stage that the ranks can run, and do not."""
    plan, stages = situation.plan, situation.plan.layout.stages
    for schedule in situation.schedules:
        most = min(MOST_VIRTUAL, len(situation.costs.layers) // stages)
        for virtual in range(2, most + 1) if schedule is Schedule.INTERLEAVED else (1,):
            possible = not any(obstacle(schedule, stages, virtual, count) for count in set(plan.microbatches))
            if possible and (schedule, virtual) != (plan.schedule, plan.layout.virtual):
                yield schedule, virtual


def _unknown_messages(situation: Situation, plan: Plan | None) -> str:
    """Why a plan with more messages than the current one cannot be trusted; empty: it can."""
    if situation.hardware.links or plan is None or plan.layout.virtual <= situation.plan.layout.virtual:
        return ""
    times = plan.layout.virtual / situation.plan.layout.virtual
    return f"{times:g} times the messages between stages, whose time is not measured: the step is at least as long"


def _repack(outlook: Outlook) -> Candidate:
    gain_ratio = outlook.situation.uneven_data_ratio
    if gain_ratio is None:
        return Candidate(kind=Kind.REPACK, obstacle="how uneven the samples are is not measured")
    return Candidate(
        kind=Kind.REPACK,
        change="samples spread over microbatches by their work",
        plan=outlook.situation.plan,
        predicted_step_seconds=outlook.step_seconds * (1 - gain_ratio),
        gain_ratio=gain_ratio,
        cost_seconds=0.0,
    )


def _requeue(outlook: Outlook) -> Candidate:
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


def _exclude(outlook: Outlook) -> Candidate:
    situation = outlook.situation
    places = situation.fault.places if situation.fault.cause == "hardware" else ()
    slow = tuple(sorted({node for place in places for node in situation.nodes.get(place, ())}))
    if not places:
        return Candidate(kind=Kind.EXCLUDE, obstacle="no node is slow")
    if not slow:
        return Candidate(kind=Kind.EXCLUDE, obstacle="the nodes of the slow places are not known")
    if situation.spare_nodes is not None and situation.spare_nodes < len(slow):
        return Candidate(kind=Kind.EXCLUDE, obstacle=f"{situation.spare_nodes} idle nodes could replace {len(slow)}")
    left = situation.exclusions_left
    if left is not None and left < len(slow):
        return Candidate(kind=Kind.EXCLUDE, obstacle=f"{left} more nodes may be left out, and {len(slow)} are slow")
    speeds = situation.hardware.speeds.copy()
    replaced = [place for place, nodes in situation.nodes.items() if set(nodes) & set(slow)]
    kept = [speeds[place] for place in situation.nodes if place not in replaced]
    if not kept:
        return Candidate(kind=Kind.EXCLUDE, obstacle="every place has ranks on a slow node")
    for place in replaced:
        speeds[place] = np.median(kept)
    hardware = replace(situation.hardware, speeds=speeds)
    found = [
        outlook.candidate(
            Kind.EXCLUDE, _without(slow, situation.plan, plan), plan, situation.toll.restart_seconds, hardware
        )
        for plan in _plans_for_peers(outlook, hardware)
    ]
    return replace(fastest(found), exclude=slow)


def _plans_for_peers(outlook: Outlook, hardware: Hardware) -> Iterator[Plan]:
    """With even shares, as an attempt begins: the current layout, and the one that is best on other devices."""
    plan = outlook.situation.plan
    count = sum(plan.microbatches) // len(plan.microbatches)
    even = replace(plan, microbatches=(count,) * len(plan.microbatches))
    yield even
    if plan.layout.stages > 1 and not outlook.situation.unsplit:
        with suppress(NoLayout):
            yield replace(outlook.best_plan(_recompute_mode(plan), hardware), microbatches=even.microbatches)


def _without(nodes: Sequence[str], before: Plan, after: Plan) -> str:
    layers = (
        f", layers {split_text(before.layout)} -> {split_text(after.layout)}" if after.layout != before.layout else ""
    )
    return f"without {', '.join(nodes)}, another node in its place{layers}"


def _mean(parts: Sequence[Part]) -> Part:
    return Part(*(fmean(getattr(part, field.name) for part in parts) for field in fields(Part)))


def split_text(layout: Layout) -> str:
    """(5, 3) -> "5|3"; of many chunks, what follows itself is counted: "1|2 x 7|1"."""
    if layout.chunks <= MOST_CHUNKS_IN_WORDS:
        return "|".join(map(str, layout.layers))
    return "|".join(f"{number} x {times}" if times > 1 else str(number) for number, times in _runs(layout.layers))


def _counts(numbers: Sequence[int]) -> str:
    """(8, 8, 8, 4) -> "3 x 8, 4"."""
    return ", ".join(f"{times} x {number}" if times > 1 else str(number) for number, times in _runs(numbers))


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Each number, and how many times it follows itself."""
    return ((number, len(list(run))) for number, run in groupby(numbers))
