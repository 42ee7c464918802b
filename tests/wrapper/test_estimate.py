"""What a plan would bring, from costs, plan and hardware."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.balance.pipeline.estimate import chunk_costs, estimate
from trimtab.balance.plan import Costs, Hardware, Link, ParameterMemory, Part, Plan, Schedule
from trimtab.protocol import Layout

LAYER = Part(2.0, 3.0, 1.0, parameters=100.0, activation_bytes=10.0, recomputed_bytes=1.0)
EMBEDDING = Part(0.5, 0.0, 0.5, parameters=50.0, activation_bytes=4.0, recomputed_bytes=4.0)
HEAD = Part(1.0, 1.0, 1.0, parameters=60.0, activation_bytes=6.0, recomputed_bytes=6.0)
COSTS = Costs((LAYER,) * 8, EMBEDDING, HEAD, boundary_bytes=8.0)
MEMORY = ParameterMemory(weight_bytes=2.0, gradient_bytes=4.0, optimizer_bytes=12.0, shards=2)


def plan(layers=(4, 4), stages=2, schedule=Schedule.ONE_F_ONE_B, microbatches=(8,), recomputed=None):
    return Plan(Layout(layers, stages), schedule, microbatches, recomputed or (0,) * stages)


def hardware(replicas=1, stages=2, memory=np.inf, links=(), overhead=0.0):
    return Hardware(np.ones((replicas, stages)), (memory,) * stages, links, overhead)


@st.composite
def situations(draw):
    """Costs, plan and hardware of any shape."""
    stages, virtual = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    schedule = draw(st.sampled_from([s for s in Schedule if (s is Schedule.INTERLEAVED) == (virtual > 1)]))
    layers = draw(st.lists(st.integers(1, 3), min_size=stages * virtual, max_size=stages * virtual))
    replicas = draw(st.integers(1, 3))
    microbatches = [stages * draw(st.integers(1, 3)) for _ in range(replicas)]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    parts = [Part(*rng.uniform(0.1, 2.0, 6)) for _ in range(sum(layers) + 2)]
    recomputed = [int(rng.integers(0, sum(layers[stage::stages]) + 1)) for stage in range(stages)]
    return (
        Costs(tuple(parts[2:]), parts[0], parts[1], boundary_bytes=1.0),
        Plan(Layout(tuple(layers), stages), schedule, tuple(microbatches), tuple(recomputed)),
        Hardware(rng.uniform(0.5, 1.0, (replicas, stages)), (np.inf,) * stages, (Link(0.01, 10.0),) * stages, 0.5),
    )


@given(situations())
@settings(deadline=None)
def test_the_ratios_follow_from_compute_and_duration(situation):
    costs, planned, machine = situation
    found = estimate(costs, MEMORY, planned, machine)
    longest = max(simulation.duration_seconds for simulation in found.simulations)
    assert found.step_seconds == longest + machine.overhead_seconds
    assert found.balance_ratio == pytest.approx(found.stage_seconds.mean() / found.stage_seconds.max())
    assert found.stage_efficiency_ratio == pytest.approx(found.stage_seconds.mean() / longest)
    assert 0 < found.stage_efficiency_ratio <= found.balance_ratio <= 1
    assert 0 <= found.bubble_ratio < 1


@given(situations())
@settings(deadline=None)
def test_compute_is_that_of_the_parts_at_each_stages_speed(situation):
    costs, planned, machine = situation
    layout = planned.layout
    for replica, microbatches in enumerate(planned.microbatches):
        for stage in range(layout.stages):
            held = [costs.layers[layer] for layer in layout.stage_layers(stage)]
            seconds = sum(part.compute_seconds for part in held)
            seconds += sum(part.forward_seconds for part in held[: planned.recomputed_layers[stage]])
            seconds += costs.embedding.compute_seconds if stage == 0 else 0
            seconds += costs.head.compute_seconds if stage == layout.stages - 1 else 0
            expected = microbatches * seconds / machine.speeds[replica, stage]
            found = estimate(costs, MEMORY, planned, machine).stage_seconds[replica, stage]
            assert found == pytest.approx(expected)


def test_equal_stages_have_no_loss_but_filling_and_draining():
    even = Costs(
        (LAYER,) * 8,
        replace(EMBEDDING, forward_seconds=0, backward_weight_seconds=0),
        replace(HEAD, forward_seconds=0, backward_input_seconds=0, backward_weight_seconds=0),
        0.0,
    )
    found = estimate(even, MEMORY, plan(), hardware(overhead=3.0))
    assert found.step_seconds == 9 * 24 + 3
    assert found.balance_ratio == 1
    assert found.bubble_ratio == pytest.approx(1 / 9)


def test_peak_memory_is_parameters_and_microbatches_in_flight():
    found = estimate(COSTS, MEMORY, plan(), hardware())
    # 2 + 4 + 12 / 2 = 12 bytes a parameter; two microbatches in flight on the first stage, one on the last.
    assert found.peak_memory_bytes.tolist() == [450 * 12 + 2 * 44, 460 * 12 + 46]


def test_a_plan_fits_where_every_stage_does():
    assert estimate(COSTS, MEMORY, plan(), hardware(memory=460 * 12 + 46)).fits
    assert not estimate(COSTS, MEMORY, plan(), hardware(memory=460 * 12 + 45)).fits


def test_recomputed_layers_cost_their_forward_again_and_keep_their_input():
    chunks = chunk_costs(COSTS, plan(recomputed=(3, 0)))
    assert chunks.backward_input_seconds.tolist() == [4 * 3 + 3 * 2, 4 * 3 + 1]
    assert chunks.activation_bytes.tolist() == [4 + 3 * 1 + 10, 4 * 10 + 6]
    assert chunks.forward_seconds.tolist() == [8.5, 9]


def test_recomputed_layers_are_counted_over_the_chunks_of_a_stage():
    layout = (1, 2, 3, 2)
    chunks = chunk_costs(COSTS, plan(layout, 2, Schedule.INTERLEAVED, recomputed=(2, 1)))
    assert chunks.activation_bytes.tolist() == [4 + 1, 1 + 10, 1 + 20, 20 + 6]


def test_the_replica_with_most_microbatches_counts():
    found = estimate(COSTS, MEMORY, plan(microbatches=(4, 8, 4)), hardware(replicas=3))
    assert found.step_seconds == estimate(COSTS, MEMORY, plan(), hardware()).step_seconds
    assert found.simulations[0] is found.simulations[2]
    assert found.stage_seconds.tolist() == [[100, 108], [200, 216], [100, 108]]


def test_a_slow_replica_counts_and_fewer_microbatches_make_up_for_it():
    slow = Hardware(np.array([[1.0, 1.0], [0.5, 1.0]]), (np.inf,) * 2, ())
    even = estimate(COSTS, MEMORY, plan(microbatches=(8, 8)), slow)
    moved = estimate(COSTS, MEMORY, plan(microbatches=(10, 6)), slow)
    assert even.stage_seconds.tolist() == [[200, 216], [400, 216]]
    assert moved.step_seconds < even.step_seconds


def test_links_take_their_time():
    slow = estimate(COSTS, MEMORY, plan(), hardware(links=(Link(0.25, 16.0),) * 2))
    free = estimate(COSTS, MEMORY, plan(), hardware())
    # There and back, the first microbatch to the slower last stage, and the last one home from it.
    assert slow.step_seconds - free.step_seconds == 2 * (0.25 + 8 / 16)


def test_a_plan_for_other_hardware_is_refused():
    with pytest.raises(ValueError, match="2 replicas x 2 stages"):
        estimate(COSTS, MEMORY, plan(microbatches=(4, 4)), hardware(replicas=1))
