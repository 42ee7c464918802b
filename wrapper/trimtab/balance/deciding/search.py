"""The search for a shape: tensor x pipeline x data, schedule, chunks, microbatches, by estimated time of a step. Pure.

Branch and bound. A configuration is first held against a bound that needs no layout, then gets its best layout and the
recomputation that this needs (`equal_layers`), is held against the bound of that layout, and is simulated only where it
could still be the best. Where the search begins is policy, where it ends is not: what is outside the starting points is
tried after them, and has only to be faster.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from trimtab.balance.deciding.words import span_text
from trimtab.balance.layouts.equal_layers import spread
from trimtab.balance.layouts.partition import NoLayout
from trimtab.balance.model.overhead import overhead_seconds
from trimtab.balance.model.placement import Cluster, Placement, place
from trimtab.balance.model.transformer import OptimizerState, Sizes, parameter_memory, transformer_costs
from trimtab.balance.pipeline.estimate import Estimate, chunk_costs, estimate
from trimtab.balance.pipeline.memory import stage_memory_bytes
from trimtab.balance.pipeline.schedules import SPLITTING
from trimtab.balance.plan import Costs, Floats, Hardware, ParameterMemory, Plan, Schedule
from trimtab.protocol import Balance, Layout, Shape, divisors, even_shares


@dataclass(frozen=True)
class Training:
    """What is trained, and what is kept of it."""

    sizes: Sizes
    global_batch_size: int
    """Sequences of one step."""
    precision: str = "bf16"
    optimizer: OptimizerState = OptimizerState.DEVICE
    distributed_optimizer: bool = True
    """Whether replicas share optimizer state (ZeRO-1)."""
    sequence_parallel: bool = True
    """Whether tensor-parallel ranks share norms and residual paths, where there are several."""


@dataclass(frozen=True)
class Space:
    """What may be chosen. Empty: whatever is possible."""

    tensor: tuple[int, ...] = ()
    pipeline: tuple[int, ...] = ()
    virtual: tuple[int, ...] = ()
    microbatch_size: tuple[int, ...] = ()
    schedules: tuple[Schedule, ...] = (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED)
    """By default those of Megatron-core."""


@dataclass(frozen=True)
class Configuration:
    """A plan but for its layout and what it recomputes."""

    shape: Shape
    schedule: Schedule
    virtual: int
    microbatch_size: int
    microbatches: tuple[int, ...]
    """[R] of each replica in one step."""

    def __str__(self) -> str:
        chunks = f" x {self.virtual}" if self.virtual > 1 else ""
        es = "" if max(self.microbatches) == 1 else "es"
        batch = f"{span_text(self.microbatches)} microbatch{es} of {self.microbatch_size}"
        return f"{self.shape}, {self.schedule}{chunks}, {batch}"


@dataclass(frozen=True)
class Outcome:
    """A configuration with a plan, and what it is estimated to bring."""

    configuration: Configuration
    plan: Plan
    estimate: Estimate
    memory_bytes: tuple[float, ...]
    """[S] the most that a rank holds, all activations of a layer that is being recomputed included."""
    fits: bool
    """Whether that is within the device's memory."""
    overhead_seconds: float
    """What of the step is beside the pipeline."""
    node_order: tuple[int, ...]
    """The node that takes each share of the ranks."""


@dataclass(frozen=True)
class Considered:
    """What became of a configuration."""

    configuration: Configuration
    verdict: str
    step_seconds: float | None = None
    """None: it did not come to an estimate, and the verdict says why."""


@dataclass(frozen=True)
class Search:
    """What was found."""

    best: Outcome | None
    """None where nothing fits."""
    considered: tuple[Considered, ...]
    """In the order in which they were tried."""


