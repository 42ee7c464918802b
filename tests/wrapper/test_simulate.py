"""How long a pipeline takes, and what it holds.

Times are small whole numbers of seconds, which floats add exactly, or the tolerance is the rounding of their sums.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.balance.pipeline.schedules import SPLITTING
from trimtab.balance.pipeline.simulate import simulate
from trimtab.balance.plan import Link, Schedule

ROUNDING = 1e-12
"""Relative: sums of a few hundred numbers, added in another order."""

equal_times = st.tuples(*[st.integers(1, 20).map(float)] * 3)


def times(chunks, microbatches, forward, backward_input=1.0, backward_weight=1.0):
    """The three times of `simulate`, from one number for all chunks or one for each."""
    full = [
        np.broadcast_to(np.reshape(one, (-1, 1)), (chunks, microbatches)).astype(float)
        for one in (forward, backward_input, backward_weight)
    ]
    return tuple(full)


@st.composite
def pipelines(draw):
    """Arguments of `simulate`: any schedule, uneven times, slow links."""
    schedule = draw(st.sampled_from(list(Schedule)))
    stages = draw(st.integers(1, 5))
    virtual = draw(st.integers(1, 3)) if schedule is Schedule.INTERLEAVED else 1
    microbatches = draw(st.integers(1, 3)) * stages if schedule is Schedule.INTERLEAVED else draw(st.integers(1, 10))
    seconds = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spread = draw(st.sampled_from([0.0, 0.3, 2.0]))
    uneven = [seconds.lognormal(0, spread, (stages * virtual, microbatches)) for _ in range(3)]
    link = st.builds(Link, st.sampled_from([0.0, 0.01, 3.0]), st.sampled_from([0.5, 10.0, np.inf]))
    links = draw(st.one_of(st.just(()), st.tuples(*[link] * stages)))
    return (schedule, stages, *uneven), {"links": links, "boundary_bytes": draw(st.sampled_from([0.0, 1.0]))}


@given(pipelines())
@settings(deadline=None, max_examples=300)
def test_the_duration_is_between_its_bounds(pipeline):
    positional, named = pipeline
    simulation = simulate(*positional, **named)
    duration = simulation.duration_seconds
    assert simulation.lower_bound_seconds <= duration * (1 + ROUNDING)
    assert duration <= simulation.upper_bound_seconds * (1 + ROUNDING)
    # The least that a bound has to say: the work of any stage, and any microbatch on its own.
    _, _, forward, backward, weight = positional
    assert simulation.lower_bound_seconds >= simulation.busy_seconds.max() * (1 - ROUNDING)
    alone = (forward + backward).sum(axis=0) + weight[0]
    assert simulation.lower_bound_seconds >= alone.max() * (1 - ROUNDING)


@given(pipelines())
@settings(deadline=None, max_examples=100)
def test_operations_take_their_time_wait_for_their_input_and_never_overlap(pipeline):
    (schedule, stages, *uneven), named = pipeline
    simulation = simulate(schedule, stages, *uneven, **named)
    run = simulation.operations
    chunks, microbatches = uneven[0].shape
    if schedule not in SPLITTING:
        uneven = [uneven[0], uneven[1] + uneven[2]]
    seconds = dict(zip("FBW", uneven, strict=False))
    start, end = ({kind: np.full((chunks, microbatches), np.nan) for kind in seconds} for _ in range(2))
    for kind in seconds:
        chosen = run.kind == kind
        start[kind][run.chunk[chosen], run.microbatch[chosen]] = run.start_seconds[chosen]
        end[kind][run.chunk[chosen], run.microbatch[chosen]] = run.end_seconds[chosen]
        assert end[kind] - start[kind] == pytest.approx(seconds[kind], rel=1e-9)
    for stage in range(stages):
        own = run.stage == stage
        assert (run.start_seconds[own][1:] >= run.end_seconds[own][:-1]).all()
    crossing = [0.0] * (chunks - 1)
    if named["links"] and stages > 1:
        joins = [named["links"][chunk % stages] for chunk in range(chunks - 1)]
        crossing = [link.latency_seconds + named["boundary_bytes"] / link.bytes_per_second for link in joins]
    crossing = np.reshape(crossing, (-1, 1)) * (1 - ROUNDING)
    assert (start["F"][1:] >= end["F"][:-1] + crossing - 1e-9).all()
    assert (start["B"][:-1] >= end["B"][1:] + crossing - 1e-9).all()
    assert (start["B"][-1] >= end["F"][-1]).all()


@given(pipelines())
@settings(deadline=None, max_examples=100)
def test_a_slower_link_or_operation_never_makes_a_step_shorter(pipeline):
    (schedule, stages, forward, backward, weight), named = pipeline
    before = simulate(schedule, stages, forward, backward, weight, **named).duration_seconds
    slower = forward.copy()
    slower[0, 0] += 1
    assert simulate(schedule, stages, slower, backward, weight, **named).duration_seconds >= before
    named["boundary_bytes"] += 1
    assert simulate(schedule, stages, forward, backward, weight, **named).duration_seconds >= before


@given(st.sampled_from([Schedule.GPIPE, Schedule.ONE_F_ONE_B]), st.integers(1, 8), st.integers(1, 20), equal_times)
@settings(deadline=None)
def test_equal_stages_take_microbatches_plus_stages_less_one(schedule, stages, microbatches, seconds):
    # Narayanan et al., 2021, section 2.2.1: of GPipe and of 1F1B alike.
    simulation = simulate(schedule, stages, *times(stages, microbatches, *seconds))
    assert simulation.duration_seconds == (microbatches + stages - 1) * sum(seconds)
    bubble = (stages - 1) / (microbatches + stages - 1)
    assert simulation.bubble_ratio == pytest.approx(np.full(stages, bubble), abs=ROUNDING)
    assert simulation.lower_bound_seconds == simulation.duration_seconds


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), equal_times)
@settings(deadline=None)
def test_interleaving_divides_the_bubble_by_the_chunks_of_a_stage(stages, virtual, groups, seconds):
    # Narayanan et al., 2021, section 2.2.2. Seconds are those of a stage; a chunk takes 1 / virtual of them.
    microbatches = stages * groups
    chunk = [virtual * one / virtual for one in seconds]
    simulation = simulate(Schedule.INTERLEAVED, stages, *times(stages * virtual, microbatches, *chunk))
    assert simulation.duration_seconds == (microbatches * virtual + stages - 1) * sum(chunk)


@given(st.integers(1, 8), st.integers(0, 12), equal_times)
@settings(deadline=None)
def test_zero_bubble_1_fills_the_bubble_with_weight_gradients(stages, more, seconds):
    # Qi et al., 2023, table 1. It holds where a weight gradient is no longer than a forward, from S microbatches on.
    forward, backward, weight = seconds
    forward = max(forward, weight)
    microbatches = stages + more
    simulation = simulate(Schedule.ZERO_BUBBLE_1, stages, *times(stages, microbatches, forward, backward, weight))
    assert longest_span(simulation) == microbatches * (forward + backward + weight) + (stages - 1) * (
        forward + backward - weight
    )


@given(st.integers(1, 8), st.integers(0, 12), equal_times)
@settings(deadline=None)
def test_zero_bubble_2_does_so_twice(stages, more, seconds):
    # Qi et al., 2023, table 1, where a weight gradient is no longer than a forward or than an input gradient, from
    # 2 S - 1 microbatches on.
    weight, *others = seconds
    forward, backward = (max(weight, other) for other in others)
    microbatches = 2 * stages - 1 + more
    simulation = simulate(Schedule.ZERO_BUBBLE_2, stages, *times(stages, microbatches, forward, backward, weight))
    work = microbatches * (forward + backward + weight)
    assert longest_span(simulation) == work + (stages - 1) * (forward + backward - 2 * weight)
    # Where all stages meet after the step, the last one's late start counts in any case.
    assert simulation.duration_seconds == work + (stages - 1) * max(forward, forward + backward - 2 * weight)


def test_zero_bubble_2_leaves_no_bubble_within_a_stage_where_all_operations_are_equal():
    simulation = simulate(Schedule.ZERO_BUBBLE_2, 4, *times(4, 12, 1, 1, 1))
    assert longest_span(simulation) == simulation.busy_seconds.max() == 36
    assert simulation.duration_seconds == 39


def longest_span(simulation):
    """The most seconds from a stage's first operation to its last: what Qi et al. count as the length of a step."""
    run = simulation.operations
    stages = range(len(simulation.busy_seconds))
    return max(np.ptp(np.append(run.start_seconds[run.stage == s], run.end_seconds[run.stage == s])) for s in stages)


