"""Which nodes a job's next attempt leaves out. Pure.

Never so many that the job could not run: Slurm takes such a list without a word, and then holds the job for ever.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from trimtab.protocol import Requeue
from trimtab.requeue.chain import Chain, Exclusion
from trimtab.wording import plural
from trimtab_slurm.cluster import JobState, Node


@dataclass(frozen=True)
class Excluded:
    """What to ask Slurm for, and what to remember."""

    chain: Chain
    """With the exclusions that remain, and what Slurm is asked for."""
    nodes: tuple[str, ...]
    """The job's whole list: the user's own nodes, then ours."""
    told: str
    """What is left out, and what no longer is; empty: nothing was or is."""


def exclude(
    chain: Chain,
    faulty: Iterable[Exclusion],
    job: JobState,
    partition: Sequence[Node],
    policy: Requeue,
    *,
    nodes: int,
    now_seconds: float,
) -> Excluded:
    """The exclusions of the next attempt, which needs `nodes` nodes; `job` is as its current attempt began.

    Expired ones go. So do the oldest, where there are more than `most_excluded_ratio` of the partition (one always may
    be), or where too few nodes would be left that could run the job. What the user left out stays left out, and what
    the user asked for by name stays in. Where Slurm does not say what the partition has, the list stays as it is.
    """
    own = tuple(node for node in job.excluded_nodes if node not in chain.asked)
    latest = {exclusion.node: exclusion for exclusion in (*chain.exclusions, *faulty)}
    newest_first = sorted(latest.values(), key=lambda exclusion: (-exclusion.since_seconds, exclusion.node))
    if not partition:
        remembered = replace(chain, exclusions=tuple(reversed(newest_first)))
        return Excluded(remembered, job.excluded_nodes, "the nodes left out stay as they are" if latest else "")
    candidates = {node.name for node in suitable(job, partition) if node.usable} - {*own, *job.required_nodes}
    room = len(candidates) - (nodes - len(job.required_nodes))
    places = most_excluded(len(partition), policy)
    kept: list[Exclusion] = []
    for exclusion in newest_first:
        takes = exclusion.node in candidates
        if exclusion.node in job.required_nodes or len(kept) == places or (takes and room < 1):
            continue
        if expired(exclusion, policy, now_seconds):
            continue
        room -= takes
        kept.append(exclusion)
    kept.reverse()
    ours = tuple(exclusion.node for exclusion in kept if exclusion.node not in own)
    return Excluded(
        chain=replace(chain, exclusions=tuple(kept), asked=ours),
        nodes=(*own, *ours),
        told=_told(kept, [exclusion.node for exclusion in newest_first if exclusion not in kept]),
    )


def expired(exclusion: Exclusion, policy: Requeue, now_seconds: float) -> bool:
    """Whether a node has been left out for long enough."""
    return now_seconds - exclusion.since_seconds >= policy.exclusion_hours * 3600


def most_excluded(partition_nodes: int, policy: Requeue) -> int:
    """How many nodes of a partition a job may leave out for its own sake."""
    return max(1, int(partition_nodes * policy.most_excluded_ratio))


def suitable(job: JobState, partition: Iterable[Node]) -> tuple[Node, ...]:
    """Nodes that can run a share of a running job when they are in service: with no less than one of its nodes has, and
    with the features of its constraint that all of its nodes have."""
    nodes = tuple(partition)
    held = [node for node in nodes if node.name in job.nodes]
    named = set(re.findall(r"[\w.-]+", job.constraint))
    features = named.intersection(*(node.features for node in held)) if held else named
    return tuple(
        node for node in nodes if features <= set(node.features) and any(node.has_all_of(one) for one in held or [node])
    )


def spare(job: JobState, partition: Iterable[Node]) -> tuple[str, ...]:
    """Idle nodes that could replace one of a running job's."""
    taken = {*job.nodes, *job.excluded_nodes}
    return tuple(node.name for node in suitable(job, partition) if node.idle and node.name not in taken)


def infeasible(job: JobState, partition: Iterable[Node], excluded: Iterable[str], nodes: int) -> str:
    """Why Slurm would hold a job for ever that asks for `nodes` nodes without these; empty: it would not.

    Nodes that are out of service count: for them, Slurm waits.
    """
    out = set(excluded)
    if required := out.intersection(job.required_nodes):
        return f"{', '.join(sorted(required))} cannot be left out: the job asks for them by name"
    if nodes < len(job.required_nodes):
        return f"the job asks for {len(job.required_nodes)} nodes by name, which is more than {nodes}"
    left = [node for node in suitable(job, partition) if node.name not in out]
    if len(left) < nodes:
        return f"without those that it would leave out, {plural(len(left), 'node')} could run it, and it needs {nodes}"
    return ""


def _told(kept: Sequence[Exclusion], dropped: Sequence[str]) -> str:
    without = ", ".join(f"{exclusion.node} ({exclusion.reason})" for exclusion in kept)
    parts = [f"without {without}"] if kept else []
    return "; ".join([*parts, f"no longer left out: {', '.join(dropped)}"] if dropped else parts)
