"""The job: frozen dataclasses, one for each section of job.toml, that refuse what cannot run.

Each class checks its own fields; `Job` checks what spans sections; `Job.shape` checks the job against the
number of ranks that an allocation has.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from trimtab.protocol.shares import even_shares


class JobError(ValueError):
    """A job that cannot run: names the key, its value, the reason, and the valid choices where there are any."""

    def __init__(self, key: str, value: object, reason: str, choices: Sequence[object] = ()) -> None:
        self.key, self.value, self.reason, self.choices = key, value, reason, tuple(choices)
        text = f"{key} = {_toml(value)}: {reason}"
        if self.choices:
            text += "; choose from: " + ", ".join(_toml(choice) for choice in self.choices)
        super().__init__(text)


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer: RMSNorm, rotary positions, SwiGLU, or a model of the user's own."""

    layers: int = 8
    """Number of transformer layers."""
    hidden_size: int = 256
    """Width of the residual stream."""
    attention_heads: int = 8
    """Query heads of each layer."""
    query_groups: int = 0
    """Key and value heads of each layer (grouped-query attention); 0: as many as query heads."""
    ffn_hidden_size: int = 0
    """Width inside the MLP; 0: four times hidden_size."""
    sequence_length: int = 128
    """Tokens of one sample."""
    tied_embeddings: bool = False
    """Whether the LM head shares the weights of the embedding."""
    dropout: float = 0.0
    """Dropout of attention and residual paths."""
    provider: str = ""
    """`module:function` that builds the user's own Megatron model instead; empty: the model described here."""

    def __post_init__(self) -> None:
        _positive(self, "model", "layers", "hidden_size", "attention_heads", "sequence_length")
        _not_negative(self, "model", "query_groups", "ffn_hidden_size")
        _provider("model.provider", self.provider)
        if not 0 <= self.dropout < 1:
            raise JobError("model.dropout", self.dropout, "must be at least 0 and below 1")
        if self.hidden_size % self.attention_heads:
            raise JobError(
                "model.attention_heads",
                self.attention_heads,
                f"does not divide hidden_size {self.hidden_size}",
                divisors(self.hidden_size),
            )
        if self.query_groups and self.attention_heads % self.query_groups:
            raise JobError(
                "model.query_groups",
                self.query_groups,
                f"does not divide attention_heads {self.attention_heads}",
                divisors(self.attention_heads),
            )


@dataclass(frozen=True)
class Parallel:
    """How the model is spread over ranks. Data parallelism is what remains of the world size."""

    tensor: int = 1
    """Ranks that share each layer (tensor parallel size)."""
    pipeline: int = 1
    """Pipeline stages."""
    virtual: int = 1
    """Model chunks on each pipeline rank (interleaved schedule)."""
    layout: str = ""
    """Stages as Megatron-core writes them, `E` embedding, `t` layer, `L` loss, `|` between stages:
    "Etttt|ttttL". Empty: equal shares."""
    sequence_parallel: bool = False
    """Whether norms and dropouts are split along the sequence over the tensor-parallel ranks."""
    distributed_optimizer: bool = False
    """Whether optimizer state is sharded over the data-parallel ranks (ZeRO-1)."""
    recomputed_layers: tuple[int, ...] = ()
    """Layers of each stage that are recomputed in the backward, counted from its first: [4, 2]. Empty: none."""

    def __post_init__(self) -> None:
        _positive(self, "parallel", "tensor", "pipeline", "virtual")
        if self.recomputed_layers and len(self.recomputed_layers) != self.pipeline:
            raise JobError(
                "parallel.recomputed_layers",
                list(self.recomputed_layers),
                f"needs one count for each of the {self.pipeline} stages",
            )
        if self.virtual > 1 and self.pipeline == 1:
            raise JobError("parallel.virtual", self.virtual, "needs a pipeline of 2 stages or more", [1])
        if self.sequence_parallel and self.tensor == 1:
            raise JobError("parallel.sequence_parallel", True, "needs parallel.tensor of 2 or more", [False])
        if self.layout and not re.fullmatch(r"E?t*(\|t*)*L?", self.layout):
            raise JobError(
                "parallel.layout",
                self.layout,
                "is not a layout: 'E' (first), 't' for each layer, 'L' (last), '|' between stages",
            )
        if self.layout and not (self.layout.startswith("E") and self.layout.endswith("L")):
            raise JobError("parallel.layout", self.layout, "must begin with 'E' (embedding) and end with 'L' (loss)")
        parts = self.layout.split("|")
        if self.layout and len(parts) != self.pipeline * self.virtual:
            raise JobError(
                "parallel.layout",
                self.layout,
                f"has {len(parts)} parts, but pipeline x virtual is {self.pipeline} x {self.virtual}",
            )
        if self.layout and "" in parts:
            raise JobError("parallel.layout", self.layout, "has an empty stage: its ranks would wait for ever")

    @property
    def microbatch_multiple(self) -> int:
        """Of which each replica's microbatches are a multiple: the interleaved schedule takes one a stage at once."""
        return self.pipeline if self.virtual > 1 else 1


