"""The ranks together: process groups, seeds, and what all of them have to agree on.

Agreement goes over a gloo group, on CPU tensors: it works before and beside NCCL, and a rank that ends breaks it at
once for all others, so that an error on one rank is never a hang of the rest.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from trimtab.protocol import Job, Order, Shape
from trimtab_megatron.identity import Identity, RankError
from trimtab_megatron.inject import Fault, Faults

TIMEOUT = timedelta(minutes=10)
"""How long ranks wait for one another at the rendezvous, and in a step."""
AGREEMENT_TIMEOUT = timedelta(hours=12)
"""How long they wait where one of them may build tokens or write a checkpoint; one that ends is noticed at once.

At the start `patience` tells of long waits; from the first step on the wrapper ends ranks that hang long before.
"""

_ORDER_KINDS: Sequence[str] = ("none", "checkpoint", "stop", "probe", "reshape")


@dataclass(frozen=True)
class World:
    """This rank's place in the parallel shape."""

    identity: Identity
    shape: Shape
    cuda: bool
    tensor_rank: int
    pipeline_rank: int
    data_rank: int
    agreement: dist.ProcessGroup
    """All ranks, over gloo."""
    faults: Faults = field(default_factory=Faults)
    """Those that are made up on this rank: none, unless it was told to."""

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return torch.device("cuda", self.identity.local_rank) if self.cuda else torch.device("cpu")

    @property
    def first_stage(self) -> bool:
        """Whether this rank holds the embedding."""
        return self.pipeline_rank == 0

    @property
    def last_stage(self) -> bool:
        """Whether this rank holds the LM head."""
        return self.pipeline_rank == self.shape.pipeline - 1

    @property
    def speaks_for_all(self) -> bool:
        """Whether this is the one rank that reports the loss."""
        return self.last_stage and self.tensor_rank == 0 and self.data_rank == 0

    def agree_on_order(self, order: Order | None) -> Order | None:
        """The order that rank 0 holds, on all ranks; None when it holds none."""
        kind = torch.tensor([_ORDER_KINDS.index(order.kind) if order else 0], dtype=torch.int64)
        dist.broadcast(kind, src=0, group=self.agreement)
        # What every step has to wait for is one number; the rest follows where there is an order.
        agreed: Order | None = self.from_rank_0(order) if kind.item() else None
        return agreed

    def same_as_rank_0(self, what: str, value: str, error: type[RankError] = RankError) -> None:
        """Raise `error` on all ranks where some rank's value is not that of rank 0."""
        values = self.gather((self.identity.node, value))
        apart = [f"rank {rank} (node {node})" for rank, (node, other) in enumerate(values) if other != values[0][1]]
        if apart:
            raise error(f"{what} is not that of rank 0 (node {values[0][0]}) on {', '.join(apart)}")

    def from_rank_0(self, value: Any) -> Any:
        """Rank 0's value, on all ranks."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.agreement)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        """Each rank's value, by rank, on all ranks."""
        values: list[Any] = [None] * self.shape.world_size
        dist.all_gather_object(values, value, group=self.agreement)
        return values

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(group=self.agreement)


def join(who: Identity, cuda: bool) -> dist.ProcessGroup:
    """Meet the other ranks at MASTER_ADDR and MASTER_PORT; returns the group of all ranks over gloo.

    The first thing that a rank does: one that fails later is noticed by the others.
    """
    if cuda:
        if who.local_rank >= torch.cuda.device_count():
            raise RankError(
                f"local rank {who.local_rank} on node {who.node} has no GPU: {torch.cuda.device_count()} are visible. "
                "Start one rank for each GPU, all of them visible to every rank (srun --gpu-bind=none)."
            )
        torch.cuda.set_device(who.local_rank)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise RankError(f"{name} is not set: the ranks do not know where to meet")
    dist.init_process_group("nccl" if cuda else "gloo", rank=who.rank, world_size=who.world_size, timeout=TIMEOUT)
    agreement: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=AGREEMENT_TIMEOUT)
    return agreement


def arrange(job: Job, who: Identity, cuda: bool, agreement: dist.ProcessGroup, faults: Sequence[Fault] = ()) -> World:
    """Build Megatron-core's groups for the job's shape, and seed this rank.

    The seeds follow Megatron-core: stages and replicas differ, tensor-parallel ranks share the default state and
    differ in the model-parallel one.
    """
    shape = job.shape(who.world_size)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=shape.tensor,
        pipeline_model_parallel_size=shape.pipeline,
        virtual_pipeline_model_parallel_size=job.parallel.virtual if job.parallel.virtual > 1 else None,
    )
    pipeline_rank = parallel_state.get_pipeline_model_parallel_rank()
    data_rank = parallel_state.get_data_parallel_rank()
    seed = job.train.seed + 100 * pipeline_rank + 10 * data_rank
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return World(
        identity=who,
        shape=shape,
        cuda=cuda,
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        pipeline_rank=pipeline_rank,
        data_rank=data_rank,
        agreement=agreement,
        faults=Faults.of_rank(faults, who, pipeline_rank),
    )
