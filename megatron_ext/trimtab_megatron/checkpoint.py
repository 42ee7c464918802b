"""Saving and resuming, all ranks together: an error on one of them is the same error on all.

A checkpoint holds parameters, optimizer and the number of consumed samples. Learning rate and sample order follow from
that, so that it can be gone on from at every shape that the model fits.
"""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from trimtab.protocol import Job, Saved, layout_of
from trimtab_megatron import checkpoint_files as files
from trimtab_megatron import checkpoint_state as state
from trimtab_megatron.checkpoint_files import Complete, DamagedError
from trimtab_megatron.engine import Engine
from trimtab_megatron.identity import InputError, RankError
from trimtab_megatron.world import World

Result = TypeVar("Result")

_DATA = "the fingerprint of the data (data.path, data.tokenizer, data.provider)"
"""A key of what is kept with each checkpoint, and compared with older ones: it stays as it is."""


@dataclass(frozen=True)
class Progress:
    """How far a run has come."""

    step: int
    consumed_samples: int


class SaveError(Exception):
    """A checkpoint that could not be written, on all ranks; the ones before are untouched, and training can go on."""


class Checkpoints:
    """The checkpoints of one run. All methods are for all ranks together."""

    def __init__(self, world: World, engine: Engine, vocabulary_size: int, fingerprint: str) -> None:
        """With the padded vocabulary, and the fingerprint of the data."""
        self._world = world
        self._leads = world.identity.rank == 0
        self._vocabulary_size = vocabulary_size
        self._samples = _sample_identity(engine.job, fingerprint)
        self.follow(engine)
        self.saved_step = -1
        """Step of the newest checkpoint that this run has written or resumed from."""
        self._rejected: set[str] = set()
        self._ours: set[str] = set()
        """What was there when the run began, or was written by it: all else in the directory is another run's."""

    def follow(self, engine: Engine) -> None:
        """Save and load this engine from now on."""
        self._engine = engine
        self._directory = Path(engine.job.train.checkpoint_directory)

    def save(self, progress: Progress) -> tuple[Saved, list[str]]:
        """Write a checkpoint, and remove those that are too old. Returns what came of it, and what to tell.

        Raises SaveError, on all ranks, where one of them cannot write.
        """
        began = time.perf_counter()
        target = files.checkpoint_path(self._directory, progress.step)
        try:
            self._together(lambda: files.begin(target, self._ours) if self._leads else None)
            self._ours.add(target.name)
            written = self._together(lambda: self._write(target))
            complete = Complete(
                step=progress.step,
                consumed_samples=progress.consumed_samples,
                model=_model_identity(self._engine.job, self._vocabulary_size),
                samples=self._samples,
                shape=self._shape,
                files={name: file for sums in written for name, file in sums.items()},
            )
            self._together(lambda: files.finish(target, complete) if self._leads else None)
        except SaveError:
            if self._leads and target.name in self._ours and target.is_dir():
                shutil.rmtree(target, ignore_errors=True)
            raise
        self.saved_step = progress.step
        self._rejected.discard(target.name)
        told = self._prune(progress.step) if self._leads else []
        self._world.barrier()
        return Saved(0, progress.step, str(target), time.perf_counter() - began, complete.size_bytes), told

    def resume(self) -> tuple[Progress, list[str]]:
        """Load the newest sound checkpoint, if there is one. Returns how far it came, and what to tell.

        Raises RankError where there are some but none is sound, and where not every rank can see it; InputError where
        it is of another model or optimizer, or has consumed other samples.
        """
        found, told = self._newest_sound()
        if found is None:
            return Progress(0, 0), told
        source, complete = found
        self._refuse_another("model", source, _model_identity(self._engine.job, self._vocabulary_size), complete.model)
        if complete.samples:
            self._refuse_another("order of samples", source, self._samples, complete.samples)
        self._world.faults.during("load")
        state.load(self._engine, source)
        told.append(f"resumed from {source}")
        if complete.shape != self._shape:
            told.append(f"it was saved as {complete.shape}, and goes on as {self._shape}")
        if not complete.files:
            told.append("it has no checksums: whether it is sound was not looked into")
        if not complete.samples:
            told.append("it does not say which samples it has consumed: whether they are this job's is not known")
        self.saved_step = complete.step
        return Progress(complete.step, complete.consumed_samples), told

    @property
    def _shape(self) -> str:
        return f"{self._world.shape}, {layout_of(self._engine.job)}"

    def _write(self, target: Path) -> dict[str, files.FileSum]:
        """Write this rank's files. Returns what they sum up to."""
        state.save(self._engine, target, self._world.agreement)
        self._world.faults.during("save")
        rank = self._world.identity.rank
        prefixes = (state.own_files(rank), *(state.COMMON_FILES if self._leads else ()))
        return files.sum_files(target, prefixes)

    def _together(self, action: Callable[[], Result]) -> list[Result]:
        """What an action gives on each rank. Raises SaveError on all ranks where it fails on one."""
        result, reason = None, ""
        try:
            result = action()
        except CheckpointException as error:
            rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
            reason = f"rank {rank}: {cause}"
        except OSError as error:
            reason = f"rank {self._world.identity.rank} on node {self._world.identity.node}: {error}"
        results = self._world.gather((result, reason))
        for _, reason in results:
            if reason:
                raise SaveError(reason)
        return [result for result, _ in results]

    def _prune(self, step: int) -> list[str]:
        try:
            files.prune(self._directory, step, self._engine.job.train.keep_checkpoints, self._rejected)
        except OSError as error:
            return [f"could not remove what is older: {error}"]
        return []

    def _newest_sound(self) -> tuple[tuple[Path, Complete] | None, list[str]]:
        saves = self._world.from_rank_0(files.checkpoints(self._directory) if self._leads else None)
        self._ours.update(save.name for save in saves)
        told: list[str] = []
        for save in reversed(saves):
            complete, reason = self._world.from_rank_0(_inspect(save) if self._leads else None)
            if complete is not None:
                self._refuse_unseen(save)
                reason = next(filter(None, self._world.gather(self._damage_in_share(save, complete))), "")
            if not reason:
                return (save, complete), told
            told.append(f"ignored {save}: {reason}")
            self._rejected.add(save.name)
        if self._world.from_rank_0(self._leads and any(map(files.is_complete, saves))):
            raise RankError(
                f"no checkpoint in {self._directory} is sound, and none is started over: {'; '.join(told)}. Bring one "
                "back, or name another train.checkpoint_directory."
            )
        return None, told

    def _refuse_unseen(self, save: Path) -> None:
        seen = self._world.gather((self._world.identity.node, files.is_complete(save)))
        if blind := sorted({node for node, sees in seen if not sees}):
            raise RankError(
                f"train.checkpoint_directory: rank 0 sees {save}, but {', '.join(blind)} does not: name a directory "
                "that all nodes share"
            )

    def _damage_in_share(self, save: Path, complete: Complete) -> str:
        share = files.blocks(complete)[self._world.identity.rank :: self._world.shape.world_size]
        try:
            files.check_blocks(save, share)
        except DamagedError as error:
            return str(error)
        return ""

    def _refuse_another(self, what: str, source: Path, own: dict[str, Any], saved: dict[str, Any]) -> None:
        differing = [
            _difference(name, own.get(name), saved.get(name))
            for name in own | saved
            if own.get(name) != saved.get(name)
        ]
        if differing:
            raise InputError(
                f"the checkpoint {source} is of another {what}: {'; '.join(differing)}. "
                "Name another train.checkpoint_directory, or change the job back."
            )


def _difference(name: str, now: Any, there: Any) -> str:
    if name == _DATA:  # two hashes would tell nobody anything
        return "data.path, data.tokenizer or data.provider give other samples now than there"
    return f"{name} is {now!r} now and {there!r} there"


def _inspect(save: Path) -> tuple[Complete | None, str]:
    try:
        return files.read_complete(save), ""
    except DamagedError as error:
        return None, str(error)


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


def _sample_identity(job: Job, fingerprint: str) -> dict[str, Any]:
    """What has to be the same for the number of consumed samples to say which ones they were."""
    return {
        "train.seed": job.train.seed,
        "model.sequence_length": job.model.sequence_length,
        _DATA: fingerprint,
    }
