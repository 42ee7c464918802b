"""What diagnose makes of jobs whose cause is known: the cause planted against the cause named.

    .venv/bin/python benchmarks/diagnose.py [--jobs 20] [--traces DIR]

Jobs of 20 steps with 5 % noise on every operation, 2 % of them 1.5 times as long, places drawn. A slowness of 25 %
means: one stage's layers take 25 % longer on all replicas (intrinsic); one place takes 25 % longer (hardware); in each
step another replica has 25 % more work, and microbatches differ by half of that (data). Prints; asserts nothing.
"""

import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations, product
from pathlib import Path

import click
import numpy as np

from trimtab.balance.diagnosing.diagnose import diagnose
from trimtab.balance.diagnosing.durations import Durations
from trimtab.balance.pipeline.replay import Replay
from trimtab.balance.plan import Place
from trimtab.diagnosis.traces import load

SLOWNESS = (0.08, 0.10, 0.15, 0.25, 0.50, 1.00)
CAUSES = ("intrinsic", "hardware", "data")


@dataclass(frozen=True)
class Shape:
    """Sizes of a job."""

    replicas: int
    stages: int
    microbatches: int = 16
    virtual: int = 1
    steps: int = 20

    def __str__(self) -> str:
        interleaved = f" x {self.virtual}" if self.virtual > 1 else ""
        return f"PP{self.stages}{interleaved} DP{self.replicas}"


SHAPES = (
    Shape(4, 2),
    Shape(2, 4),
    Shape(8, 4),
    Shape(4, 4, virtual=2),
    Shape(4, 8, 32),
    Shape(2, 16, 32),
    Shape(32, 16, 32),
)


@dataclass(frozen=True)
class Planted:
    """A made-up job and what is wrong with it."""

    durations: Durations
    place: Place
    """The slow one."""
    stage: int
    """The long one."""
    costs: dict[str, float]
    """By how much each cause alone makes the step longer, without noise, over a step in which it is mended."""


def planted(
    random: np.random.Generator,
    shape: Shape,
    causes: Mapping[str, float],
    *,
    noise: float = 0.05,
    outliers: float = 0.02,
) -> Planted:
    """A job with some causes, each with its slowness."""
    chunks = shape.stages * shape.virtual
    size = shape.steps, shape.replicas, chunks, shape.microbatches
    place = int(random.integers(shape.replicas)), int(random.integers(shape.stages))
    stage = int(random.integers(shape.stages))
    factors = {cause: np.ones(size) for cause in causes}
    if "intrinsic" in causes:
        factors["intrinsic"][:, :, stage :: shape.stages] += causes["intrinsic"]
    if "hardware" in causes:
        factors["hardware"][:, place[0], place[1] :: shape.stages] += causes["hardware"]
    if "data" in causes:
        factors["data"] *= _work(random, shape, causes["data"])[:, :, None, :]
    seconds = []
    for base in (0.1, 0.2):
        noisy = base * np.prod(list(factors.values()), axis=0) * random.lognormal(0.0, noise, size)
        seconds.append(np.where(random.random(size) < outliers, 1.5, 1.0) * noisy)
    durations = Durations(seconds[0], seconds[1], shape.stages, overhead_seconds=0.2)
    costs = {cause: _cost(durations, factor, cause) for cause, factor in factors.items()}
    return Planted(durations, place, stage, costs)


def _work(random: np.random.Generator, shape: Shape, slowness: float) -> np.ndarray:
    """[T, R, M] in each step, some replica has more than the others, and microbatches differ."""
    load = np.ones((shape.steps, shape.replicas, 1))
    load[np.arange(shape.steps), random.integers(shape.replicas, size=shape.steps)] += slowness
    return load * random.lognormal(0.0, slowness / 2, (shape.steps, shape.replicas, shape.microbatches))


def _cost(durations: Durations, factor: np.ndarray, cause: str) -> float:
    chunks, microbatches = factor.shape[2:]
    replay = Replay(durations.schedule, durations.stages, chunks, microbatches)
    mended = np.full_like(factor, 1.0 if cause == "hardware" else factor.mean())
    slow, level = (replay.duration_seconds(0.1 * f, 0.2 * f, np.zeros(1)).max(axis=1).mean() for f in (factor, mended))
    return float(slow / level - 1)


