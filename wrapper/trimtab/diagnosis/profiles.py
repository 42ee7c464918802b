"""A profile's training part -> durations, and who is where. Pure.

A profile has one sum a step for each stage: the microbatches of a step count as equal, and so do the chunks of a stage.
"""

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from trimtab.balance.diagnosing.durations import LEAST_STEPS, Durations
from trimtab.balance.pipeline.replay import Replays
from trimtab.balance.plan import Floats, Place
from trimtab.diagnosis.settings import Settings, settings_of
from trimtab.protocol import Balance
from trimtab.protocol.tables import job_from_dict
from trimtab.report.stages import stage_matrix
from trimtab_slurm.contents import TrainingProfile

NEWEST_STEPS = 200
"""So many steps are diagnosed, the newest. The first step of an attempt, which warms up, is not among them."""


@dataclass(frozen=True)
class Training:
    """What the ranks reported."""

    durations: Durations
    ranks: Mapping[Place, tuple[int, ...]]
    nodes: Mapping[Place, tuple[str, ...]]
    policy: Balance
    """The job's."""
    start_seconds: float
    end_seconds: float
    """When the diagnosed steps were taken; UTC."""


def read(training: TrainingProfile) -> Training:
    """Of the steps since the setting last changed.

    Raises ValueError where there is nothing to diagnose, JobError where the job's policy is none.
    """
    job = json.loads(str(training.attributes["job"]))
    settings = settings_of(training)
    first, steps = _counting(training, settings)
    if steps - first < LEAST_STEPS:
        since = " since layers or microbatches last moved" if settings.changed else ""
        raise ValueError(f"{steps - first} steps were measured{since}: at least {LEAST_STEPS} are needed")
    rows = slice(max(steps - NEWEST_STEPS, first + 1 if steps - first > LEAST_STEPS else first), steps)
    ended, took = (np.asarray(training.steps[name], dtype=np.float64) for name in ("time_seconds", "duration_seconds"))
    ranks, nodes = _members(training)
    passes = settings.last.microbatches if settings.last else _equal_shares(training, rows)
    durations = _durations(training, rows, int(job["parallel"]["virtual"]), passes)
    return Training(
        durations=replace(durations, overhead_seconds=_overhead_seconds(durations, took[rows])),
        ranks=ranks,
        nodes=nodes,
        policy=job_from_dict({"balance": job.get("balance", {})}).balance,
        start_seconds=float(ended[rows][0] - took[rows][0]),
        end_seconds=float(ended[-1]),
    )


def _counting(training: TrainingProfile, settings: Settings) -> tuple[int, int]:
    """The first row of steps under the last setting, and the end of the rows."""
    counts = settings.counts(np.asarray(training.steps["step"], dtype=np.int64))
    return len(counts) - int(counts.sum()), len(counts)


def _members(training: TrainingProfile) -> tuple[dict[Place, tuple[int, ...]], dict[Place, tuple[str, ...]]]:
    """Ranks and nodes of each place."""
    ranks: dict[Place, list[int]] = defaultdict(list)
    nodes: dict[Place, list[str]] = defaultdict(list)
    columns = (training.ranks[name].tolist() for name in ("data_rank", "pipeline_rank", "rank", "node"))
    for replica, stage, rank, node in zip(*columns, strict=True):
        ranks[replica, stage].append(rank)
        nodes[replica, stage].append(node)
    return (
        {place: tuple(sorted(found)) for place, found in ranks.items()},
        {place: tuple(dict.fromkeys(found)) for place, found in nodes.items()},
    )


def _durations(training: TrainingProfile, rows: slice, virtual: int, passes: tuple[int, ...]) -> Durations:
    """Of steps in which each replica had so many microbatches, [R]."""
    replicas, stages = (int(training.attributes[name]) for name in ("data", "pipeline"))
    if replicas * stages > len(training.ranks["rank"]):
        raise ValueError(f"{replicas} replicas of {stages} stages, but {len(training.ranks['rank'])} ranks")
    matrix = stage_matrix(training)
    shape = len(matrix.steps[rows]), replicas, stages
    of_replica = np.array(passes, dtype=np.float64)[:, None]

    def of_a_microbatch(seconds: Floats) -> Floats:
        """[T, R, C, 1] from what the places took, [all steps, P]."""
        found = np.full(shape, np.nan)
        for column, (replica, stage) in enumerate(matrix.places):
            if replica < replicas and stage < stages:
                found[:, replica, stage] = seconds[rows, column]
        found = np.where(found > 0, found, np.nan) / (of_replica * virtual)
        return np.tile(found, (1, 1, virtual))[..., None]

    return Durations(
        forward_seconds=of_a_microbatch(matrix.forward_seconds),
        backward_seconds=of_a_microbatch(matrix.backward_seconds),
        stages=stages,
        microbatches=passes,
        steps=tuple(matrix.steps[rows].tolist()),
        workload=_workload(training, matrix.steps[rows], replicas) / of_replica,
    )


def _equal_shares(training: TrainingProfile, rows: slice) -> tuple[int, ...]:
    """[R] microbatches of each replica in a typical step."""
    replicas = int(training.attributes["data"])
    samples, size = (
        float(np.median(np.asarray(training.steps[name][rows], dtype=np.float64)))
        for name in ("global_batch_size", "microbatch_size")
    )
    return (max(1, round(samples / max(size, 1.0) / replicas)),) * replicas


def _workload(training: TrainingProfile, steps: npt.NDArray[np.int64], replicas: int) -> Floats:
    """[T, R, W] what passed the first stage: tokens, and the squared lengths where the file has them."""
    table = training.stages
    row, replica = np.searchsorted(steps, table["step"]), np.asarray(table["replica"], dtype=np.int64)
    known = (np.append(steps, -1)[row] == table["step"]) & (table["stage"] == 0) & (replica >= 0) & (replica < replicas)
    names = [name for name in ("tokens", "squared_lengths") if name in table]
    found = np.full((len(steps), replicas, len(names)), np.nan)
    for column, name in enumerate(names):
        found[row[known], replica[known], column] = table[name][known]
    return found


def _overhead_seconds(durations: Durations, took: Floats) -> float:
    """What the steps typically took beside their longest pipeline; 0 where no step was measured whole."""
    forward, backward = durations.forward_seconds, durations.backward_seconds
    whole = np.isfinite(forward + backward).all(axis=(1, 2, 3)) & np.isfinite(took)
    if not whole.any():
        return 0.0
    replays = Replays(durations.schedule, durations.stages, forward.shape[2], durations.passes)
    pipelines = replays.duration_seconds(forward[whole], backward[whole], np.zeros(durations.stages)).max(axis=1)
    return max(0.0, float(np.median(took[whole] - pipelines)))
