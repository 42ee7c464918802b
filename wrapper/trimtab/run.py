"""`trimtab run`: the batch script's one command. The attempts of a job, each from what is left of the one before it.

Everything is checked before anything starts (`prepared.py`). Then the ranks train, and afterwards, where that helps,
the job begins again: at once, on nodes that it has, or requeued.
"""

import asyncio
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trimtab import launch, places
from trimtab.afterwards import MOST_ORDERS, Next, what_next
from trimtab.balance.deciding.ledger import Given
from trimtab.outcome import Outcome, Why
from trimtab.prepared import Prepared, prepare
from trimtab.protocol import Job, job_to_json
from trimtab.ranks import End, Ranks, Taken
from trimtab.recorder import Recorder, RunIdentity, recover
from trimtab.requeue import act, store
from trimtab.requeue.chain import Attempt, Chain
from trimtab.requeue.exclusions import expired, most_excluded, spare
from trimtab.requeue.limits import why_not
from trimtab.requeue.shapes import restarted
from trimtab.supervise import HANDED_ON
from trimtab.trimming.surroundings import Surroundings
from trimtab.trimming.trimmer import Trimmer
from trimtab_slurm import profile
from trimtab_slurm.cluster import JobState, Node, SlurmClient, SlurmError


def run(job: Job, ranks_per_node: int | None) -> Outcome:
    """Train, in as many attempts as this allocation has, and return how the last one ended.

    Its exit codes are those of `outcome.ExitCode`, or 128 + n after signal n. Raises as `prepare`, and LaunchError
    where another attempt has begun since.
    """
    while True:
        outcome, here = attempt(prepare(job, ranks_per_node))
        if not here:
            return outcome


def attempt(prepared: Prepared) -> tuple[Outcome, bool]:
    """Train once. Returns how that ended, and whether the job begins again in this allocation."""
    start, job = prepared.start, prepared.start.job
    allocated, shape = start.allocated, start.shape
    began_seconds = time.time()
    begun = Attempt(
        job_id=allocated.job_id,
        restart_count=allocated.restart_count,
        started_seconds=began_seconds,
        nodes=allocated.nodes,
        shape=shape,
        setting=prepared.begin.setting,
    )
    chain = replace(prepared.chain.begun(begun), job=job_to_json(prepared.job_file))
    if unkept := _keep(chain, job):
        print(f"trimtab: {unkept}", flush=True)
    identity = RunIdentity(
        cluster=allocated.cluster,
        job_id=allocated.job_id,
        user=allocated.user,
        restart_count=allocated.restart_count,
        start_seconds=began_seconds,
        nodes=allocated.nodes,
        job=job_to_json(job),
        tensor=shape.tensor,
        pipeline=shape.pipeline,
        data=shape.data,
    )
    recorder = Recorder(places.job_directory(allocated.cluster, allocated.job_id), identity)
    print(f"trimtab: job {allocated.job_id}, {shape} on {', '.join(allocated.nodes)}", flush=True)
    for text in prepared.told:
        recorder.event("shape", text)
        print(f"trimtab: {text}", flush=True)
    trimmer = Trimmer(job, shape, f"Job {allocated.job_id}")
    trimmer.restored(chain.orders, restarted=restarted(prepared.chain, prepared.begin, allocated.nodes))
    ranks = Ranks(
        start=start,
        setting=prepared.begin.setting,
        recorder=recorder,
        trimmer=trimmer,
        surroundings=lambda first: _surroundings(prepared, chain, first),
        remember=lambda orders: _remember(chain, orders, job),
    )
    end = asyncio.run(ranks.train())
    after = conclude(prepared, chain, end)
    if after.told:
        recorder.event("requeue", after.told)
    try:
        recorder.finish(end.outcome.exit_code, end.outcome.sentence)
    except OSError as error:  # its journal stays
        print(f"trimtab: the training part of the profile cannot be written: {error}", flush=True)
    return end.outcome, begin_again(prepared, after)


