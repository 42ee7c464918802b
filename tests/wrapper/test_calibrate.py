"""What steps take beside their pipelines."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.balance.pipeline.calibrate import overheads_seconds
from trimtab.balance.pipeline.estimate import estimate
from trimtab.balance.pipeline.simulate import simulate
from trimtab.balance.plan import Costs, Hardware, Link, ParameterMemory, Part, Plan, Schedule
from trimtab.protocol import Layout

LAYER = Part(2.0, 3.0, 1.0, parameters=1.0, activation_bytes=0.0, recomputed_bytes=0.0)
FREE = Part(0.0, 0.0, 0.0, parameters=0.0, activation_bytes=0.0, recomputed_bytes=0.0)
COSTS = Costs((LAYER,) * 8, FREE, FREE, boundary_bytes=4.0)


@given(
    virtual=st.integers(1, 2),
    speeds=st.lists(st.floats(0.5, 2), min_size=4, max_size=4),
    overhead=st.floats(0, 50),
    stages_at_once=st.sampled_from([1.0, 1.5, np.inf]),
)
@settings(deadline=None)
def test_the_overhead_of_estimated_steps_is_found_again(virtual, speeds, overhead, stages_at_once):
    schedule = Schedule.INTERLEAVED if virtual > 1 else Schedule.ONE_F_ONE_B
    plan = Plan(Layout.uniform(8, 2, virtual), schedule, (4, 6), (0, 0))
    links = (Link(0.1, 8.0),) * 2
    hardware = Hardware(np.reshape(speeds, (2, 2)), (np.inf,) * 2, links, overhead, stages_at_once)
    step = estimate(COSTS, ParameterMemory(0, 0, 0), plan, hardware)
    forward, backward = step.stage_seconds / 3, step.stage_seconds * 2 / 3
    found = overheads_seconds(
        [step.step_seconds], forward[None], backward[None], plan, hardware, boundary_bytes=COSTS.boundary_bytes
    )
    assert found == pytest.approx([overhead], abs=1e-9)


@given(
    schedule=st.sampled_from([Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED]),
    microbatches=st.lists(st.sampled_from([3, 6, 9]), min_size=1, max_size=4),
    latency=st.floats(0, 2),
    boundary_bytes=st.floats(0, 50),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=50)
def test_all_steps_at_once_are_as_one_by_one(schedule, microbatches, latency, boundary_bytes, seed):
    stages, virtual = 3, 2 if schedule is Schedule.INTERLEAVED else 1
    plan = Plan(Layout.uniform(6, stages, virtual), schedule, tuple(microbatches), (0,) * stages)
    links = tuple(Link(latency * number, 8.0 * number) for number in (1, 2, 3))
    hardware = Hardware(np.ones((len(microbatches), stages)), (np.inf,) * stages, links)
    forward, backward = np.random.default_rng(seed).uniform(1, 9, (2, 4, len(microbatches), stages))
    longest = [max(one_by_one(plan, *step, links, boundary_bytes)) for step in zip(forward, backward, strict=True)]
    assert overheads_seconds([0.0] * 4, forward, backward, plan, hardware, boundary_bytes) == pytest.approx(
        -np.array(longest), rel=1e-12
    )


def one_by_one(plan, forward_seconds, backward_seconds, links, boundary_bytes):
    virtual = plan.layout.virtual
    for microbatches, forward, backward in zip(plan.microbatches, forward_seconds, backward_seconds, strict=True):
        forward, backward = (np.tile(one / virtual / microbatches, virtual)[:, None] for one in (forward, backward))
        yield simulate(
            plan.schedule,
            plan.layout.stages,
            np.repeat(forward, microbatches, axis=1),
            backward,
            0.0,
            links=links,
            boundary_bytes=boundary_bytes,
        ).duration_seconds


def test_a_step_is_set_against_its_own_compute():
    plan = Plan(Layout((1, 1), 2), Schedule.GPIPE, (3,), (0, 0))
    hardware = Hardware(np.ones((1, 2)), (np.inf,) * 2, ())
    forward = np.array([[[3.0, 3.0]], [[6.0, 6.0]]])
    # (3 + 2 - 1) x (1 + 2) s, and twice that.
    assert overheads_seconds([12.5, 24.5], forward, 2 * forward, plan, hardware).tolist() == [0.5, 0.5]


def test_stages_that_share_one_core_take_turns():
    plan = Plan(Layout((1, 1), 2), Schedule.GPIPE, (3,), (0, 0))
    alone = Hardware(np.ones((1, 2)), (np.inf,) * 2, ())
    forward = np.full((1, 1, 2), 3.0)
    shared = overheads_seconds([20.0], forward, 2 * forward, plan, replace(alone, stages_at_once=1.0))
    assert shared.tolist() == [20.0 - 18.0]
