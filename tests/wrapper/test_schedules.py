"""The order in which each stage takes its operations."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.balance.pipeline.schedules import SPLITTING, obstacle, stage_orders
from trimtab.balance.plan import Schedule


@st.composite
def shapes(draw, schedules=tuple(Schedule)):
    """(schedule, stages, virtual, microbatches) that can run."""
    schedule = draw(st.sampled_from(schedules))
    stages = draw(st.integers(1, 6))
    if schedule is Schedule.INTERLEAVED:
        return schedule, stages, draw(st.integers(1, 4)), stages * draw(st.integers(1, 4))
    return schedule, stages, 1, draw(st.integers(1, 20))


def written(order):
    """As papers draw it: "F0 F1 B0 W0", with the chunk before the microbatch where there are several."""
    return " ".join(f"{kind}{microbatch}" for kind, _, microbatch in order)


@given(shapes())
@settings(deadline=None)
def test_every_operation_is_run_once_and_on_the_stage_of_its_chunk(shape):
    schedule, stages, virtual, microbatches = shape
    kinds = "FBW" if schedule in SPLITTING else "FB"
    for stage, order in enumerate(stage_orders(*shape)):
        chunks = range(stage, stages * virtual, stages)
        assert Counter(order) == Counter(
            (kind, chunk, microbatch) for kind in kinds for chunk in chunks for microbatch in range(microbatches)
        )


@given(shapes())
@settings(deadline=None)
def test_no_stages_wait_for_each_other(shape):
    _, stages, virtual, _ = shape
    last = stages * virtual - 1
    waiting = [list(reversed(order)) for order in stage_orders(*shape)]
    done = set()

    def possible(kind, chunk, microbatch):
        if kind == "F":
            return chunk == 0 or ("F", chunk - 1, microbatch) in done
        if kind == "W":
            return ("B", chunk, microbatch) in done
        return (("F", last, microbatch) if chunk == last else ("B", chunk + 1, microbatch)) in done

    while any(waiting):
        before = len(done)
        for order in waiting:
            while order and possible(*order[-1]):
                done.add(order.pop())
        assert len(done) > before, f"all of these wait: {[order[-1] for order in waiting if order]}"


@given(shapes())
@settings(deadline=None)
def test_a_stage_holds_no_more_microbatches_than_its_schedule_promises(shape):
    schedule, stages, virtual, microbatches = shape
    limits = {
        Schedule.GPIPE: lambda stage: microbatches,
        Schedule.ONE_F_ONE_B: lambda stage: stages - stage,
        Schedule.INTERLEAVED: lambda stage: (virtual - 1) * stages + 2 * (stages - 1 - stage) + 1,
        Schedule.ZERO_BUBBLE_1: lambda stage: stages,
        Schedule.ZERO_BUBBLE_2: lambda stage: 2 * stages - 1,
    }
    freeing = "W" if schedule in SPLITTING else "B"
    for stage, order in enumerate(stage_orders(*shape)):
        held = most = 0
        for kind, _, _ in order:
            held += (kind == "F") - (kind == freeing)
            most = max(most, held)
        assert most == min(limits[schedule](stage), microbatches * virtual)
        assert held == 0


def test_gpipe_runs_all_forwards_first():
    assert [written(order) for order in stage_orders(Schedule.GPIPE, 2, 1, 3)] == ["F0 F1 F2 B0 B1 B2"] * 2


def test_1f1b_is_that_of_its_paper():
    # Narayanan et al., 2021, figure 4, with four stages.
    assert [written(order) for order in stage_orders(Schedule.ONE_F_ONE_B, 4, 1, 5)] == [
        "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4",
        "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    ]


def test_zero_bubble_orders_are_those_of_their_paper():
    # Qi et al., 2023, figures 2 and 3, with two stages: the last stage keeps weight gradients back for its end.
    assert [written(order) for order in stage_orders(Schedule.ZERO_BUBBLE_1, 2, 1, 3)] == [
        "F0 F1 B0 W0 F2 B1 W1 B2 W2",
        "F0 B0 F1 B1 W0 F2 B2 W1 W2",
    ]
    assert [written(order) for order in stage_orders(Schedule.ZERO_BUBBLE_2, 2, 1, 4)] == [
        "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    ]


def test_more_warm_up_than_microbatches_is_all_of_them():
    assert [written(order) for order in stage_orders(Schedule.ZERO_BUBBLE_2, 3, 1, 1)] == ["F0 B0 W0"] * 3


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((Schedule.ONE_F_ONE_B, 2, 2, 4), "schedule 1f1b takes one chunk a stage, not 2"),
        ((Schedule.INTERLEAVED, 4, 2, 6), "schedule interleaved takes a multiple of 4 microbatches"),
        ((Schedule.INTERLEAVED, 4, 2, 2), "schedule interleaved takes a multiple of 4 microbatches"),
        ((Schedule.GPIPE, 2, 1, 0), "0 microbatches: a step takes at least one"),
    ],
)
def test_a_shape_that_a_schedule_cannot_run_is_refused(shape, reason):
    assert obstacle(*shape).startswith(reason)
    with pytest.raises(ValueError, match=reason):
        stage_orders(*shape)


@given(stages=st.integers(2, 6), virtual=st.integers(2, 4), groups=st.integers(1, 4), data=st.data())
@settings(deadline=None, max_examples=50)
def test_the_interleaved_order_is_megatron_cores(stages, virtual, groups, data):
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules", reason="compares with Megatron-core")
    stage = data.draw(st.integers(0, stages - 1))
    microbatches = stages * groups
    table = schedules.get_schedule_table(microbatches, virtual, stages)

    class Ranks:
        virtual_pipeline_model_parallel_size = virtual

        class pp_group:  # noqa: N801 - as Megatron-core names it
            size = staticmethod(lambda: stages)
            rank = staticmethod(lambda: stage)

    _, _, warm_up, remaining = schedules.get_pp_rank_microbatches(microbatches, virtual, stages, p2p_communicator=Ranks)
    order = stage_orders(Schedule.INTERLEAVED, stages, virtual, microbatches)[stage]
    assert "".join(kind for kind, _, _ in order) == "F" * warm_up + "FB" * remaining + "B" * warm_up
    forwards = [(chunk // stages, microbatch) for kind, chunk, microbatch in order if kind == "F"]
    backwards = [(chunk // stages, microbatch) for kind, chunk, microbatch in order if kind == "B"]
    assert forwards == [(chunk, microbatch) for microbatch, chunk in table]
    assert backwards == [(virtual - 1 - chunk, microbatch) for microbatch, chunk in table]
