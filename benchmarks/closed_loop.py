"""A run under the controller's hand, made up: pipelines as `balance.simulate` has them, noise as it is drawn here.

    .venv/bin/python benchmarks/closed_loop.py [--seeds 20]

Ranks that obey stand in for hardware: they take steps, tell what these took, are probed, and reshape. What is wrong
with them is given, so that what the controller makes of it can be held against the best that could be done. Prints a
line for each case; asserts nothing.
"""

import argparse
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from trimtab.account import Account, OrderRecord, RunIdentity
from trimtab.balance.measuring.steps import Step
from trimtab.balance.pipeline.estimate import chunk_costs, estimate
from trimtab.balance.pipeline.replay import Replays
from trimtab.balance.plan import Costs, Floats, Hardware, ParameterMemory, Part, Plan, Schedule
from trimtab.protocol import (
    Balance,
    Batch,
    Hello,
    Job,
    Layout,
    Message,
    Model,
    Order,
    Parallel,
    Probe,
    Reshaped,
    Setting,
    Shape,
    StepReport,
    Train,
    job_to_json,
    setting_of,
)
from trimtab.trimming.advising import advise
from trimtab.trimming.surroundings import Advice, Restart, Surroundings
from trimtab.trimming.trimmer import Sight, Trimmer
from trimtab.watching import Assembly

LAYER_SECONDS = 0.03
"""Forward and backward of one microbatch."""
START_SECONDS = 1.8e9
ONE, TWO, FOUR = Shape(1, 2, 1), Shape(1, 2, 2), Shape(1, 2, 4)
"""Two stages, of one replica, of two and of four."""
MEMORY = ParameterMemory(4.0, 4.0, 8.0)


@dataclass(frozen=True)
class World:
    """What is under a run: the truth that the controller does not know."""

    layers: int = 8
    shape: Shape = ONE
    microbatches: int = 8
    """Of each replica."""
    layer_seconds: float = LAYER_SECONDS
    embedding_layers: float = 0.1
    """What the embedding costs, in layers; likewise the head."""
    head_layers: float = 0.6
    overhead_seconds: float = 0.05
    speeds: Callable[[int], Floats] | None = None
    """Of the places, [R, S], in a step; by default 1."""
    loads: Callable[[int, np.random.Generator], Floats] | None = None
    """Tokens of each replica's microbatches in a step, [R], over the usual; by default 1."""
    noise_ratio: float = 0.02
    """Of a place in a step, normal."""
    correlation: float = 0.0
    """Of that with the step before: first order."""
    together_ratio: float = 0.0
    """Of all places of a step alike."""
    outlier_ratio: float = 0.0
    """How often a place takes `outlier_times` as long in a step."""
    outlier_times: float = 5.0
    probe_noise_ratio: float = 0.02
    policy: Balance = field(default_factory=Balance)
    ranks_per_node: int = 1
    spare_nodes: int = 0
    fixed_nodes: str = ""
    no_restart: str = ""
    restart_seconds: float | None = None
    """As measured; None: not."""
    steps: int = 300

    @property
    def job(self) -> Job:
        """What the run was submitted as."""
        tensor, pipeline, data = self.shape.tensor, self.shape.pipeline, self.shape.data
        return Job(
            model=Model(layers=self.layers),
            parallel=Parallel(tensor=tensor, pipeline=pipeline),
            batch=Batch(microbatch_size=2, global_batch_size=2 * self.microbatches * data),
            train=Train(steps=self.steps),
            balance=self.policy,
        )

    @property
    def setting(self) -> Setting:
        """What it begins with."""
        return setting_of(self.job, self.shape)

    @property
    def costs(self) -> Costs:
        """Of the parts; a third is forward."""

        def part(layers: float) -> Part:
            seconds = layers * self.layer_seconds
            return Part(seconds / 3, seconds / 3, seconds / 3, 1e6 * layers, 0.0, 0.0)

        return Costs((part(1.0),) * self.layers, part(self.embedding_layers), part(self.head_layers), 0.0)

    def node(self, place: tuple[int, int]) -> str:
        """Of a place: nodes are filled with the replicas of a stage first, as Megatron-core counts ranks."""
        replica, stage = place
        return f"n{(stage * self.shape.data + replica) // self.ranks_per_node + 1}"

    def speeds_in(self, step: int) -> Floats:
        """[R, S]"""
        return np.ones((self.shape.data, self.shape.pipeline)) if self.speeds is None else self.speeds(step)

    def loads_in(self, step: int, random: np.random.Generator) -> Floats:
        """[R]"""
        return np.ones(self.shape.data) if self.loads is None else self.loads(step, random)

    def step_seconds(self, setting: Setting, step: int) -> float:
        """Without noise."""
        shape = self.shape
        hardware = Hardware(self.speeds_in(step), (math.inf,) * shape.pipeline, (), self.overhead_seconds)
        return estimate(self.costs, MEMORY, plan_of(setting), hardware).step_seconds

    def best_seconds(self, step: int) -> float:
        """Of all layouts and shares of the microbatches, which may be tried where both are few."""
        shape = self.shape
        layouts = [
            Layout(layers, shape.pipeline)
            for layers in itertools.product(range(1, self.layers), repeat=shape.pipeline)
            if sum(layers) == self.layers
        ]
        total = self.microbatches * shape.data
        shares = (
            [counts for counts in itertools.product(range(1, total), repeat=shape.data) if sum(counts) == total]
            if shape.data > 1
            else [(total,)]
        )
        settings = (
            replace(self.setting, layout=layout, microbatches=counts) for layout in layouts for counts in shares
        )
        return min(self.step_seconds(setting, step) for setting in settings)


