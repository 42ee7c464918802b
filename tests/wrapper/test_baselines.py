from operator import attrgetter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import partition as benchmark
from trimtab.balance.layouts.baselines import diffusion, smallest_spread, stage_seconds
from trimtab.balance.layouts.partition import NoLayout, partition
from trimtab.balance.plan import Costs, Hardware, Part, Schedule
from trimtab.protocol import Layout

SECONDS = attrgetter("compute_seconds")


def model(seconds, embedding=0.0, head=0.0):
    def part(amount: float) -> Part:
        return Part(amount / 4, amount / 4, amount / 2, 1e6, 1e6, 0.0)

    return Costs(tuple(map(part, seconds)), part(embedding), part(head), 0.0)


def best_seconds(costs, speeds):
    on, memory = Hardware(np.array([speeds]), (np.inf,) * len(speeds), ()), benchmark.MEMORY
    found = partition(costs, memory, on, schedule=Schedule.ONE_F_ONE_B, stages=len(speeds), microbatches=8)
    return found.slowest_seconds


@st.composite
def models(draw: st.DrawFn) -> tuple[Costs, list[float]]:
    """(costs, speeds)"""
    stages = draw(st.integers(1, 5))
    seconds = draw(st.lists(st.floats(0.5, 2), min_size=stages, max_size=16))
    speeds = draw(st.lists(st.sampled_from([0.5, 0.8, 1.0]), min_size=stages, max_size=stages))
    return model(seconds, draw(st.floats(0, 1)), draw(st.floats(0, 4))), speeds


@settings(deadline=None, max_examples=60)
@given(models())
def test_no_rule_is_faster_than_the_optimum(given):
    costs, speeds = given
    uniform = Layout.uniform(len(costs.layers), len(speeds))
    # Rounding: sums in another order.
    best = best_seconds(costs, speeds) * (1 - 1e-9)
    for layout in (uniform, smallest_spread(costs, len(speeds), SECONDS), diffusion(costs, uniform, np.array(speeds))):
        assert sum(layout.layers) == len(costs.layers)
        assert stage_seconds(costs, layout, np.array(speeds)).max() >= best


@settings(deadline=None, max_examples=40)
@given(models())
def test_diffusion_never_makes_the_slowest_stage_slower(given):
    costs, speeds = given
    uniform = Layout.uniform(len(costs.layers), len(speeds))
    after = diffusion(costs, uniform, np.array(speeds))
    now, then = (stage_seconds(costs, layout, np.array(speeds)).max() for layout in (after, uniform))
    assert now <= then
    assert diffusion(costs, after, np.array(speeds)) == after


def test_diffusion_stays_where_no_neighbor_gains():
    # The head needs two layers less, but its neighbor is as full as it: what the stages before could take is not seen.
    costs, start = model([1] * 8, head=2), Layout((2, 3, 3, 0), 4)
    speeds = np.ones(4)
    assert diffusion(costs, start, speeds) == start
    assert stage_seconds(costs, start, speeds).tolist() == [2, 3, 3, 2]
    assert diffusion(costs, Layout((2, 2, 2, 2), 4), speeds) == Layout((2, 2, 3, 1), 4)


@pytest.mark.parametrize(
    ("costs", "stages", "layers"),
    [
        # Embedding and head are parts like others: five parts of one second over four stages.
        (model([1] * 3, embedding=1, head=1), 4, (0, 1, 1, 1)),
        (model([1] * 6, embedding=1, head=1), 4, (1, 2, 2, 1)),
        (model([1] * 8, embedding=0, head=4), 3, (4, 4, 0)),
        (model([3, 1, 1, 1], embedding=0, head=0), 2, (1, 3)),
        (model([1] * 5), 1, (5,)),
    ],
)
def test_the_smallest_spread(costs, stages, layers):
    assert smallest_spread(costs, stages, SECONDS) == Layout(layers, stages)


def test_the_smallest_spread_may_be_of_parameters():
    costs = model([1, 1, 1, 5])
    assert smallest_spread(costs, 2, attrgetter("parameters")) == Layout((2, 2), 2)
    assert smallest_spread(costs, 2, SECONDS) == Layout((3, 1), 2)


def test_more_stages_than_parts_are_refused():
    with pytest.raises(ValueError, match="4 parts for 5 stages"):
        smallest_spread(model([1, 1]), 5, SECONDS)


def test_the_optimum_equals_an_integer_program():
    fitting = 0
    for seed in range(20):
        random = np.random.default_rng(seed)
        kind = benchmark.Kind(
            name="",
            layers=int(random.integers(6, 25)),
            stages=int(random.integers(2, 5)),
            head=random.uniform(0, 4),
            spread=0.5,
            slow=0.8,
            memory_layers=random.uniform(3, 8),
        )
        costs, on = kind.instance(random)
        expected = benchmark.integer_program(costs, on.speeds[0].tolist(), on.memory_bytes)
        try:
            found = partition(
                costs,
                benchmark.MEMORY,
                on,
                schedule=Schedule.ONE_F_ONE_B,
                stages=kind.stages,
                microbatches=benchmark.MICROBATCHES,
            ).slowest_seconds
        except NoLayout:
            found = np.inf
        # The solver's tolerance of feasibility.
        assert found == pytest.approx(expected, rel=1e-6)
        fitting += found < np.inf
    assert 5 < fitting < 20
