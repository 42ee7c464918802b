"""Megatron-core's optimizer and schedule, as the job sets them: AdamW, linear warm-up, then a cosine."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig

from trimtab.protocol import Job

INITIAL_LOSS_SCALE = 2.0**14
"""Of fp16. Megatron-core's 2^32 is for the smallest of gradients: it costs the first 18 steps to come down from it."""
LEAST_LOSS_SCALE = 1.0
"""Gradients that overflow at it do so by themselves."""


def build_optimizer(job: Job, config: TransformerConfig, chunks: Sequence[DistributedDataParallel]) -> Any:
    """The optimizer of the chunks, plain or distributed. Weight decay spares vectors (norms and biases)."""
    train = job.train
    optimizer: MegatronOptimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=train.learning_rate,
            min_lr=train.minimum_learning_rate,
            weight_decay=train.weight_decay,
            adam_beta1=train.adam_beta1,
            adam_beta2=train.adam_beta2,
            adam_eps=train.adam_epsilon,
            clip_grad=train.clip_gradient_norm or math.inf,  # with 0 Megatron-core would not even take the norm
            bf16=config.bf16,
            fp16=config.fp16,
            initial_loss_scale=INITIAL_LOSS_SCALE,
            min_loss_scale=LEAST_LOSS_SCALE,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=job.parallel.distributed_optimizer,
        ),
        list(chunks),
    )
    config.grad_scale_func = optimizer.scale_loss
    return optimizer


def build_schedule(job: Job, optimizer: Any) -> Any:
    """The learning rate of each step; call `step(1)` before the optimizer takes its step.

    Step k of the warm-up takes k / warmup_steps of the peak, and the last step of the run the minimum.
    """
    train = job.train
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=train.learning_rate,
        min_lr=train.minimum_learning_rate,
        lr_warmup_steps=train.warmup_steps,
        lr_decay_steps=train.steps,
        lr_decay_style="cosine",
        start_wd=train.weight_decay,
        end_wd=train.weight_decay,
        wd_incr_steps=train.steps,
        wd_incr_style="constant",
        override_opt_param_scheduler=True,
        use_checkpoint_opt_param_scheduler=False,
    )


def learning_rate(optimizer: Any) -> float:
    """The rate that the next step is taken with."""
    return float(optimizer.param_groups[0]["lr"])


def inner_optimizers(optimizer: Any) -> list[Any]:
    """The Megatron-core optimizers inside a chained one."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def give_each_parameter_state(optimizer: torch.optim.Optimizer) -> None:
    """AdamW's state as it is before the first step, for parameters that have none yet."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter.data),
                    "exp_avg_sq": torch.zeros_like(parameter.data),
                }
