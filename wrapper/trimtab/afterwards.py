"""What comes after an attempt: whether the job begins again, where, and in which shape. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trimtab.balance.deciding.situation import kept_nodes
from trimtab.outcome import Why
from trimtab.protocol import Job, JobError, setting_of
from trimtab.ranks import End
from trimtab.requeue.chain import Attempt, Chain, Exclusion, Wanted, fingerprint
from trimtab.requeue.exclusions import exclude, spare
from trimtab.requeue.limits import why_not
from trimtab.wording import listed
from trimtab_slurm.cluster import JobState, Node

AGAIN = (Why.TIME_LIMIT, Why.PREEMPTED, Why.RESHAPE, Why.FAILED, Why.HUNG, Why.NOT_STARTED)
"""After what a job begins again by itself. What Slurm or a user ends is theirs."""
MOST_ORDERS = 100
"""That the next attempt remembers."""


@dataclass(frozen=True)
class Next:
    """What comes next."""

    chain: Chain
    """As it is to be kept."""
    again: bool
    """Whether the job is to begin again: requeued, unless nodes are `kept`."""
    told: str
    """Why, or why not; empty: there is nothing to say."""
    nodes: int | None = None
    """How many the next attempt needs; None: as the job asked for, which may be a range."""
    excluded: tuple[str, ...] = ()
    """The job's whole list of nodes to leave out."""
    kept: tuple[str, ...] = ()
    """Nodes of the allocation on which the job begins again at once, the others given back: no queue to wait in. Empty:
    it is requeued."""


def what_next(
    chain: Chain,
    end: End,
    job_file: Job,
    ran: Job,
    job: JobState | None,
    partition: Sequence[Node],
    now_seconds: float,
) -> Next:
    """After the chain's last attempt has ended; it is not yet said there how.

    `job_file` is the job as the user wrote it, `ran` as this attempt began it, and `job` what Slurm had of it then;
    None: Slurm did not say.
    """
    policy, outcome = job_file.requeue, end.outcome
    attempt = replace(
        chain.attempts[-1],
        first_step=end.first.step if end.first else None,
        first_step_seconds=end.first.time_seconds if end.first else None,
        last_step=end.last.step if end.last else None,
        last_step_seconds=end.last.time_seconds if end.last else None,
        ended_seconds=now_seconds,
        exit_code=outcome.exit_code,
        cause=outcome.cause,
        why=outcome.sentence,
        node=outcome.node,
    )
    chain = replace(chain.updated(attempt), orders=end.orders[-MOST_ORDERS:])
    # Whoever begins it again: Slurm, after a preemption, does so by itself.
    chain = replace(chain, wanted=_wanted(chain, end, job_file, ran))
    obstacle = _obstacle(chain, end, job_file, job)
    if outcome.why not in AGAIN or obstacle or job is None:
        return Next(chain, again=False, told=obstacle)
    faulty = _faulty(chain, end, now_seconds)
    nodes = end.restart.nodes if end.restart is not None else _nodes_without(faulty, attempt, job_file, job, partition)
    left_out = exclude(chain, faulty, job, partition, policy, nodes=nodes, now_seconds=now_seconds)
    chain = left_out.chain.updated(replace(attempt, requeued=True))
    again = ""
    first = len(chain.of(job.job_id)[0].nodes)
    if end.restart is None and nodes < first <= _ready(attempt, job, partition, left_out.nodes):
        nodes = first
        chain = replace(chain, wanted=None)  # it is for fewer ranks
        again = f"on {nodes} nodes again"
    kept = kept_nodes(attempt.nodes, end.restart.exclude, end.restart.nodes) if end.restart is not None else ()
    if kept:
        again = f"at once, on {listed(kept)}, which it has"
    told = "; ".join(filter(None, (f"the job begins again: {_reason(end)}", left_out.told, again)))
    changed = end.restart is not None or nodes != _given(chain)
    return Next(chain, True, told, nodes if changed else None, left_out.nodes, kept)


