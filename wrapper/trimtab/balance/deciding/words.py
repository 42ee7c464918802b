"""Layouts and counts in a few words."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from trimtab.protocol import Layout

MOST_CHUNKS_IN_WORDS = 8
"""Of a layout that is told chunk by chunk."""


def split_text(layout: Layout) -> str:
    """(5, 3) -> "5|3"; of many chunks, what follows itself is counted: "1|2 x 7|1"."""
    if layout.chunks <= MOST_CHUNKS_IN_WORDS:
        return "|".join(map(str, layout.layers))
    return "|".join(f"{number} x {times}" if times > 1 else str(number) for number, times in _runs(layout.layers))


def counts_text(numbers: Sequence[int]) -> str:
    """(8, 8, 8, 4) -> "3 x 8, 4"."""
    return ", ".join(f"{times} x {number}" if times > 1 else str(number) for number, times in _runs(numbers))


def span_text(numbers: Sequence[int]) -> str:
    """(8, 8) -> "8"; (6, 5, 5) -> "5 to 6"."""
    least, most = min(numbers), max(numbers)
    return str(most) if least == most else f"{least} to {most}"


def node_count(nodes: int) -> str:
    """1 -> "1 node"; 3 -> "3 nodes"."""
    return "1 node" if nodes == 1 else f"{nodes} nodes"


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Each number, and how many times it follows itself."""
    return ((number, len(list(run))) for number, run in groupby(numbers))
