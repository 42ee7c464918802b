"""All that a rank trains with, and how it comes by it."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch

from trimtab.protocol import Hello, Job, Notice, Setting, layout_of, setting_of
from trimtab_megatron.checkpoint import Checkpoints, Progress
from trimtab_megatron.control import Control
from trimtab_megatron.data import Dataset, open_dataset
from trimtab_megatron.engine import Engine, build_engine
from trimtab_megatron.identity import InputError, introduction
from trimtab_megatron.model import padded_vocabulary
from trimtab_megatron.patience import told
from trimtab_megatron.world import World


@dataclass
class Run:
    """What a rank trains with."""

    world: World
    control: Control
    dataset: Dataset
    engine: Engine
    setting: Setting
    checkpoints: Checkpoints | None
    progress: Progress
    save_tried_seconds: float = field(default_factory=time.monotonic)
    """When a checkpoint was last tried, or the run began; monotonic clock."""

    @property
    def job(self) -> Job:
        """As it is now: its layout follows the setting."""
        return self.engine.job

    def tell(self, kind: str, text: str) -> None:
        """Send a notice that concerns all ranks: rank 0 does."""
        if self.world.identity.rank == 0:
            self.control.send(Notice(0, self.progress.step, kind, text))


def prepare(job: Job, world: World, control: Control) -> Run:
    """Open the data, build the model and say Hello, resume. An error here ends all ranks: none goes on alone."""

    def slow(doing: str) -> AbstractContextManager[None]:
        return told(world.identity, doing, lambda text: control.send(Notice(world.identity.rank, 0, "slow", text)))

    with slow("opening the data"):
        dataset = open_dataset(job)
    with slow("waiting for other ranks to open the data"):
        world.same_as_rank_0("the data", dataset.fingerprint, InputError)
    vocabulary_size = dataset.samples.vocabulary_size
    with slow("building the model with the other ranks"):
        engine = build_engine(job, world, vocabulary_size)
    control.hello(greeting(job, world, engine.chunks))
    checkpoints = None
    if job.train.checkpoint_directory:
        padded = padded_vocabulary(vocabulary_size, world.shape.tensor)
        checkpoints = Checkpoints(world, engine, padded, dataset.fingerprint)
    run = Run(world, control, dataset, engine, setting_of(job, world.shape), checkpoints, Progress(0, 0))
    if dataset.built:
        control.send(Notice(world.identity.rank, 0, "data", f"built and cached {dataset.built}"))
    if checkpoints is not None:
        with slow("looking for a checkpoint and reading it with the other ranks"):
            run.progress, found = checkpoints.resume()
        for text in found:
            run.tell("checkpoint", text)
    engine.schedule.step(run.progress.step)
    with slow("waiting for other ranks to be ready for the first step"):
        world.barrier()
    return run


def greeting(job: Job, world: World, chunks: Sequence[torch.nn.Module]) -> Hello:
    """Who this rank is and what it holds."""
    who = world.identity
    hello = replace(
        introduction(who, job),
        tensor_rank=world.tensor_rank,
        pipeline_rank=world.pipeline_rank,
        data_rank=world.data_rank,
        layers=layout_of(job).stage_layers(world.pipeline_rank),
        parameters=sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters()),
    )
    if not world.cuda:
        return hello
    gpu = torch.cuda.get_device_properties(who.local_rank)
    return replace(hello, device=f"GPU-{gpu.uuid}", device_model=gpu.name, device_memory_bytes=gpu.total_memory)