@given(
    st.integers(1, 20),
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=8),
)
@settings(deadline=None)
def test_gpipe_is_two_flow_shops(microbatches, stages):
    # All jobs alike: each machine once, and the slowest one for all the other jobs (any text on flow shops).
    forward, backward = np.array(stages).T
    simulation = simulate(Schedule.GPIPE, len(stages), *times(len(stages), microbatches, forward, backward, 0))
    expected = [one.sum() + (microbatches - 1) * one.max() for one in (forward, backward)]
    assert simulation.duration_seconds == sum(expected)


@given(st.integers(1, 20), st.lists(st.integers(1, 20), min_size=1, max_size=8), st.booleans())
@settings(deadline=None)
def test_the_formula_of_uneven_stages_bounds_1f1b(microbatches, forward, slowest_last):
    # max(C) + (sum(C) - max(C)) / M, as the report's cost of imbalance takes it: exact where the last stage is slowest.
    forward = np.array(sorted(forward) if slowest_last else forward)
    compute = 3 * forward * microbatches
    formula = compute.max() + (compute.sum() - compute.max()) // microbatches
    simulation = simulate(
        Schedule.ONE_F_ONE_B, len(forward), *times(len(forward), microbatches, forward, forward, forward)
    )
    assert simulation.duration_seconds <= formula
    if slowest_last:
        assert simulation.duration_seconds == formula


