"""Whether a job may requeue itself once more. Pure."""

from trimtab.protocol import Requeue
from trimtab.requeue.chain import Chain
from trimtab.wording import plural


def why_not(chain: Chain, job_id: int, policy: Requeue, *, saved: bool) -> str:
    """Why the job whose last attempt has just ended must not be requeued; empty: it may.

    `saved`: whether there is a checkpoint to go on from, or at least a directory that the next attempt can fill.
    """
    if not policy.enabled:
        return "requeue.enabled is false"
    if not saved:
        return "train.checkpoint_directory is empty: the next attempt would begin anew"
    attempts = chain.of(job_id)
    requeues = sum(attempt.requeued for attempt in attempts)
    if requeues >= policy.most_requeues:
        return f"it has requeued itself {plural(requeues, 'time')}, and requeue.most_requeues is {policy.most_requeues}"
    if len(attempts) < 2:
        return ""
    before, last = attempts[-2:]
    came, now = before.last_step or 0, last.last_step or 0
    if last.cause and last.cause == before.cause and now <= came:
        return (
            f"the last two attempts ended for the same reason ({last.cause}), the later one after step {now}, which is "
            f"no further than step {came}: a third would too"
        )
    return ""
