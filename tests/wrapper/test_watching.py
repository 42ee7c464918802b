import dataclasses

import pytest

from trimtab.account import MOST_BEHIND_STEPS
from trimtab.balance.detect import WARM_UP_STEPS, Detection
from trimtab.protocol import Balance, Hello, Layout, Setting, StepReport
from trimtab.watching import Assembly, Lookout, Sight

POLICY = Balance(window_steps=4, trigger_windows=2)


def ranks(places):
    return {
        rank: Hello("", rank, "n1", rank, 9, 0, stage, replica, (), 1, "")
        for rank, (replica, stage) in enumerate(places)
    }


def report(rank, step, compute=1.0):
    return StepReport(rank, step, 0.0, 2.0, compute / 3, compute * 2 / 3, 4, 1024, 65536, 0)


def setting(places, microbatches=(4, 4), layers=2):
    replicas, stages = (max(index) + 1 for index in zip(*places, strict=True))
    return Setting(Layout((layers,) * stages, stages), microbatches[:replicas], (0,) * stages)


def sights(places, computes, microbatches=(4, 4)):
    """What a lookout sees at each step; `computes` [steps][places]."""
    assembly, lookout, seen = Assembly(len(places)), Lookout(POLICY), {}
    for step, compute in enumerate(computes, start=1):
        for rank, seconds in enumerate(compute):
            if whole := assembly.add(report(rank, step, seconds), ranks(places)):
                seen[step] = lookout.see(whole, setting(places, microbatches))
    found = {step: dataclasses.replace(sight, window=None) for step, sight in seen.items()}
    return {step: sight for step, sight in found.items() if sight != Sight()}


ONE = [(0, 0), (0, 1), (0, 2)]
TWO = [(0, 0), (0, 1), (1, 0), (1, 1)]
WARM = WARM_UP_STEPS
EVEN, SLOW = [1.0, 1.0, 1.0], [1.0, 1.0, 1.25]


def test_what_one_rank_no_longer_reports_is_not_kept_for_ever():
    assembly = Assembly(2)
    for step in range(1, 10 * MOST_BEHIND_STEPS):
        assert assembly.add(report(0, step), ranks(TWO)) is None
    assert len(assembly._pending) <= MOST_BEHIND_STEPS


def test_a_step_is_whole_when_its_last_rank_has_reported():
    assembly = Assembly(2)
    assert assembly.add(report(0, 1), ranks(TWO)) is None
    assert assembly.add(report(0, 2), ranks(TWO)) is None  # one rank may be ahead
    assert assembly.add(report(1, 1), ranks(TWO)).step == 1
    assert assembly.add(report(1, 2), ranks(TWO)).step == 2


def test_a_step_that_lacks_a_report_is_given_up_with_the_next_whole_one():
    assembly = Assembly(2)
    assembly.add(report(0, 1), ranks(TWO))
    assembly.add(report(0, 2), ranks(TWO))
    assert assembly.add(report(1, 2), ranks(TWO)).step == 2
    assert assembly.add(report(1, 1), ranks(TWO)) is None


def test_level_stages_of_one_replica_are_probed_once_when_warm():
    assert sights(ONE, [EVEN] * 40) == {WARM: Sight(probe="the ranks are warm")}


def test_coming_apart_is_told_once_and_probed():
    seen = sights(ONE, [EVEN] * (WARM + 4) + [SLOW] * 30)
    assert seen == {
        WARM: Sight(probe="the ranks are warm"),
        WARM + 12: Sight(
            f"since step {WARM + 5} stage 2 takes 25.0% longer than the median stage, at least 25.0%",
            "the stages have come apart",
        ),
    }


def test_being_level_again_is_told():
    seen = sights(ONE, [SLOW] * (WARM + 8) + [EVEN] * 8)
    since = f"the stages are level again since step {WARM + 9}"
    assert seen[WARM + 12] == Sight(f"{since}: stage 0 takes 0.0% longer than the median stage, at most 0.0%")


def test_with_several_replicas_the_replica_is_named_and_none_is_probed():
    seen = sights(TWO, [[1.0, 1.0, 1.2, 1.0]] * (WARM + 8))
    text = f"since step {WARM + 1} stage 0 of replica 1 takes 20.0% longer than the median stage, at least 20.0%"
    assert seen == {WARM + 8: Sight(text)}


@pytest.mark.parametrize(
    ("microbatches", "computes", "apart"),
    [
        ((5, 4), [1.25, 1.25, 1.0, 1.0], False),  # a microbatch more, which one of the two has to take
        ((5, 4), [1.25, 1.25, 1.2, 1.0], True),
        ((6, 3), [1.0, 1.0, 1.0, 1.0], False),  # shifted, as replica 1 takes twice as long for each
        ((6, 3), [1.0, 1.0, 0.5, 0.5], True),  # which it no longer does
    ],
)
def test_replicas_are_apart_by_what_they_take_for_what_they_have_to_do(microbatches, computes, apart):
    assert bool(sights(TWO, [computes] * (WARM + 8), microbatches)) is apart


def test_one_stage_is_neither_watched_nor_probed():
    assert sights([(0, 0)], [[1.0]] * 40) == {}


def test_another_setting_begins_anew_and_what_was_found_under_the_one_before_has_ended():
    assembly, lookout = Assembly(len(ONE)), Lookout(POLICY)

    def see(steps, layers):
        for step in steps:
            for rank, seconds in enumerate(SLOW):
                if whole := assembly.add(report(rank, step, seconds), ranks(ONE)):
                    sight = lookout.see(whole, setting(ONE, layers=layers))
        return sight

    last = WARM + 8
    assert see(range(1, last + 1), 2).window.last_step == last
    detection = lookout.detection
    assert (detection.since_step, detection.place, len(detection.windows)) == (WARM + 1, (0, 2), 1)
    assert see([last + 1], 3) == Sight()
    assert lookout.detection == Detection((), ())
    assert see(range(last + 2, last + WARM + 9), 3).event is not None
