"""Who holds which layer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.protocol import Layout, job_from_dict, layout_of


@pytest.mark.parametrize(
    ("parallel", "layout"),
    [
        ({}, "EttttL"),
        ({"pipeline": 2}, "Ett|ttL"),
        ({"pipeline": 2, "virtual": 2}, "Et|t|t|tL"),
        ({"pipeline": 2, "layout": "Ettt|tL"}, "Ettt|tL"),
        ({"pipeline": 3, "layout": "E|tttt|L"}, "E|tttt|L"),
    ],
)
def test_a_job_without_a_layout_gets_equal_shares(parallel, layout):
    job = job_from_dict({"model": {"layers": 4}, "parallel": parallel})
    assert str(layout_of(job)) == layout


def test_shares_that_cannot_be_equal_differ_by_one_layer():
    assert Layout.uniform(10, 4) == Layout((3, 3, 2, 2), 4)


def test_chunks_of_the_interleaved_schedule_alternate_between_the_stages():
    layout = Layout.parse("Et|tt|t|tttL", stages=2)
    assert [list(layout.chunk_layers(chunk)) for chunk in range(4)] == [[0], [1, 2], [3], [4, 5, 6]]
    assert [layout.stage_layers(stage) for stage in range(2)] == [(0, 3), (1, 2, 4, 5, 6)]
    assert layout.owners == (0, 1, 1, 0, 1, 1, 1)
    assert (layout.chunks, layout.virtual) == (4, 2)


def test_the_first_and_the_last_stage_may_hold_no_layer():
    layout = Layout.parse("E|tt|L", 3)
    assert [layout.stage_layers(stage) for stage in range(3)] == [(), (0, 1), ()]


def test_a_stage_between_them_may_not():
    with pytest.raises(ValueError, match="empty"):
        Layout.parse("Et||tL", 3)


def test_chunks_that_do_not_fill_the_stages_are_refused():
    with pytest.raises(ValueError, match=r"3 chunks .* 2 stages"):
        Layout((1, 1, 1), 2)


@given(st.integers(1, 4), st.integers(1, 3), st.data())
def test_every_layer_is_on_exactly_one_stage(stages, virtual, data):
    counts = data.draw(st.lists(st.integers(1, 5), min_size=stages * virtual, max_size=stages * virtual))
    layout = Layout(tuple(counts), stages)
    assert Layout.parse(str(layout), stages) == layout
    held = [layer for stage in range(stages) for layer in layout.stage_layers(stage)]
    assert sorted(held) == list(range(sum(counts)))
    assert all(layer in layout.stage_layers(owner) for layer, owner in enumerate(layout.owners))
