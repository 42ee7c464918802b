"""Who holds which elements of which tensor, and what has to go where for others to hold them. Pure.

Each tensor of the model and of its optimizer has a global name and a kind. A rank holds an interval of it: all of its
tensor-parallel part, or a slice of that where a distributed optimizer shares it out over the replicas. Ranks of one
tensor-parallel rank form a plane; nothing goes from one plane to another.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

MODEL, MAIN, STATES = "model", "main", ("exp_avg", "exp_avg_sq")
"""Kinds: what the model computes with, its fp32 copy where it is none itself, and Adam's moments."""


@dataclass(frozen=True)
class Shard:
    """Elements `start` to `stop` of one tensor, flattened."""

    name: str
    kind: str
    start: int
    stop: int
    item_bytes: int

    @property
    def size_bytes(self) -> int:
        """Of its elements."""
        return (self.stop - self.start) * self.item_bytes


@dataclass(frozen=True)
class Holder:
    """One rank, and its shards: at most one of each tensor."""

    tensor_rank: int
    data_rank: int
    shards: Sequence[Shard]


@dataclass(frozen=True)
class Piece:
    """What one rank gives to another, or keeps (`source` and `target` are the same)."""

    source: int
    target: int
    shard: Shard


def layer_of(name: str) -> int | None:
    """The global id of the layer that a tensor belongs to."""
    found = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return int(found.group(1)) if found else None


def plan(old: Sequence[Holder], new: Sequence[Holder]) -> list[Piece]:
    """What has to go where, for each rank to come to hold what it shall: in the order of the rounds.

    Of several that hold the same elements, a rank takes its own, or else those of its replica's rank: replicas do not
    wait for one another. Raises ValueError for elements that no rank holds.
    """
    places: dict[tuple[int, str, str], list[tuple[int, int, Shard]]] = {}
    for rank, holder in enumerate(old):
        for shard in holder.shards:
            place = places.setdefault((holder.tensor_rank, shard.name, shard.kind), [])
            place.append((rank, holder.data_rank, shard))
    pieces: list[Piece] = []
    for rank, holder in enumerate(new):
        for shard in holder.shards:
            held = places.get((holder.tensor_rank, shard.name, shard.kind), [])
            own = {source: part for source, _, part in held if source == rank}
            near = own | {source: part for source, replica, part in held if replica == holder.data_rank}
            # The nearest that have all of it, so that of a thousand replicas only one is looked at.
            sources = next((parts for parts in (own, near) if _covers(parts.values(), shard)), None)
            sources = sources or near | {source: part for source, _, part in held}
            pieces.extend(Piece(source, rank, part) for source, part in _cut(shard, sources))
    return sorted(pieces, key=lambda piece: (_round(piece.shard.name), piece.source, piece.target))


def rounds(pieces: Iterable[Piece]) -> list[list[Piece]]:
    """The pieces that move together: those of one layer, or of one tensor outside of the layers."""
    return [list(group) for _, group in groupby(pieces, key=lambda piece: _round(piece.shard.name))]


def moved_bytes(pieces: Iterable[Piece]) -> int:
    """What goes from rank to rank."""
    return sum(piece.shard.size_bytes for piece in pieces if piece.source != piece.target)


def least_bytes(new: Iterable[Holder], layers: Iterable[int]) -> int:
    """What has to, where these layers change their stage: all that is held of them, on all ranks."""
    changed = set(layers)
    return sum(shard.size_bytes for holder in new for shard in holder.shards if layer_of(shard.name) in changed)


def _covers(parts: Iterable[Shard], shard: Shard) -> bool:
    return any(part.start <= shard.start and shard.stop <= part.stop for part in parts)


def _cut(shard: Shard, sources: Mapping[int, Shard]) -> list[tuple[int, Shard]]:
    """The shard in parts, each with the first of the sources that has it."""
    edges = {shard.start, shard.stop}
    edges |= {edge for part in sources.values() for edge in (part.start, part.stop) if shard.start < edge < shard.stop}
    cut: list[tuple[int, Shard]] = []
    for start, stop in pairwise(sorted(edges)):
        part = Shard(shard.name, shard.kind, start, stop, shard.item_bytes)
        source = next((rank for rank, held in sources.items() if _covers([held], part)), None)
        if source is None:
            raise ValueError(f"no rank holds elements {start} to {stop} of {shard.kind} of {shard.name}")
        if cut and cut[-1][0] == source:
            part = Shard(shard.name, shard.kind, cut.pop()[1].start, stop, shard.item_bytes)
        cut.append((source, part))
    return cut


def _round(name: str) -> tuple[int, str]:
    layer = layer_of(name)
    return (-1, name) if layer is None else (layer, "")
