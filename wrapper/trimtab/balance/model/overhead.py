"""What a step takes beside its pipeline: replicas add up their gradients, the optimizer takes its step. Pure.

Nothing of it is taken to overlap with the pipeline, which is what the ranks do.
"""

from trimtab.balance.model.accelerators import Accelerator
from trimtab.balance.model.transformer import OptimizerState, parameter_memory
from trimtab.balance.plan import Link, ParameterMemory


def overhead_seconds(
    accelerator: Accelerator,
    *,
    parameters: float,
    memory: ParameterMemory,
    optimizer: OptimizerState,
    replicas: int,
    replica_link: Link,
    precision: str = "bf16",
) -> float:
    """For a rank with `parameters`, whose gradients `replicas` ranks add up in a ring over `replica_link`."""
    reduced = _reduce_seconds(memory, replicas, replica_link, parameters)
    if optimizer is OptimizerState.HOST:
        return reduced + _host_seconds(accelerator, parameters, memory, parameter_memory(precision))
    # Gradients are read for the norm and for the step, weights and state are read and written.
    traffic = 2 * (memory.weight_bytes + memory.gradient_bytes + memory.optimizer_bytes) * parameters / memory.shards
    return reduced + traffic / (accelerator.memory_bytes_per_second * accelerator.achievable.memory_ratio)


def _reduce_seconds(memory: ParameterMemory, replicas: int, link: Link, parameters: float) -> float:
    """Reduce-scatter and all-gather of the gradients; with sharded state, of gradients and of weights."""
    if replicas == 1:
        return 0.0
    gathered_bytes = memory.gradient_bytes if memory.shards == 1 else memory.weight_bytes
    size_bytes = (memory.gradient_bytes + gathered_bytes) * parameters
    hops = replicas - 1
    return 2 * hops * link.latency_seconds + hops / replicas * size_bytes / link.bytes_per_second


def _host_seconds(
    accelerator: Accelerator, parameters: float, memory: ParameterMemory, kept_on_host: ParameterMemory
) -> float:
    """Gradients to the host, the step there, weights back, one after another; Adam is bound by the host's memory.

    Ren et al. 2021 (ZeRO-Offload), section 4.1, without its delayed update.
    """
    share = accelerator.achievable
    crossing = (memory.gradient_bytes + memory.weight_bytes) * parameters / memory.shards
    traffic = (
        (memory.gradient_bytes + 2 * kept_on_host.optimizer_bytes + memory.weight_bytes) * parameters / memory.shards
    )
    return crossing / (accelerator.host_bytes_per_second * share.link_ratio) + traffic / (
        accelerator.host_memory_bytes_per_second * share.memory_ratio
    )
