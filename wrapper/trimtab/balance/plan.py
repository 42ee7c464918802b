"""What balance reasons about: the parts of a model and what they cost, a plan, and the hardware under it.

Shapes, in all of `balance`: R replicas, S pipeline stages, C model chunks (C = S x virtual), L layers, M microbatches.
A place is one stage of one replica. Seconds and bytes of a part are those of one rank, after tensor parallelism.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from trimtab.protocol import Layout, even_shares

Floats = npt.NDArray[np.float64]
Place = tuple[int, int]
"""(replica, stage)"""


@dataclass(frozen=True)
class Part:
    """A layer, the embedding, or the LM head with the loss: what one microbatch costs on a device of speed 1."""

    forward_seconds: float
    backward_input_seconds: float
    """Gradients of the part's input: what the stage before waits for."""
    backward_weight_seconds: float
    """Gradients of the part's weights: nobody waits for them before the optimizer step."""
    parameters: float
    """On one rank."""
    activation_bytes: float
    """Kept from the forward of one microbatch until its backward."""
    recomputed_bytes: float
    """Kept instead where the part is recomputed: its input."""

    @property
    def backward_seconds(self) -> float:
        """Both halves of the backward."""
        return self.backward_input_seconds + self.backward_weight_seconds

    @property
    def compute_seconds(self) -> float:
        """Forward and backward together."""
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True)
class Costs:
    """The parts of a model, in the order in which a microbatch passes them."""

    layers: tuple[Part, ...]
    embedding: Part
    head: Part
    boundary_bytes: float
    """What one microbatch hands from one chunk to the next, and back."""

    def chunk(self, layout: Layout, chunk: int) -> tuple[Part, ...]:
        """The parts of one chunk of a layout."""
        parts = tuple(self.layers[layer] for layer in layout.chunk_layers(chunk))
        first = (self.embedding,) if chunk == 0 else ()
        last = (self.head,) if chunk == layout.chunks - 1 else ()
        return first + parts + last


@dataclass(frozen=True)
class ParameterMemory:
    """Bytes that one parameter takes on a rank."""

    weight_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    """fp32 main parameter and both moments, before sharding."""
    shards: int = 1
    """Replicas over which optimizer state is sharded (ZeRO-1); 1: not sharded."""

    @property
    def total_bytes(self) -> float:
        """Of one parameter, sharded."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes / self.shards

    @property
    def moved_bytes(self) -> float:
        """What a parameter takes along when it moves to another stage: all but its gradient."""
        return self.weight_bytes + self.optimizer_bytes / self.shards


class Schedule(StrEnum):
    """The order in which a stage takes its microbatches."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZERO_BUBBLE_1 = "zb-h1"
    """Weight gradients fill the bubble; memory of 1F1B."""
    ZERO_BUBBLE_2 = "zb-h2"
    """Likewise, with up to twice the activations."""

    def microbatch_multiple(self, stages: int) -> int:
        """Of which each replica's microbatches are a multiple."""
        return stages if self is Schedule.INTERLEAVED else 1


@dataclass(frozen=True)
class Plan:
    """How a model runs on a fixed tensor x pipeline x data shape."""

    layout: Layout
    schedule: Schedule
    microbatches: tuple[int, ...]
    """[R] of each replica in one step."""
    recomputed_layers: tuple[int, ...]
    """[S] how many layers of each stage are recomputed in the backward, counted from its first."""

    @property
    def even_microbatches(self) -> tuple[int, ...]:
        """[R] as many, in the shares with which an attempt begins."""
        multiple = self.schedule.microbatch_multiple(self.layout.stages)
        return even_shares(sum(self.microbatches), len(self.microbatches), multiple)


@dataclass(frozen=True)
class Link:
    """The way from one stage to the next."""

    latency_seconds: float
    bytes_per_second: float


@dataclass(frozen=True)
class Hardware:
    """What a plan runs on."""

    speeds: Floats
    """[R, S] 1: as the costs say; 0.5: everything takes twice as long."""
    memory_bytes: tuple[float, ...]
    """[S] what a rank of a stage may hold; infinite where it is not known."""
    links: tuple[Link, ...]
    """[S] link s joins stage s and stage (s + 1) % S, each way at once; the last is only used by interleaved chunks."""
    overhead_seconds: float = 0.0
    """What a step takes beside the pipeline: reducing gradients, the optimizer."""
    stages_at_once: float = np.inf
    """How many stages, of all replicas, can compute at the same time: fewer than there are where ranks share cores."""