class Appraiser:
    """Estimates configurations of one training on one cluster."""

    def __init__(
        self,
        training: Training,
        cluster: Cluster,
        policy: Balance | None = None,
        speeds: Mapping[int, float] | None = None,
    ) -> None:
        """`speeds` are those of stages, of all replicas, that are not as fast as the others."""
        self.training, self.cluster = training, cluster
        self.policy = policy or Balance()
        self.speeds = speeds or {}
        self._costs: dict[tuple[int, int], Costs] = {}
        self._placements: dict[tuple[Shape, bool], Placement] = {}

    def costs(self, configuration: Configuration) -> Costs:
        """Of the parts, on a rank."""
        key = configuration.shape.tensor, configuration.microbatch_size
        if key not in self._costs:
            tensor, microbatch_size = key
            self._costs[key] = transformer_costs(
                self.training.sizes,
                self.cluster.accelerator,
                tensor=tensor,
                microbatch_size=microbatch_size,
                sequence_parallel=self.training.sequence_parallel and tensor > 1,
                precision=self.training.precision,
                across_nodes=self.cluster.splits(tensor),
            )
        return self._costs[key]

    def memory(self, shape: Shape) -> ParameterMemory:
        """Of a parameter, on a rank."""
        shards = shape.data if self.training.distributed_optimizer else 1
        return parameter_memory(self.training.precision, shards, self.training.optimizer)

    def placement(self, configuration: Configuration) -> Placement:
        """Where its ranks are."""
        key = configuration.shape, configuration.virtual > 1
        if key not in self._placements:
            self._placements[key] = place(self.cluster, *key, self.policy.slow_link_seconds)
        return self._placements[key]

    def hardware(self, configuration: Configuration) -> Hardware:
        """What it runs on, without overhead."""
        shape = configuration.shape
        speeds = [self.speeds.get(stage, 1.0) for stage in range(shape.pipeline)]
        return Hardware(
            speeds=np.tile(np.array(speeds), (shape.data, 1)),
            memory_bytes=(self.cluster.accelerator.memory_bytes,) * shape.pipeline,
            links=self.placement(configuration).links,
        )

    def overhead_seconds(self, configuration: Configuration, parameters: float) -> float:
        """Of a rank with so many parameters."""
        return overhead_seconds(
            self.cluster.accelerator,
            parameters=parameters,
            memory=self.memory(configuration.shape),
            optimizer=self.training.optimizer,
            replicas=configuration.shape.data,
            replica_link=self.placement(configuration).replica_link,
            precision=self.training.precision,
        )

    def split(self, configuration: Configuration) -> Plan:
        """The best plan of a configuration, which recomputes only what it must. Raises NoLayout where none fits."""
        shape, schedule = configuration.shape, configuration.schedule
        costs, memory, hardware = self.costs(configuration), self.memory(shape), self.hardware(configuration)
        self._check_parameters(configuration)
        layout, recomputed_layers = spread(
            costs,
            memory,
            hardware,
            schedule=schedule,
            stages=shape.pipeline,
            virtual=configuration.virtual,
            microbatches=max(configuration.microbatches),
        )
        return self.plan(configuration, layout, recomputed_layers)

    def _check_parameters(self, configuration: Configuration) -> None:
        """Refuse at once what cannot fit in any layout."""
        share = _parameters(self.costs(configuration)) / configuration.shape.pipeline
        needed, capacity = share * self.memory(configuration.shape).total_bytes, self.cluster.accelerator.memory_bytes
        if needed > capacity:
            raise NoLayout(
                f"weights, gradients and optimizer state alone take {needed / 2**30:,.1f} GiB of "
                f"{capacity / 2**30:,.1f} GiB a device; take more GPUs, or keep optimizer state elsewhere"
            )

    def plan(self, configuration: Configuration, layout: Layout, recomputed_layers: tuple[int, ...]) -> Plan:
        """A plan with a given layout."""
        return Plan(layout, configuration.schedule, configuration.microbatches, recomputed_layers)

    def appraise(self, configuration: Configuration, plan: Plan) -> Outcome:
        """Estimate a plan, whether it fits or not."""
        costs, memory, hardware = (
            self.costs(configuration),
            self.memory(configuration.shape),
            self.hardware(configuration),
        )
        overhead = self.overhead_seconds(configuration, self._most_parameters(configuration, plan))
        held = stage_memory_bytes(costs, memory, plan)
        return Outcome(
            configuration=configuration,
            plan=plan,
            estimate=estimate(costs, memory, plan, replace(hardware, overhead_seconds=overhead)),
            memory_bytes=held,
            fits=max(held) <= self.cluster.accelerator.memory_bytes,
            overhead_seconds=overhead,
            node_order=self.placement(configuration).order,
        )

    def least_seconds(self, configuration: Configuration) -> float:
        """No layout is faster: all stages work all the time, at their speeds, and nothing is recomputed."""
        costs, shape = self.costs(configuration), configuration.shape
        parts = (costs.embedding, *costs.layers, costs.head)
        speed = self.hardware(configuration).speeds[0].sum()
        pipeline = max(configuration.microbatches) * sum(part.compute_seconds for part in parts) / speed
        return float(pipeline + self.overhead_seconds(configuration, _parameters(costs) / shape.pipeline))

    def likely_seconds(self, configuration: Configuration) -> float:
        """Likewise, with the fill and drain of equal stages (Narayanan et al. 2021, section 2.2)."""
        stages, turns = configuration.shape.pipeline, max(configuration.microbatches) * configuration.virtual
        return self.least_seconds(configuration) * (1 + (stages - 1) / turns)

    def least_plan_seconds(self, configuration: Configuration, plan: Plan) -> float:
        """No step is faster with this plan.

        A stage begins when its first microbatch has come down to it, works on all of them without a pause, and what it
        does last has to go up from it, where that is a backward: split, its input half may be over long before.
        """
        chunks = chunk_costs(self.costs(configuration), plan)
        backward = chunks.backward_input_seconds + chunks.backward_weight_seconds
        ways = chunks.forward_seconds + (0 if plan.schedule in SPLITTING else backward)
        stages, speeds = plan.layout.stages, self.hardware(configuration).speeds[0]
        reach = np.concatenate([[0.0], np.cumsum(ways[: stages - 1] / speeds[:-1])])
        pipeline = (reach + max(configuration.microbatches) * self._stage_seconds(configuration, plan)).max()
        return float(pipeline + self.overhead_seconds(configuration, self._most_parameters(configuration, plan)))

    def balance_ratio(self, configuration: Configuration, plan: Plan) -> float:
        """Mean compute of the stages over that of the slowest: it does not depend on the schedule."""
        seconds = self._stage_seconds(configuration, plan)
        return float(seconds.mean() / seconds.max())

    def _stage_seconds(self, configuration: Configuration, plan: Plan) -> Floats:
        """[S] compute of one microbatch over all chunks of a stage, at its speed."""
        chunks = chunk_costs(self.costs(configuration), plan)
        seconds = chunks.forward_seconds + chunks.backward_input_seconds + chunks.backward_weight_seconds
        works: Floats = seconds.reshape(-1, plan.layout.stages).sum(axis=0) / self.hardware(configuration).speeds[0]
        return works

    def _most_parameters(self, configuration: Configuration, plan: Plan) -> float:
        """Of the rank that has the most."""
        parameters = chunk_costs(self.costs(configuration), plan).parameters
        return float(parameters.reshape(-1, plan.layout.stages).sum(axis=0).max())