@dataclass(frozen=True)
class Batch:
    """How many samples a step takes, and how they are cut."""

    microbatch_size: int = 2
    """Samples that pass a stage at once."""
    global_batch_size: int = 16
    """Samples of one optimizer step, over all replicas."""

    def __post_init__(self) -> None:
        _positive(self, "batch", "microbatch_size", "global_batch_size")
        if self.global_batch_size % self.microbatch_size:
            raise JobError(
                "batch.microbatch_size",
                self.microbatch_size,
                f"does not divide global_batch_size {self.global_batch_size}",
                divisors(self.global_batch_size),
            )


@dataclass(frozen=True)
class Train:
    """Optimizer, schedule, precision and checkpoints."""

    steps: int = 100
    """Optimizer steps of the whole run, over all its attempts."""
    learning_rate: float = 3e-4
    """Peak learning rate."""
    minimum_learning_rate: float = 3e-5
    """Learning rate at the end of the cosine."""
    warmup_steps: int = 10
    """Steps over which the learning rate rises linearly to its peak."""
    weight_decay: float = 0.1
    """AdamW's decoupled weight decay."""
    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.95
    """Decay of the second moment."""
    adam_epsilon: float = 1e-8
    """Added to the root of the second moment."""
    clip_gradient_norm: float = 1.0
    """The global gradient norm is clipped to this; 0: not clipped."""
    precision: str = "auto"
    """auto: bf16 on GPUs, fp32 on CPUs; or fp32, bf16, or fp16 with a dynamic loss scale."""
    seed: int = 1234
    """Seed of initialisation, data order and dropout."""
    checkpoint_interval_steps: int = 0
    """Steps between checkpoints; 0: as often as is worth it, by what one takes and `node_mtbf_hours`."""
    longest_checkpoint_minutes: float = 30.0
    """Longest time between checkpoints, where `checkpoint_interval_steps` is 0."""
    node_mtbf_hours: float = 6000.0
    """Mean time between failures of one node. The default is what Llama 3's training saw: 419 unexpected
    interruptions in 54 days of 2,048 nodes (Dubey et al., 2024, "The Llama 3 herd of models", section 3.3.4)."""
    checkpoint_directory: str = "checkpoints/{job_id}"
    """Where checkpoints go, relative to the directory of submission; `{job_id}` becomes the Slurm job's id, which
    a requeue keeps. A run resumes from the newest complete checkpoint in it. Empty: none is written."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints are kept."""

    def __post_init__(self) -> None:
        _positive(
            self,
            "train",
            "steps",
            "learning_rate",
            "adam_epsilon",
            "keep_checkpoints",
            "longest_checkpoint_minutes",
            "node_mtbf_hours",
        )
        _not_negative(
            self,
            "train",
            "minimum_learning_rate",
            "warmup_steps",
            "weight_decay",
            "clip_gradient_norm",
            "checkpoint_interval_steps",
            "seed",
        )
        for key in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, key) < 1:
                raise JobError(f"train.{key}", getattr(self, key), "must be at least 0 and below 1")
        _choice("train.precision", self.precision, ("auto", "fp32", "bf16", "fp16"))
        if self.minimum_learning_rate > self.learning_rate:
            raise JobError(
                "train.minimum_learning_rate",
                self.minimum_learning_rate,
                f"is above learning_rate {self.learning_rate}",
            )
        if self.warmup_steps >= self.steps:
            raise JobError("train.warmup_steps", self.warmup_steps, f"must be below steps {self.steps}")


@dataclass(frozen=True)
class Data:
    """The text to train on, and its tokenizer."""

    path: str = ""
    """A text file, a directory of text files, or the prefix of a Megatron `.bin`/`.idx` pair.
    Empty: the source code of the Python standard library on the machine."""
    tokenizer: str = "bpe"
    """bpe: trained once on the text, and cached; bytes: one token a byte; or the path of a tokenizers JSON file."""
    vocabulary_size: int = 8192
    """Size of the vocabulary that bpe trains; it does not apply to the other tokenizers."""
    cache_directory: str = ""
    """Where tokens and vocabulary are cached; empty: `$XDG_CACHE_HOME/trimtab`."""
    provider: str = ""
    """`module:function` that gives the user's own samples instead; empty: the text described here."""

    def __post_init__(self) -> None:
        _provider("data.provider", self.provider)
        if self.tokenizer == "bpe" and self.vocabulary_size < 512:
            raise JobError("data.vocabulary_size", self.vocabulary_size, "must be at least 512 (256 are bytes)")
        if not self.tokenizer:
            raise JobError("data.tokenizer", "", "is empty", ["bpe", "bytes", "a path to a tokenizer.json"])


