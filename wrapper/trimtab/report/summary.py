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
    """Slowest stage over median stage - 1, from the stages' medians over the window; where replicas have unequal shares
    because they must, over their share."""

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
    """Where the time of the window's steps went, by the model of a 1F1B pipeline; the five add up to 1."""

    compute_ratio: float
    fill_ratio: float
    imbalance_ratio: float
    other_ratio: float
    """The rest: communication, optimizer, data, and whatever else held the processes."""
    unequal_ratio: float
    """Waiting for the replicas that have more to do because microbatches cannot be shared out equally."""


@dataclass(frozen=True)
class Cost:
    """What imbalance cost over all steps of one setting, by the same model."""

    imbalance_seconds: float
    imbalance_device_hours: float
    imbalance_ratio: float
    """Of the duration of these steps."""
    measured_steps: int


@dataclass(frozen=True)
class Setting:
    """How layers, microbatches and recomputation were shared out over some steps, and what these steps took.

    Times and ratios are medians over them.
    """

    first_step: int
    last_step: int | None
    """None: no step was measured under it."""
    layers: tuple[int, ...]
    """Of each model chunk; empty: not recorded."""
    microbatches: tuple[int, ...]
    """Of each replica; empty: not recorded."""
    recomputed_layers: tuple[int, ...]
    """Of each stage; empty: not recorded."""
    measured_steps: int
    step_seconds: float | None
    tokens_per_second: float | None
    imbalance_ratio: float | None
    """Slowest stage over median stage - 1, from the stages' medians."""
    cost: Cost | None


@dataclass(frozen=True)
class Order:
    """What trimtab set out to change, and what became of it. Times of a step but for `cost_seconds`."""

    number: int
    step: int
    """The first step that ran, or was to run, under it."""
    time_seconds: float
    kind: str
    before: str
    after: str
    reason: str
    before_seconds: float | None
    predicted_seconds: float | None
    measured_seconds: float | None
    cost_seconds: float | None
    """How long training stood still for it."""
    moved_bytes: float | None
    outcome: str


@dataclass(frozen=True)
class Stack:
    """Where ranks were in their program when they were asked."""

    ranks: tuple[int, ...]
    """All that were at the same place."""
    text: str


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
    setting: int
    """The latest setting with a measured step, by its place in `settings`: speed, imbalance, shares and cost are of its
    steps alone."""
    tokens_per_second: float | None
    """Median over its steps."""
    step_seconds: float | None
    """Median over its steps."""
    window_steps: int
    """Length of the window: the figures of the stages are over its last so many steps that all stages reported."""
    window_first_step: int | None
    window_last_step: int | None
    own_model: bool
    """Whether the model is the user's own, not the one that the job file describes."""
    virtual: int
    """Model chunks of a stage."""
    stages: tuple[Stage, ...]
    imbalance: Imbalance | None
    shares: StepShares | None
    cost: Cost | None
    settings: tuple[Setting, ...]
    """In the order of their steps; at least one."""
    orders: tuple[Order, ...]
    checkpoints: int
    """Saved in this attempt."""
    checkpoint_directory: str
    """As the job file has it; empty: none are saved."""
    stacks: tuple[Stack, ...]
    """Of ranks that hung; the place where the fewest were comes first."""


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
    """Under the latest setting."""
    parameters: int
    """When it began."""


@dataclass(frozen=True)
class Event:
    """Something that happened; `source` is a node, or "training"."""

    time_seconds: float
    source: str
    kind: str
    text: str


@dataclass(frozen=True)
class Attempt:
    """One training of the job, as the chain of attempts lists it; of a run of Slurm's without one, the run itself."""

    number: int
    """From 1, in the order of their start."""
    start_seconds: float | None
    duration_seconds: float | None
    state: str
    """As of an outcome; or damaged: its file cannot be read."""
    sentence: str
    file: str
    nodes: tuple[str, ...] = ()
    shape: str = ""
    """TP, PP and DP; empty: no training is recorded."""
    orders: int = 0
    """Orders that were carried out in it."""
    first_step: int | None = None
    last_step: int | None = None
    waited_seconds: float | None = None
    """From the end of the attempt before it to its start; None of the first."""
    repeated_steps: int = 0
    """Steps of it that an earlier attempt had taken already."""
    lost_steps: int = 0
    """Steps of it that a later attempt took again: they were after the checkpoint that that one resumed from."""


@dataclass(frozen=True)
class Goodput:
    """Where the wall time of a chain went, from the first start to the last end; in seconds."""

    wall_seconds: float
    useful_seconds: float
    """Steps; of one that was taken more than once, the last time."""
    repeated_seconds: float
    """Steps that had to be taken again."""
    saving_seconds: float
    """Training stood still for a checkpoint."""
    waiting_seconds: float
    """Between attempts: in the queue, or while ranks are started anew in the same allocation."""
    starting_seconds: float
    """From the start of an attempt to its first step, and from its last step to its end; whole attempts without one."""
    other_seconds: float
    """The rest: between steps."""
    ratio: float
    """Useful time over wall time: the goodput."""


@dataclass(frozen=True)
class Curve:
    """Loss by step, in a bounded number of points."""

    attempt: int
    """Whose values these are; 0: each step's last ones, over all attempts."""
    step: tuple[int, ...]
    loss: tuple[float | None, ...]
    """None: no finite value, or a step that is missing."""


@dataclass(frozen=True)
class Chain:
    """All attempts of a job as one run."""

    goodput: Goodput
    loss: Curve
    repeated: tuple[Curve, ...]
    """Values that do not count, since the step was taken again."""
    resumed_steps: tuple[tuple[int, int], ...]
    """(attempt, the first step that it took), of all but the first."""
    largest_loss_difference: float | None
    """Of steps that were taken more than once: between the values of two attempts, as a fraction; None: there is none.
    """
    notes: tuple[str, ...]
    """What is missing or twice, and what that does to the figures."""


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
    """The chain that this attempt belongs to; empty where only a file of one training was read."""
    chain: Chain | None = None
    """The chain as one run; None where it is not known, or where there is one attempt."""
    attempt_number: int = 0
    """Its place in the chain, from 1; 0 where neither the chain nor the file says."""
    previous: str = ""
    """Name of the file of the attempt before, which may be the same; empty where there is none."""


def to_json(summaries: Sequence[Summary]) -> str:
    """One attempt as an object, several as a list. Absent figures are null; there is no NaN."""
    values = [asdict(summary) for summary in summaries]
    return json.dumps(values[0] if len(values) == 1 else values, indent=2, allow_nan=False)
