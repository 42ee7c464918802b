"""Saving and resuming with Megatron-core's distributed checkpoints.

A checkpoint is a directory `step-00000020`. It counts once its `complete.json` is there, which rank 0 writes last,
after all ranks have finished: what a kill leaves behind is never taken for one. It holds parameters, optimizer,
consumed samples and random states; the learning rate follows from the step.
"""

import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from trimtab.protocol import Job, layout_of
from trimtab_megatron.engine import Engine
from trimtab_megatron.identity import RankError
from trimtab_megatron.optimizer import give_each_parameter_state, inner_optimizers
from trimtab_megatron.world import World

COMPLETE = "complete.json"


@dataclass(frozen=True)
class Progress:
    """How far a run has come."""

    step: int
    consumed_samples: int


class Checkpoints:
    """The checkpoints of one run. All methods are for all ranks together."""

    def __init__(self, world: World, engine: Engine, vocabulary_size: int) -> None:
        self._world = world
        self._vocabulary_size = vocabulary_size
        self.follow(engine)
        self.saved_step = -1
        """Step of the newest checkpoint that this run has written or resumed from."""

    def follow(self, engine: Engine) -> None:
        """Save and load this engine from now on."""
        self._directory = Path(engine.job.train.checkpoint_directory)
        self._keep = engine.job.train.keep_checkpoints
        self._chunks, self._optimizer = engine.chunks, engine.optimizer
        self._model = _model_identity(engine.job, self._vocabulary_size)
        self._shape = f"{self._world.shape}, {layout_of(engine.job)}"

    def save(self, progress: Progress) -> str:
        """Write a checkpoint, and delete those that are too old. Returns what to tell."""
        target = self._directory / f"step-{progress.step:08d}"
        leader = self._world.identity.rank == 0
        if leader:
            shutil.rmtree(target, ignore_errors=True)  # what an interrupted save left
            target.mkdir(parents=True)
        self._world.barrier()
        dist_checkpointing.save(self._state(is_loading=False), str(target))
        self._world.barrier()
        if leader:
            self._complete(target, progress)
            self._prune()
        self._world.barrier()
        self.saved_step = progress.step
        return f"saved {target}"

    def resume(self) -> tuple[Progress, list[str]]:
        """Load the newest complete checkpoint, if there is one. Returns how far it came, and what to tell.

        Raises RankError when it is of another model or optimizer, or when not every rank can see it.
        """
        found, incomplete = self._world.from_rank_0(self._newest() if self._world.identity.rank == 0 else None)
        told = [f"ignored {name}: its save was interrupted" for name in incomplete]
        if found is None:
            return Progress(0, 0), told
        source = self._directory / found
        try:
            meta = json.loads((source / COMPLETE).read_text())
        except OSError as error:
            raise RankError(
                f"train.checkpoint_directory: rank 0 sees {source}, but node {self._world.identity.node} does not "
                f"({error}): name a directory that all nodes share"
            ) from error
        self._refuse_another_model(source, meta["model"])
        same_shape = meta["shape"] == self._shape
        self._load(source, with_random_states=same_shape)
        told.append(f"resumed from {source}")
        if not same_shape:
            told.append(f"it was saved as {meta['shape']}: the random states of dropout begin anew")
        self.saved_step = meta["step"]
        return Progress(meta["step"], meta["consumed_samples"]), told

    def _newest(self) -> tuple[str | None, list[str]]:
        saves = _saves(self._directory)
        complete = [save.name for save in saves if (save / COMPLETE).is_file()]
        return (complete[-1] if complete else None), [str(save) for save in saves if save.name not in complete]

    def _complete(self, target: Path, progress: Progress) -> None:
        meta = {
            "step": progress.step,
            "consumed_samples": progress.consumed_samples,
            "model": self._model,
            "shape": self._shape,
        }
        unfinished = target / f"{COMPLETE}.unfinished"
        with unfinished.open("w") as file:
            json.dump(meta, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(target / COMPLETE)
        directory = os.open(target, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _prune(self) -> None:
        complete = [save for save in _saves(self._directory) if (save / COMPLETE).is_file()]
        for save in complete[: -self._keep]:
            (save / COMPLETE).unlink()
            shutil.rmtree(save)

    def _refuse_another_model(self, source: Path, saved: dict[str, Any]) -> None:
        differing = [
            f"{name} is {self._model.get(name)!r} now and {saved.get(name)!r} there"
            for name in self._model | saved
            if self._model.get(name) != saved.get(name)
        ]
        if differing:
            raise RankError(
                f"the checkpoint {source} is of another model: {'; '.join(differing)}. "
                "Name another train.checkpoint_directory, or change the job back."
            )

    def _load(self, source: Path, with_random_states: bool) -> None:
        for optimizer in self._distributed_optimizers():
            give_each_parameter_state(optimizer.optimizer)  # else loading into a fresh optimizer asserts
            _keep_step(optimizer)
        wanted = self._state(is_loading=True)
        if not with_random_states:
            del wanted["random"]
        state = dist_checkpointing.load(wanted, str(source))
        for name, chunk in zip(_chunk_names(self._chunks), self._chunks, strict=True):
            chunk.module.load_state_dict(state[name])
        self._optimizer.load_state_dict(state["optimizer"])
        for inner in inner_optimizers(self._optimizer):
            _separate_steps(inner.optimizer)
        if with_random_states:
            _set_random_states(state["random"])

    def _state(self, is_loading: bool) -> dict[str, Any]:
        metadata = {
            "chained_optim_avoid_prefix": True,
            "distrib_optim_sharding_type": "fully_reshardable",
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
            "non_homogeneous_layers": True,
            "singleton_local_shards": False,
        }
        state: dict[str, Any] = {
            name: chunk.module.sharded_state_dict(metadata=metadata)
            for name, chunk in zip(_chunk_names(self._chunks), self._chunks, strict=True)
        }
        state["optimizer"] = self._optimizer.sharded_state_dict(dict(state), is_loading=is_loading, metadata=metadata)
        world, shape = self._world, self._world.shape
        state["random"] = ShardedObject(
            "random",
            None if is_loading else _random_states(),
            (shape.pipeline, shape.tensor, shape.data),
            (world.pipeline_rank, world.tensor_rank, world.data_rank),
        )
        return state

    def _distributed_optimizers(self) -> list[Any]:
        return [inner for inner in inner_optimizers(self._optimizer) if isinstance(inner, DistributedOptimizer)]


def _model_identity(job: Job, vocabulary_size: int) -> dict[str, Any]:
    model = job.model
    return {
        "model.layers": model.layers,
        "model.hidden_size": model.hidden_size,
        "model.attention_heads": model.attention_heads,
        "model.query_groups": model.query_groups or model.attention_heads,
        "model.ffn_hidden_size": job.ffn_hidden_size,
        "model.tied_embeddings": model.tied_embeddings,
        "model.provider": model.provider,
        "the padded vocabulary": vocabulary_size,
        "parallel.distributed_optimizer": job.parallel.distributed_optimizer,
    }


def _saves(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return sorted(entry for entry in directory.iterdir() if re.fullmatch(r"step-\d{8}", entry.name))


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


def _random_states() -> dict[str, Any]:
    return {
        "cpu": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracked": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def _set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    torch.cuda.set_rng_state(states["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracked"])
