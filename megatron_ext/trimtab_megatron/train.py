"""One rank's training, step after step: orders between steps, then the step."""

import math
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func

from trimtab.protocol import Order, Probe, StepReport
from trimtab_megatron.checkpoint import Progress, SaveError
from trimtab_megatron.data import Microbatch, microbatch_indices
from trimtab_megatron.identity import RankError
from trimtab_megatron.optimizer import LEAST_LOSS_SCALE, learning_rate
from trimtab_megatron.probe import product_seconds
from trimtab_megatron.recompute import recompute_layers
from trimtab_megatron.reshape import reshape
from trimtab_megatron.run import Run
from trimtab_megatron.world import World


def train(run: Run) -> None:
    """Take steps until the last one, or until told to stop; save on the way and at the end.

    All orders that have come are carried out between the same two steps: none delays another by a step.
    """
    interval = run.job.train.checkpoint_interval_steps
    recompute_layers(run.engine.chunks, run.setting.recomputed_layers[run.world.pipeline_rank])
    while run.progress.step < run.job.train.steps:
        stopped = False
        while not stopped and (order := run.world.agree_on_order(next_order(run))):
            obey(run, order)
            stopped = order.kind == "stop"
        if stopped:
            break
        if interval and run.progress.step and run.progress.step % interval == 0:
            save(run)
        run.world.faults.before_step(run.progress.step + 1)
        take_step(run)
    save(run, last=True)


def next_order(run: Run) -> Order | None:
    """What rank 0 has all ranks do next, if anything.

    Without a wrapper that could order it, a checkpoint is due as often as the job wants one at the least.
    """
    if run.world.identity.rank:
        return None
    if (order := run.control.take_order()) or run.control.connected:
        return order
    settings = run.job.train
    automatic = run.checkpoints is not None and not settings.checkpoint_interval_steps
    if automatic and time.monotonic() - run.save_tried_seconds > 60 * settings.longest_checkpoint_minutes:
        return Order("checkpoint", "there is no wrapper to order one")
    return None


def obey(run: Run, order: Order) -> None:
    """Carry out an order, on all ranks at the same step."""
    if order.kind in ("checkpoint", "stop"):
        if run.checkpoints is None:
            run.tell("checkpoint", f"told to {order.kind}, but train.checkpoint_directory is empty: nothing is saved")
        save(run)
    elif order.kind == "probe":
        probe(run)
    elif order.kind == "reshape":
        reshape(run, order)


def take_step(run: Run) -> None:
    """One optimizer step over the global batch, and the report of it."""
    began = time.perf_counter()
    microbatches = step_microbatches(run)
    losses = forward_and_backward(run, microbatches)
    run.engine.schedule.step(1)
    rate = learning_rate(run.engine.optimizer)
    gradient_norm = apply_gradients(run)
    consumed = run.progress.consumed_samples + run.job.batch.global_batch_size
    run.progress = Progress(run.progress.step + 1, consumed)

    loss = mean_loss(losses, run.world) if run.world.last_stage else None
    times = run.engine.config.timers.read()
    speaks = run.world.speaks_for_all
    run.control.send(
        StepReport(
            rank=run.world.identity.rank,
            step=run.progress.step,
            time_seconds=time.time(),
            duration_seconds=time.perf_counter() - began,
            forward_seconds=times.forward_seconds,
            backward_seconds=times.backward_seconds,
            microbatches=len(microbatches),
            # What passed this stage, padding included: it costs as much as what is real.
            tokens=sum(len(microbatch.lengths) * microbatch.length for microbatch in microbatches),
            squared_lengths=sum(len(microbatch.lengths) * microbatch.length**2 for microbatch in microbatches),
            peak_memory_bytes=peak_memory_bytes(run.world.cuda),
            loss=loss if speaks else None,
            gradient_norm=gradient_norm if speaks else None,
            learning_rate=rate if speaks else None,
            consumed_samples=consumed if speaks else None,
        )
    )


def step_microbatches(run: Run) -> list[Microbatch]:
    """What this replica takes in the next step; stages that see no tokens get none."""
    world, size, consumed = run.world, run.job.batch.microbatch_size, run.progress.consumed_samples
    return [
        run.dataset.microbatch(indices, with_tokens=world.first_stage or world.last_stage)
        for indices in microbatch_indices(run.setting.microbatches, size, consumed, world.data_rank)
    ]


def loss_weights(run: Run, microbatches: Sequence[Microbatch]) -> list[float]:
    """What each microbatch's mean loss is multiplied by, so that every token of the global batch counts the same.

    The schedule divides by the replica's number of microbatches, and data parallelism by the number of replicas: they
    are in the weight, and what is left is the microbatch's share of the tokens. Where all are equal it is exactly 1.
    """
    shape, tokens = run.world.shape, [sum(microbatch.lengths) for microbatch in microbatches]
    total = run.job.batch.global_batch_size * run.job.model.sequence_length
    if run.dataset.variable_lengths:
        over_ranks = torch.tensor(sum(tokens))
        dist.all_reduce(over_ranks, group=run.world.agreement)
        total = int(over_ranks) // (shape.tensor * shape.pipeline)
    return [own * len(microbatches) * shape.data / total for own in tokens]


