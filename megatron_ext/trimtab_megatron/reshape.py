"""Changes what the ranks run, between two steps: who holds which layers, how many microbatches, what is recomputed.

Layers move in four acts. What the first two need can be refused, on any rank, and then all ranks train on as they
were; what fails after that ends them all, and the job begins again from its last checkpoint. A mixture of the old
layout and the new one never trains.

1. Agree: all ranks run the same setting, and were told the same one.
2. Prepare: the old gradients' memory is let go, and the new engine is built beside the old one, without weights.
3. Move: parameters and optimizer states go from their old owners to the new ones, layer by layer.
4. Verify: checksums of all tensors are what they were before, and each layer is in one place.

Memory of one rank, in bytes, between steps (no activations are alive then). With n parameters held before and k
after, m bytes for each of the model's (4 in fp32, else 2), f for its fp32 copy (0 in fp32, else 4), and r ranks that
share the optimizer's states (1, or with a distributed optimizer the replicas):

    preparing: n (m + (f + 8) / r) + k (m + 4 + f / r)
    moving: n (m + (f + 8) / r) + k (m + f / r) + 8 (come so far - gone so far) / r + one layer sent, one received

The first is the larger, unless more than half of what is held after has come before anything has gone. A step takes
n (m + 4 + (f + 8) / r), and its activations. On a CPU what is prepared counts once it is written to: less.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch

from trimtab.protocol import Order, Reshaped, Setting
from trimtab_megatron import checksums, transfer
from trimtab_megatron.engine import Engine, dismantle
from trimtab_megatron.holdings import Holdings, Key, adam_step
from trimtab_megatron.identity import RankError
from trimtab_megatron.initialize import bare, blank, layer_ids
from trimtab_megatron.model import build_chunks, transformer_config
from trimtab_megatron.optimizer import build_optimizer, build_schedule, inner_optimizers
from trimtab_megatron.recompute import recompute_layers
from trimtab_megatron.run import Run
from trimtab_megatron.shards import Holder, Piece, least_bytes, moved_bytes, plan
from trimtab_megatron.world import World

Built = TypeVar("Built")


class Refused(Exception):
    """All ranks stay as they are: says why."""


def reshape(run: Run, order: Order) -> None:
    """Run the order's setting from here on, or tell why not. For all ranks together.

    Raises RankError on all ranks where what runs is not what was to be: no step may follow.
    """
    began = time.perf_counter()
    moved = least = 0
    refused = ""
    try:
        setting = agreed_setting(run, order)
        if setting.layout != run.setting.layout:
            moved, least = move_layers(run, setting)
        run.setting = setting
        recompute_layers(run.engine.chunks, setting.recomputed_layers[run.world.pipeline_rank])
    except Refused as error:
        refused = str(error)
        run.tell("reshape", f"not reshaped: {refused}")
    if run.world.identity.rank == 0:
        seconds = time.perf_counter() - began
        run.control.send(Reshaped(0, run.progress.step, run.setting, refused, seconds, moved, least))


def agreed_setting(run: Run, order: Order) -> Setting:
    """The setting of an order that can be carried out, the same on all ranks."""
    setting = order.setting
    if setting is None:
        raise Refused("the order names no setting")
    run.world.same_as_rank_0("the setting that is run", run.setting.fingerprint)
    run.world.same_as_rank_0("the setting that was ordered", setting.fingerprint)
    if order.replaces != run.setting.fingerprint:
        raise Refused(f"it was worked out for another setting than what runs: {run.setting}")
    if obstacle := setting.obstacle(run.job, run.world.shape):
        raise Refused(obstacle)
    return setting


@dataclass
class Prepared:
    """A new engine without weights, and what has to be moved into it."""

    engine: Engine
    old: Holdings
    new: Holdings
    pieces: Sequence[Piece]
    holders: Sequence[Holder]
    """All ranks, as they will be."""
    step: float
    """That Adam counts."""


def move_layers(run: Run, setting: Setting) -> tuple[int, int]:
    """Put a new engine of this setting in the place of the old one. Returns bytes moved, and least bytes.

    Raises Refused when it cannot be prepared on some rank: nothing is changed then.
    """
    world, old_layout = run.world, run.setting.layout
    prepared = prepare(run, setting)
    keys = sorted({(shard.name, shard.kind) for holder in prepared.holders for shard in holder.shards})

    def totals(holdings: Holdings) -> Any:
        return checksums.totals(holdings, keys, world.tensor_rank, world.shape.tensor, world.agreement)

    before = totals(prepared.old)
    world.faults.during("move")
    transfer.move(prepared.pieces, world.identity.rank, prepared.old, prepared.new, world.device)
    prepared.new.count(prepared.step)
    dismantle(run.engine.chunks)
    run.engine = prepared.engine
    for chunk in run.engine.chunks:
        chunk.restore_grad_buffers()
    if run.checkpoints is not None:
        run.checkpoints.follow(run.engine)
    verify(keys, before, totals(prepared.new))
    changed = [
        layer
        for layer, (was, will) in enumerate(zip(old_layout.owners, setting.layout.owners, strict=True))
        if was != will
    ]
    return moved_bytes(prepared.pieces), least_bytes(prepared.holders, changed)


def prepare(run: Run, setting: Setting) -> Prepared:
    """Build beside the old engine what a setting needs. Where that fails on any rank, Refused is raised on all."""
    world, old = run.world, run.engine
    old.optimizer.zero_grad()
    for chunk in old.chunks:
        chunk.offload_grad_buffers()
    job = replace(old.job, parallel=replace(old.job.parallel, layout=str(setting.layout)))
    config = transformer_config(job, world.cuda)
    chunks: list[Any] = []

    def build_model() -> None:
        world.faults.during("reshape")
        with blank():
            chunks.extend(build_chunks(job, config, world, run.dataset.samples.vocabulary_size))
        for chunk in chunks:
            chunk.offload_grad_buffers()

    def build_rest() -> Engine:
        optimizer = build_optimizer(job, config, chunks)
        engine = Engine(job, config, chunks, optimizer, build_schedule(job, optimizer))
        carry_on(old, engine)
        return engine

    try:
        together(world, build_model)
        engine = together(world, build_rest)
        return plan_moves(run, setting, engine)
    except Refused:
        dismantle(chunks)
        for chunk in old.chunks:
            chunk.restore_grad_buffers()
        raise


def carry_on(old: Engine, new: Engine) -> None:
    """Go on with the learning rate and the loss scale of the old engine."""
    new.schedule.step(old.schedule.num_steps)
    for was, will in zip(inner_optimizers(old.optimizer), inner_optimizers(new.optimizer), strict=True):
        if getattr(was, "grad_scaler", None) is not None:
            will.grad_scaler.load_state_dict(was.grad_scaler.state_dict())


def plan_moves(run: Run, setting: Setting, engine: Engine) -> Prepared:
    """What has to go from rank to rank. Raises Refused where the new engine does not hold what it should."""
    world = run.world
    step = max(world.gather(adam_step(run.engine)))

    def look() -> tuple[Holdings, Holdings]:
        layers = sorted(layer for chunk in engine.chunks for layer in layer_ids(bare(chunk)))
        wanted = sorted(setting.layout.stage_layers(world.pipeline_rank))
        if layers != wanted:
            raise ValueError(f"the model was built with layers {layers} instead of {wanted}")
        return Holdings(run.engine, with_states=step > 0), Holdings(engine, with_states=step > 0)

    old, new = together(world, look)
    holders = world.gather(
        [Holder(world.tensor_rank, world.data_rank, list(held.shards.values())) for held in (old, new)]
    )
    are, shall_be = ([pair[index] for pair in holders] for index in (0, 1))
    return Prepared(engine, old, new, together(world, lambda: plan(are, shall_be)), shall_be, step)


def verify(keys: Sequence[Key], before: torch.Tensor, after: torch.Tensor) -> None:
    """Raise RankError, on all ranks, where the checksums [planes, keys] of a tensor have changed."""
    changed = [
        f"{kind} of {name}" for (name, kind), same in zip(keys, (before == after).all(0), strict=True) if not same
    ]
    if changed:
        raise RankError(
            f"after the reshape {len(changed)} tensors are not what they were, among them {changed[0]}: "
            "begin again from the last checkpoint"
        )


def together(world: World, action: Callable[[], Built]) -> Built:
    """What each rank does that can fail on some: Refused on all ranks where it did on one."""
    built, failure = None, ""
    try:
        built = action()
    except (MemoryError, RuntimeError, ValueError, AssertionError) as error:  # a model's own code runs in there
        failure = f"{type(error).__name__}: {' '.join(str(error).split())}"
    failures = world.gather(failure)
    if any(failures):
        raise Refused("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(failures) if text))
    return cast("Built", built)
