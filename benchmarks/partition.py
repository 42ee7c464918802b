"""How long the best layout takes to find, and how far the layouts of other rules are from it.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/partition.py [--instances 200]

The rules of others (`trimtab.balance.layouts.baselines`) know neither memory nor, DeepSpeed's, the stages' speeds. The
integer program is solved by HiGHS (highspy, of the test dependencies). Prints; asserts nothing.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

import click
import highspy
import numpy as np

from trimtab.balance.layouts.baselines import diffusion, smallest_spread, stage_seconds
from trimtab.balance.layouts.partition import partition
from trimtab.balance.layouts.stage_costs import Recompute
from trimtab.balance.pipeline.memory import stage_memory_bytes
from trimtab.balance.plan import Costs, Hardware, ParameterMemory, Part, Plan, Schedule
from trimtab.protocol import Layout

MEMORY = ParameterMemory(weight_bytes=2, gradient_bytes=4, optimizer_bytes=12, shards=8)
LAYER_PARAMETERS, LAYER_BYTES = 1e8, 1e9
MICROBATCHES = 64


@dataclass(frozen=True)
class Kind:
    """A kind of instances."""

    name: str
    layers: int
    stages: int
    head: float = 1.0
    """Seconds, of the mean layer's."""
    spread: float = 0.0
    """By which share layers are apart from the mean, at most."""
    slow: float = 1.0
    """Speed of one stage."""
    memory_layers: float = np.inf
    """What the first stage has room for, in layers."""

    def instance(self, random: np.random.Generator) -> tuple[Costs, Hardware]:
        """One of them."""

        def part(seconds: float, parameters: float = LAYER_PARAMETERS, kept: float = LAYER_BYTES) -> Part:
            return Part(seconds / 3, seconds / 3, seconds / 3, parameters, kept, kept / 10)

        layers = tuple(map(part, 1 + self.spread * random.uniform(-1, 1, self.layers)))
        costs = Costs(layers, part(0.05, 3 * LAYER_PARAMETERS, 0.1), part(self.head, 3 * LAYER_PARAMETERS, 0.1), 0.0)
        speeds = np.ones((1, self.stages))
        speeds[0, random.integers(self.stages)] = self.slow
        layer_bytes = LAYER_PARAMETERS * MEMORY.total_bytes + self.stages * LAYER_BYTES
        room = self.memory_layers * layer_bytes + 3 * LAYER_PARAMETERS * MEMORY.total_bytes
        return costs, Hardware(speeds, (room,) * self.stages, ())


KINDS = (
    Kind("equal layers, head of 1 layer", 32, 8),
    Kind("equal layers, head of 2 layers", 32, 8, head=2),
    Kind("equal layers, head of 4 layers", 32, 8, head=4),
    Kind("a stage at 0.8 speed", 32, 8, slow=0.8),
    Kind("head of 4 layers, a stage at 0.8", 32, 8, head=4, slow=0.8),
    Kind("memory for 3 layers in the first stage", 32, 8, head=1, memory_layers=3.5),
    Kind("layers apart by 10 %", 32, 8, head=2, spread=0.1),
    Kind("layers apart by 50 %", 32, 8, head=2, spread=0.5),
    Kind("layers apart by 50 %, a stage at 0.8", 64, 8, head=2, spread=0.5, slow=0.8),
)


def integer_program(costs: Costs, speeds: Sequence[float], memory_bytes: Sequence[float] = ()) -> float:
    """The fastest slowest stage with one chunk a stage under 1F1B, nothing recomputed, by a solver that knows nothing
    of our dynamic program: which layer is on which stage, in order; infinite where nothing fits."""
    model = highspy.Highs()
    model.setOptionValue("output_flag", False)
    model.setOptionValue("mip_rel_gap", 0.0)
    stages, layers = range(len(speeds)), range(len(costs.layers))
    on = [[model.addBinary() for _ in stages] for _ in layers]
    slowest = model.addVariable()
    ends = [[] for _ in stages]
    ends[0].append(costs.embedding)
    ends[-1].append(costs.head)
    for layer in layers:
        model.addConstr(sum(on[layer]) == 1)
    for before, after in pairwise(on):
        for stage in stages[:-1]:  # no layer is on an earlier stage than the one before it
            model.addConstr(sum(after[: stage + 1]) <= sum(before[: stage + 1]))
    for stage in stages:
        held = [(costs.layers[layer], on[layer][stage]) for layer in layers]
        seconds = sum(part.compute_seconds for part in ends[stage])
        model.addConstr(sum(part.compute_seconds * var for part, var in held) + seconds <= speeds[stage] * slowest)
        if 0 < stage < len(stages) - 1:
            model.addConstr(sum(var for _, var in held) >= 1)
        if memory_bytes and np.isfinite(memory_bytes[stage]):

            def peak(part: Part, in_flight: int = len(stages) - stage) -> float:
                return (part.parameters * MEMORY.total_bytes + in_flight * part.activation_bytes) / LAYER_BYTES

            rest = memory_bytes[stage] / LAYER_BYTES - sum(map(peak, ends[stage]))
            model.addConstr(sum(peak(part) * var for part, var in held) <= rest)
    model.minimize(slowest)
    optimal = model.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return model.getObjectiveValue() if optimal else np.inf