def forward_and_backward(run: Run, microbatches: Sequence[Microbatch]) -> Sequence[dict[str, torch.Tensor]]:
    """All microbatches through the pipeline and back: gradients, and on the last stage the loss of each."""
    engine = run.engine
    weighted = list(zip(microbatches, loss_weights(run, microbatches), strict=True))
    engine.config.variable_seq_lengths = run.dataset.variable_lengths  # whether sends say what shape they have
    for chunk in engine.chunks:
        chunk.zero_grad_buffer()
    engine.optimizer.zero_grad()
    losses: Sequence[dict[str, torch.Tensor]] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(weighted) for _ in engine.chunks],
        model=list(engine.chunks),
        num_microbatches=len(microbatches),
        seq_length=run.job.model.sequence_length,
        micro_batch_size=run.job.batch.microbatch_size,
        forward_only=False,
    )
    return losses


def forward_step(
    data: Iterator[tuple[Microbatch, float]], model: DistributedDataParallel
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    """One microbatch through one chunk, as Megatron-core's schedules call it: the output, and how to make a loss."""
    microbatch, weight = next(data)
    if model.config.randomness is not None:
        model.config.randomness.begin(microbatch.sample)
    loss = partial(token_loss, microbatch, weight)
    if microbatch.tokens is None:
        return model(input_ids=None, position_ids=None, attention_mask=None), loss
    tokens = microbatch.tokens.to(torch.cuda.current_device(), non_blocking=True)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    return model(input_ids=inputs, position_ids=positions, attention_mask=None, labels=labels), loss


def token_loss(
    microbatch: Microbatch, weight: float, output: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Weighted mean of the losses [b, s] of one microbatch where there is a label, to differentiate and to report."""
    losses, mask = output.float(), microbatch.mask(output.device)
    mean = losses.mean() if mask is None else (losses * mask).sum() / mask.sum()
    loss = mean * weight
    return loss, {"loss": loss.detach().clone()}  # the schedule divides the loss in place


def apply_gradients(run: Run) -> float | None:
    """The optimizer's step. Returns the global norm of the gradients; None where they overflowed fp16.

    Such a step counts, but changes no parameter, and after some the loss scale is halved. Raises RankError, on all
    ranks alike as norm and scale are global, where training cannot go on.
    """
    optimizer, step = run.engine.optimizer, run.progress.step + 1
    scale = optimizer.get_loss_scale()
    applied, norm, _ = optimizer.step()
    if applied and not math.isfinite(norm):
        # Before a checkpoint of broken parameters is written.
        raise RankError(f"the gradient norm of step {step} is {float(norm)}: lower train.learning_rate")
    if applied:
        return float(norm)
    now = optimizer.get_loss_scale()
    if scale <= LEAST_LOSS_SCALE:
        raise RankError(
            f"the gradients of step {step} overflow fp16 at the least loss scale, {float(scale):g}: "
            "lower train.learning_rate, or set train.precision to bf16 or fp32"
        )
    if now < scale:
        run.tell(
            "precision",
            f"skipped step {step}: its gradients overflowed fp16 at the loss scale {float(scale):g}, "
            f"which is {float(now):g} from here on",
        )
    return None


def mean_loss(losses: Sequence[dict[str, torch.Tensor]], world: World) -> float:
    """Mean over the tokens of the global batch, from the weighted losses of this replica's microbatches."""
    mean = torch.stack([loss["loss"] for loss in losses]).mean()
    dist.all_reduce(mean, group=parallel_state.get_data_parallel_group())
    return float(mean) / world.shape.data


def save(run: Run, last: bool = False) -> None:
    """Write a checkpoint of the current step, unless there is one.

    Where it cannot be written training goes on, but for the last one: then it raises RankError.
    """
    step = run.progress.step
    run.save_tried_seconds = time.monotonic()
    if run.checkpoints is None or run.checkpoints.saved_step == step:
        return
    try:
        saved, told = run.checkpoints.save(run.progress)
    except SaveError as error:
        if last:
            raise RankError(f"the last checkpoint, of step {step}, could not be written: {error}") from error
        told = [f"no checkpoint of step {step}: {error}"]
    else:
        if run.world.identity.rank == 0:
            run.control.send(saved)
    for text in told:
        run.tell("checkpoint", text)


def probe(run: Run) -> None:
    """Time the fixed matrix product, and report it."""
    seconds = product_seconds(run.world.device, run.engine.config.params_dtype, run.world.faults.slow_probe)
    run.control.send(Probe(run.world.identity.rank, run.progress.step, seconds))


def peak_memory_bytes(cuda: bool) -> int:
    """Most device memory allocated since the rank began; on a CPU, its most resident memory."""
    if cuda:
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts it in KiB
