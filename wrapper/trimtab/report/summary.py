"""Every figure of the report, and nothing of how it is found or shown. As JSON these are `trimtab report --json`.

A figure that was not measured is None. Ratios are fractions: 0.31 is 31 %. Times are UTC, seconds since 1970.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

SCHEMA = 1


@dataclass(frozen=True)
class Outcome:
    """How the attempt ended."""

    state: str
    """finished, stopped (progress saved), failed, unknown (nobody could say), or recorded (not started by trimtab)."""
    sentence: str
    exit_code: int | None


@dataclass(frozen=True)
class Stage:
    """One stage of one replica; times are medians over the window."""

    replica: int
    stage: int
    layers: str
    """Global ids, "0-3,8"; empty: none, or not known."""
    embedding: bool
    head: bool
    """Whether it computes the loss (LM head)."""
    forward_seconds: float | None
    backward_seconds: float | None
    compute_seconds: float | None
    """Forward and backward of one step, all microbatches."""
    not_computing_ratio: float | None
    """Share of the step outside this compute: waiting for other stages, communication, optimizer."""
    peak_memory_bytes: float | None
    """Most over all steps."""


@dataclass(frozen=True)
class Imbalance:
    """Slowest stage over median stage - 1, from the stages' medians over the window."""

    ratio: float
    replica: int
    stage: int
    """The slowest."""
    trigger_ratio: float
    triggered: bool
    """Whether the ratio has reached the trigger: from there on it is reported as an imbalance."""
    measured_steps: int
    """Steps of the window that every stage reported."""


@dataclass(frozen=True)
class StepShares:
    """Where the time of the window's steps went, by the model of a 1F1B pipeline; the four add up to 1."""

    compute_ratio: float
    fill_ratio: float
    imbalance_ratio: float
    other_ratio: float
    """The rest: communication, optimizer, data, and whatever else held the processes."""


@dataclass(frozen=True)
class Cost:
    """What imbalance cost over all measured steps, by the same model."""

    imbalance_seconds: float
    imbalance_device_hours: float
    imbalance_ratio: float
    """Of the duration of these steps."""
    measured_steps: int


@dataclass(frozen=True)
class Training:
    """What the ranks reported."""

    tensor: int
    pipeline: int
    data: int
    ranks: int
    """Ranks that reported."""
    duration_seconds: float
    first_step: int | None
    last_step: int | None
    measured_steps: int
    planned_steps: int
    first_loss: float | None
    last_loss: float | None
    last_loss_step: int | None
    """The last step with a finite loss."""
    tokens: int
    tokens_per_second: float | None
    """Median over steps."""
    step_seconds: float | None
    """Median over steps."""
    window_steps: int
    """Length of the window: the figures of the stages are over the last so many steps that all stages reported."""
    own_model: bool
    """Whether the model is the user's own, not the one that the job file describes."""
    virtual: int
    """Model chunks of a stage."""
    stages: tuple[Stage, ...]
    imbalance: Imbalance | None
    shares: StepShares | None
    cost: Cost | None


@dataclass(frozen=True)
class Throttling:
    """One reason why a GPU was slower than it could be."""

    reason: str
    ratio: float
    """Samples with this reason over those that say whether there is one. There may be several reasons at once."""


@dataclass(frozen=True)
class Device:
    """One device over the whole attempt."""

    node: str
    uuid: str
    kind: str
    model: str
    index: int | None
    ranks: tuple[int, ...]
    utilization_mean_ratio: float | None
    """Of a GPU: the share of time in which a kernel ran. Of a task without one: CPU time of its processes over that of
    the cores that it may run on."""
    utilization_max_ratio: float | None
    memory_max_bytes: float | None
    samples: int
    coverage_ratio: float | None
    """Samples with a utilization, or all where none has one, over those that the sampling period asks for: of a GPU
    over the whole attempt, of a task from its first sample to its last."""
    no_data: str
    """Why there is no utilization; empty where there is one."""
    pci: str = ""
    """Bus id, of a GPU."""
    sm_active_mean_ratio: float | None = None
    power_mean_watts: float | None = None
    throttled_ratio: float | None = None
    """Samples with any reason to throttle over those that say whether there is one."""
    throttling: tuple[Throttling, ...] = ()
    """The reasons, the most frequent first."""
    absent: dict[str, str] = field(default_factory=dict)
    """Column of the profile -> why no sample has it; of those that these figures are made of."""


@dataclass(frozen=True)
class Rank:
    """One rank, and the device it ran on."""

    rank: int
    node: str
    device: str
    tensor_rank: int
    pipeline_rank: int
    data_rank: int
    layers: str
    parameters: int


@dataclass(frozen=True)
class Event:
    """Something that happened; `source` is a node, or "training"."""

    time_seconds: float
    source: str
    kind: str
    text: str


@dataclass(frozen=True)
class Attempt:
    """One run of the job, as the chain of attempts lists it."""

    number: int
    """From 1, in the order of their start."""
    start_seconds: float | None
    duration_seconds: float | None
    state: str
    """As of an outcome; or damaged: its file cannot be read."""
    sentence: str
    file: str


@dataclass(frozen=True)
class Finding:
    """One thing to change, or that there is nothing to change."""

    kind: str
    """failure, stopped, imbalance, cause, plan or none."""
    text: str


@dataclass(frozen=True)
class Summary:
    """The report of one attempt."""

    schema: int
    cluster: str
    job_id: int
    user: str
    restart_count: int
    start_seconds: float
    end_seconds: float
    duration_seconds: float
    outcome: Outcome
    training: Training | None
    devices: tuple[Device, ...]
    ranks: tuple[Rank, ...]
    expected_nodes: tuple[str, ...]
    missing_nodes: tuple[str, ...]
    events: tuple[Event, ...]
    warnings: tuple[str, ...]
    findings: tuple[Finding, ...]
    """At least one."""
    attempts: tuple[Attempt, ...] = ()
    """The chain that this attempt belongs to; empty where only a file was read."""
    attempt_number: int = 0
    """Its place in the chain, from 1; 0 where neither the chain nor the file says."""
    previous: str = ""
    """Name of the file of the attempt before; empty where there is none."""


def to_json(summaries: Sequence[Summary]) -> str:
    """One attempt as an object, several as a list. Absent figures are null; there is no NaN."""
    values = [asdict(summary) for summary in summaries]
    return json.dumps(values[0] if len(values) == 1 else values, indent=2, allow_nan=False)