def plan_of(setting: Setting) -> Plan:
    """1F1B."""
    return Plan(setting.layout, Schedule.ONE_F_ONE_B, setting.microbatches, setting.recomputed_layers)


@dataclass(frozen=True)
class Ran:
    """What came of a run."""

    world: World
    settings: tuple[tuple[int, Setting], ...]
    """With the first step under each."""
    records: tuple[OrderRecord, ...]
    """Of orders, as they ended."""
    advices: tuple[Advice, ...]
    restart: Restart | None
    """What ended it before its last step."""
    last_step: int
    events: tuple[str, ...]

    @property
    def orders(self) -> tuple[str, ...]:
        """Kinds, in turn."""
        return tuple(record.kind for record in self.records)

    @property
    def efficiency_ratio(self) -> float:
        """The best step, by simulation, over the one that it ended with."""
        _, setting = self.settings[-1]
        return self.world.best_seconds(self.last_step) / self.world.step_seconds(setting, self.last_step)


class Ranks:
    """Fake ranks of one tensor-parallel rank each: a place is a rank."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.setting = world, world.setting
        self.now_seconds = START_SECONDS
        self._random = np.random.default_rng(seed)
        self._loads = np.array([world.loads_in(step, self._random) for step in range(world.steps)])  # [T, R]
        speeds = np.array([world.speeds_in(step) for step in range(1, world.steps + 1)])
        self._slowness = self._noise(speeds.shape) * self._loads[..., None] / speeds  # [T, R, S]
        self._set(self.setting)

    @property
    def places(self) -> list[tuple[int, int]]:
        """(replica, stage) of each rank."""
        return list(np.ndindex(self.world.shape.data, self.world.shape.pipeline))

    def hellos(self) -> Iterator[Hello]:
        """Of every rank."""
        for rank, (replica, stage) in enumerate(self.places):
            layers = self.setting.layout.stage_layers(stage)
            yield Hello("", rank, self.world.node((replica, stage)), 0, 1, 0, stage, replica, layers, 1, "")

    def take(self, step: int) -> Iterator[StepReport]:
        """A step, and what each rank tells of it."""
        duration_seconds = float(self._durations[step - 1])
        self.now_seconds += duration_seconds
        for rank, (replica, stage) in enumerate(self.places):
            count = self.setting.microbatches[replica]
            tokens = round(256 * count * float(self._loads[step - 1, replica]))
            yield StepReport(
                rank=rank,
                step=step,
                time_seconds=self.now_seconds,
                duration_seconds=duration_seconds,
                forward_seconds=count * float(self._forward[step - 1, replica, stage]),
                backward_seconds=count * float(self._backward[step - 1, replica, stage]),
                microbatches=count,
                tokens=tokens,
                squared_lengths=128 * tokens,
                peak_memory_bytes=1 << 30,
            )

    def _set(self, setting: Setting) -> None:
        """What all steps would take under a setting."""
        self.setting, stages = setting, self.world.shape.pipeline
        chunks = chunk_costs(self.world.costs, plan_of(setting))
        backward_seconds = chunks.backward_input_seconds + chunks.backward_weight_seconds
        self._forward, self._backward = self._slowness * chunks.forward_seconds, self._slowness * backward_seconds
        replays = Replays(Schedule.ONE_F_ONE_B, stages, stages, setting.microbatches)
        pipelines = replays.duration_seconds(self._forward[..., None], self._backward[..., None], np.zeros(stages))
        self._durations = pipelines.max(axis=1) + self.world.overhead_seconds

    def _noise(self, shape: tuple[int, ...]) -> Floats:
        """[T, R, S] times as long as without."""
        world, random = self.world, self._random
        logs = random.normal(0.0, world.noise_ratio, shape)
        for before, now in itertools.pairwise(logs):
            now *= math.sqrt(1 - world.correlation**2)
            now += world.correlation * before
        together = random.normal(0.0, world.together_ratio, (shape[0], 1, 1))
        outliers = np.where(random.random(shape) < world.outlier_ratio, world.outlier_times, 1.0)
        return np.exp(logs + together) * outliers

    def probe(self, step: int) -> Iterator[Probe]:
        """What each rank took for the same product."""
        speeds = self.world.speeds_in(step)
        for rank, place in enumerate(self.places):
            noise = float(np.exp(self._random.normal(0.0, self.world.probe_noise_ratio)))
            yield Probe(rank, step, 0.01 / float(speeds[place]) * noise)

    def obey(self, order: Order, step: int) -> Reshaped:
        """Reshape after `step`."""
        assert order.setting is not None
        refused = "" if order.replaces == self.setting.fingerprint else "another setting runs"
        refused = refused or order.setting.obstacle(self.world.job, self.world.shape)
        if not refused:
            self._set(order.setting)
            self.now_seconds += 0.5
        return Reshaped(0, step, self.setting, refused, 0.5, 10_000_000, 10_000_000)


def run(world: World, seed: int = 1) -> Ran:
    """Train under the controller, to the last step or to a restart."""
    loop = _Loop(world, seed)
    for step in range(1, world.steps + 1):
        if loop.restart:
            break
        loop.take(step)
    return loop.ran()


class _Loop:
    """What `trimtab run` does: ranks are heard by the account and the trimmer, whose orders go to the ranks."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.ranks = world, Ranks(world, seed)
        shape, job = world.shape, world.job
        names = tuple(dict.fromkeys(hello.node for hello in self.ranks.hellos()))
        identity = RunIdentity(
            "made-up", 1, "ada", 0, START_SECONDS, names, job_to_json(job), shape.tensor, shape.pipeline, shape.data
        )
        self.account, self.trimmer = Account(identity), Trimmer(job, shape)
        self.assembly, self.hellos = Assembly(shape.world_size), {hello.rank: hello for hello in self.ranks.hellos()}
        self.settings, self.records = [(1, self.ranks.setting)], dict[int, OrderRecord]()
        self.advices, self.events = list[Advice](), list[str]()
        self.restart: Restart | None = None
        self.last_step = 0
        self._tell("setting", {"first_step": 1, "setting": asdict(self.ranks.setting)})
        for hello in self.hellos.values():
            self._hear(hello)

    def take(self, step: int) -> None:
        """One step, and what follows from it."""
        self.last_step = step
        for report in self.ranks.take(step):
            self._hear(report)
            if whole := self.assembly.add(report, self.hellos):
                self._see(whole)

    def ran(self) -> Ran:
        """What came of it."""
        records = tuple(self.records[number] for number in sorted(self.records))
        return Ran(
            self.world,
            tuple(self.settings),
            records,
            tuple(self.advices),
            self.restart,
            self.last_step,
            tuple(self.events),
        )

    def _see(self, step: Step) -> None:
        sight = self.trimmer.see(step)
        self._note(sight)
        if sight.probe:
            for probe in self.ranks.probe(step.step):
                self._hear(probe)
        if sight.due:
            self._decide(step.step)

    def _decide(self, step: int) -> None:
        world = self.world
        surroundings = Surroundings(
            now_seconds=self.ranks.now_seconds,
            spare_nodes=world.spare_nodes,
            fixed_nodes=world.fixed_nodes,
            no_restart=world.no_restart,
            restart_seconds=world.restart_seconds,
            cores=world.shape.world_size,
        )
        advice = advise(self.trimmer.question(self.account.training(), surroundings))
        self.advices.append(advice)
        self._note(self.trimmer.given(advice))
        self.restart = advice.restart
        if advice.order:
            reshaped = self.ranks.obey(advice.order, step)
            self._hear(reshaped)
            if not reshaped.refused:
                self.settings.append((step + 1, reshaped.setting))

    def _hear(self, message: Message) -> None:
        body = asdict(message) if isinstance(message, Reshaped) else dict(vars(message))
        body.pop("token", None)
        self._tell(type(message).__name__, body)
        self._note(self.trimmer.hear(message))

    def _tell(self, kind: str, body: dict[str, object]) -> None:
        self.account.take({"time_seconds": self.ranks.now_seconds, "kind": kind, "body": body})

    def _note(self, sight: Sight) -> None:
        self.events += [f"{kind}: {text}" for kind, text in sight.events]
        self.records |= {record.number: record for record in sight.records}


