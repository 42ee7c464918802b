"""Layouts as strings: who holds which layer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.protocol import job_from_dict
from trimtab_megatron.layout import chunk_layers, layout_of, rank_layers


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
    assert layout_of(job) == layout


def test_chunks_of_the_interleaved_schedule_alternate_between_the_ranks():
    assert chunk_layers("Et|tt|t|tttL") == [[0], [1, 2], [3], [4, 5, 6]]
    assert rank_layers("Et|tt|t|tttL", pipeline=2, pipeline_rank=0) == [0, 3]
    assert rank_layers("Et|tt|t|tttL", pipeline=2, pipeline_rank=1) == [1, 2, 4, 5, 6]


def test_a_stage_may_hold_no_layer():
    assert [rank_layers("E|tt|L", 3, rank) for rank in range(3)] == [[], [0, 1], []]


@given(st.integers(1, 4), st.integers(1, 3), st.data())
def test_every_layer_is_on_exactly_one_rank(pipeline, virtual, data):
    counts = data.draw(st.lists(st.integers(0, 5), min_size=pipeline * virtual, max_size=pipeline * virtual))
    layout = "E" + "|".join("t" * count for count in counts) + "L"
    held = [layer for rank in range(pipeline) for layer in rank_layers(layout, pipeline, rank)]
    assert sorted(held) == list(range(sum(counts)))
