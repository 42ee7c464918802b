"""What the figures rest on, and where they end, in sentences with their numbers."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from trimtab.balance.deciding.search import Appraiser, Outcome, Training
from trimtab.balance.deciding.words import span_text
from trimtab.balance.model.transformer import (
    CROSS_ENTROPY_BACKWARD_BYTES,
    CROSS_ENTROPY_FORWARD_BYTES,
    FLASH_BACKWARD,
    KERNELS,
    OptimizerState,
)
from trimtab.simulation.compare import Comparison
from trimtab.simulation.needs import LEAST_STAGE_EFFICIENCY, MOST_BUBBLE, Need
from trimtab.wording import data_size

ONLY_PROPORTIONS = (
    "On CPUs only proportions of figures mean anything: how fast these are is assumed, how much they "
    "hold is not looked at."
)
_STATES = {
    OptimizerState.DEVICE: "weights bf16; gradients, main parameters and both moments fp32, all on the GPU",
    OptimizerState.HOST: "weights bf16 and gradients fp32 on the GPU; main parameters and both moments fp32 in the "
    "host's memory, where the optimizer takes its step: gradients go there and weights come back in every step, with "
    "nothing beside it",
    OptimizerState.BF16: "weights, gradients and both moments bf16 on the GPU, no main parameters: other numerics",
}


def _state(training: Training) -> str:
    return "weights, gradients and both moments fp32" if training.precision == "fp32" else _STATES[training.optimizer]


def assumptions(appraiser: Appraiser) -> list[str]:
    """All that what it works out takes for granted."""
    accelerator, training = appraiser.cluster.accelerator, appraiser.training
    share = accelerator.achievable
    speeds = ", ".join(f"stage {stage}: {speed:g}" for stage, speed in sorted(appraiser.speeds.items()))
    arithmetic, memory = "bf16", f"{accelerator.memory_bytes / 1e9:,.0f} GB ({data_size(accelerator.memory_bytes)})"
    if accelerator.only_proportions:  # a CPU: its memory is not counted, and it computes in fp32
        arithmetic, memory = "fp32", "memory"
    return [
        *([ONLY_PROPORTIONS.rstrip(".")] if accelerator.only_proportions else []),
        f"{accelerator.name}: {accelerator.flops_per_second / 1e12:,g} TFLOP/s in dense {arithmetic}, {memory} "
        f"at {accelerator.memory_bytes_per_second / 1e9:,.0f} GB/s, links of "
        f"{accelerator.peer_bytes_per_second / 1e9:,.0f} GB/s in a node and "
        f"{accelerator.network_bytes_per_second / 1e9:,.0f} GB/s between nodes, one way ({accelerator.source})",
        f"of these peaks, matrix products reach {share.matmul_ratio:.0%}, fused attention {share.attention_ratio:.0%}, "
        f"memory {share.memory_ratio:.0%}, links {share.link_ratio:.0%}: assumed, not measured",
        "a decoder of RMSNorm, rotary positions, grouped-query attention and SwiGLU, without biases, without dropout",
        f"fused causal attention: half of the scores are computed, the backward takes {FLASH_BACKWARD:g} forwards",
        "cross entropy in fp32, as Megatron-core has it without fusion: "
        f"{CROSS_ENTROPY_FORWARD_BYTES + CROSS_ENTROPY_BACKWARD_BYTES} bytes of memory traffic a logit",
        "each microbatch adds its gradients to the fp32 sums in a pass of its own",
        "tensor-parallel ranks exchange over the links in a node, or where their groups are split, over those between "
        f"nodes, {'with' if training.sequence_parallel else 'without'} sequence parallelism, and nothing hides it",
        f"optimizer state ({training.optimizer}): {_state(training)}; "
        f"{'shared by replicas' if training.distributed_optimizer else 'whole on each replica'}",
        "all sequences are full, and all GPUs equally fast" + (f", but {speeds} of that" if speeds else ""),
        f"a layer, or the head, launches {KERNELS} kernels in its forward and in each half of its backward, and takes "
        f"no less than {share.launch_seconds * 1e6:g} us for each",
        "a chunk takes nothing beside its layers: many small chunks look better than they are",
        "not counted as memory: what CUDA, NCCL and the allocator's fragments take, for which there are the 7 % that a "
        "GPU has beyond the gigabytes of its data sheet",
        "stage efficiency counts recomputed layers as work; utilization (MFU) does not",
        "fused attention, recomputed layers and optimizer state on the host are options of Megatron-core for which a "
        "job.toml has no key",
    ]


def fails_where(comparison: Comparison, needs: Sequence[Need], statics: Sequence[Outcome]) -> list[str]:
    """Where balanced stages with a small bubble are out of reach, and where the static plan is not what it seems."""
    return list(_fails(comparison, needs, statics))


def _fails(comparison: Comparison, needs: Sequence[Need], statics: Sequence[Outcome]) -> Iterator[str]:
    capacity = comparison.question.cluster.accelerator.memory_bytes
    for state in comparison.states:
        if state.device_bytes > capacity:
            yield (
                f"memory: with --optimizer {state.optimizer} a parameter takes {state.bytes_per_parameter:g} bytes, "
                f"{data_size(state.device_bytes)} of each GPU's {data_size(capacity)} before any activation"
            )
    for shape, those in groupby((need for need in needs if need.obstacle), key=lambda need: need.shape):
        reasons = "; ".join(f"{need.run}: {need.obstacle}" for need in those)
        yield f"{shape}: a stage efficiency of {LEAST_STAGE_EFFICIENCY:.0%} is out of reach: {reasons}"
    few = [one for one in statics if one.estimate.bubble_ratio >= MOST_BUBBLE]
    if few:
        said = ", ".join(
            f"{one.estimate.stage_efficiency_ratio:.0%} with {span_text(one.configuration.microbatches)}"
            for one in statics
        )
        yield f"microbatches: the static plan's stage efficiency is that of its batch: {said} microbatches"
    if comparison.chosen.overhead_seconds:
        share = comparison.chosen.overhead_seconds / comparison.chosen.estimate.step_seconds
        yield (
            f"beside the pipeline: {comparison.chosen.overhead_seconds:.2f} s of the chosen plan's step ({share:.0%}) "
            "are the optimizer's and the gradients', in which no stage computes; stage efficiency leaves them out"
        )
