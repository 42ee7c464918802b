"""Layouts, counts and shares in a few words. Pure."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from trimtab.protocol import Job, Layout, Shape, divisors

MOST_ONE_BY_ONE = 8
"""Of chunks or counts that are told each for itself."""


def split_text(layout: Layout) -> str:
    """(5, 3) -> "5|3"; of many chunks, what follows itself is counted: "1|2 x 7|1"."""
    if layout.chunks <= MOST_ONE_BY_ONE:
        return "|".join(map(str, layout.layers))
    return "|".join(f"{number} x {times}" if times > 1 else str(number) for number, times in _runs(layout.layers))


def counts_text(numbers: Sequence[int]) -> str:
    """(3, 3, 2) -> "3, 3, 2"; of many, what follows itself is counted: "12 of 3, 4 of 2"."""
    if len(numbers) <= MOST_ONE_BY_ONE:
        return ", ".join(map(str, numbers))
    return ", ".join(f"{times} of {number}" for number, times in _runs(numbers))


def span_text(numbers: Sequence[int]) -> str:
    """(8, 8) -> "8"; (6, 5, 5) -> "5 to 6"."""
    least, most = min(numbers), max(numbers)
    return str(most) if least == most else f"{least} to {most}"


def unequal_shares(job: Job, shape: Shape) -> str:
    """What it costs that microbatches cannot be shared out equally, and what would have equal shares; empty: they can.

    A pipeline of S equal stages of v chunks takes as long as m + (S - 1) / v microbatches (Narayanan et al., 2021,
    section 2.2): m is the most of a replica, and would be the mean. Raises JobError where the job has no such shape.
    """
    parallel, batch = job.parallel, job.batch
    shares = job.shares(shape.data)
    most, mean = max(shares), sum(shares) / shape.data
    if most == mean:
        return ""
    cost_ratio = (most - mean) / (most + (shape.pipeline - 1) / parallel.virtual)
    unit = batch.microbatch_size * parallel.microbatch_multiple * shape.data
    below = batch.global_batch_size // unit * unit
    others = f"{below} or {below + unit}"
    smaller = [
        size
        for size in divisors(batch.microbatch_size)[:-1]
        if batch.global_batch_size % (size * parallel.microbatch_multiple * shape.data) == 0
    ]
    others += f", or microbatches of {smaller[-1]}," if smaller else ""
    return (
        f"microbatches {counts_text(shares)}: batch.global_batch_size {batch.global_batch_size} gives "
        f"{shape.data} replicas unequal shares, which costs about {cost_ratio:.1%} of a step; {others} would not"
    )


def node_count(nodes: int) -> str:
    """1 -> "1 node"; 3 -> "3 nodes"."""
    return "1 node" if nodes == 1 else f"{nodes} nodes"


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Each number, and how many times it follows itself."""
    return ((number, len(list(run))) for number, run in groupby(numbers))
