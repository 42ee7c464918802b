"""Which job an attempt runs on the ranks that it got: the wanted shape, the job file's own, or the nearest that fits.

Pure, and deterministic: every attempt that sees the same comes to the same.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from trimtab.balance.deciding.situation import Kind
from trimtab.balance.deciding.words import unequal_shares
from trimtab.protocol import Job, JobError, Layout, Parallel, Setting, divisors, setting_of
from trimtab.requeue.chain import Chain, Wanted, fingerprint


@dataclass(frozen=True)
class Beginning:
    """What an attempt runs."""

    job: Job
    """The job file's, its `parallel` and `batch` as they are run."""
    setting: Setting
    """What it shall come to at once: the job's own, but for microbatches that were shifted between replicas."""
    told: str
    """Why it is not the job file's shape, and what unequal shares of the microbatches cost; empty: it is, and they are
    equal."""
    as_wanted: bool = False
    """Whether it is what the attempt before has asked for."""


def beginning(chain: Chain, job: Job, world_size: int) -> Beginning:
    """What the next attempt runs on `world_size` ranks.

    `job` is the job file's. Raises JobError, with what does not fit, where no shape of the job fits the ranks.
    """
    told = ""
    if wanted := chain.wanted:
        begin = _wanted(wanted, job, world_size)
        if isinstance(begin, Beginning):
            return begin
        told = f"not run as wanted ({wanted.reason}): {begin}"
    begun, nearest = _own_or_nearest(job, world_size)
    shape = begun.shape(world_size)
    told = "; ".join(filter(None, (told, nearest, unequal_shares(begun, shape))))
    return Beginning(begun, setting_of(begun, shape), told)


def restarted(chain: Chain, begin: Beginning, nodes: Sequence[str]) -> bool:
    """Whether an attempt that begins on these nodes is what the last order of the chain has asked for."""
    if not (chain.wanted and begin.as_wanted and chain.orders and len(nodes) == chain.wanted.nodes):
        return False
    if not {exclusion.node for exclusion in chain.exclusions}.isdisjoint(nodes):
        return False
    return chain.orders[-1].kind is not Kind.EXCLUDE or not set(chain.attempts[-1].nodes) <= set(nodes)


def _wanted(wanted: Wanted, job: Job, world_size: int) -> Beginning | str:
    """The wanted job, or why it cannot be run."""
    if wanted.job != fingerprint(job):
        return "the job file has changed since"
    setting = wanted.setting
    try:
        job = replace(job, parallel=wanted.parallel, batch=wanted.batch)
        shape = job.shape(world_size)
        if obstacle := setting.obstacle(job, shape):
            return obstacle
        job = replace(job, parallel=_with_setting(job.parallel, setting))
        told = f"{shape}, {setting}: {wanted.reason}"
        if setting.even and (unequal := unequal_shares(job, shape)):
            told += f"; {unequal}"
        return Beginning(job, setting, told, as_wanted=True)
    except JobError as error:
        return str(error)


def _with_setting(parallel: Parallel, setting: Setting) -> Parallel:
    recomputed = setting.recomputed_layers if any(setting.recomputed_layers) else ()
    return replace(parallel, layout=str(setting.layout), recomputed_layers=recomputed)


def _own_or_nearest(job: Job, world_size: int) -> tuple[Job, str]:
    try:
        setting_of(job, job.shape(world_size))
        return job, ""
    except JobError as error:
        obstacle = error
    candidates = [candidate for candidate in _candidates(job, world_size) if _fits(candidate, world_size)]
    if not candidates:
        raise JobError(
            "parallel",
            f"tensor {job.parallel.tensor} x pipeline {job.parallel.pipeline}",
            f"does not fit {world_size} ranks ({obstacle}), and neither does any other shape of this job",
        )
    nearest = min(candidates, key=lambda candidate: _distance(candidate, job))
    shape = nearest.shape(world_size)
    smaller = nearest.batch.microbatch_size
    cut = f" with microbatches of {smaller}" if smaller != job.batch.microbatch_size else ""
    wanted = f"TP{job.parallel.tensor} x PP{job.parallel.pipeline}"
    return nearest, f"{shape}{cut}: the job file's {wanted} does not fit {world_size} ranks, this is the nearest"


def _candidates(job: Job, world_size: int) -> Iterator[Job]:
    """The job in other shapes, its global batch kept; not all of them fit.

    A model of the user's own stays cut as it is: what else it could run as is not known here.
    """
    own = job.parallel.tensor, job.parallel.pipeline, job.parallel.virtual
    sizes = [size for size in range(1, job.batch.microbatch_size + 1) if job.batch.global_batch_size % size == 0]
    for tensor in divisors(world_size):
        for pipeline in divisors(world_size // tensor):
            for virtual in sorted({1, job.parallel.virtual}):
                if job.model.provider and (tensor, pipeline, virtual) != own:
                    continue
                for size in sizes:
                    try:
                        parallel = _parallel(job, tensor, pipeline, virtual)
                        yield replace(job, parallel=parallel, batch=replace(job.batch, microbatch_size=size))
                    except (JobError, ValueError):  # a tensor size that divides no heads, more stages than layers
                        continue


def _parallel(job: Job, tensor: int, pipeline: int, virtual: int) -> Parallel:
    """Layers in equal shares, of which each stage recomputes at least the share that the job's did."""
    own = job.parallel
    if (pipeline, virtual) == (own.pipeline, own.virtual):
        return replace(own, tensor=tensor, sequence_parallel=own.sequence_parallel and tensor > 1)
    layout = Layout.uniform(job.model.layers, pipeline, virtual)
    share = sum(own.recomputed_layers) / job.model.layers
    recomputed = tuple(math.ceil(share * len(layout.stage_layers(stage))) for stage in range(pipeline))
    return replace(
        own,
        tensor=tensor,
        pipeline=pipeline,
        virtual=virtual,
        layout=str(layout),
        recomputed_layers=recomputed if share else (),
        sequence_parallel=own.sequence_parallel and tensor > 1,
    )


def _fits(job: Job, world_size: int) -> bool:
    try:
        setting_of(job, job.shape(world_size))
    except JobError:
        return False
    return True


def _distance(candidate: Job, job: Job) -> tuple[float, ...]:
    """Smaller is nearer. The tensor size stays if it can, since it follows the node; no fewer ranks share the model
    than the user thought it needs; and then as little changes as can be."""
    new, own = candidate.parallel, job.parallel
    ratio = new.tensor * new.pipeline / (own.tensor * own.pipeline)
    return (
        new.tensor != own.tensor,
        ratio < 1,
        abs(math.log(ratio)),
        abs(new.tensor - own.tensor),
        new.virtual != own.virtual,
        job.batch.microbatch_size - candidate.batch.microbatch_size,
    )
