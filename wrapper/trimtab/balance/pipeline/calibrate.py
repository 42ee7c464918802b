"""What a run's steps take beside their pipelines, from the steps that it has taken. Pure.

The optimizer, the reduction of gradients, and what a schedule does between operations are not compute of a stage: they
are what a measured step is longer than the simulation of that step from its own compute. Each step is set against
itself, so that one whose compute was slow says nothing wrong about the rest.
"""

from collections.abc import Sequence

import numpy as np

from trimtab.balance.pipeline.estimate import together_seconds
from trimtab.balance.pipeline.simulate import simulate
from trimtab.balance.plan import Floats, Hardware, Plan


def overheads_seconds(
    step_seconds: Sequence[float],
    forward_seconds: Floats,
    backward_seconds: Floats,
    plan: Plan,
    hardware: Hardware,
    boundary_bytes: float = 0.0,
) -> Floats:
    """[T] what each of T steps took beside its pipelines; their median makes `Hardware.overhead_seconds`.

    Compute of the stages in each step is [T, R, S], as measured: the speeds of `hardware` do not count again. Chunks of
    a stage, and its microbatches, are taken to share it equally. Negative where a step was shorter than simulated.
    """
    simulated = [
        _pipeline_seconds(forward, backward, plan, hardware, boundary_bytes)
        for forward, backward in zip(forward_seconds, backward_seconds, strict=True)
    ]
    return np.asarray(step_seconds, dtype=np.float64) - simulated


def stages_at_once(step_seconds: Sequence[float], forward_seconds: Floats, backward_seconds: Floats) -> float:
    """How many stages computed at the same time, as `Hardware.stages_at_once` has it where ranks share cores.

    All compute of a step, [T, R, S], over how long the step took: the median of the steps. Ranks with devices of their
    own are below the number of stages by their bubble alone, so that it bounds nothing there.
    """
    compute = (forward_seconds + backward_seconds).sum(axis=(1, 2))
    return float(np.median(compute / np.asarray(step_seconds, dtype=np.float64)))


def _pipeline_seconds(
    forward_seconds: Floats, backward_seconds: Floats, plan: Plan, hardware: Hardware, boundary_bytes: float
) -> float:
    """What the pipelines of one step take by simulation; compute is [R, S]."""
    layout = plan.layout
    durations = []
    for replica, microbatches in enumerate(plan.microbatches):
        passes = layout.virtual * microbatches
        forward, backward = (
            np.tile(seconds[replica] / passes, layout.virtual)[:, None]  # [C, 1]
            for seconds in (forward_seconds, backward_seconds)
        )
        simulation = simulate(
            plan.schedule,
            layout.stages,
            np.repeat(forward, microbatches, axis=1),
            backward,
            0.0,
            links=hardware.links,
            boundary_bytes=boundary_bytes,
        )
        durations.append(simulation.duration_seconds)
    return together_seconds(durations, forward_seconds + backward_seconds, hardware)