def search(appraiser: Appraiser, space: Space | None = None) -> Search:
    """The fastest configuration that fits, with the best layout for it."""
    policy, best, considered = appraiser.policy, None, []
    configurations = sorted(
        configurations_of(appraiser.training, appraiser.cluster, space or Space()),
        key=lambda one: (not _is_starting_point(one, policy), appraiser.likely_seconds(one)),
    )
    for configuration in configurations:
        tried, verdict = _try(appraiser, configuration, best.estimate.step_seconds if best else math.inf)
        considered.append(Considered(configuration, verdict, tried.estimate.step_seconds if tried else None))
        if tried and (best is None or tried.estimate.step_seconds < best.estimate.step_seconds):
            best = tried
    return Search(best, tuple(considered))


def _try(appraiser: Appraiser, configuration: Configuration, limit_seconds: float) -> tuple[Outcome | None, str]:
    """What a configuration brings, and the verdict; None where it fits nowhere or cannot be below the limit."""
    least = appraiser.least_seconds(configuration)
    if least >= limit_seconds:
        return None, f"not below {least:.3f} s, whatever the layout"
    try:
        plan = appraiser.split(configuration)
    except NoLayout as reason:
        return None, str(reason)
    least = appraiser.least_plan_seconds(configuration, plan)
    if least >= limit_seconds:
        return None, f"not below {least:.3f} s with its best layout"
    outcome = appraiser.appraise(configuration, plan)
    return outcome, f"{outcome.estimate.step_seconds:.3f} s"


def configurations_of(training: Training, cluster: Cluster, space: Space) -> Iterator[Configuration]:
    """All that can run: every GPU is used, tensor-parallel ranks share a node, shares are as equal as can be."""
    sizes = [size for size in divisors(training.global_batch_size) if _allows(space.microbatch_size, size)]
    for shape, microbatch_size, schedule in product(_shapes(training.sizes, cluster, space), sizes, space.schedules):
        try:
            microbatches = even_shares(
                training.global_batch_size // microbatch_size,
                shape.data,
                schedule.microbatch_multiple(shape.pipeline),
            )
        except ValueError:  # too few, or no whole groups
            continue
        for virtual in _virtuals(training.sizes.layers, shape.pipeline, schedule, space.virtual):
            yield Configuration(shape, schedule, virtual, microbatch_size, microbatches)


def _shapes(sizes: Sizes, cluster: Cluster, space: Space) -> Iterator[Shape]:
    for tensor in divisors(math.gcd(sizes.attention_heads, sizes.query_groups, sizes.ffn_hidden_size, cluster.gpus)):
        for pipeline in divisors(cluster.gpus // tensor):
            possible = not cluster.splits(tensor) and pipeline <= sizes.layers
            if possible and _allows(space.tensor, tensor) and _allows(space.pipeline, pipeline):
                yield Shape(tensor, pipeline, cluster.gpus // tensor // pipeline)


def _virtuals(layers: int, stages: int, schedule: Schedule, asked: tuple[int, ...]) -> list[int]:
    """Chunks a stage; of those not asked for 2, 3, 4 and 8, and what gives all chunks equally many layers."""
    if schedule is not Schedule.INTERLEAVED:
        return [1] if _allows(asked, 1) else []
    if stages == 1:
        return []
    possible = range(2, layers // stages + 1)
    return [n for n in possible if n in asked or (not asked and (n in (2, 3, 4, 8) or layers % (stages * n) == 0))]


def _is_starting_point(configuration: Configuration, policy: Balance) -> bool:
    return (
        policy.least_stages <= configuration.shape.pipeline <= policy.most_stages
        and policy.least_microbatches <= max(configuration.microbatches) <= policy.most_microbatches
    )


def _parameters(costs: Costs) -> float:
    """Of the whole model, on one tensor-parallel rank."""
    return sum(part.parameters for part in (costs.embedding, *costs.layers, costs.head))


def _allows(choices: tuple[int, ...], value: int) -> bool:
    return not choices or value in choices