def _obstacle(chain: Chain, end: End, job_file: Job, job: JobState | None) -> str:
    """Why the job does not begin again though what ended it asks for it; empty: it does, or nothing asks."""
    why = end.outcome.why
    if why not in AGAIN:
        return ""
    if job is None:
        return "not requeued: Slurm did not say what it knows of the job"
    if why is Why.HUNG and job_file.requeue.on_hang == "end":
        return 'not requeued: requeue.on_hang is "end"'
    if all(attempt.last_step is None for attempt in chain.of(job.job_id)):
        return "not requeued: no step was ever taken, so there is nothing to go on from"
    saved = bool(job_file.train.checkpoint_directory)
    limit = why_not(chain, job.job_id, job_file.requeue, saved=saved)
    return f"not requeued: {limit}" if limit else ""


def _nodes_without(
    faulty: Sequence[Exclusion], attempt: Attempt, job_file: Job, job: JobState, partition: Sequence[Node]
) -> int:
    """How many nodes the next attempt needs: fewer than the last where no idle ones replace the faulty, if all
    that changes is the number of replicas, and these hold no more. Where Slurm does not say what is idle: as many."""
    now = len(attempt.nodes)
    gone = len({exclusion.node for exclusion in faulty}.intersection(attempt.nodes)) - len(spare(job, partition))
    if not partition or gone <= 0 or gone == now or job_file.parallel.distributed_optimizer:
        return now
    try:
        job_file.shape(attempt.shape.world_size // now * (now - gone))
    except JobError:
        return now
    return now - gone


def _given(chain: Chain) -> int:
    """How many nodes this run of the batch script began with, those given back included: Slurm would give as many."""
    last = chain.attempts[-1]
    runs = (one for one in chain.of(last.job_id) if one.restart_count == last.restart_count)
    return len(next(runs).nodes)


def _ready(attempt: Attempt, job: JobState, partition: Sequence[Node], excluded: Sequence[str]) -> int:
    """How many nodes the next attempt can have at once: those of an attempt that are not left out, and idle ones."""
    return len({*attempt.nodes, *spare(replace(job, excluded_nodes=tuple(excluded)), partition)}.difference(excluded))


def _wanted(chain: Chain, end: End, job_file: Job, ran: Job) -> Wanted | None:
    """What the next attempt shall run, where it is not what the job file says."""
    attempt, restart = chain.attempts[-1], end.restart
    if restart is not None:
        job = replace(job_file, parallel=restart.parallel, batch=restart.batch)
        ranks_per_node = attempt.shape.world_size // len(attempt.nodes)
        setting = setting_of(job, job.shape(restart.nodes * ranks_per_node))
        return Wanted(fingerprint(job_file), restart.nodes, job.parallel, job.batch, setting, restart.reason)
    if end.setting is None or not end.orders or end.orders[-1].fault.cause == "hardware":
        return chain.wanted  # what was fitted to slow nodes does not fit others
    parallel = replace(
        ran.parallel,
        layout=str(end.setting.layout) if end.setting.layout.chunks > 1 else "",
        recomputed_layers=end.setting.recomputed_layers if any(end.setting.recomputed_layers) else (),
    )
    reason = "as the attempt before ended"
    return Wanted(fingerprint(job_file), len(attempt.nodes), parallel, ran.batch, end.setting, reason)


def _faulty(chain: Chain, end: End, now_seconds: float) -> tuple[Exclusion, ...]:
    """Nodes that were slow, are lost, or were where the last two attempts failed."""
    if end.restart is not None:
        return tuple(Exclusion(node, "slow", now_seconds) for node in end.restart.exclude)
    outcome = end.outcome
    before: tuple[Attempt, ...] = chain.attempts[-2:-1]
    twice = bool(before) and before[0].node == outcome.node
    if outcome.node and (outcome.lost_node or twice):
        reason = "lost" if outcome.lost_node else "two attempts on end failed there"
        return (Exclusion(outcome.node, reason, now_seconds),)
    return ()


def _reason(end: End) -> str:
    return end.restart.reason if end.restart is not None else end.outcome.sentence