@dataclass(frozen=True)
class Balance:
    """When stages count as apart, and when it is worth acting on."""

    trigger_ratio: float = 0.10
    """Imbalance, slowest stage over median stage - 1, that counts as one: its lower 95 % bound is above this in
    `trigger_windows` windows on end."""
    clear_ratio: float = 0.05
    """Imbalance below which it no longer counts as one."""
    window_steps: int = 20
    """Steps of a window."""
    trigger_windows: int = 3
    """Windows on end."""
    least_gain_ratio: float = 0.02
    """Least share of a step's time that an order must save."""
    gain_over_cost: float = 2.0
    """How many times its cost an order must bring over its horizon."""
    hardware_horizon_seconds: float = 600.0
    """How long a fault of the hardware is taken to last when it is new."""
    cooldown_seconds: float = 300.0
    """Rest after an order, while its effect is measured."""
    orders_per_hour: int = 4
    """Most orders in an hour."""
    dry_run: bool = False
    """Whether orders are only worked out and told, not given."""
    least_utilization_ratio: float = 0.80
    """Mean device utilization below which a new plan is looked for, balanced or not."""
    slow_link_seconds: float = 0.05
    """Latency from which a link between stages is avoided."""
    least_stages: int = 4
    """Fewest pipeline stages that a search for a shape begins with; it goes beyond where that is better."""
    most_stages: int = 8
    """Most pipeline stages that it begins with."""
    least_microbatches: int = 8
    """Fewest microbatches of a replica that it begins with."""
    most_microbatches: int = 16
    """Most microbatches of a replica that it begins with."""

    def __post_init__(self) -> None:
        if self.window_steps < 4:
            raise JobError("balance.window_steps", self.window_steps, "must be at least 4: fewer steps bound nothing")
        _positive(
            self,
            "balance",
            "trigger_ratio",
            "trigger_windows",
            "gain_over_cost",
            "orders_per_hour",
            "slow_link_seconds",
            "least_stages",
            "least_microbatches",
        )
        _not_negative(
            self,
            "balance",
            "clear_ratio",
            "least_gain_ratio",
            "hardware_horizon_seconds",
            "cooldown_seconds",
            "least_utilization_ratio",
        )
        for key, limit in (
            ("clear_ratio", "trigger_ratio"),
            ("least_stages", "most_stages"),
            ("least_microbatches", "most_microbatches"),
        ):
            if getattr(self, key) > getattr(self, limit):
                raise JobError(f"balance.{key}", getattr(self, key), f"is above {limit} {getattr(self, limit)}")


@dataclass(frozen=True)
class Requeue:
    """When the job ends and begins again: before Slurm ends it, after a failure, or for a better shape."""

    enabled: bool = True
    """Whether the job may be requeued, by Slurm (after a node failure or a preemption) or by itself."""
    grace_seconds: int = 120
    """How long before its time limit the job is told to save and stop."""
    most_requeues: int = 20
    """Most times within 24 hours that the job requeues itself after a failure or a hang."""
    exclusion_hours: float = 24.0
    """How long a node that was slow or has failed is left out."""
    most_excluded_ratio: float = 0.05
    """Most of the partition's nodes that are left out at once; one always may be."""
    hang_seconds: float = 0.0
    """Without a step for this long the ranks count as hung; 0: as long as the measured steps suggest."""
    on_hang: str = "restart"
    """restart: from the last checkpoint; end: the job fails."""

    def __post_init__(self) -> None:
        _positive(self, "requeue", "grace_seconds", "exclusion_hours")
        _not_negative(self, "requeue", "most_requeues", "hang_seconds")
        _choice("requeue.on_hang", self.on_hang, ("restart", "end"))
        if not 0 <= self.most_excluded_ratio < 1:
            raise JobError("requeue.most_excluded_ratio", self.most_excluded_ratio, "must be at least 0 and below 1")


@dataclass(frozen=True)
class Shape:
    """A job on a number of ranks: tensor x pipeline x data."""

    tensor: int
    pipeline: int
    data: int

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline * self.data

    def __str__(self) -> str:
        return f"TP{self.tensor} x PP{self.pipeline} x DP{self.data}"