def outlived(job: Job, ranks_per_node: int | None, number: int) -> Outcome:
    """Of the process that outlives the wrapper: what comes after that one was killed by a signal."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDED_ON)  # as the wrapper has them once its ranks have ended
    prepared = prepare(job, ranks_per_node)
    allocated, name = prepared.start.allocated, signal.Signals(number).name
    sentence = f"the wrapper was killed by {name}"
    outcome = Outcome(128 + number, sentence, Why.FAILED, cause=sentence)
    mine = prepared.chain.attempts[-1:]
    if number not in HANDED_ON and mine and _is_of(mine[0], allocated):
        _end_ranks(prepared)
        first, last = _taken(places.job_directory(allocated.cluster, allocated.job_id), mine[0].started_seconds)
        end = End(outcome, first, last, orders=prepared.chain.orders)  # its own went with it
        begin_again(prepared, conclude(prepared, prepared.chain, end))
    return outcome


def _end_ranks(prepared: Prepared) -> None:
    """Kill the ranks: without a wrapper they would train on, unrecorded, and wait out SIGTERM."""
    if prepared.state is None:
        return
    try:
        prepared.slurm.signal_steps(prepared.state, launch.STEP, signal.SIGKILL)
    except SlurmError as error:
        print(f"trimtab: the ranks are left to Slurm: {error}", flush=True)


def conclude(prepared: Prepared, chain: Chain, end: End) -> Next:
    """Work out what comes after an attempt, and keep it for the next one.

    Signals are held back, from here on and in what is started: Slurm sends SIGTERM with the requeue that is asked for,
    and when a node has failed. What is left is done within seconds, before its KillWait is over, or not at all.
    """
    after = what_next(
        chain,
        end,
        prepared.job_file,
        prepared.begin.job,
        prepared.state,
        _partition(prepared.slurm, prepared.state),
        time.time(),
    )
    try:
        unkept = _keep(after.chain, prepared.start.job)
    except launch.LaunchError as error:
        unkept = str(error)
    # What limits a chain is counted in it: without it, a job could begin again for ever.
    if obstacle := unkept or (_refusal(prepared, after) if after.again else ""):
        told = (f"not requeued: {obstacle}",) if after.again else filter(None, (after.told, obstacle))
        return replace(after, again=False, told="; ".join(told))
    return after


def _refusal(prepared: Prepared, after: Next) -> str:
    """Why Slurm would not let the job begin again; empty: it would, or does not say: then asking it will tell."""
    state = prepared.state
    try:
        now = prepared.slurm.job(prepared.start.allocated.job_id)
    except SlurmError:
        return ""
    if not now or not state or act.is_requeued(now, state):
        return ""
    return act.ending(now) if after.kept else act.why_not(now)


def begin_again(prepared: Prepared, after: Next) -> bool:
    """Have the job begin again, where that is what comes next; what came of it is printed.

    Returns whether it does so in this allocation.
    """
    if after.told:
        print(f"trimtab: {after.told}", flush=True)
    slurm, state = prepared.slurm, prepared.state
    if not after.again or state is None:
        return False
    if after.kept:
        try:
            act.give_back(slurm, state, after.kept)
        except SlurmError as error:
            print(f"trimtab: nodes cannot be given back: {error}", flush=True)
        else:
            return True
    asked = act.requeue(slurm, state, excluded=after.excluded, nodes=after.nodes)
    print(f"trimtab: {'requeued' if asked.done else 'not requeued'}: {asked.told}", flush=True)
    return False


def _taken(directory: Path, started_seconds: float) -> tuple[Taken | None, Taken | None]:
    """The first and the last step of an attempt whose wrapper was killed, from what it had recorded."""
    for part in recover(directory):
        training = profile.read(part).training
        if training is not None and training.start_seconds == started_seconds and len(training.steps["step"]):
            steps = [(int(training.steps["step"][row]), float(training.steps["time_seconds"][row])) for row in (0, -1)]
            return Taken(*steps[0]), Taken(*steps[1])
    return None, None


def _surroundings(prepared: Prepared, chain: Chain, first: Taken | None) -> Surroundings:
    """The job's place in the cluster now; what Slurm does not say is not known. `first`: the attempt's first step."""
    if first is not None:
        chain = chain.updated(replace(chain.attempts[-1], first_step_seconds=first.time_seconds))
    policy, state = prepared.job_file.requeue, prepared.state
    allocated = prepared.start.allocated
    partition = _partition(prepared.slurm, state)
    saved = bool(prepared.job_file.train.checkpoint_directory)
    no_restart = why_not(chain, allocated.job_id, policy, saved=saved)
    no_requeue = act.unsuitable(state) if state else ""
    ends_seconds = state.end_seconds if state else None
    now_seconds = time.time()
    left_out = sum(not expired(exclusion, policy, now_seconds) for exclusion in chain.exclusions)
    return Surroundings(
        now_seconds=now_seconds,
        seconds_left=ends_seconds - now_seconds if ends_seconds and (no_restart or no_requeue) else None,
        spare_nodes=len(spare(state, partition)) if state and partition else None,
        exclusions_left=most_excluded(len(partition), policy) - left_out if partition else None,
        allocation=allocated.nodes,
        fixed_nodes=_fixed_nodes(state) if state else "",
        no_requeue=no_requeue,
        no_restart=no_restart,
        restart_seconds=chain.restart_seconds,
    )


def _fixed_nodes(state: JobState) -> str:
    """Why a requeued job cannot have fewer nodes; empty: it can."""
    return "the job asks for nodes by name" if state.required_nodes else act.fixed_nodes(state)


def _partition(slurm: SlurmClient, state: JobState | None) -> Sequence[Node]:
    """The nodes that the job can get; none where Slurm does not say."""
    if state is None:
        return ()
    try:
        return slurm.nodes(state.partition)
    except SlurmError as error:
        print(f"trimtab: the nodes of partition {state.partition} are not known: {error}", flush=True)
        return ()


def _keep(chain: Chain, job: Job) -> str:
    """Keep a chain; returns why it could not be kept, empty: it is.

    Raises LaunchError where a later attempt has begun.
    """
    if not job.train.checkpoint_directory:
        return ""
    try:
        store.save(Path(job.train.checkpoint_directory), chain)
    except store.StaleChain as error:
        raise launch.LaunchError(str(error)) from error
    except OSError as error:
        return f"what the next attempt should know cannot be kept: {error}"
    return ""


def _remember(chain: Chain, orders: Sequence[Given], job: Job) -> None:
    """Keep the orders that were given so far: should the wrapper be killed, the next attempt knows of them."""
    try:
        unkept = _keep(replace(chain, orders=tuple(orders[-MOST_ORDERS:])), job)
    except launch.LaunchError as error:
        unkept = str(error)
    if unkept:
        print(f"trimtab: {unkept}", flush=True)


def _is_of(attempt: Attempt, allocated: launch.Allocation) -> bool:
    return (attempt.job_id, attempt.restart_count) == (allocated.job_id, allocated.restart_count)
