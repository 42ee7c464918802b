"""An attempt as its profile has it: which steps count, and what stages took in them. Pure."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from trimtab.balance.detect import WARM_UP_STEPS
from trimtab.balance.measuring.samples import Samples, samples_of
from trimtab.balance.plan import Costs, Floats, Part
from trimtab.protocol import Job, JobError, Layout, Shape, job_from_json, layout_of
from trimtab.report.stages import Rows, StageMatrix, stage_matrix
from trimtab_slurm.contents import Profile, TrainingProfile

LEAST_STEPS = 5
"""Whole steps after the warm-up that a plan needs."""


class PlanError(Exception):
    """Nothing can be planned: says of what, why, and what to do."""


@dataclass(frozen=True)
class Observed:
    """An attempt whose steps tell enough to plan by."""

    title: str
    profile: Profile
    training: TrainingProfile
    job: Job
    shape: Shape
    matrix: StageMatrix
    rows: Rows
    """The steps that count, by their row: the last whole ones that took a time, as many as a trigger needs."""

    @property
    def running(self) -> bool:
        """Whether nobody has said how it ended, and a node is left that has not handed in its part."""
        ended = bool(self.profile.nodes) and not self.profile.missing_nodes
        return int(self.training.attributes["exit_code"]) == -1 and not ended

    @property
    def cores(self) -> int | None:
        """How many a rank may run on, where ranks compute on CPUs; None: not known."""
        allowed = [
            used / ratio
            for node in self.profile.nodes
            for device in node.devices
            if device.kind == "cpu" and "utilization_cores" in device.samples
            for used, ratio in zip(
                *(device.samples[name].tolist() for name in ("utilization_cores", "utilization_ratio")), strict=True
            )
            if used > 0 and ratio > 0
        ]
        return round(float(np.median(allowed))) if allowed else None

    @property
    def layout(self) -> Layout:
        """What the job says."""
        return layout_of(self.job)

    @property
    def microbatches(self) -> int:
        """Of each replica."""
        return self.job.batch.global_batch_size // (self.job.batch.microbatch_size * self.shape.data)

    @cached_property
    def time_seconds(self) -> Floats:
        """When each step ended."""
        return np.asarray(self.training.steps["time_seconds"], dtype=np.float64)

    @property
    def step_seconds(self) -> float:
        """Median of the steps that count."""
        return float(np.median(self.step_compute[0]))

    @property
    def step_compute(self) -> tuple[Floats, Floats, Floats]:
        """Of the steps that count: seconds [T], and what stages took forward and backward, [T, R, S] each."""
        seconds = np.asarray(self.training.steps["duration_seconds"], dtype=np.float64)[self.rows]
        shape = len(self.rows), self.shape.data, self.shape.pipeline
        forward, backward = (
            part[self.rows].reshape(shape) for part in (self.matrix.forward_seconds, self.matrix.backward_seconds)
        )
        return seconds, forward, backward

    @property
    def samples(self) -> Samples:
        """Of the steps that count. Files of earlier versions do not tell how many microbatches there were."""
        every = samples_of(self.training.stages)
        counted = np.where(np.isfinite(every.microbatches), every.microbatches, self.microbatches)
        return replace(every, microbatches=counted).select(np.isin(every.step, self.matrix.steps[self.rows]))

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """[S] the most that a rank of each stage held."""
        peaks, stages = (np.asarray(self.training.stages[name]) for name in ("peak_memory_bytes", "stage"))
        return tuple(float(peaks[stages == stage].max()) for stage in range(self.shape.pipeline))

    def stage_costs(self, speeds: Floats) -> Costs:
        """Of a model that nobody describes: what each stage takes, in equal shares on its layers; no bytes."""
        held = [len(self.layout.stage_layers(stage)) for stage in range(self.shape.pipeline)]
        forward, backward = (
            self._typical(seconds, speeds) / self.microbatches / np.maximum(held, 1)
            for seconds in (self.matrix.forward_seconds, self.matrix.backward_seconds)
        )
        parts = [Part(ahead, back / 2, back / 2, 0.0, 0.0, 0.0) for ahead, back in zip(forward, backward, strict=True)]
        nothing = Part(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        return Costs(
            layers=tuple(parts[stage] for stage in self.layout.owners),
            embedding=nothing if held[0] else parts[0],
            head=nothing if held[-1] else parts[-1],
            boundary_bytes=0.0,
        )

    def _typical(self, seconds: Floats, speeds: Floats) -> Floats:
        """[S] of a step on a device of speed 1: medians over steps, means over replicas."""
        work = np.zeros(speeds.shape)
        for place, median in zip(self.matrix.places, np.median(seconds[self.rows], axis=0), strict=True):
            work[place] = median * speeds[place]
        return np.asarray(work.mean(axis=0))


def observed(title: str, profile: Profile) -> Observed:
    """The attempt of a profile. Raises PlanError where it does not tell enough."""
    training = profile.training
    if training is None:
        raise PlanError(f"{title}: no training is recorded: trimtab did not start this job; plan a job.toml instead")
    job = _job_of(title, training)
    shape = Shape(*(int(training.attributes[name]) for name in ("tensor", "pipeline", "data")))
    matrix = stage_matrix(training)
    if shape.pipeline * shape.data == 1:
        raise PlanError(f"{title}: one replica of one stage has nothing to balance; plan its job.toml for other shapes")
    if shape.pipeline != job.parallel.pipeline:
        raise PlanError(f"{title}: {shape.pipeline} stages ran, but its job has {job.parallel.pipeline}: it is damaged")
    expected = {(replica, stage) for replica in range(shape.data) for stage in range(shape.pipeline)}
    if absent := sorted(expected - set(matrix.places)):
        replica, stage = absent[0]
        raise PlanError(f"{title}: stage {stage} of replica {replica} has reported no step: there is nothing to go by")
    whole = np.flatnonzero(matrix.complete & _timed(training, matrix))[WARM_UP_STEPS:]
    if len(whole) < LEAST_STEPS:
        raise PlanError(
            f"{title}: {len(whole)} whole steps are recorded after a warm-up of {WARM_UP_STEPS}, and {LEAST_STEPS} are "
            "needed: let it run longer"
        )
    rows = whole[-job.balance.window_steps * job.balance.trigger_windows :]
    return Observed(title, profile, training, job, shape, matrix, rows)


def _timed(training: TrainingProfile, matrix: StageMatrix) -> npt.NDArray[np.bool_]:
    """[S] whether a step and its stages took a time that can be reckoned with."""
    seconds = np.asarray(training.steps["duration_seconds"], dtype=np.float64)
    return np.asarray(np.isfinite(seconds) & (seconds > 0) & (matrix.compute_seconds > 0).all(axis=1))


def _job_of(title: str, training: TrainingProfile) -> Job:
    try:
        return job_from_json(str(training.attributes["job"]))
    except (JobError, ValueError, AttributeError, TypeError) as error:
        raise PlanError(f"{title}: its job cannot be read: {error}") from error
