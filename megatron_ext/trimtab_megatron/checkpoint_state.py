"""What a checkpoint holds, as Megatron-core's distributed checkpoints: by global names, so that it fits every shape.

It is loaded by `dist_checkpointing.load`, and written in the same format, but by torch's writer: Megatron-core's own
writes from helper processes, for which a rank waits for ever when one dies, and where rank 0 alone meets an error the
others wait for it. Here an error on one rank is one on all of them.
"""

import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from trimtab_megatron import checkpoint_files
from trimtab_megatron.engine import Engine
from trimtab_megatron.optimizer import give_each_parameter_state, inner_optimizers


def own_files(rank: int) -> str:
    """What the names of the files begin with that a rank writes."""
    return f"__{rank}_"


COMMON_FILES = (".metadata", COMMON_STATE_FNAME, CONFIG_FNAME)
"""Those that rank 0 writes for all."""


class _Writer(FileSystemWriter):
    """Says what the disk said: torch.save's archive hides it behind "unexpected pos", of what it then misses."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def save(engine: Engine, directory: Path, group: dist.ProcessGroup) -> None:
    """Write parameters and optimizer into an empty directory, all ranks together.

    Raises CheckpointException on all of them where a rank's files cannot be written, OSError on rank 0 for those that
    it writes for all.
    """
    sharded, common = save_preprocess(_state(engine, is_loading=False))
    sharded, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    save_sharded(
        torch_dist.mcore_to_pyt_state_dict(sharded, False),
        storage_writer=_Writer(directory),
        planner=torch_dist.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        process_group=group,
    )
    if dist.get_rank() == 0:
        buffer = io.BytesIO()
        torch.save(common, buffer)
        checkpoint_files.write(directory / COMMON_STATE_FNAME, buffer.getvalue())
        checkpoint_files.write(directory / CONFIG_FNAME, json.dumps(asdict(CheckpointingConfig("torch_dist"))).encode())


def load(engine: Engine, directory: Path) -> None:
    """Read parameters and optimizer into a new engine, all ranks together."""
    for inner in inner_optimizers(engine.optimizer):
        if isinstance(inner, DistributedOptimizer):
            give_each_parameter_state(inner.optimizer)  # else loading into a fresh optimizer asserts
            _keep_step(inner)
    state = dist_checkpointing.load(_state(engine, is_loading=True), str(directory))
    for name, chunk in zip(_chunk_names(engine.chunks), engine.chunks, strict=True):
        chunk.module.load_state_dict(state[name])
    engine.optimizer.load_state_dict(state["optimizer"])
    for inner in inner_optimizers(engine.optimizer):
        _separate_steps(inner.optimizer)


def _state(engine: Engine, is_loading: bool) -> dict[str, Any]:
    metadata = {
        "chained_optim_avoid_prefix": True,
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "non_homogeneous_layers": True,
        "singleton_local_shards": False,
    }
    state: dict[str, Any] = {
        name: chunk.module.sharded_state_dict(metadata=metadata)
        for name, chunk in zip(_chunk_names(engine.chunks), engine.chunks, strict=True)
    }
    state["optimizer"] = engine.optimizer.sharded_state_dict(dict(state), is_loading=is_loading, metadata=metadata)
    return state


def _chunk_names(chunks: Sequence[DistributedDataParallel]) -> list[str]:
    return ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]


def _keep_step(optimizer: Any) -> None:
    """Let a distributed optimizer load states that hold no step, as its own checkpoints are.

    Its setter asks for every entry of torch's AdamW, `step` among them, which is saved once for all parameters.
    """
    if getattr(optimizer, "trimtab_keeps_step", False):
        return
    set_states = optimizer._set_main_param_and_optimizer_states

    def set_all(model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        group, order = optimizer.model_param_group_index_map[model_param]
        main = optimizer.optimizer.param_groups[group]["params"][order]
        set_states(model_param, {"step": optimizer.optimizer.state[main]["step"], **tensors})

    optimizer._set_main_param_and_optimizer_states = set_all
    optimizer.trimtab_keeps_step = True


def _separate_steps(optimizer: torch.optim.Optimizer) -> None:
    """One step tensor for each parameter: loading leaves one that all share, and each would count it up."""
    for state in optimizer.state.values():
        state["step"] = state["step"].detach().clone()
