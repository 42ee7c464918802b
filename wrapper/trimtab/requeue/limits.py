"""Whether a job may requeue itself once more. Pure."""

from collections.abc import Sequence

from trimtab.protocol import Requeue
from trimtab.requeue.chain import Attempt, Chain
from trimtab.wording import plural

DAY_SECONDS = 86400.0
MOST_IN_VAIN = 2
"""Attempts on end that come no further than those before: a job that gets nowhere, whatever ends it."""


def why_not(chain: Chain, job_id: int, policy: Requeue, *, saved: bool) -> str:
    """Why the job whose last attempt has ended, or still runs, must not be requeued; empty: it may.

    `saved`: whether there is a checkpoint to go on from, or at least a directory that the next attempt can fill.
    """
    if not policy.enabled:
        return "requeue.enabled is false"
    if not saved:
        return "train.checkpoint_directory is empty: the next attempt would begin anew"
    attempts = chain.of(job_id)
    failures = sum(
        attempt.requeued
        and bool(attempt.cause)
        and attempt.started_seconds > attempts[-1].started_seconds - DAY_SECONDS
        for attempt in attempts
    )
    if failures >= policy.most_requeues:
        return (
            f"it has requeued itself {plural(failures, 'time')} after failures within 24 hours, and "
            f"requeue.most_requeues is {policy.most_requeues}"
        )
    return _in_vain([attempt for attempt in attempts if attempt.ended_seconds is not None])


def _in_vain(ended: Sequence[Attempt]) -> str:
    """Why another attempt would come no further; empty: it may. How far one came that could not say is not known."""
    furthest = in_vain = 0
    for attempt in ended:
        step = attempt.last_step or 0
        in_vain = 0 if step > furthest else in_vain + 1
        furthest = max(furthest, step)
    if in_vain >= MOST_IN_VAIN:
        return f"the last {plural(in_vain, 'attempt')} came no further than step {furthest}: another would not either"
    if in_vain and len(ended) > 1 and ended[-1].cause and ended[-1].cause == ended[-2].cause:
        return (
            f"the last two attempts ended for the same reason ({ended[-1].cause}), the later one after step "
            f"{ended[-1].last_step or 0}, which is no further than step {furthest}: a third would too"
        )
    return ""
