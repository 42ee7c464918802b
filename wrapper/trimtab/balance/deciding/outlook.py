"""What a plan would bring in a situation, by simulation, held against the current one. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from trimtab.balance.deciding.search import Configuration
from trimtab.balance.deciding.situation import Kind, Situation
from trimtab.balance.layouts.partition import partition
from trimtab.balance.layouts.stage_costs import Recompute
from trimtab.balance.pipeline.estimate import Estimate, estimate
from trimtab.balance.plan import Plan


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
    nodes: int | None = None
    """On how many it would run; None: on as many as now."""
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


class Outlook:
    """Plans in one situation, predicted against the same prediction for the current one."""

    def __init__(self, situation: Situation) -> None:
        self.situation = situation
        self._current_seconds = _estimate(situation.plan, situation).step_seconds
        self.step_seconds = situation.step_seconds or self._current_seconds

    def candidate(
        self, kind: Kind, change: str, plan: Plan, cost_seconds: float, elsewhere: Situation | None = None
    ) -> Candidate:
        """With what its plan would bring, on other devices than the current where it says so."""
        there = elsewhere or self.situation
        estimated = _estimate(plan, there)
        gain_ratio = 1 - estimated.step_seconds / self._current_seconds
        return Candidate(
            kind=kind,
            change=change,
            plan=plan,
            predicted_step_seconds=self.step_seconds * (1 - gain_ratio),
            gain_ratio=gain_ratio,
            cost_seconds=cost_seconds,
            fits=estimated.fits,
            room=fullest(estimated.peak_memory_bytes.tolist(), there.hardware.memory_bytes),
        )


def _estimate(plan: Plan, situation: Situation) -> Estimate:
    return estimate(situation.costs, situation.memory, plan, situation.hardware)


def best_plan(situation: Situation, recompute: Recompute) -> Plan:
    """With the best layout for the current schedule. Raises NoLayout."""
    plan = situation.plan
    found = partition(
        situation.costs,
        situation.memory,
        situation.hardware,
        schedule=plan.schedule,
        stages=plan.layout.stages,
        virtual=plan.layout.virtual,
        microbatches=max(plan.microbatches),
        recompute=recompute,
        current=plan.layout,
    )
    return replace(plan, layout=found.layout, recomputed_layers=found.recomputed_layers)


def recompute_mode(plan: Plan) -> Recompute:
    """What a plan does about recomputation, as `partition` takes it."""
    if not any(plan.recomputed_layers):
        return "none"
    held = tuple(len(plan.layout.stage_layers(stage)) for stage in range(plan.layout.stages))
    return "full" if plan.recomputed_layers == held else "fit"


def fastest(found: Sequence[Candidate]) -> Candidate:
    """The one with the shortest step of those that fit and are in no doubt; where none does, the shortest of all."""
    return min(found, key=lambda one: (not one.fits, bool(one.doubt), one.predicted_step_seconds))
