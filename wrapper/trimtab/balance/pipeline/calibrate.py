"""What a run's steps take beside their pipelines, from the steps that it has taken. Pure.

The optimizer, the reduction of gradients, and what a schedule does between operations are not compute of a stage: they
are what a measured step is longer than the simulation of that step from its own compute. Each step is set against
itself, so that one whose compute was slow says nothing wrong about the rest.
"""

from collections.abc import Sequence

import numpy as np

from trimtab.balance.pipeline.estimate import together_seconds
from trimtab.balance.pipeline.replay import Replays
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
    durations = _pipeline_seconds(forward_seconds, backward_seconds, plan, hardware, boundary_bytes)
    compute = forward_seconds + backward_seconds
    simulated = [
        together_seconds(of_step, seconds, hardware) for of_step, seconds in zip(durations, compute, strict=True)
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
) -> Floats:
    """[T, R] what each pipeline of each step takes by simulation; compute is [T, R, S]."""
    layout = plan.layout
    links = hardware.links if layout.stages > 1 else ()
    passes = layout.virtual * np.array(plan.microbatches)[:, None]  # [R, 1]
    forward, backward = (
        np.tile(seconds / passes, layout.virtual)[..., None]  # [T, R, C, 1]
        for seconds in (forward_seconds, backward_seconds)
    )
    return Replays(plan.schedule, layout.stages, layout.chunks, plan.microbatches).duration_seconds(
        forward,
        backward,
        np.array([link.latency_seconds for link in links] or [0.0] * layout.stages),
        [boundary_bytes / link.bytes_per_second for link in links],
    )
