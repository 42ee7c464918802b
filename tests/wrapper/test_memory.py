import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.balance.pipeline.memory import in_flight, in_flight_mixes, stage_memory_bytes, transient_bytes
from trimtab.balance.pipeline.simulate import simulate
from trimtab.balance.plan import Costs, ParameterMemory, Part, Plan, Schedule
from trimtab.protocol import Layout

MEMORY = ParameterMemory(weight_bytes=2, gradient_bytes=4, optimizer_bytes=12, shards=4)


def part(parameters: float, activation_bytes: float, recomputed_bytes: float = 0.0) -> Part:
    return Part(1.0, 1.0, 1.0, parameters, activation_bytes, recomputed_bytes)


def model(layers: int) -> Costs:
    """Layers that keep 100, 101, ... bytes, 10 where they are recomputed."""
    return Costs(tuple(part(1000, 100 + layer, 10) for layer in range(layers)), part(500, 7), part(600, 13), 0.0)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[Schedule, int, int, int]:
    """(schedule, stages, virtual, microbatches)"""
    schedule = draw(st.sampled_from(Schedule))
    stages = draw(st.integers(1, 6))
    if schedule is not Schedule.INTERLEAVED:
        return schedule, stages, 1, draw(st.integers(1, 20))
    return schedule, stages, draw(st.integers(1, 4)), stages * draw(st.integers(1, 5))


@settings(deadline=None, max_examples=150)
@given(shapes(), st.randoms(use_true_random=False))
def test_what_is_in_flight_equals_the_simulated_peak(shape, random):
    schedule, stages, virtual, microbatches = shape
    activations = np.array([random.randint(0, 50) for _ in range(stages * virtual)], dtype=float)
    simulation = simulate(
        schedule, stages, np.ones((stages * virtual, microbatches)), 1.0, 1.0, activation_bytes=activations
    )
    for stage in range(stages):
        mixes = in_flight_mixes(schedule, stages, virtual, stage, microbatches)
        # Whole numbers: exact.
        assert (mixes @ activations[stage::stages]).max() == simulation.peak_bytes[stage]


@settings(deadline=None, max_examples=60)
@given(shapes(), st.randoms(use_true_random=False))
def test_memory_equals_the_simulated_peak_with_recomputed_layers(shape, random):
    schedule, stages, virtual, microbatches = shape
    sizes = [random.randint(1, 3) for _ in range(stages * virtual)]
    costs, layout = model(sum(sizes)), Layout(tuple(sizes), stages)
    recomputed = tuple(random.randint(0, len(layout.stage_layers(stage))) for stage in range(stages))
    plan = Plan(layout, schedule, (1, microbatches), recomputed)
    kept, static = np.zeros(layout.chunks), np.array(transient_bytes(costs, plan))
    for chunk in range(layout.chunks):
        stage = chunk % stages
        static[stage] += sum(one.parameters for one in costs.chunk(layout, chunk)) * (2 + 4 + 12 / 4)
        again = layout.stage_layers(stage)[: recomputed[stage]]
        kept[chunk] = sum(10 if layer in again else 100 + layer for layer in layout.chunk_layers(chunk))
    kept[0] += 7
    kept[-1] += 13
    simulation = simulate(
        schedule, stages, np.ones((layout.chunks, microbatches)), 1.0, 1.0, activation_bytes=kept, static_bytes=static
    )
    assert stage_memory_bytes(costs, MEMORY, plan) == tuple(simulation.peak_bytes)


@pytest.mark.parametrize(
    ("schedule", "virtual", "counts"),
    [
        (Schedule.GPIPE, 1, (16, 16, 16, 16)),
        (Schedule.ONE_F_ONE_B, 1, (4, 3, 2, 1)),
        # 2 (S - stage - 1) + (v - 1) S + 1
        (Schedule.INTERLEAVED, 2, (11, 9, 7, 5)),
        (Schedule.INTERLEAVED, 3, (15, 13, 11, 9)),
        (Schedule.ZERO_BUBBLE_1, 1, (4, 4, 4, 4)),
        (Schedule.ZERO_BUBBLE_2, 1, (7, 7, 7, 7)),
    ],
)
def test_in_flight_of_four_stages(schedule, virtual, counts):
    assert tuple(in_flight(schedule, 4, virtual, stage, 16) for stage in range(4)) == counts


@settings(deadline=None)
@given(shapes())
def test_no_more_is_in_flight_than_there_is(shape):
    schedule, stages, virtual, microbatches = shape
    for stage in range(stages):
        mixes = in_flight_mixes(schedule, stages, virtual, stage, microbatches)
        assert mixes.min() >= 0
        assert mixes.max() <= microbatches
        assert in_flight(schedule, stages, virtual, stage, microbatches) == mixes.sum(axis=1).max()


def test_memory_of_a_stage_by_hand():
    # 3|2 layers, two microbatches at most; the first stage recomputes its first two layers.
    plan = Plan(Layout((3, 2), 2), Schedule.ONE_F_ONE_B, (8,), (2, 0))
    first = 3500 * (2 + 4 + 3) + 2 * (7 + 10 + 10 + 102) + (101 - 10)
    second = 2600 * 9 + 1 * (103 + 104 + 13)
    assert stage_memory_bytes(model(5), MEMORY, plan) == (first, second)


def test_optimizer_state_is_shared_by_its_shards():
    plan = Plan(Layout((5,), 1), Schedule.GPIPE, (1,), (0,))
    parameters = 5 * 1000 + 500 + 600
    held = [stage_memory_bytes(model(5), ParameterMemory(2, 4, 12, shards), plan)[0] for shards in (1, 4)]
    assert held[0] - held[1] == parameters * (12 - 3)


def test_recomputing_the_only_microbatch_saves_nothing_of_the_largest_layer():
    # One layer, one microbatch: its activations are all there while its backward runs.
    costs = Costs((part(0, 100, 10),), part(0, 0), part(0, 0), 0.0)
    held = [
        stage_memory_bytes(costs, MEMORY, Plan(Layout((1,), 1), Schedule.ONE_F_ONE_B, (1,), (count,)))[0]
        for count in (0, 1)
    ]
    assert held == [100, 100]
