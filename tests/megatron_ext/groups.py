"""Leaving the process groups of one shape, for ranks that go on in another."""

import torch.distributed as dist
from megatron.core import parallel_state


def leave(agreement: dist.ProcessGroup) -> None:
    """Destroy all groups but that of all ranks and `agreement`, on all ranks together.

    Megatron-core only forgets its groups, and each goes on waking up a hundred times a second, over gloo: after some
    shapes, ranks do little else.
    """
    parallel_state.destroy_model_parallel()
    dist.barrier(group=agreement)
    for group in list(dist.distributed_c10d._world.pg_map):
        if group not in (dist.group.WORLD, agreement):
            dist.destroy_process_group(group)