@dataclass(frozen=True)
class Job:
    """A whole job file."""

    model: Model = field(default_factory=Model)
    parallel: Parallel = field(default_factory=Parallel)
    batch: Batch = field(default_factory=Batch)
    train: Train = field(default_factory=Train)
    data: Data = field(default_factory=Data)
    balance: Balance = field(default_factory=Balance)
    requeue: Requeue = field(default_factory=Requeue)

    def __post_init__(self) -> None:
        model, parallel = self.model, self.parallel
        if model.layers < parallel.pipeline * parallel.virtual:
            raise JobError(
                "model.layers",
                model.layers,
                f"are fewer than the stages (pipeline {parallel.pipeline} x virtual {parallel.virtual})",
            )
        if model.provider:
            return  # its layers and heads are the provider's own business
        if model.attention_heads % parallel.tensor:
            raise JobError(
                "parallel.tensor",
                parallel.tensor,
                f"does not divide model.attention_heads {model.attention_heads}",
                divisors(model.attention_heads),
            )
        if model.query_groups and model.query_groups % parallel.tensor:
            raise JobError(
                "parallel.tensor",
                parallel.tensor,
                f"does not divide model.query_groups {model.query_groups}",
                divisors(model.query_groups),
            )
        if self.ffn_hidden_size % parallel.tensor:
            raise JobError(
                "model.ffn_hidden_size",
                self.ffn_hidden_size,
                f"is not a multiple of parallel.tensor {parallel.tensor}",
            )
        if parallel.sequence_parallel and model.sequence_length % parallel.tensor:
            raise JobError(
                "model.sequence_length",
                model.sequence_length,
                f"is not a multiple of parallel.tensor {parallel.tensor}, as sequence_parallel needs",
            )
        self._check_layers()

    def _check_layers(self) -> None:
        layers, stages = self.model.layers, self.parallel.pipeline * self.parallel.virtual
        layout = self.parallel.layout
        if layout and layout.count("t") != layers:
            raise JobError("parallel.layout", layout, f"has {layout.count('t')} layers, but model.layers is {layers}")
        if not layout and layers % stages:
            raise JobError(
                "model.layers",
                layers,
                f"cannot be split equally over {stages} stages (pipeline {self.parallel.pipeline} x virtual "
                f"{self.parallel.virtual}); write the shares as parallel.layout, or take a multiple",
                [near for near in (layers // stages * stages, (layers // stages + 1) * stages) if near],
            )

    @property
    def ffn_hidden_size(self) -> int:
        """Width inside the MLP, with the default resolved."""
        return self.model.ffn_hidden_size or 4 * self.model.hidden_size

    def shape(self, world_size: int) -> Shape:
        """The shape of this job on `world_size` ranks. Raises JobError where there is none."""
        tensor, pipeline = self.parallel.tensor, self.parallel.pipeline
        if world_size < 1 or world_size % (tensor * pipeline):
            raise JobError(
                "parallel",
                f"tensor {tensor} x pipeline {pipeline}",
                f"needs a multiple of {tensor * pipeline} ranks, but the allocation gives {world_size}: choose --nodes "
                "x --gpus-per-node to match",
            )
        data = world_size // (tensor * pipeline)
        self.shares(data)
        return Shape(tensor, pipeline, data)

    def shares(self, replicas: int) -> tuple[int, ...]:
        """[R] microbatches of a step that each replica begins with: as equal as can be.

        Raises JobError where they are too few, or no whole groups for the interleaved schedule.
        """
        size, multiple = self.batch.microbatch_size, self.parallel.microbatch_multiple
        try:
            return even_shares(self.batch.global_batch_size // size, replicas, multiple)
        except ValueError as error:
            schedule = f", as the interleaved schedule of {multiple} stages needs" if multiple > 1 else ""
            step = size * multiple
            more = f"or more by multiples of {step}" if step > 1 else "or more"
            raise JobError(
                "batch.global_batch_size",
                self.batch.global_batch_size,
                f"its {error}{schedule}; take {step * replicas}, {more}",
            ) from error


def _positive(section: object, name: str, *keys: str) -> None:
    for key in keys:
        if getattr(section, key) <= 0:
            raise JobError(f"{name}.{key}", getattr(section, key), "must be above 0")


def _not_negative(section: object, name: str, *keys: str) -> None:
    for key in keys:
        if getattr(section, key) < 0:
            raise JobError(f"{name}.{key}", getattr(section, key), "must not be negative")


def _choice(key: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise JobError(key, value, "is not one of the choices", choices)


def _provider(key: str, value: str) -> None:
    if value and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value):
        raise JobError(key, value, 'must be written "module:function"')


def divisors(number: int) -> list[int]:
    """All of them, ascending."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, str) else str(value)
