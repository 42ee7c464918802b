"""The picture of a simulation."""

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab import timeline
from trimtab.balance.pipeline.simulate import simulate
from trimtab.balance.plan import Schedule
from trimtab.timeline import Picture

pytest.importorskip("plotly", reason="pictures need plotly: pip install 'trimtab[report]'")


def simulated(schedule=Schedule.ONE_F_ONE_B, stages=2, virtual=1, microbatches=4):
    return simulate(schedule, stages, np.full((stages * virtual, microbatches), 0.001), 0.002, 0.001)


def data_of(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_every_operation_is_drawn_once_where_and_when_it_runs():
    simulation = simulated(Schedule.INTERLEAVED, virtual=2)
    (chart,) = data_of(timeline.render("a title", [Picture("1F1B", simulation)]))
    run = simulation.operations
    drawn = {
        (group["kind"], round(group["shade"]) * 2 + stage, microbatch): (start, length)
        for group in chart["bars"]
        for stage, microbatch, start, length in zip(
            group["stage"], group["microbatch"], group["start"], group["length"], strict=True
        )
    }
    assert len(drawn) == len(run.kind)
    for kind, chunk, microbatch, start, end in zip(
        run.kind, run.chunk, run.microbatch, run.start_seconds, run.end_seconds, strict=True
    ):
        assert drawn[kind, chunk, microbatch] == pytest.approx((start * 1e3, (end - start) * 1e3))


def test_gradients_are_named_apart_only_where_they_are_run_apart():
    names = {
        schedule: [
            group["name"] for group in data_of(timeline.render("", [Picture("", simulated(schedule))]))[0]["bars"]
        ]
        for schedule in (Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE_1)
    }
    assert names == {
        Schedule.ONE_F_ONE_B: ["forward", "backward"],
        Schedule.ZERO_BUBBLE_1: ["forward", "input gradients", "weight gradients"],
    }


def test_pictures_have_the_same_scale():
    charts = data_of(
        timeline.render("", [Picture("", simulated(microbatches=4)), Picture("", simulated(microbatches=8))])
    )
    assert [chart["longest"] for chart in charts] == [pytest.approx(9 * 4)] * 2


def test_many_operations_are_drawn_as_shares_and_the_page_says_so():
    simulation = simulated(stages=8, microbatches=timeline.MOST_BARS)
    page = timeline.render("", [Picture("", simulation)])
    (chart,) = data_of(page)
    assert np.shape(chart["spans"]) == (8, timeline.SPANS)
    assert f"{8 * 2 * timeline.MOST_BARS:,} operations are too many for a bar each" in page
    assert len(page) < 6e6


@given(st.integers(1, 4), st.integers(1, 8), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=30)
def test_shares_add_up_to_what_a_stage_computes(stages, microbatches, seed):
    seconds = np.random.default_rng(seed).uniform(0, 1, (stages, microbatches))
    simulation = simulate(Schedule.ONE_F_ONE_B, stages, seconds, seconds, seconds)
    width = simulation.duration_seconds / timeline.SPANS
    for stage in range(stages):
        shares = timeline.busy_ratio(simulation.operations, stage, width)
        assert shares.min() > -1e-9
        assert shares.max() < 1 + 1e-9
        assert shares.sum() * width == pytest.approx(simulation.busy_seconds[stage])


def test_texts_are_escaped_and_nothing_is_loaded():
    hostile = "</script><script>alert(1)</script>\x1b[31m"
    page = timeline.render(hostile, [Picture(hostile, simulated(), hostile)])
    assert "<script>alert" not in page
    assert "\x1b" not in page
    markup = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r'(src|href)="(?!data:)', markup)


def test_the_page_is_written_whole(tmp_path):
    path = tmp_path / "timeline.html"
    timeline.write(path, "a title", [Picture("1F1B", simulated())])
    assert path.read_text(encoding="utf-8") == timeline.render("a title", [Picture("1F1B", simulated())])
    assert list(tmp_path.iterdir()) == [path]
