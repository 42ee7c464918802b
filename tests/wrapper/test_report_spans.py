"""Which steps ran under which setting, and what is made of it."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from trimtab.report import series
from trimtab.report.spans import passes, spans
from trimtab.report.summarize import summarize


def settings(steps, layouts=("Ett|ttL", "Ettt|tL", "Et|tttL"), microbatches=("8", "8", "8")):
    count = len(steps)
    return {
        "step": np.array(steps),
        "layout": np.array([layouts[place % 3] for place in range(count)], dtype=np.str_),
        "microbatches": np.array([microbatches[place % 3] for place in range(count)], dtype=np.str_),
        "recomputed_layers": np.array(["0|0"] * count, dtype=np.str_),
    }


def test_without_a_recorded_setting_all_steps_are_of_one(profile):
    (span,) = spans(profile.training)
    assert (span.first_step, span.layers, len(span.rows)) == (1, (), 30)


@limits(deadline=None)  # the machine may be busy
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6, unique=True).map(sorted))
def test_every_step_is_of_one_setting(plain_training, steps):
    training = dataclasses.replace(plain_training, settings=settings(steps))
    found = spans(training)
    assert [span.first_step for span in found] == ([] if steps[0] == 1 else [1]) + steps
    assert bool(found[0].layers) == (steps[0] == 1)  # what ran before is not known
    assert np.concatenate([span.rows for span in found]).tolist() == list(range(30))
    for span in found[1:]:
        assert all(training.steps["step"][span.rows] >= span.first_step)


def test_a_setting_that_changes_nothing_is_none(profile, profiles):
    again = settings([1, 21], layouts=("Ett|ttL",) * 3)
    assert len(spans(profiles.change(profile, training={"settings": again}).training)) == 1


def test_figures_are_of_the_latest_setting_alone(profile, profiles):
    training = summarize(profiles.trimmed(profile, step=21)).training
    before, after = training.settings
    assert (before.first_step, before.last_step, before.layers) == (1, 20, (4, 4))
    assert (after.first_step, after.last_step, after.recomputed_layers) == (21, 30, (0, 1))
    assert (before.step_seconds, after.step_seconds) == (1.5, pytest.approx(1.2))
    assert before.imbalance_ratio == pytest.approx(0.85 / 0.725 - 1)
    assert after.imbalance_ratio == pytest.approx(0.75 / 0.725 - 1)
    assert training.imbalance.ratio == after.imbalance_ratio
    assert (training.imbalance.stage, training.imbalance.measured_steps) == (0, 10)
    assert (training.window_first_step, training.window_last_step) == (21, 30)
    assert (training.step_seconds, training.cost) == (after.step_seconds, after.cost)
    assert after.cost.measured_steps == 10
    assert [stage.layers for stage in training.stages] == ["0-4", "5-7"]


def test_a_setting_without_a_step_yet_leaves_the_figures_to_the_one_before(profile, profiles):
    training = summarize(profiles.change(profile, training={"settings": settings([1, 31])})).training
    assert training.setting == 0
    assert (training.settings[1].last_step, training.settings[1].step_seconds) == (None, None)
    assert training.imbalance.ratio == pytest.approx(0.85 / 0.725 - 1)


def test_no_window_reaches_back_over_a_change(profile, profiles):
    changed = profiles.trimmed(profile, step=21).training
    _, window = series.imbalance_lines(changed, 20)
    before, after = 0.85 / 0.725 - 1, 0.75 / 0.725 - 1
    assert window.y[19:21] == (pytest.approx(before * 100, abs=1e-4), pytest.approx(after * 100, abs=1e-4))


def test_marks_are_where_a_setting_began(profile, profiles):
    (mark,) = series.marks(profiles.trimmed(profile, step=21).training)
    assert (mark.label, mark.step) == ("2", 21)
    assert mark.time_seconds == pytest.approx(profile.start_seconds + 10 + 21 * 1.5 - 1.2)
    assert series.marks(profile.training) == ()


def test_unequal_microbatches_are_counted_for_each_replica(profiles):
    training = profiles.make(tensor=1, data=2).training
    uneven = dataclasses.replace(training, settings=settings([1, 11], microbatches=("8|8", "9|7", "8|8")))
    counts = passes(uneven, spans(uneven), virtual=2)
    assert counts[9].tolist() == [16, 16]
    assert counts[10].tolist() == [18, 14]


@pytest.fixture
def unequal(profiles):
    """A function that makes two level replicas of two stages with so many microbatches each, of a second in all."""

    def make(microbatches):
        counts = np.array([int(count) for count in microbatches.split("|")])
        profile = profiles.make(tensor=1, data=2, head_seconds=0.0, microbatches=2)
        stages = dict(profile.training.stages)
        share = counts[stages["replica"]] / counts.sum()
        stages |= {"forward_seconds": share / 3, "backward_seconds": share * 2 / 3}
        ran = settings([1], layouts=("Etttt|ttttL",), microbatches=(microbatches,))
        return profiles.change(profile, training={"stages": stages, "settings": ran})

    return make


def test_replicas_that_must_have_more_to_do_are_not_apart_by_it(unequal):
    profile = unequal("2|1")
    training = summarize(profile).training
    assert training.imbalance.ratio == pytest.approx(0)
    assert training.settings[0].imbalance_ratio == pytest.approx(0)
    assert training.cost.imbalance_seconds == pytest.approx(0)
    assert [stage.compute_seconds for stage in training.stages] == pytest.approx([2 / 3, 2 / 3, 1 / 3, 1 / 3])
    # Half a second on average, and the larger share takes a third more; a step takes 1.5 s.
    assert training.shares.unequal_ratio == pytest.approx((2 / 3 - 1 / 2) / 1.5)
    assert training.shares.fill_ratio == pytest.approx(1 / 2 / 1.5 / 1.5)
    assert sum(dataclasses.astuple(training.shares)) == pytest.approx(1)
    each, window = series.imbalance_lines(profile.training, 20)
    assert set(each.y) == set(window.y) == {0.0}


def test_replicas_whose_shares_were_shifted_are(unequal):
    training = summarize(unequal("3|1")).training
    assert training.imbalance.ratio == pytest.approx(0.75 / 0.5 - 1)
    assert training.shares.unequal_ratio == 0


def test_stages_of_other_places_than_the_shape_has_are_refused(profile, profiles):
    stages = dict(profile.training.stages)
    stages["replica"] = stages["replica"] + 1
    with pytest.raises(ValueError, match="stage 0 of replica 1 reported, of 1 replicas of 2 stages"):
        summarize(profiles.change(profile, training={"stages": stages}))


def test_steps_without_a_record_and_steps_recorded_twice_are_said(profile, profiles):
    steps = {name: np.delete(column, [4, 5, 9]) for name, column in profile.training.steps.items()}
    steps["step"][-1] = steps["step"][-2]
    warnings = summarize(profiles.change(profile, training={"steps": steps})).warnings
    assert warnings[:2] == (
        "1 step recorded more than once, the first of them step 29",
        "3 steps without a record: 5-6,10",
    )
