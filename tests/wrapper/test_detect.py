from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.detect import made_up_seconds, places_of, wrong_bounds
from trimtab.balance.detect import WARM_UP_STEPS, Watch, detect, imbalance, imbalance_ratio, observe
from trimtab.protocol import Balance

POLICY = Balance()
WINDOW = POLICY.window_steps


def found(seconds, policy=POLICY, **options):
    return detect(seconds, np.arange(1, len(seconds) + 1), places_of(seconds.shape[1]), policy, **options)


def level(steps, places=4):
    return np.ones((steps, places))


def apart(steps, ratio, places=4, slowest=2):
    seconds = level(steps, places)
    seconds[:, slowest] += ratio
    return seconds


def begun(*parts):
    """Steps of warming up, and then these."""
    return np.concatenate([level(WARM_UP_STEPS, parts[0].shape[1]), *parts])


def test_imbalance_is_slowest_over_median():
    assert imbalance_ratio([1.0, 1.0, 1.0, 1.3]) == pytest.approx(0.3)
    assert imbalance_ratio([0.735, 1.0]) == pytest.approx(1.0 / 0.8675 - 1)


def test_one_outlier_step_does_not_move_a_window():
    seconds = level(9, 2)
    seconds[8, 1] = 50.0
    assert imbalance(seconds, range(9), places_of(2)).ratio == 0.0


def test_imbalance_names_the_slowest_stage_and_replica():
    seen = imbalance(np.array([[1.0, 1.0, 1.0, 1.2]]), [7], [(0, 0), (0, 1), (1, 0), (1, 1)])
    assert (seen.place, seen.first_step, seen.last_step) == ((1, 1), 7, 7)
    assert seen.ratio == pytest.approx(0.2)


def test_a_single_step_says_nothing_for_certain():
    seen = imbalance(np.array([[1.0, 1.5]]), [1], places_of(2))
    assert (seen.lower_ratio, seen.upper_ratio) == (-np.inf, np.inf)


def test_one_stage_cannot_be_apart():
    assert imbalance(level(20, 1), range(20), places_of(1)) is None
    assert found(level(200, 1)).windows == ()


@pytest.mark.parametrize("absent", [0.0, np.nan, np.inf, -1.0])
def test_steps_that_are_not_whole_do_not_count(absent):
    seconds = apart(10, 0.2)
    seconds[[2, 5], 0] = absent
    seen = imbalance(seconds, range(10), places_of(4))
    assert seen.ratio == pytest.approx(0.2)
    assert imbalance(np.full((3, 2), absent), range(3), places_of(2)) is None


