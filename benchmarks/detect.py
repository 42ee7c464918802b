"""How surely an imbalance is found, by its size and the noise, and how often one is found where there is none.

    .venv/bin/python benchmarks/detect.py [--runs 1000] [--steps 100000]

The steps are made up: each place takes 16 microbatches a step, each with normal noise, and one in fifty takes half as
long again. Every step is also longer or shorter as a whole. Windows and limits are the policy's defaults. Prints;
asserts nothing.
"""

import time

import click
import numpy as np

from trimtab.balance.detect import WARM_UP_STEPS, detect
from trimtab.balance.plan import Floats, Place
from trimtab.protocol import Balance

MICROBATCHES = 16
OUTLIER_RATIO, OUTLIER_FACTOR = 0.02, 1.5
WHOLE_STEP_NOISE = 0.1
RATIOS = (0.0, 0.02, 0.05, 0.08, 0.10, 0.12, 0.15, 0.20, 0.30)
NOISES = (0.02, 0.05, 0.10, 0.20)
PLACES = (4, 16, 64)
CORRELATIONS = (0.0, 0.3, 0.6)
WITHIN_WINDOWS = 4


def made_up_seconds(
    random: np.random.Generator,
    steps: int,
    places: int,
    *,
    ratio: float = 0.0,
    noise: float = 0.05,
    slowest: int = 0,
    correlation: float = 0.0,
) -> Floats:
    """Compute [T, P] of a pipeline whose place `slowest` makes an imbalance of `ratio`; all others are alike.

    The sum of a step's microbatches is drawn at once: with k outliers among M it is normal with mean M + (f - 1) k and
    variance noise^2 (M + (f^2 - 1) k). `correlation`: of this noise with that of the step before.
    """
    outliers = random.binomial(MICROBATCHES, OUTLIER_RATIO, (steps, places))
    normal = random.normal(size=(steps, places))
    if correlation:
        for step in range(1, steps):
            normal[step] = correlation * normal[step - 1] + np.sqrt(1 - correlation**2) * normal[step]
    deviation = noise * np.sqrt(MICROBATCHES + (OUTLIER_FACTOR**2 - 1) * outliers)
    seconds = MICROBATCHES + (OUTLIER_FACTOR - 1) * outliers + deviation * normal
    # The median of two is their mean, which the slower one shifts.
    seconds[:, slowest] *= 1 + (2 * ratio / (1 - ratio) if places == 2 else ratio)
    return np.asarray(seconds * np.exp(WHOLE_STEP_NOISE * random.normal(size=(steps, 1))))


def places_of(count: int) -> tuple[Place, ...]:
    """The stages of one replica."""
    return tuple((0, stage) for stage in range(count))


@click.command()
@click.option("--runs", default=1000, show_default=True, help="Runs of each cell of the tables.")
@click.option("--steps", default=100_000, show_default=True, help="Balanced steps to look for false triggers in.")
def main(runs: int, steps: int) -> None:
    """Print the probability of detection, false triggers, and how often the bounds are wrong."""
    random = np.random.default_rng(1)
    policy = Balance()
    began = time.perf_counter()
    for count in PLACES:
        print(f"\nfound within {WITHIN_WINDOWS} windows, {count} places, {runs} runs a cell:")
        print("imbalance" + "".join(f"{f'noise {noise:.0%}':>12}" for noise in NOISES))
        for ratio in RATIOS:
            cells = (found_ratio(random, runs, count, ratio, noise, policy) for noise in NOISES)
            print(f"{ratio:9.0%}" + "".join(f"{cell:12.1%}" for cell in cells), flush=True)
    print(f"\nfalse triggers in {steps:,} balanced steps:")
    print("places   " + "".join(f"{f'noise {noise:.0%}':>12}" for noise in NOISES))
    for count in PLACES:
        cells = [false_triggers(random, steps, count, noise, policy) for noise in NOISES]
        print(f"{count:<9}" + "".join(f"{cell:12}" for cell in cells), flush=True)
    print(
        f"\nwindows whose lower (upper) bound is on the wrong side of a true 10 %, noise 20 %, {runs} windows a cell:"
    )
    print("places   " + "".join(f"{f'correlation {correlation}':>20}" for correlation in CORRELATIONS))
    for count in (2, *PLACES):
        cells = [wrong_bounds(random, runs, count, correlation, policy) for correlation in CORRELATIONS]
        print(f"{count:<9}" + "".join(f"{f'{lower:.1%} ({upper:.1%})':>20}" for lower, upper in cells), flush=True)
    print(f"\n{time.perf_counter() - began:.0f} s")


def found_ratio(
    random: np.random.Generator, runs: int, count: int, ratio: float, noise: float, policy: Balance
) -> float:
    """Share of the runs in which an imbalance that is there from the first window on triggers in time."""
    steps = range(1, WARM_UP_STEPS + WITHIN_WINDOWS * policy.window_steps + 1)
    found = 0
    for _ in range(runs):
        seconds = made_up_seconds(random, len(steps), count, ratio=ratio, noise=noise)
        found += bool(detect(seconds, steps, places_of(count), policy).findings)
    return found / runs


def false_triggers(random: np.random.Generator, steps: int, count: int, noise: float, policy: Balance) -> int:
    """How often so many steps of a balanced pipeline trigger."""
    seconds = made_up_seconds(random, steps, count, noise=noise)
    return len(detect(seconds, range(1, steps + 1), places_of(count), policy).findings)


def wrong_bounds(
    random: np.random.Generator, runs: int, count: int, correlation: float, policy: Balance
) -> tuple[float, float]:
    """Share of windows whose lower bound is above the truth, and whose upper bound is below it."""
    steps, ratio = WARM_UP_STEPS + runs * policy.window_steps, 0.10
    seconds = made_up_seconds(random, steps, count, ratio=ratio, noise=0.2, correlation=correlation)
    windows = detect(seconds, range(1, steps + 1), places_of(count), policy).windows
    lower = sum(window.lower_ratio > ratio for window in windows)
    upper = sum(window.upper_ratio < ratio for window in windows)
    return lower / len(windows), upper / len(windows)


if __name__ == "__main__":
    main()
