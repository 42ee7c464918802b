from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.protocol import Layout, Requeue, Setting, Shape
from trimtab.requeue.chain import Attempt, Chain
from trimtab.requeue.limits import why_not

ATTEMPT = Attempt(7, 0, 0.0, ("n1",), Shape(1, 1, 1), Setting(Layout((8,), 1), (1,), (0,)))
HOUR = 3600.0
POLICY = Requeue(most_requeues=3)


def _attempts(*ends, job_id=7, requeued=True):
    return tuple(
        replace(
            ATTEMPT,
            job_id=job_id,
            restart_count=number,
            started_seconds=number * HOUR,
            ended_seconds=(number + 1) * HOUR,
            cause=cause,
            last_step=step,
            requeued=requeued,
        )
        for number, (cause, step) in enumerate(ends)
    )


def _why_not(attempts, policy=POLICY, saved=True):
    return why_not(Chain(attempts), 7, policy, saved=saved)


def test_a_first_failure_may_begin_again():
    assert _why_not(_attempts(("rank failed", None))) == ""


def test_where_requeues_are_off_none_is_made():
    assert _why_not((ATTEMPT,), Requeue(enabled=False)) == "requeue.enabled is false"


def test_where_nothing_is_saved_nothing_can_go_on():
    assert _why_not((ATTEMPT,), saved=False) == (
        "train.checkpoint_directory is empty: the next attempt would begin anew"
    )


def test_a_job_requeues_itself_a_number_of_times_a_day_after_failures():
    ends = [("hung", 10), ("hung", 20), ("hung", 30)]
    running = replace(ATTEMPT, started_seconds=3 * HOUR)
    assert _why_not((*_attempts(*ends[:2]), running)) == ""
    assert _why_not((*_attempts(*ends), running)) == (
        "it has requeued itself 3 times after failures within 24 hours, and requeue.most_requeues is 3"
    )
    assert _why_not((*_attempts(*ends), replace(running, started_seconds=24 * HOUR))) == ""


def test_a_run_that_only_its_time_limits_end_goes_on_for_as_long_as_it_comes_further():
    assert _why_not(_attempts(*[("", 10 * number) for number in range(1, 41)])) == ""


@pytest.mark.parametrize(
    "ends",
    [
        [("", 20), ("", None), ("", None)],  # a time limit that is shorter than the start
        [("OOM, pid 1", 20), ("OOM, pid 2", 20), ("OOM, pid 3", 20)],
        [("hung", 30), ("rank failed", 20), ("", 25)],
    ],
)
def test_two_attempts_on_end_in_vain_are_enough_whatever_ends_them(ends):
    assert _why_not(_attempts(*ends[:2])) == ""
    furthest = ends[0][1]
    many = Requeue(most_requeues=20)
    assert _why_not(_attempts(*ends), many) == (
        f"the last 2 attempts came no further than step {furthest}: another would not either"
    )
    assert _why_not(_attempts(*ends[:2], ("", 31)), many) == ""


def test_an_attempt_that_runs_or_could_not_say_how_far_it_came_was_not_in_vain():
    ended = _attempts(("", 20), ("", None))
    assert _why_not((*ended, ATTEMPT)) == ""
    assert _why_not((*ended[:1], ATTEMPT, ATTEMPT, ATTEMPT)) == ""


def test_slurms_own_requeues_and_those_of_other_jobs_do_not_count():
    lost = _attempts(*[("lost", step) for step in range(1, 11)], requeued=False)
    others = _attempts(*[("hung", step) for step in range(1, 11)], job_id=6)
    assert _why_not((*others, *lost, ATTEMPT)) == ""


def test_a_cause_that_repeats_without_progress_ends_the_chain():
    assert _why_not(_attempts(("rank failed", 30), ("rank failed", 31))) == ""
    assert _why_not(_attempts(("rank failed", 30), ("hung", 30))) == ""
    assert _why_not(_attempts(("rank failed", 30), ("rank failed", 30))) == (
        "the last two attempts ended for the same reason (rank failed), the later one after step 30, which is no "
        "further than step 30: a third would too"
    )
    assert "after step 0, which is no further than step 30" in _why_not(
        _attempts(("rank failed", 30), ("rank failed", None))
    )


def test_the_same_cause_in_another_job_is_another_story():
    assert _why_not((*_attempts(("hung", 5), job_id=6), *_attempts(("hung", 5)))) == ""


@given(
    st.lists(st.tuples(st.sampled_from(["hung", "rank failed", ""]), st.integers(0, 5)), max_size=12),
    st.integers(0, 12),
)
@settings(deadline=None)
def test_no_chain_goes_on_for_ever(ends, most_requeues):
    """However attempts end, the job requeues itself no more often after failures than it may, nor twice in vain."""
    policy = Requeue(most_requeues=most_requeues)
    attempts = ()
    for number, (cause, step) in enumerate(ends):
        attempts += (replace(ATTEMPT, restart_count=number, ended_seconds=1.0, cause=cause, last_step=step),)
        if _why_not(attempts, policy):
            break
        attempts = (*attempts[:-1], replace(attempts[-1], requeued=True))
    assert sum(attempt.requeued and attempt.cause != "" for attempt in attempts) <= most_requeues
    furthest = [max(attempt.last_step for attempt in attempts[:end]) for end in range(1, len(attempts))]
    assert all(later > first for first, later in zip([0, *furthest], furthest[1:], strict=False))
