"""What an attempt begins with, once it has passed every check: nothing is started before."""

import importlib.util
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from trimtab import launch
from trimtab.protocol import Job, JobError
from trimtab.ranks import Start
from trimtab.requeue import act, store
from trimtab.requeue.chain import Chain, changed_keys
from trimtab.requeue.shapes import Beginning, beginning
from trimtab_slurm.cluster import JobState, SlurmClient, client


@dataclass(frozen=True)
class Prepared:
    """A run that has passed every check."""

    job_file: Job
    """As the user wrote it, its paths made whole."""
    start: Start
    begin: Beginning
    chain: Chain
    """Of the attempts before."""
    slurm: SlurmClient
    state: JobState | None
    """The job as Slurm has it; None: it did not say."""
    told: tuple[str, ...]
    """What there is to say before it begins."""


def prepare(job: Job, ranks_per_node: int | None) -> Prepared:
    """Check the job against allocation and machine. Raises JobError or LaunchError; nothing is started before it."""
    allocated, slurm = launch.allocation(os.environ, ranks_per_node), client()
    state = act.patiently(lambda: slurm.job(allocated.job_id))
    if state is not None and state.nodes and set(state.nodes) < set(allocated.nodes):
        allocated = replace(allocated, nodes=state.nodes)  # others were given back, which the environment does not tell
    job = _with_paths(job, allocated)
    _check_grace(job, state)
    chain, damage = _kept(job)
    if allocated.restart_count == 0 and not chain.of(allocated.job_id):
        job.shape(allocated.world_size)  # what a user has just asked for is run as it is, or not at all
    begin = beginning(chain, job, allocated.world_size)
    for module in ("torch", "megatron"):
        if importlib.util.find_spec(module) is None:
            raise launch.LaunchError(f"{module} is not installed for {sys.executable}: pip install 'trimtab[train]'")
    if obstacle := _other_job(chain, allocated.job_id, slurm):
        raise launch.LaunchError(
            f"train.checkpoint_directory {job.train.checkpoint_directory}: {obstacle}: wait for its end, or name "
            "another directory ({job_id} in it gives each job its own)"
        )
    address = act.patiently(lambda: slurm.node_address(allocated.nodes[0]))
    port = launch.free_port(address, launch.port_candidates(allocated.job_id, allocated.restart_count))
    start = Start(begin.job, allocated, begin.job.shape(allocated.world_size), address, port)
    changed = ", ".join(changed_keys(chain.job, job))
    changed = f"the job file has changed since the attempt before: {changed}" if changed else ""
    told = tuple(filter(None, (damage, changed, begin.told, _never_again(job, state))))
    return Prepared(job, start, begin, chain, slurm, state, told)


def _kept(job: Job) -> tuple[Chain, str]:
    """What earlier attempts have left in the checkpoint directory, which must be one that can be read and written."""
    if not job.train.checkpoint_directory:
        return Chain(), ""
    directory = Path(job.train.checkpoint_directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"trimtab")
        return store.load(directory)
    except OSError as error:
        raise launch.LaunchError(
            f"train.checkpoint_directory: {error}: name one that this node can read and write, or none: then nothing "
            "is saved"
        ) from error


def _check_grace(job: Job, state: JobState | None) -> None:
    """Raises JobError where the job would be told of its time limit before it could train."""
    if state is None or state.state not in act.RUNNING or state.start_seconds is None or state.end_seconds is None:
        return
    limit_seconds, grace_seconds = state.end_seconds - state.start_seconds, job.requeue.grace_seconds
    if limit_seconds <= grace_seconds:
        raise JobError(
            "requeue.grace_seconds",
            grace_seconds,
            f"is what is kept for saving of the job's time limit, which is {limit_seconds:.0f} s: nothing is left to "
            "train in. Give the job more time (--time), or make it less",
        )


def _never_again(job: Job, state: JobState | None) -> str:
    """That Slurm would not requeue the job, whatever ends it; empty: it would, or nobody wants it to."""
    if not job.requeue.enabled or state is None or not (obstacle := act.unsuitable(state)):
        return ""
    return f"this job will not be requeued, whatever ends it: {obstacle}"


def _other_job(chain: Chain, job_id: int, slurm: SlurmClient) -> str:
    """Which other job trains in the chain's directory, or waits to go on there; empty: none."""
    last = chain.attempts[-1] if chain.attempts else None
    if last is None or last.job_id == job_id or (last.ended_seconds is not None and not last.requeued):
        return ""
    other = act.patiently(lambda: slurm.job(last.job_id))
    if other is None or other.ended:
        return ""
    if last.requeued:
        return f"job {last.job_id} waits to go on there ({other.state})"
    return f"job {last.job_id} trains there ({other.state})" if other.state in act.RUNNING else ""


def _with_paths(job: Job, allocated: launch.Allocation) -> Job:
    directory = job.train.checkpoint_directory.replace("{job_id}", str(allocated.job_id))
    if directory:
        directory = os.fspath(Path(allocated.submit_directory, directory).absolute())
    return replace(job, train=replace(job.train, checkpoint_directory=directory))
