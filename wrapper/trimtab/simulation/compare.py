"""The plan as usual beside the best one, and what each way of keeping optimizer state would need."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from trimtab.balance.deciding.search import (
    Appraiser,
    Configuration,
    Outcome,
    Search,
    Space,
    Training,
    configurations_of,
    search,
)
from trimtab.balance.model.placement import Cluster
from trimtab.balance.model.transformer import OptimizerState, Sizes, parameter_memory
from trimtab.balance.plan import Schedule
from trimtab.protocol import Balance, Layout
from trimtab.wording import data_size


class NoPlan(ValueError):
    """Nothing can be simulated: says why, and the way out."""


@dataclass(frozen=True)
class Question:
    """What is to be simulated."""

    sizes: Sizes
    cluster: Cluster
    global_batch_size: int
    optimizer: OptimizerState | None = None
    """None: on the device, or where no plan fits then, on the host."""
    space: Space = field(default_factory=Space)
    speeds: Mapping[int, float] = field(default_factory=dict)
    """Of stages that are not as fast as the others."""
    policy: Balance = field(default_factory=Balance)


@dataclass(frozen=True)
class StateNeed:
    """What one way of keeping optimizer state takes, in the shape that takes least: every GPU another share."""

    optimizer: OptimizerState
    bytes_per_parameter: float
    """On the device."""
    device_bytes: float
    """Of each GPU: weights, gradients and state, no activations."""
    host_bytes: float
    """Of all hosts together."""
    fits: bool | None
    """Whether a plan was found; None: none was looked for."""


@dataclass(frozen=True)
class Comparison:
    """The answer."""

    question: Question
    appraiser: Appraiser
    """With the optimizer state that was taken."""
    states: tuple[StateNeed, ...]
    static: Outcome
    """Equal layers, 1F1B, one chunk a stage, one sequence a microbatch, as many stages as policy begins with."""
    chosen: Outcome
    """The fastest of all."""
    other: Outcome | None
    """The fastest without a pipeline where the chosen plan has one, else the fastest with one; None: there is none."""
    search: Search

    @property
    def training(self) -> Training:
        """What both plans train."""
        return self.appraiser.training

    def tokens_per_second(self, outcome: Outcome) -> float:
        """Of all GPUs together."""
        tokens = self.training.global_batch_size * self.training.sizes.sequence_length
        return tokens / outcome.estimate.step_seconds

    def utilization_ratio(self, outcome: Outcome) -> float | None:
        """Model FLOPs utilization: of the peak of all GPUs, nothing recomputed counted (Chowdhery et al. 2022, B).

        None where the peak is not known."""
        cluster = self.question.cluster
        if cluster.accelerator.only_proportions:
            return None
        flops = self.tokens_per_second(outcome) * self.training.sizes.model_flops_per_token
        return flops / (cluster.gpus * cluster.accelerator.flops_per_second)


def compare(question: Question) -> Comparison:
    """Work out both plans. Raises NoPlan where nothing is possible, or nothing fits."""
    _check(question)
    tried: dict[OptimizerState, Search] = {}
    for optimizer in [question.optimizer] if question.optimizer else [OptimizerState.DEVICE, OptimizerState.HOST]:
        training = Training(question.sizes, question.global_batch_size, optimizer=optimizer)
        appraiser = Appraiser(training, question.cluster, question.policy, question.speeds)
        found = tried[optimizer] = search(appraiser, question.space)
        if found.best:
            break
    states = tuple(_state_need(question, state, tried.get(state)) for state in OptimizerState)
    if not found.best:
        raise NoPlan(_why_none(question, states))
    pipelined = found.best.configuration.shape.pipeline > 1
    others = tuple(stages for stages in _pipelines(question) if (stages == 1) is pipelined)
    other = search(appraiser, replace(question.space, pipeline=others)).best if others else None
    return Comparison(
        question=question,
        appraiser=appraiser,
        states=states,
        static=static_plan(appraiser, question.space),
        chosen=found.best,
        other=other,
        search=found,
    )


def static_plan(appraiser: Appraiser, space: Space) -> Outcome:
    """The plan as usual, with the fewest tensor-parallel ranks with which it fits; if with none, with the most.

    Replicas have equal shares of the microbatches if they can. It recomputes no layer, or if it must, all.
    """
    usual = Space(
        tensor=space.tensor,
        pipeline=space.pipeline,
        microbatch_size=space.microbatch_size or (1,),
        schedules=(Schedule.ONE_F_ONE_B,),
    )
    possible = list(configurations_of(appraiser.training, appraiser.cluster, usual))
    equal = [one for one in possible if len(set(one.microbatches)) == 1] or possible
    within = [one for one in equal if one.shape.pipeline <= appraiser.policy.most_stages] or equal
    stages = max(one.shape.pipeline for one in within)
    layout = Layout.uniform(appraiser.training.sizes.layers, stages)
    for configuration in (one for one in within if one.shape.pipeline == stages):
        for recomputed_layers in ((0,) * stages, layout.layers):
            plan = appraiser.plan(configuration, layout, recomputed_layers)
            outcome = appraiser.appraise(configuration, plan)
            if outcome.fits:
                return outcome
    return outcome


def _pipelines(question: Question) -> list[int]:
    """The numbers of stages that a search may have."""
    gpus = question.cluster.gpus
    return [n for n in question.space.pipeline or range(1, gpus + 1) if gpus % n == 0]


def _state_need(question: Question, optimizer: OptimizerState, found: Search | None) -> StateNeed:
    kept = parameter_memory("bf16", optimizer=optimizer)
    host = parameter_memory("bf16").optimizer_bytes if optimizer is OptimizerState.HOST else 0.0
    parameters = question.sizes.parameters
    return StateNeed(
        optimizer=optimizer,
        bytes_per_parameter=kept.total_bytes,
        device_bytes=kept.total_bytes * parameters / question.cluster.gpus,
        host_bytes=host * parameters,
        fits=None if found is None else found.best is not None,
    )


def _check(question: Question) -> None:
    """Refuse what no configuration has, by the first wish that cannot be met."""
    training = Training(question.sizes, question.global_batch_size)
    cluster, asked = question.cluster, question.space
    space = Space(schedules=asked.schedules)
    possible = list(configurations_of(training, cluster, space))
    if not possible:
        raise NoPlan(
            f"{cluster.gpus} GPUs and {question.global_batch_size} sequences cannot be shared out: the interleaved "
            "schedule takes two stages or more, and for each replica a multiple of as many microbatches"
        )
    for name, value in _PINS.items():
        if wanted := getattr(asked, name):
            space = replace(space, **{name: wanted})
            before, possible = possible, list(configurations_of(training, cluster, space))
            if not possible:
                choices = ", ".join(map(str, sorted({value(one) for one in before})))
                raise NoPlan(
                    f"{name} {', '.join(map(str, wanted))}: {question.sizes.layers} layers and "
                    f"{question.global_batch_size} sequences cannot be shared out so over {cluster.gpus} GPUs, "
                    f"{cluster.gpus_per_node} a node; choose from: {choices}"
                )


_PINS: Mapping[str, Callable[[Configuration], int]] = {
    "tensor": lambda one: one.shape.tensor,
    "pipeline": lambda one: one.shape.pipeline,
    "virtual": lambda one: one.virtual,
    "microbatch_size": lambda one: one.microbatch_size,
}
"""What can be asked of a configuration."""


def _why_none(question: Question, states: tuple[StateNeed, ...]) -> str:
    cluster = question.cluster
    needs = ", ".join(f"{need.optimizer} {data_size(need.device_bytes)}" for need in states)
    return (
        f"nothing fits into the {data_size(cluster.accelerator.memory_bytes)} of each of {cluster.gpus} GPUs: "
        f"weights, gradients and optimizer state alone take at least, by where that state is kept: {needs}; take more "
        "GPUs, GPUs with more memory, or another --optimizer"
    )
