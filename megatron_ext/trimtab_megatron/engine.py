"""What trains under one layout: the model's chunks, their optimizer, and its schedule."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.transformer_config import TransformerConfig

from trimtab.protocol import Job
from trimtab_megatron.model import build_chunks, transformer_config
from trimtab_megatron.optimizer import build_optimizer, build_schedule
from trimtab_megatron.world import World


@dataclass
class Engine:
    """Of one rank."""

    job: Job
    """Its parallel.layout is the one that the chunks have."""
    config: TransformerConfig
    chunks: Sequence[DistributedDataParallel]
    optimizer: Any
    schedule: Any


def build_engine(job: Job, world: World, vocabulary_size: int) -> Engine:
    """A new one, with initial weights."""
    config = transformer_config(job, world.cuda)
    chunks = build_chunks(job, config, world, vocabulary_size)
    optimizer = build_optimizer(job, config, chunks)
    return Engine(job, config, chunks, optimizer, build_schedule(job, optimizer))


def dismantle(chunks: Sequence[DistributedDataParallel]) -> None:
    """Free the memory of chunks that train no more. They are in cycles through autograd, which Python cannot see."""
    for chunk in chunks:
        chunk.grad_accs.clear()  # and with them the hooks that hold the chunk
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            for flat in (buffer.grad_data, buffer.param_data):
                if flat is not None:
                    flat.untyped_storage().resize_(0)
