"""The messages of a run, one line of JSON each.

Ranks send Hello, StepReport, Probe, Saved, Reshaped, Stack, Notice, and at last Done or Failed; the wrapper sends
Orders.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

from trimtab.protocol.layout import Layout
from trimtab.protocol.setting import Setting

LONGEST_LINE_BYTES = 1 << 20
"""A longer line is no message: whoever sends it is cut off."""


@dataclass(frozen=True)
class Hello:
    """The first message of a rank: who it is and what it holds."""

    token: str
    """The secret that the wrapper gave to its ranks."""
    rank: int
    node: str
    local_rank: int
    pid: int
    tensor_rank: int
    pipeline_rank: int
    data_rank: int
    layers: tuple[int, ...]
    """Global ids of the transformer layers on this rank, from 0."""
    parameters: int
    """Number of parameters that this rank holds."""
    device: str
    """UUID of the rank's GPU; empty on a CPU."""
    device_model: str = ""
    """Of the GPU, as its driver names it."""
    device_memory_bytes: int = 0
    """What the GPU holds."""


@dataclass(frozen=True)
class StepReport:
    """What one rank measured in one optimizer step."""

    rank: int
    step: int
    """From 1."""
    time_seconds: float
    """UTC, seconds since 1970, at the end of the step."""
    duration_seconds: float
    """Wall time of the step."""
    forward_seconds: float
    """Forward compute of this stage, summed over microbatches, waiting for other stages excluded."""
    backward_seconds: float
    """Backward compute of this stage, likewise."""
    microbatches: int
    tokens: int
    """Tokens that passed this stage, padding included: the work that it had."""
    squared_lengths: int
    """Sum over the documents in them of the square of their length in tokens: attention costs in proportion to it."""
    peak_memory_bytes: int
    """Most device memory allocated since the run began; on a CPU, most resident memory of the process."""
    loss: float | None = None
    """Mean over the global batch; from one rank of the last stage only."""
    gradient_norm: float | None = None
    """Global norm before clipping; from the same rank."""
    learning_rate: float | None = None
    """Rate that the step was taken with; from the same rank."""
    consumed_samples: int | None = None
    """Samples consumed since the beginning of the run, this step included; from the same rank."""


@dataclass(frozen=True)
class Probe:
    """How long a rank took for a fixed matrix product that is the same on all ranks: the speed of its device."""

    rank: int
    step: int
    """Steps taken before it; 0: none."""
    seconds: float
    """Median over its repetitions of one product, by the stage clock's way of counting."""


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint; from rank 0."""

    rank: int
    step: int
    directory: str
    seconds: float
    """How long training stood still for it."""
    size_bytes: int


@dataclass(frozen=True)
class Reshaped:
    """What became of an order to reshape; from rank 0."""

    rank: int
    step: int
    """Steps taken before it."""
    setting: Setting
    """What runs from here on."""
    refused: str
    """Why all stays as it was; empty: it was carried out."""
    seconds: float
    """How long training stood still for it."""
    moved_bytes: int
    """Sent from rank to rank, over all ranks."""
    least_bytes: int
    """Parameters and optimizer state of the layers that changed their stage, over all ranks."""


@dataclass(frozen=True)
class Stack:
    """Where a rank is in its program."""

    rank: int
    step: int
    text: str
    """The frames of its main thread, the innermost last."""


@dataclass(frozen=True)
class Notice:
    """Something worth keeping that is no figure: a checkpoint written, a fallback taken."""

    rank: int
    step: int
    kind: str
    text: str


@dataclass(frozen=True)
class Failed:
    """The last message of a rank that raised an error."""

    rank: int
    step: int
    error: str
    peer_lost: bool
    """Whether the error is that a peer's connection broke: then the cause lies with another rank."""
    bad_input: bool = False
    """Whether the cause is what the run was given (the job file, its data, its checkpoints), and so will not pass."""


@dataclass(frozen=True)
class Done:
    """The last message of a rank that came to its end."""

    rank: int
    step: int
    """The last step taken."""


@dataclass(frozen=True)
class Order:
    """What the ranks shall do at the next step boundary; stacks: at once."""

    kind: str
    """checkpoint: save and go on; stop: save and end; probe: time a fixed matrix product and go on; reshape: run
    `setting` from here on; stacks: tell where you are."""
    reason: str
    setting: Setting | None = None
    """Of a reshape."""
    replaces: str = ""
    """Fingerprint of the setting that a reshape was worked out for: ranks that run another one refuse it."""


Message = Hello | StepReport | Probe | Saved | Reshaped | Stack | Notice | Failed | Done | Order

_KINDS: dict[str, type[Message]] = {
    kind.__name__: kind for kind in (Hello, StepReport, Probe, Saved, Reshaped, Stack, Notice, Failed, Done, Order)
}


def encode(message: Message) -> bytes:
    """A message as one line, newline included."""
    return json.dumps({"message": type(message).__name__, **asdict(message)}).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The inverse of `encode`. Raises ValueError for what is no message."""
    try:
        values = json.loads(line)
        kind = _KINDS[values.pop("message")]
        if kind is Hello:
            values["layers"] = tuple(values["layers"])
        if values.get("setting"):
            values["setting"] = setting_from(values["setting"])
        return kind(**values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a message: {line[:80]!r}") from error


def setting_from(values: dict[str, Any]) -> Setting:
    """A Setting from what its JSON holds."""
    layout = values["layout"]
    return Setting(
        layout=Layout(tuple(layout["layers"]), layout["stages"]),
        microbatches=tuple(values["microbatches"]),
        recomputed_layers=tuple(values["recomputed_layers"]),
    )
