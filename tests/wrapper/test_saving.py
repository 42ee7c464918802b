"""When the ranks shall save."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.protocol import Train
from trimtab.saving import FIRST_SAVE_SECONDS, Saving, interval_seconds

HOUR = 3600.0


def lost_ratio(interval, save, mtbf, restart=0.0):
    """Share of the wall time lost, by Daly's complete model (equation 13): exponential failures."""
    wall = mtbf * math.exp(restart / mtbf) * math.expm1((interval + save) / mtbf) / interval
    return 1 - 1 / wall


@pytest.mark.parametrize(("save", "mtbf"), [(5.0, 24 * HOUR), (60.0, 6 * HOUR), (300.0, HOUR), (900.0, HOUR)])
def test_the_interval_is_within_a_percent_of_the_best(save, mtbf):
    best = min(
        lost_ratio(save * 1.02**power, save, mtbf) for power in range(-200, 900) if save * 1.02**power < mtbf * 3
    )
    assert lost_ratio(interval_seconds(save, mtbf), save, mtbf) <= best + 0.01


@given(save=st.floats(0.01, 1e4), mtbf=st.floats(60.0, 1e8))
def test_the_interval_is_positive_and_at_most_the_time_between_failures_or_youngs(save, mtbf):
    interval = interval_seconds(save, mtbf)
    assert 0 < interval <= max(mtbf, 1.5 * math.sqrt(2 * save * mtbf))


def test_saves_beyond_the_time_between_failures_come_once_in_it():
    assert interval_seconds(100.0, 50.0) == 50.0


def test_the_first_save_comes_early_and_the_next_by_what_it_took():
    saving = Saving(Train(node_mtbf_hours=1000.0), nodes=100, began_seconds=0.0)
    assert not saving.due(FIRST_SAVE_SECONDS - 1)
    assert saving.due(FIRST_SAVE_SECONDS)
    assert not saving.due(2 * FIRST_SAVE_SECONDS), "it was told once"
    saving.saved(310.0, took_seconds=10.0)
    interval = interval_seconds(10.0, 10 * HOUR)
    assert not saving.due(310 + interval - 1)
    assert saving.due(310 + interval + 1)


def test_a_save_that_does_not_come_is_asked_for_again():
    saving = Saving(Train(longest_checkpoint_minutes=30), nodes=1, began_seconds=0.0)
    assert saving.due(FIRST_SAVE_SECONDS)
    assert not saving.due(FIRST_SAVE_SECONDS + 1799.0)
    assert saving.due(FIRST_SAVE_SECONDS + 1800.0)


def test_no_two_saves_are_further_apart_than_the_longest_time():
    saving = Saving(Train(longest_checkpoint_minutes=30), nodes=1, began_seconds=0.0)
    saving.saved(0.0, took_seconds=60.0)
    assert not saving.due(1799.0)
    assert saving.due(1800.0)


@pytest.mark.parametrize("train", [Train(checkpoint_interval_steps=10), Train(checkpoint_directory="")])
def test_nothing_is_due_where_the_job_counts_steps_or_has_no_directory(train):
    assert not Saving(train, nodes=1, began_seconds=0.0).due(1e9)
