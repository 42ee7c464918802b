from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.protocol import Layout, Requeue, Setting, Shape
from trimtab.requeue.chain import Attempt, Chain
from trimtab.requeue.limits import why_not

ATTEMPT = Attempt(7, 0, 0.0, ("n1",), Shape(1, 1, 1), Setting(Layout((8,), 1), (1,), (0,)))
POLICY = Requeue(most_requeues=3)


def _attempts(*ends, job_id=7, requeued=True):
    return tuple(
        replace(ATTEMPT, job_id=job_id, restart_count=number, cause=cause, last_step=step, requeued=requeued)
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


def test_a_job_requeues_itself_a_number_of_times_at_most():
    ends = [("time limit", 10), ("time limit", 20), ("time limit", 30)]
    assert _why_not((*_attempts(*ends[:2]), ATTEMPT)) == ""
    assert _why_not((*_attempts(*ends), ATTEMPT)) == ("it has requeued itself 3 times, and requeue.most_requeues is 3")


def test_slurms_own_requeues_and_those_of_other_jobs_do_not_count():
    preempted = _attempts(*[("preempted", step) for step in range(10)], requeued=False)
    others = _attempts(*[("time limit", step) for step in range(10)], job_id=6)
    assert _why_not((*others, *preempted, ATTEMPT)) == ""


def test_a_cause_that_repeats_without_progress_ends_the_chain():
    assert _why_not(_attempts(("rank failed", 30), ("rank failed", 31))) == ""
    assert _why_not(_attempts(("rank failed", 30), ("hung", 30))) == ""
    assert _why_not(_attempts(("rank failed", 30), ("rank failed", 30))) == (
        "the last two attempts ended for the same reason (rank failed), the later one after step 30, which is no "
        "further than step 30: a third would too"
    )
    assert "after step 0, which is no further than step 0" in _why_not(
        _attempts(("rank failed", None), ("rank failed", None))
    )


def test_the_same_cause_in_another_job_is_another_story():
    assert _why_not((*_attempts(("hung", 5), job_id=6), *_attempts(("hung", 5)))) == ""


@given(
    st.lists(st.tuples(st.sampled_from(["hung", "rank failed", "time limit"]), st.integers(0, 5)), max_size=12),
    st.integers(0, 12),
)
@settings(deadline=None)
def test_no_chain_goes_on_for_ever(ends, most_requeues):
    """However attempts end, the job requeues itself no more often than it may."""
    policy = Requeue(most_requeues=most_requeues)
    attempts = ()
    for number, (cause, step) in enumerate(ends):
        attempts += (replace(ATTEMPT, restart_count=number, cause=cause, last_step=step),)
        if _why_not(attempts, policy):
            break
        attempts = (*attempts[:-1], replace(attempts[-1], requeued=True))
    assert sum(attempt.requeued for attempt in attempts) <= most_requeues
    for before, after in pairwise(attempts[:-1]):
        assert before.cause != after.cause or after.last_step > before.last_step
