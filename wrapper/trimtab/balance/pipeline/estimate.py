"""What a plan would bring: costs, plan and hardware, put through the simulation. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter

import numpy as np

from trimtab.balance.pipeline.memory import transient_bytes
from trimtab.balance.pipeline.simulate import Simulation, simulate
from trimtab.balance.plan import Costs, Floats, Hardware, ParameterMemory, Part, Plan


@dataclass(frozen=True)
class Estimate:
    """One step under a plan."""

    step_seconds: float
    """What the pipelines take, and what a step takes beside them."""
    stage_seconds: Floats
    """[R, S] compute of each stage in the step."""
    balance_ratio: float
    """Mean compute of all stages over that of the slowest."""
    bubble_ratio: float
    """Share of the pipelines' duration in which the slowest stage is idle: it fills, drains or waits."""
    peak_memory_bytes: Floats
    """[S] the most that a rank holds: weights, gradients, optimizer state, activations."""
    fits: bool
    """Whether that is within the memory of each stage."""
    simulations: tuple[Simulation, ...]
    """[R] equal replicas share one."""

    @property
    def stage_efficiency_ratio(self) -> float:
        """Mean compute of all stages over the pipelines' duration: balance_ratio x (1 - bubble_ratio)."""
        return self.balance_ratio * (1 - self.bubble_ratio)


@dataclass(frozen=True)
class ChunkCosts:
    """What each chunk costs for one microbatch on a device of speed 1: [C] each."""

    forward_seconds: Floats
    backward_input_seconds: Floats
    backward_weight_seconds: Floats
    parameters: Floats
    activation_bytes: Floats


_COSTS = tuple(attrgetter(field.name) for field in fields(ChunkCosts))
"""Each is also one of a `Part`."""


def recomputed(part: Part) -> Part:
    """A part that keeps its input alone: its forward runs again before either half of its backward."""
    return replace(
        part,
        backward_input_seconds=part.forward_seconds + part.backward_input_seconds,
        activation_bytes=part.recomputed_bytes,
    )


def chunk_costs(costs: Costs, plan: Plan) -> ChunkCosts:
    """The costs of the parts, summed over each chunk of a plan."""
    layers = list(costs.layers)
    for stage, count in enumerate(plan.recomputed_layers):
        for layer in plan.layout.stage_layers(stage)[:count]:
            layers[layer] = recomputed(layers[layer])
    costs = replace(costs, layers=tuple(layers))
    chunks = [costs.chunk(plan.layout, chunk) for chunk in range(plan.layout.chunks)]
    return ChunkCosts(*(np.array([sum(map(cost, parts)) for parts in chunks], dtype=np.float64) for cost in _COSTS))


def estimate(costs: Costs, memory: ParameterMemory, plan: Plan, hardware: Hardware) -> Estimate:
    """Simulate a step of each replica.

    Raises ValueError where the plan's schedule cannot run in its shape, or where plan and hardware differ in shape.
    """
    stages, replicas = plan.layout.stages, len(plan.microbatches)
    if hardware.speeds.shape != (replicas, stages):
        raise ValueError(f"speeds of {hardware.speeds.shape} for a plan of {replicas} replicas x {stages} stages")
    simulations = _simulate_replicas(costs, memory, plan, hardware)
    seconds = np.array([simulation.busy_seconds for simulation in simulations])
    longest = together_seconds([simulation.duration_seconds for simulation in simulations], seconds, hardware)
    peak = np.max([simulation.peak_bytes for simulation in simulations], axis=0)
    return Estimate(
        step_seconds=longest + hardware.overhead_seconds,
        stage_seconds=seconds,
        balance_ratio=float(seconds.mean() / seconds.max()),
        bubble_ratio=max(0.0, float(1 - seconds.max() / longest)),  # below 0 it is rounding
        peak_memory_bytes=peak,
        fits=bool((peak <= hardware.memory_bytes).all()),
        simulations=simulations,
    )


def _simulate_replicas(costs: Costs, memory: ParameterMemory, plan: Plan, hardware: Hardware) -> tuple[Simulation, ...]:
    stages, chunks = plan.layout.stages, chunk_costs(costs, plan)
    parameters = chunks.parameters.reshape(-1, stages).sum(axis=0)
    static_bytes = parameters * memory.total_bytes + transient_bytes(costs, plan)
    simulations: dict[tuple[float, ...], Simulation] = {}
    kinds = [(microbatches, *speeds) for microbatches, speeds in zip(plan.microbatches, hardware.speeds, strict=True)]
    for microbatches, *speeds in dict.fromkeys(kinds):
        # [C, 1]: chunks take turns on the stages.
        slowness = np.tile(1 / np.array(speeds), plan.layout.virtual)[:, None]
        simulations[microbatches, *speeds] = simulate(
            plan.schedule,
            stages,
            np.repeat(chunks.forward_seconds[:, None] * slowness, microbatches, axis=1),
            chunks.backward_input_seconds[:, None] * slowness,
            chunks.backward_weight_seconds[:, None] * slowness,
            links=hardware.links,
            boundary_bytes=costs.boundary_bytes,
            activation_bytes=chunks.activation_bytes,
            static_bytes=static_bytes,
        )
    return tuple(simulations[kind] for kind in kinds)


def together_seconds(pipeline_seconds: Sequence[float] | Floats, stage_seconds: Floats, hardware: Hardware) -> float:
    """How long the pipelines of all replicas take, which meet at the end of a step.

    That is the longest of them, where each rank has a device of its own. Where ranks share cores it is no less than all
    compute [R, S] over what the cores do at once; exact where a single stage keeps them busy.
    """
    return max(*pipeline_seconds, float(stage_seconds.sum()) / hardware.stages_at_once)