def slowed(
    place: tuple[int, int] | list[tuple[int, int]], factor: float, shape: Shape, first: int = 30, last: int = 10_000
) -> Callable[[int], Floats]:
    """Speeds of places of which one, or some, take `factor` times as long, from a step to another."""

    def speeds(step: int) -> Floats:
        found = np.ones((shape.data, shape.pipeline))
        for slow in [place] if isinstance(place, tuple) else place:
            found[slow] /= factor if first <= step <= last else 1.0
        return found

    return speeds


def slow_node(factor: float, microbatches: int = 12) -> World:
    """Four replicas on four nodes of two ranks, of which n2 has the first stage of two, and none is to spare."""
    slow = slowed([(2, 0), (3, 0)], factor, FOUR)
    return World(shape=FOUR, microbatches=microbatches, ranks_per_node=2, speeds=slow, steps=2000)


def uneven(step: int, random: np.random.Generator) -> Floats:
    """In each step one of two replicas has half as much again to do."""
    return np.array([1.5, 1.0] if random.random() < 0.5 else [1.0, 1.5])


CASES: dict[str, World] = {
    "heavy head": World(head_layers=2.2),
    "heavy head, two replicas": World(head_layers=2.2, shape=TWO),
    "slow stage": World(speeds=slowed((0, 1), 1.6, ONE)),
    "slow place": World(shape=TWO, speeds=slowed((1, 1), 1.6, TWO)),
    "slow place, spare node": World(shape=TWO, speeds=slowed((1, 1), 1.6, TWO), spare_nodes=1, steps=2000),
    "slow stage, for a while": World(speeds=slowed((0, 1), 1.6, ONE, last=160), steps=500),
    "slow place, for a while": World(shape=TWO, speeds=slowed((1, 1), 1.6, TWO, last=160), steps=500),
    "uneven data": World(shape=TWO, loads=uneven),
    "noise, two replicas": World(
        shape=TWO, head_layers=0.3, noise_ratio=0.05, correlation=0.5, outlier_ratio=0.02, steps=500
    ),
    "noise": World(head_layers=0.3, noise_ratio=0.05, correlation=0.5, outlier_ratio=0.02, steps=500),
}


def main() -> None:
    """Print what came of each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    seeds: Sequence[int] = range(1, parser.parse_args().seeds + 1)
    print(f"{'case':26}{'orders':>8}{'restarts':>10}{'best / end':>12}  kinds")
    for name, world in CASES.items():
        runs = [run(world, seed) for seed in seeds]
        kinds = sorted({kind for each in runs for kind in each.orders})
        restarts = sum(each.restart is not None for each in runs)
        orders = sum(len(each.orders) for each in runs)
        worst = min(each.efficiency_ratio for each in runs)
        print(f"{name:26}{orders / len(runs):8.1f}{restarts:10}{worst:12.1%}  {', '.join(kinds)}")


if __name__ == "__main__":
    main()
