"""Which rank this process is: from torchrun's names of the environment, or else Slurm's. And how it says so."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from trimtab.protocol import Hello, Job


class RankError(RuntimeError):
    """This rank cannot start or go on: names what is wrong and what to do."""


class InputError(RankError):
    """What the run was given does not fit together: another attempt would meet the same."""


@dataclass(frozen=True)
class Identity:
    """Place of a rank among all ranks, and on its node."""

    rank: int
    world_size: int
    local_rank: int
    """Place on the node; on a node with GPUs, the index of its GPU."""
    node: str


def identity(environment: Mapping[str, str] = os.environ) -> Identity:
    """This process's place. Raises RankError when it was started by neither torchrun nor srun."""
    for rank, world_size, local_rank in (
        ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ):
        if rank in environment:
            return Identity(
                rank=_number(environment, rank),
                world_size=_number(environment, world_size),
                local_rank=_number(environment, local_rank),
                node=environment.get("SLURMD_NODENAME") or socket.gethostname(),
            )
    raise RankError(
        "no rank in the environment: neither RANK (torchrun) nor SLURM_PROCID (srun) is set. "
        "Start the ranks with `trimtab run`, srun or torchrun."
    )


def introduction(who: Identity, job: Job) -> Hello:
    """The Hello of a rank that holds nothing yet. Raises JobError where the job does not fit so many ranks.

    Its place is the one that Megatron-core will give it: ranks go by tensor rank first, then replica, then stage.
    """
    shape = job.shape(who.world_size)
    stage, place = divmod(who.rank, shape.tensor * shape.data)
    replica, tensor_rank = divmod(place, shape.tensor)
    return Hello(
        token=os.environ.get("TRIMTAB_TOKEN", ""),
        rank=who.rank,
        node=who.node,
        local_rank=who.local_rank,
        pid=os.getpid(),
        tensor_rank=tensor_rank,
        pipeline_rank=stage,
        data_rank=replica,
        layers=(),
        parameters=0,
        device="",
    )


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "")
    if not value.isdecimal():
        raise RankError(f"{name}={value!r} in the environment of the rank is not a number: set it, or use srun")
    return int(value)
