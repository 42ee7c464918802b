"""How sure `trimtab.balance.measuring.measure` is, by steps, replicas and stages, and what it takes to work it out.

    .venv/bin/python benchmarks/measure.py [--draws 100]

Costs and speeds are planted: equal layers, a head of 1.5 and an embedding of 0.2 layers, one place that runs at 0.8,
16 microbatches a step with 5 % noise, and 5 % of steps slow by 1.4 on all places. Prints; asserts nothing.
"""

import time

import click
import numpy as np

from trimtab.balance.measuring.measure import Measured, Samples, measure
from trimtab.protocol import Layout

MICROBATCHES, NOISE, SLOW_STEPS, SLOWNESS = 16, 0.05, 0.05, 1.4
LAYER, EMBEDDING, HEAD, SLOW_SPEED = 0.01, 0.002, 0.015, 0.8
TWO_OF_THREE = 0.683
"""What lies within one standard error, where errors are normal."""
HEADING = f"{'replicas':>8}{'stages':>8}{'layers':>8}{'steps':>7} {'layer':>9}{'embedding':>10}{'head':>8}{'speed':>8}"


@click.command()
@click.option("--draws", default=100, show_default=True, help="Random windows for each line.")
def main(draws: int) -> None:
    """Print which relative error two of three draws stay below, the share within 3 told errors, and CPU seconds."""
    print(f"{HEADING}{'within 3':>11}{'CPU ms':>9}")
    for replicas, stages, layers in (1, 4, 32), (2, 4, 32), (4, 4, 32), (16, 4, 32), (4, 16, 128):
        for steps in 5, 20, 60:
            accuracy(replicas, stages, layers, steps, draws)
    print("\none replica, and a layer moved between two of its stages, 20 steps before and after")
    for layers in 8, 16, 32, 64, 128:
        moved(layers, draws)
    print("\nCPU seconds of one window of 20 steps")
    for replicas, stages, layers in (8, 8, 64), (64, 16, 128), (64, 64, 128):
        layout = Layout.uniform(layers, stages)
        _, seconds = timed([layout], plant([layout], layers, np.ones((replicas, stages)), 20, 0))
        print(f"{replicas:4} replicas x {stages:2} stages, {layers:3} layers {seconds:8.2f}")


def accuracy(replicas: int, stages: int, layers: int, steps: int, draws: int) -> None:
    """A line of the first table."""
    layout, speeds = Layout.uniform(layers, stages), np.ones((replicas, stages))
    if replicas > 1:  # of one replica the speed is an assumption
        speeds[0, 1] = SLOW_SPEED
    costs, within, places, spent = [], [], [], []
    for seed in range(draws):
        measured, seconds = timed([layout], plant([layout], layers, speeds, steps, seed))
        apart = measured.forward_seconds / planted(layers) - 1
        costs.append(apart)
        within.append(np.abs(apart) < 3 * measured.forward_error_ratio * measured.forward_seconds / planted(layers))
        places.append(measured.speeds / speeds - 1)
        spent.append(seconds)
    errors = np.quantile(np.abs(costs), TWO_OF_THREE, axis=0)
    speed = f"{np.quantile(np.abs(places), TWO_OF_THREE):8.2%}" if replicas > 1 else f"{'-':>8}"
    figures = f"{np.median(errors[1:-1]):9.2%}{errors[0]:10.1%}{errors[-1]:8.2%}{speed}"
    print(
        f"{replicas:8}{stages:8}{layers:8}{steps:7} {figures}{np.mean(within):11.1%}{1000 * np.median(spent):9.1f}",
        flush=True,
    )


def moved(layers: int, draws: int) -> None:
    """What the move tells of the speed of the stage that lost the layer."""
    share = layers // 4
    layouts = [Layout((share,) * 4, 4), Layout((share, share - 1, share + 1, share), 4)]
    speeds, found = np.array([[1, SLOW_SPEED, 1, 1]]), []
    for seed in range(draws):
        measured, _ = timed(layouts, plant(layouts, layers, speeds, 20, seed))
        told = np.isfinite(measured.speed_error_ratio[0, 1])
        found.append(measured.speeds[0, 1] / SLOW_SPEED - 1 if told else np.nan)
    told = np.isfinite(found)
    error = f"error {np.nanquantile(np.abs(found), TWO_OF_THREE):.1%}" if told.any() else "left to the assumption"
    print(f"{share:4} layers a stage: speed told in {np.mean(told):4.0%} of windows, {error}")


def planted(layers: int) -> np.ndarray:
    """Forward seconds of the parts [L + 2]; backward takes twice as long."""
    return np.array([EMBEDDING, *[LAYER] * layers, HEAD])


def plant(layouts: list[Layout], layers: int, speeds: np.ndarray, steps: int, seed: int) -> Samples:
    """`steps` steps under each layout."""
    random = np.random.default_rng(seed)
    shape = (steps * len(layouts), *speeds.shape)
    layout = np.arange(shape[0]) // steps
    held = np.array([[len(each.stage_layers(stage)) for stage in range(each.stages)] for each in layouts])
    clean = (LAYER * held).astype(float)
    clean[:, 0] += EMBEDDING
    clean[:, -1] += HEAD
    slow = np.where(random.random(shape[0]) < SLOW_STEPS, SLOWNESS, 1.0)[:, None, None]
    forward, backward = (
        factor * slow * clean[layout][:, None] / speeds * (MICROBATCHES + MICROBATCHES**0.5 * NOISE * noise)
        for factor, noise in ((1, random.standard_normal(shape)), (2, random.standard_normal(shape)))
    )
    step, replica, stage = (index.ravel() for index in np.indices(shape))
    same = np.ones(step.size)
    return Samples(
        step=step + 1,
        replica=replica,
        stage=stage,
        forward_seconds=forward.ravel(),
        backward_seconds=backward.ravel(),
        microbatches=same * MICROBATCHES,
        tokens=same * MICROBATCHES * 1000,
        squared_lengths=same * MICROBATCHES * 1e6,
        layout=layout[step],
    )


def timed(layouts: list[Layout], samples: Samples) -> tuple[Measured, float]:
    """What is measured, and the CPU seconds it took."""
    begin = time.process_time()
    measured = measure(samples, layouts)
    return measured, time.process_time() - begin


if __name__ == "__main__":
    main()
