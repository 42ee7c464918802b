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
    """Let go of the memory of chunks that train no more. What is left of them is for Python's collector."""
    for chunk in chunks:
        chunk.grad_accs.clear()  # hooks in them hold the chunk, through autograd, where the collector cannot see
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            for flat in (buffer.grad_data, buffer.param_data):
                # Memory that numpy or a checkpoint has seen is not resizable: that goes with its tensors.
                if flat is not None and flat.untyped_storage().resizable():
                    flat.untyped_storage().resize_(0)
