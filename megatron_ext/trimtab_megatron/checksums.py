"""Checksums of tensors that do not depend on how these are cut and spread over ranks.

Of a tensor: the sum over its elements of their bits, as an integer, times their place from 1, modulo 2^64. A part's is
the same sum over its elements, with their places in the whole: those of all parts add up to the whole's.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from trimtab_megatron.holdings import Holdings, Key

BLOCK = 1 << 16
"""Elements at a time: what is made of them on the way stays in a CPU's cache."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(flat: torch.Tensor, first: int) -> torch.Tensor:
    """Of elements `first`, `first + 1`, ... of a tensor: an int64 scalar on its device."""
    bits = flat.view(_BITS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    places = torch.arange(1, min(BLOCK, flat.numel()) + 1, device=flat.device)
    for start in range(0, flat.numel(), BLOCK):
        block = bits[start : start + BLOCK].to(torch.int64)
        total += (block * places[: block.numel()]).sum() + (first + start) * block.sum()
    return total


def totals(
    holdings: Holdings, keys: Sequence[Key], tensor_rank: int, planes: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """[planes, len(keys)] the checksums of all tensors, each over all ranks that hold some of it, copies included."""
    own = torch.zeros(planes, len(keys), dtype=torch.int64)
    places = {key: place for place, key in enumerate(keys)}
    for key, shard in holdings.shards.items():
        own[tensor_rank, places[key]] = checksum(holdings.tensor(key), shard.start).cpu()
    dist.all_reduce(own, group=group)
    return own