def named(random: np.random.Generator, shape: Shape, causes: Mapping[str, float]) -> tuple[str, bool]:
    """The cause named, and whether its places are the planted ones."""
    job = planted(random, shape, causes)
    found = diagnose(job.durations)
    expected = {
        "intrinsic": {(replica, job.stage) for replica in range(shape.replicas)},
        "hardware": {job.place},
    }.get(found.cause, set())
    return found.cause, set(found.places) == expected


@click.command()
@click.option("--jobs", default=20, show_default=True, help="Made-up jobs for each cell.")
@click.option("--traces", type=click.Path(path_type=Path, exists=True), help="Directory of the public traces.")
def main(jobs: int, traces: Path | None) -> None:
    """Print which causes are named for planted ones, by slowness and shape, and for two at once."""
    print(f"{'shape':16}{'planted':12}" + "".join(f"{f'{slowness:.0%}':>7}" for slowness in SLOWNESS))
    everything: Counter[tuple[str, str]] = Counter()
    for shape in SHAPES:
        level = Counter(named(random(job), shape, {})[0] for job in range(jobs))
        everything.update(("nothing", cause) for cause in level.elements())
        print(f"{shape!s:16}{'nothing':12}{level['none'] / jobs:7.0%} named none", flush=True)
        for cause in CAUSES:
            found = [[named(random(job), shape, {cause: slowness}) for job in range(jobs)] for slowness in SLOWNESS]
            everything.update((cause, name) for cell in found for name, _ in cell)
            right = [sum(each == (cause, True) for each in cell) / jobs for cell in found]
            print(f"{'':16}{cause:12}" + "".join(f"{ratio:7.0%}" for ratio in right), flush=True)
    print_confusion(everything)
    print_pairs(jobs)
    print_times()
    if traces:
        print_traces(traces)


def random(job: int) -> np.random.Generator:
    """The same jobs at each call."""
    return np.random.default_rng(job)


def print_confusion(everything: Mapping[tuple[str, str], int]) -> None:
    """Planted against named, over all shapes and slownesses."""
    names = (*CAUSES, "unknown", "none")
    print(f"\n{'planted':12}" + "".join(f"{name:>11}" for name in names))
    for planted_cause in ("nothing", *CAUSES):
        print(f"{planted_cause:12}" + "".join(f"{everything[planted_cause, name]:11,}" for name in names))


def print_pairs(jobs: int) -> None:
    """Two causes at once: the larger by what it costs alone, where it costs at least half as much again."""
    print(f"\n{'two causes':28}{'jobs':>6}{'first':>8}{'both':>8}")
    for larger, smaller in permutations(CAUSES, 2):
        cases, first_right, both_right = 0, 0, 0
        for shape in SHAPES[:-1]:
            for job, (more, less) in product(range(max(1, jobs // 4)), ((0.25, 0.10), (0.50, 0.15), (1.00, 0.50))):
                made = planted(random(job), shape, {larger: more, smaller: less})
                if made.costs[larger] < 1.5 * made.costs[smaller]:
                    continue
                found = diagnose(made.durations)
                cases += 1
                first_right += found.cause == larger
                both_right += (found.cause, found.secondary) == (larger, smaller)
        print(f"{f'{larger} > {smaller}':28}{cases:6}{first_right / cases:8.1%}{both_right / cases:8.1%}", flush=True)


def print_times() -> None:
    """What a diagnosis takes."""
    print(f"\n{'shape':16}{'operations':>12}{'seconds':>9}")
    for shape in SHAPES:
        job = planted(random(0), shape, {"hardware": 0.25})
        begin = time.perf_counter()
        diagnose(job.durations)
        print(f"{shape!s:16}{2 * job.durations.forward_seconds.size:12,}{time.perf_counter() - begin:9.2f}", flush=True)


def print_traces(directory: Path) -> None:
    """The production jobs: their authors' figures beside ours."""
    print(f"\n{'trace':7}{'cause':20}{'confidence':>11}{'slowdown':>10}{'authors':>9}  shares")
    for name in ("AR", "SE", "ST"):
        found = diagnose(load(directory / f"trace-{name}.parquet", directory / f"meta-{name}.yaml").durations)
        authors = json.loads((directory / f"mw-{name}.json").read_text())
        causes = ", ".join(cost.cause for cost in found.causes)
        shares = ", ".join(f"{cause} {share:.1%}" for cause, share in found.shares.items())
        ratio = authors["tori"] / authors["tideal"]
        print(f"{name:7}{causes:20}{found.confidence:11.2f}{found.slowdown_ratio:10.3f}{ratio:9.3f}  {shares}")


if __name__ == "__main__":
    main()
