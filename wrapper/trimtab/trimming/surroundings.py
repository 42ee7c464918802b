"""What a decision rests on that the ranks do not report, and what it comes to: values only."""

import math
from dataclasses import dataclass

from trimtab.account import OrderRecord
from trimtab.balance.deciding.decide import asks
from trimtab.balance.deciding.ledger import Ledger
from trimtab.balance.deciding.situation import Toll
from trimtab.balance.detect import Detection
from trimtab.planning.answer import Answer
from trimtab.protocol import Batch, Order, Parallel, Setting
from trimtab_slurm.contents import TrainingProfile


@dataclass(frozen=True)
class Surroundings:
    """The job's place in the cluster at one moment."""

    now_seconds: float
    """UTC."""
    seconds_left: float | None = None
    """Until the job's time limit; None: it has none, goes on after it, or it is not known."""
    spare_nodes: int | None = None
    """Idle nodes that could replace one; None: not known."""
    exclusions_left: int | None = None
    """How many more nodes may be left out; None: as many as there are."""
    allocation: tuple[str, ...] = ()
    """The job's nodes, first the one that runs its batch script."""
    fixed_nodes: str = ""
    """Why a requeued job's number of nodes stays as it is: "--ntasks=4 fixes it"; empty: it may change."""
    no_requeue: str = ""
    """Why Slurm would not requeue the job: it was submitted with --no-requeue; empty: it would."""
    no_restart: str = ""
    """Why the job does not begin again at all: "requeue.enabled is false"; empty: it does."""
    restart_seconds: float | None = None
    """From the last step of an attempt to the first one of the next, as measured; None: it has not been."""
    cores: int | None = None
    """On how many cores the ranks of a node may run, where they compute on CPUs; None: not known, or they do not."""
    gpu_model: str = ""
    """As the driver calls the GPUs, of which all are alike: "NVIDIA H100 80GB HBM3"; empty: not known, or there are
    none."""
    gpu_memory_bytes: float = math.inf
    """What each of them holds; infinite: not known."""


@dataclass(frozen=True)
class Question:
    """All that a decision rests on, as it was at one moment: nothing in it changes any more."""

    title: str
    training: TrainingProfile
    setting: Setting
    """In force."""
    detection: Detection
    relieved_seconds: float | None
    """UTC, since when hardware is slow that layers or microbatches were moved away from; None: none were."""
    ledger: Ledger
    settled_seconds: float
    """UTC, until when the ledger has counted what the fault costs."""
    toll: Toll
    surroundings: Surroundings


@dataclass(frozen=True)
class Restart:
    """A restart that is wanted: what the job's next attempt shall run, and where not."""

    parallel: Parallel
    """Layout and recomputed layers included."""
    batch: Batch
    nodes: int
    exclude: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Advice:
    """What was decided, in the forms in which it is carried out and told."""

    answer: Answer
    sentence: str
    time_seconds: float
    """UTC, of the surroundings that it rests on."""
    ledger: Ledger
    """With what the fault has cost until then."""
    record: OrderRecord | None = None
    """Of what is asked for, its number still 0; None: nothing is."""
    order: Order | None = None
    """To the ranks, in place."""
    restart: Restart | None = None
    """To Slurm."""

    @property
    def asked(self) -> bool:
        """Whether anything asked for a change; if not, there is nothing to tell."""
        return bool(asks(self.answer.case.situation, self.answer.case.job.balance))

    @property
    def acts(self) -> bool:
        """Whether something is to be carried out."""
        return self.order is not None or self.restart is not None