def test_what_slows_a_whole_step_does_not_count():
    random = np.random.default_rng(1)
    seconds = apart(20, 0.15) * random.lognormal(sigma=0.5, size=(20, 1))
    seen = imbalance(seconds, range(20), places_of(4))
    assert seen.ratio == pytest.approx(0.15)
    assert seen.upper_ratio - seen.lower_ratio < 1e-9  # the rounding of the last digit


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_bounds_enclose_the_ratio_and_follow_permutation_and_scale(data):
    steps, places = data.draw(st.integers(1, 25)), data.draw(st.integers(2, 9))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    seconds = random.lognormal(sigma=data.draw(st.sampled_from([0.0, 0.05, 1.0])), size=(steps, places))
    seen = imbalance(seconds, range(steps), places_of(places))
    assert seen.lower_ratio <= seen.ratio <= seen.upper_ratio
    assert seen.ratio >= 0
    order = random.permutation(places)
    moved = imbalance(4 * seconds[:, order], range(steps), [places_of(places)[index] for index in order])
    for name in ("ratio", "lower_ratio", "upper_ratio"):
        # Places that are equal to the last digit may be taken in another order.
        assert getattr(moved, name) == pytest.approx(getattr(seen, name), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("places", [2, 4, 64])
@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_the_lower_bound_is_above_the_truth_in_one_window_of_twenty_at_most(places, correlation):
    random = np.random.default_rng(2)
    lower, upper = wrong_bounds(random, 400, places, correlation, POLICY)
    # 400 windows: 5 % of them are 20, with a standard deviation of 4.4. Correlation is itself only estimated from 20
    # steps, and the median of four places is a little above the true one: twice as many have to be enough.
    assert lower <= 0.05 + 3 * 0.011
    assert upper <= 0.10 + 3 * 0.015


@pytest.mark.parametrize("places", [2, 4, 16, 64])
def test_balanced_steps_trigger_at_most_once_in_a_hundred_thousand(places):
    steps = 100_000 if places == 16 else 20_000
    seconds = made_up_seconds(np.random.default_rng(3), steps, places)
    seen = found(seconds)
    assert len(seen.windows) == (steps - WARM_UP_STEPS) // WINDOW
    assert len(seen.findings) <= (steps == 100_000)


@pytest.mark.parametrize("places", [2, 4, 16, 64])
def test_a_lasting_15_percent_is_found_within_four_windows(places):
    random = np.random.default_rng(4)
    runs, missed = 200, 0
    for _ in range(runs):
        balanced = random.integers(0, 3 * WINDOW)  # it begins anywhere in a window
        slowest = int(random.integers(places))
        before = made_up_seconds(random, WARM_UP_STEPS + balanced, places)
        after = made_up_seconds(random, 4 * WINDOW, places, ratio=0.15, slowest=slowest)
        seen = found(np.concatenate([before, after]))
        missed += [finding.imbalance.place for finding in seen.findings] != [(0, slowest)]
    assert missed <= 0.01 * runs


@pytest.mark.parametrize("ratio", [0.02, 0.05, 0.08])
def test_less_than_the_trigger_is_not_found(ratio):
    random = np.random.default_rng(5)
    assert found(made_up_seconds(random, 4000, 4, ratio=ratio)).findings == ()


def test_it_takes_three_windows_on_end():
    slow, even = apart(WINDOW, 0.3), level(WINDOW)
    assert found(begun(slow, slow)).findings == ()
    assert found(begun(slow, slow, even, slow, slow)).findings == ()
    seen = found(begun(even, slow, slow, slow))
    assert (seen.triggered, seen.place) == (True, (0, 2))
    assert seen.since_step == WARM_UP_STEPS + WINDOW + 1
    assert seen.findings[0].found_step == WARM_UP_STEPS + 4 * WINDOW
    assert seen.ratio == pytest.approx(0.3)
    assert seen.lower_ratio == pytest.approx(0.3)
    assert type(seen.since_step) is int  # whatever the record's steps are: it goes into JSON


def test_a_straggler_that_comes_and_goes_within_windows_is_no_lasting_one():
    seconds = level(400)
    seconds[::9, 1] = 2.0  # two or three steps of each window
    assert found(begun(seconds)).findings == ()


def test_between_clear_and_trigger_all_stays_as_it_is():
    slow, between, even = apart(3 * WINDOW, 0.2), apart(5 * WINDOW, 0.08), apart(WINDOW, 0.03)
    assert found(begun(between)).findings == ()
    seen = found(begun(slow, between))
    assert (seen.triggered, len(seen.findings)) == (True, 1)
    seen = found(begun(slow, between, even, between))
    assert (seen.triggered, len(seen.findings)) == (False, 1)
    assert seen.findings[0].ended_step == WARM_UP_STEPS + 9 * WINDOW
    assert seen.since_step is None


def test_it_clears_by_the_upper_bound():
    noisy = apart(WINDOW, 0.03)
    noisy[::2, 2] += 0.05
    noisy[1::2, 2] -= 0.05
    seen = found(begun(apart(3 * WINDOW, 0.2), noisy))
    assert seen.ratio < POLICY.clear_ratio < seen.windows[-1].upper_ratio
    assert seen.triggered


def test_it_can_trigger_again():
    slow, even = apart(3 * WINDOW, 0.2), level(WINDOW)
    ended = [finding.ended_step for finding in found(begun(slow, even, slow, even)).findings]
    assert ended == [WARM_UP_STEPS + 4 * WINDOW, WARM_UP_STEPS + 8 * WINDOW]


def test_the_first_steps_do_not_count():
    seconds = level(WARM_UP_STEPS + WINDOW)
    seconds[:WARM_UP_STEPS, 0] = 100.0
    (window,) = found(seconds).windows
    assert (window.first_step, window.ratio) == (WARM_UP_STEPS + 1, 0.0)


def test_a_window_never_mixes_two_settings():
    seconds = begun(apart(3 * WINDOW, 0.2), level(10), apart(4 * WINDOW, 0.2, slowest=0))
    one = WARM_UP_STEPS + 3 * WINDOW + 10
    layouts = ["4|4"] * one + ["5|3"] * (len(seconds) - one)
    seen = found(seconds, settings=layouts)
    assert [window.place for window in seen.windows] == [(0, 2)] * 3 + [(0, 0)] * 3
    assert seen.windows[3].first_step == one + 1 + WARM_UP_STEPS
    assert [finding.ended_step for finding in seen.findings] == [one + 1, None]


def test_steps_that_are_missing_for_long_or_go_back_begin_windows_anew():
    slow = apart(WINDOW, 0.2)
    steps = [*range(1, 26), *range(100, 125), *range(60, 85)]  # two windows, reports lost, then a resume
    seconds = np.concatenate([np.concatenate([level(WARM_UP_STEPS), slow])] * 3)
    seen = detect(seconds, steps, places_of(4), POLICY)
    assert [window.first_step for window in seen.windows] == [6, 105, 65]
    assert seen.findings == ()


def test_a_few_missing_steps_are_bridged():
    seconds = begun(apart(70, 0.2))
    seconds[[10, 30, 31], 1] = np.nan
    seen = found(seconds)
    assert [(window.first_step, window.last_step) for window in seen.windows] == [(6, 26), (27, 48), (49, 68)]
    assert seen.triggered


def test_a_place_that_never_reports_says_nothing():
    seconds = apart(200, 0.5)
    seconds[:, 0] = np.nan
    assert (found(seconds).windows, found(seconds).ratio, found(seconds).place) == ((), None, None)


@pytest.mark.parametrize("window_steps", [4, 5])
def test_short_windows_are_judged_by_what_they_can_say(window_steps):
    policy = replace(POLICY, window_steps=window_steps)
    seen = found(made_up_seconds(np.random.default_rng(6), 3000, 4), policy)
    assert len(seen.windows) == (3000 - WARM_UP_STEPS) // window_steps
    assert seen.findings == ()


def test_observing_leaves_the_watch_as_it_was():
    watch = Watch(places_of(2), POLICY)
    after, window = observe(watch, 1, [1.0, 2.0])
    assert watch == Watch(places_of(2), POLICY) != after
    assert window is None