RULES: dict[str, Callable[[Costs, Hardware], Layout]] = {
    "uniform": lambda costs, on: Layout.uniform(len(costs.layers), on.speeds.shape[1]),
    "DeepSpeed, parameters": lambda costs, on: smallest_spread(costs, on.speeds.shape[1], attrgetter("parameters")),
    "DeepSpeed, seconds": lambda costs, on: smallest_spread(costs, on.speeds.shape[1], attrgetter("compute_seconds")),
    "diffusion": lambda costs, on: diffusion(
        costs, Layout.uniform(len(costs.layers), on.speeds.shape[1]), on.speeds[0]
    ),
}


@click.command()
@click.option("--instances", default=200, show_default=True, help="Random instances of each kind.")
def main(instances: int) -> None:
    """Print how far the rules of others are from the optimum, and how long the optimum takes."""
    _print_ratios(instances)
    _print_times()


def _print_ratios(instances: int) -> None:
    print(f"slowest stage over the optimum's, mean (largest) of {instances} instances; *: does not fit in some")
    print(f"{'':40}" + "".join(f"{name:>23}" for name in RULES))
    for kind in KINDS:
        random = np.random.default_rng(0)
        ratios: dict[str, list[float]] = {name: [] for name in RULES}
        misfits = set()
        for _ in range(instances):
            costs, on = kind.instance(random)
            best = partition(
                costs, MEMORY, on, schedule=Schedule.ONE_F_ONE_B, stages=kind.stages, microbatches=MICROBATCHES
            )
            for name, rule in RULES.items():
                layout = rule(costs, on)
                ratios[name].append(stage_seconds(costs, layout, on.speeds[0]).max() / best.slowest_seconds)
                plan = Plan(layout, Schedule.ONE_F_ONE_B, (MICROBATCHES,), (0,) * kind.stages)
                if max(stage_memory_bytes(costs, MEMORY, plan)) > on.memory_bytes[0]:
                    misfits.add(name)
        cells = (
            f"{np.mean(values):.3f} ({max(values):.3f})" + ("*" if name in misfits else " ")
            for name, values in ratios.items()
        )
        print(f"{kind.name:40}" + "".join(f"{cell:>23}" for cell in cells))


def _print_times() -> None:
    print(f"\n{'time to the best layout, least of 9':68}{'ms':>9}{'over the bound':>16}{'proved':>8}")
    for layers, stages, virtual, spread, recompute, moving in (
        (128, 16, 1, 0.0, "none", False),
        (128, 16, 1, 0.5, "none", True),
        (128, 16, 1, 0.5, "fit", True),
        (512, 64, 1, 0.5, "none", True),
        (128, 8, 2, 0.0, "none", False),
        (128, 8, 2, 0.02, "none", True),
        (128, 8, 2, 0.5, "none", True),
        (96, 8, 3, 0.02, "none", True),
        (128, 8, 4, 0.02, "none", True),
    ):
        _print_time(layers, stages, virtual, spread, recompute, moving)
    for layers, stages in ((32, 8), (64, 8)):
        costs, on = Kind("", layers, stages, head=2, spread=0.1).instance(np.random.default_rng(0))
        begin = time.perf_counter()
        integer_program(costs, on.speeds[0].tolist())
        milliseconds = 1e3 * (time.perf_counter() - begin)
        print(f"{f'integer program, {layers} layers x {stages} stages, apart by 10 %':68}{milliseconds:9.0f}")


def _print_time(layers: int, stages: int, virtual: int, spread: float, recompute: Recompute, moving: bool) -> None:
    room = 0.8 * layers / stages / virtual if recompute == "fit" else np.inf
    costs, on = Kind("", layers, stages, head=2, spread=spread, memory_layers=room).instance(np.random.default_rng(0))
    seconds = []
    for _ in range(9):
        begin = time.perf_counter()
        found = partition(
            costs,
            MEMORY,
            on,
            schedule=Schedule.ONE_F_ONE_B if virtual == 1 else Schedule.INTERLEAVED,
            stages=stages,
            virtual=virtual,
            microbatches=MICROBATCHES,
            recompute=recompute,
            current=Layout.uniform(layers, stages, virtual) if moving else None,
        )
        seconds.append(time.perf_counter() - begin)
    what = f"{layers} layers x {stages} stages x {virtual}, apart by {spread:.0%}"
    what += ", recompute" if recompute == "fit" else ""
    what += ", from uniform" if moving else ""
    gap = found.slowest_seconds / found.bound_seconds - 1
    print(f"{what:68}{1e3 * min(seconds):9.1f}{gap:16.2%}{'yes' if found.exact else 'no':>8}")


if __name__ == "__main__":
    main()
