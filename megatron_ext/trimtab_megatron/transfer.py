"""Moves the pieces of a plan from the tensors of one engine to those of another.

Round after round: a round is one layer, and each pair of ranks exchanges one message in it. What a rank has given away
is let go at once, and what it keeps of Adam's moments is handed over, not copied.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

from trimtab_megatron.holdings import Holdings
from trimtab_megatron.shards import Piece, Shard, rounds


def move(pieces: Sequence[Piece], rank: int, old: Holdings, new: Holdings, device: torch.device) -> None:
    """Carry out the plan, on all ranks together. What `old` holds is gone afterwards, piece by piece."""
    for together in rounds(pieces):
        exchange(together, rank, old, new, device)
        old.release({piece.shard.name for piece in together})


def exchange(pieces: Iterable[Piece], rank: int, old: Holdings, new: Holdings, device: torch.device) -> None:
    """One round, as far as it concerns this rank."""
    sent: dict[int, list[Shard]] = {}
    received: dict[int, list[Shard]] = {}
    kept: list[Shard] = []
    for piece in sorted(pieces, key=_aligned):
        if piece.source == piece.target == rank:
            kept.append(piece.shard)
        elif piece.source == rank:
            sent.setdefault(piece.target, []).append(piece.shard)
        elif piece.target == rank:
            received.setdefault(piece.source, []).append(piece.shard)
    into = {
        peer: torch.empty(sum(shard.size_bytes for shard in shards), dtype=torch.uint8, device=device)
        for peer, shards in received.items()
    }
    messages = [dist.P2POp(dist.irecv, buffer, peer) for peer, buffer in into.items()]
    for peer, shards in sent.items():
        message = torch.cat([_part(old.tensor((s.name, s.kind)), s, old).view(torch.uint8) for s in shards])
        messages.append(dist.P2POp(dist.isend, message, peer))
    under_way = dist.batch_isend_irecv(messages) if messages else []
    for shard in kept:
        key = (shard.name, shard.kind)
        if not new.take_over(key, old):
            _part(new.receive(key), shard, new).copy_(_part(old.tensor(key), shard, old))
    for work in under_way:
        work.wait()
    for peer, shards in received.items():
        edges = accumulate((shard.size_bytes for shard in shards), initial=0)
        for shard, (start, stop) in zip(shards, pairwise(edges), strict=True):
            part = _part(new.receive((shard.name, shard.kind)), shard, new)
            part.copy_(into[peer][start:stop].view(part.dtype))


def _aligned(piece: Piece) -> tuple[int, str, str, int]:
    """The same order on both ends of a message; widest elements first, so that each is where its width divides."""
    shard = piece.shard
    return -shard.item_bytes, shard.name, shard.kind, shard.start


def _part(tensor: torch.Tensor, shard: Shard, holdings: Holdings) -> torch.Tensor:
    first = holdings.shards[shard.name, shard.kind].start
    return tensor[shard.start - first : shard.stop - first]
