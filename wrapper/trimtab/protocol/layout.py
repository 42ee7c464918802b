"""Which layers each model chunk holds, and on which stage it is. Pure.

A microbatch passes the chunks in order. With the interleaved schedule a stage has several of them: of n stages, chunk i
is on stage i % n. The first chunk also holds the embedding, the last one the LM head and the loss.
"""

from dataclasses import dataclass

from trimtab.protocol.job import Job


@dataclass(frozen=True)
class Layout:
    """The split of a model's layers, in order, over model chunks.

    Raises ValueError where the chunks are not shared out equally over the stages, or where a chunk between the first
    and the last is empty: its ranks would wait for ever.
    """

    layers: tuple[int, ...]
    """Number of layers of each chunk."""
    stages: int
    """Number of pipeline stages."""

    def __post_init__(self) -> None:
        if self.stages < 1 or not self.layers or len(self.layers) % self.stages:
            raise ValueError(f"{len(self.layers)} chunks cannot be shared out equally over {self.stages} stages")
        if min(self.layers) < 0 or 0 in self.layers[1:-1]:
            raise ValueError(f"a layout of {self.layers} layers: a chunk between the first and the last is empty")

    @classmethod
    def parse(cls, text: str, stages: int) -> "Layout":
        """From the form that Megatron-core takes: `E` embedding, `t` a layer, `L` loss, `|` between chunks."""
        return cls(tuple(part.count("t") for part in text.split("|")), stages)

    @classmethod
    def uniform(cls, layers: int, stages: int, virtual: int = 1) -> "Layout":
        """Equal shares; where they cannot be equal, the first chunks take one more."""
        least, more = divmod(layers, stages * virtual)
        return cls(tuple(least + (chunk < more) for chunk in range(stages * virtual)), stages)

    def __str__(self) -> str:
        return "E" + "|".join("t" * count for count in self.layers) + "L"

    @property
    def chunks(self) -> int:
        """Number of model chunks, over all stages."""
        return len(self.layers)

    @property
    def virtual(self) -> int:
        """Number of model chunks on each stage."""
        return len(self.layers) // self.stages

    def chunk_layers(self, chunk: int) -> range:
        """Global ids of the layers of one chunk, from 0."""
        first = sum(self.layers[:chunk])
        return range(first, first + self.layers[chunk])

    def stage_layers(self, stage: int) -> tuple[int, ...]:
        """Global ids of the layers of one stage, over all its chunks, from 0."""
        chunks = range(stage, self.chunks, self.stages)
        return tuple(layer for chunk in chunks for layer in self.chunk_layers(chunk))

    @property
    def owners(self) -> tuple[int, ...]:
        """The stage of each layer, by its global id."""
        return tuple(chunk % self.stages for chunk, count in enumerate(self.layers) for _ in range(count))


def layout_of(job: Job) -> Layout:
    """The layout of a job: equal shares where it names none."""
    parallel = job.parallel
    if parallel.layout:
        return Layout.parse(parallel.layout, parallel.pipeline)
    return Layout.uniform(job.model.layers, parallel.pipeline, parallel.virtual)