def test_a_slow_first_stage_costs_1f1b_less_than_the_formula():
    # It runs the forwards of its warm-up while the first microbatch is away: 12 s, of which 6 were lost otherwise.
    simulation = simulate(Schedule.ONE_F_ONE_B, 3, *times(3, 8, [6, 1, 1], [6, 1, 1], 0))
    assert simulation.duration_seconds == 8 * 12


def test_one_microbatch_goes_there_and_back():
    link = Link(0.5, 4.0)
    simulation = simulate(Schedule.ONE_F_ONE_B, 3, *times(3, 1, [1, 2, 3], 2, 1), links=[link] * 3, boundary_bytes=2.0)
    assert simulation.duration_seconds == 6 + 9 + 4 * 1.0
    assert simulation.lower_bound_seconds == simulation.upper_bound_seconds == simulation.duration_seconds


def test_transfers_queue_for_as_long_as_their_bytes_occupy_the_link_and_not_for_the_latency():
    # Forwards end at 1, 2 and 3 s; bytes take 2 s, the latency 10 s more.
    forward = times(2, 3, [1, 0])[0]
    simulation = simulate(Schedule.GPIPE, 2, forward, 0, 0, links=[Link(10.0, 1.0)] * 2, boundary_bytes=2.0)
    run = simulation.operations
    assert run.start_seconds[(run.stage == 1) & (run.kind == "F")].tolist() == [13.0, 15.0, 17.0]


def test_the_two_directions_of_a_link_do_not_hinder_each_other():
    # Microbatch 1 goes forward from 5 to 9 s, microbatch 0 back from 8 to 12 s.
    simulation = simulate(
        Schedule.ONE_F_ONE_B, 2, *times(2, 2, 1, 1, 1), links=[Link(0.0, 1.0)] * 2, boundary_bytes=4.0
    )
    run = simulation.operations
    assert run.start_seconds[(run.stage == 0) & (run.kind == "B")][0] == 12


def test_a_single_stage_needs_no_link():
    simulation = simulate(Schedule.INTERLEAVED, 1, *times(3, 4, 1, 1, 1), links=[Link(100.0, 1e-3)], boundary_bytes=1e9)
    assert simulation.duration_seconds == simulation.upper_bound_seconds == 36


def test_chunks_of_the_last_stage_reach_the_first_over_the_last_link():
    links = [Link(0.0, np.inf), Link(5.0, np.inf)]
    simulation = simulate(Schedule.INTERLEAVED, 2, *times(4, 2, 1, 0, 0), links=links)
    run = simulation.operations
    (started,) = run.start_seconds[(run.chunk == 2) & (run.microbatch == 0) & (run.kind == "F")]
    assert started == 2 + 5


def test_memory_is_static_bytes_and_the_microbatches_in_flight():
    activations, static = [1.0, 10.0, 100.0], [1000.0, 2000.0, 3000.0]
    peaks = {
        schedule: simulate(
            schedule, 3, *times(3, 8, 1), activation_bytes=activations, static_bytes=static
        ).peak_bytes.tolist()
        for schedule in (Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE_1, Schedule.ZERO_BUBBLE_2)
    }
    assert peaks == {
        Schedule.GPIPE: [1008, 2080, 3800],
        Schedule.ONE_F_ONE_B: [1003, 2020, 3100],
        Schedule.ZERO_BUBBLE_1: [1003, 2030, 3300],
        Schedule.ZERO_BUBBLE_2: [1005, 2050, 3500],
    }


def test_chunks_of_a_stage_hold_their_own_activations():
    # Before its first backward the first stage holds both microbatches of both chunks, the last one chunk 3 only once.
    simulation = simulate(Schedule.INTERLEAVED, 2, *times(4, 2, 1), activation_bytes=[1.0, 10.0, 100.0, 1000.0])
    assert simulation.peak_bytes.tolist() == [202, 1020]


def test_times_may_differ_by_microbatch():
    forward = np.array([[1.0, 5.0], [1.0, 1.0]])
    simulation = simulate(Schedule.GPIPE, 2, forward, 1.0, 0.0)
    assert simulation.duration_seconds == 1 + 5 + 1 + 1 + 1 + 1
    assert simulation.busy_seconds.tolist() == [8, 4]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"stages": 2, "forward_seconds": np.ones((3, 4))}, "3 chunks cannot be shared out equally over 2 stages"),
        ({"stages": 2, "forward_seconds": np.ones((4, 4))}, "takes one chunk a stage, not 2"),
        ({"stages": 3, "forward_seconds": np.ones((3, 4)), "links": [Link(0, 1)] * 2}, "2 links for 3 stages"),
    ],
)
def test_what_does_not_fit_together_is_refused(arguments, reason):
    with pytest.raises(ValueError, match=reason):
        simulate(Schedule.ONE_F_ONE_B, backward_input_seconds=1, backward_weight_seconds=1, **arguments)
