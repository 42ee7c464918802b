"""Which layers each stage holds. Pure: strings and numbers, as `Parallel.layout` writes them.

A layout has one part for each model chunk, `|` between them. With the interleaved schedule there are
pipeline x virtual parts, and part i is chunk i // pipeline of pipeline rank i % pipeline.
"""

from trimtab.protocol import Job


def layout_of(job: Job) -> str:
    """The layout of a job, with equal shares written out where it names none."""
    if job.parallel.layout:
        return job.parallel.layout
    parts = job.parallel.pipeline * job.parallel.virtual
    return "E" + "|".join(["t" * (job.model.layers // parts)] * parts) + "L"


def chunk_layers(layout: str) -> list[list[int]]:
    """Global ids of the layers of each part of a layout, from 0, in the order of the parts."""
    chunks: list[list[int]] = []
    first = 0
    for part in layout.split("|"):
        count = part.count("t")
        chunks.append(list(range(first, first + count)))
        first += count
    return chunks


def rank_layers(layout: str, pipeline: int, pipeline_rank: int) -> list[int]:
    """Global ids of the layers on one pipeline rank, over all its chunks, from 0."""
    return [layer for chunk in chunk_layers(layout)[pipeline_rank::pipeline] for layer in chunk]
