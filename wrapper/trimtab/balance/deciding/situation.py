"""All that a decision rests on: what runs, what was measured of it, what ails it, and what acting would take."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from trimtab.balance.deciding.search import Outcome
from trimtab.balance.plan import Costs, Hardware, ParameterMemory, Place, Plan, Schedule
from trimtab.protocol import Shape


class Kind(StrEnum):
    """What can be done about a pipeline."""

    NOTHING = "nothing"
    LAYERS = "move layers"
    MICROBATCHES = "move microbatches"
    RECOMPUTE = "toggle recompute"
    SCHEDULE = "other schedule"
    REPACK = "repack"
    REQUEUE = "requeue in another shape"
    EXCLUDE = "exclude a node"
    FEWER = "run on fewer nodes"

    @property
    def restarts(self) -> bool:
        """Whether the job ends and begins again for it: the costly ones."""
        return self in (Kind.SCHEDULE, Kind.REQUEUE, Kind.EXCLUDE, Kind.FEWER)


@dataclass(frozen=True)
class Fault:
    """What ails a run, as far as a remedy depends on it."""

    cause: str = "none"
    """intrinsic, hardware, data, unknown or none, as `diagnose` has them."""
    places: tuple[Place, ...] = ()
    """The slow ones."""


@dataclass(frozen=True)
class Toll:
    """What acting takes, beside the bytes that move."""

    reshape_seconds: float = 0.65
    """The fixed part of any change in place: as measured, the first time, with 59 M parameters on four CPU ranks."""
    moved_bytes_per_second: float = 1e9
    """At which a rank hands over parameters and optimizer state: assumed, a tenth of a 100 Gbit/s link."""
    restart_seconds: float = 120.0
    """Checkpoint, Slurm, imports and load of a requeue: assumed, clusters take 60 to 180 s."""


NO_TOLL = Toll(reshape_seconds=0.0, moved_bytes_per_second=float("inf"), restart_seconds=0.0)
"""Of a job that does not run: what is changed is only its next submission."""


@dataclass(frozen=True)
class Shapes:
    """What a search for a shape found, and by the same reckoning the current one: all worked out, nothing measured."""

    current: Outcome
    best: Outcome | None
    """None: nothing fits."""
    memory_bytes: float = math.inf
    """What each device holds; infinite: not known."""
    doubt: str = ""
    """Why that reckoning cannot be relied on; empty: it can."""


@dataclass(frozen=True)
class Situation:
    """A run at one moment."""

    costs: Costs
    memory: ParameterMemory
    hardware: Hardware
    """Without links, what messages take is not known: it is then part of the overhead."""
    plan: Plan
    shape: Shape
    step_seconds: float | None = None
    """Measured; None: nothing has run, predictions stand alone."""
    triggered: bool = False
    """Whether the stages count as apart."""
    fault: Fault = Fault()
    confidence: float | None = None
    """In the fault's cause, 0 to 1; None: not known."""
    live: bool = True
    """Whether ranks run that an order would reach; if not, what is decided is a suggestion for the next run."""
    lasting_seconds: float = 0.0
    """Since the trigger; of hardware that was relieved, since the one that this was for."""
    relieved: bool = False
    """Whether layers or microbatches were moved away from hardware that is slow: level or not, it still costs."""
    utilization_ratio: float | None = None
    """Mean over the devices; None: not measured."""
    asked: bool = False
    """Whether a user asks what could be better, triggered or not."""
    seconds_left: float | None = None
    """Of the run, the time limit or its steps, whichever ends first; None: not known."""
    uneven_data_ratio: float | None = None
    """Share of the step's time that an even split of the samples over microbatches would save; None: not measured."""
    shapes: Shapes | None = None
    """None: what another shape would cost is not known."""
    nodes: Mapping[Place, tuple[str, ...]] = field(default_factory=dict)
    """The nodes of each place's ranks; empty: not known."""
    spare_nodes: int | None = None
    """Idle nodes that could replace one; None: not known."""
    exclusions_left: int | None = None
    """How many more nodes may be left out; None: as many as there are."""
    allocation: tuple[str, ...] = ()
    """The job's nodes, first the one that runs its batch script; empty: not known."""
    fixed_nodes: str = ""
    """Why a requeued job's number of nodes stays as it is; empty: it may change."""
    no_requeue: str = ""
    """Why the job cannot be requeued; empty: it can."""
    no_restart: str = ""
    """Why the job cannot be begun again at all; empty: it can."""
    schedules: tuple[Schedule, ...] = (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED)
    """Those that the ranks can run: of Megatron-core, these two."""
    unsplit: str = ""
    """Why the layers' costs do not tell what another layout would bring; empty: they do."""
    toll: Toll = Toll()
    now_seconds: float = 0.0
    """On the clock of the ledger's orders."""


def kept_nodes(allocation: Sequence[str], exclude: Sequence[str], nodes: int) -> tuple[str, ...]:
    """Those of a job's nodes that an attempt of `nodes` nodes can do with; empty: it needs others, and a requeue.

    `allocation` as the situation has it: the first node cannot be given back.
    """
    good = tuple(node for node in allocation if node not in exclude)
    return good[:nodes] if good[:1] == tuple(allocation[:1]) and len(good) >= nodes else ()
