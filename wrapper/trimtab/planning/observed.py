"""An attempt as its profile has it: which steps count, and what stages took in them. Pure."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from trimtab.balance.detect import LEAST_STEPS, WARM_UP_STEPS, Detection, detect
from trimtab.balance.measuring.samples import Samples, samples_of
from trimtab.balance.plan import Costs, Floats, Part
from trimtab.diagnosis.settings import Settings, settings_of
from trimtab.protocol import Job, JobError, Setting, Shape, job_from_json, setting_of
from trimtab.report.stages import Rows, StageMatrix, stage_matrix
from trimtab_slurm.contents import Profile, TrainingProfile


class PlanError(Exception):
    """Nothing can be planned: says of what, why, and what to do."""


@dataclass(frozen=True)
class Observed:
    """An attempt whose steps tell enough to plan by."""

    title: str
    training: TrainingProfile
    running: bool
    """Whether nobody has said how it ended, and a node is left that has not handed in its part."""
    job: Job
    """As it was submitted."""
    shape: Shape
    settings: Settings
    first_setting: Setting
    setting: Setting
    """The one in force at the end."""
    matrix: StageMatrix
    rows: Rows
    """The steps that count, by their row: of those under the last setting the last whole ones that took a time, as many
    as a trigger needs."""

    @cached_property
    def detection(self) -> Detection:
        """What the whole record shows."""
        numbers = self.settings.numbers(self.matrix.steps)
        steps, places = self.matrix.steps.tolist(), self.matrix.places
        loads = np.array([each.loads for each in (self.first_setting, *self.settings.settings)])  # [N, R]
        return detect(self.matrix.relative_seconds(loads[numbers]), steps, places, self.job.balance, numbers.tolist())

    @cached_property
    def time_seconds(self) -> Floats:
        """When each step ended."""
        return np.asarray(self.training.steps["time_seconds"], dtype=np.float64)

    @property
    def first_seconds(self) -> float:
        """When the first step that counts began."""
        return float(self.time_seconds[self.rows[0]] - self.step_compute[0][0])

    @property
    def last_seconds(self) -> float:
        """When the last one ended."""
        return float(self.time_seconds[self.rows[-1]])

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

    def samples(self, prior: Costs | None) -> Samples:
        """Of the steps that count, without what was recomputed in them: that is a plan's doing, and no cost of a part.

        Of a stage's forward, what layers recomputed again is their share by the prior; without one, each layer's is
        the same, and embedding and head have none. Files of earlier versions do not tell how many microbatches there
        were.
        """
        every = samples_of(self.training.stages)
        every = every.select(np.isin(every.step, self.matrix.steps[self.rows]))
        again = np.array([self._recomputed_share(stage, prior) for stage in range(self.shape.pipeline)])
        shares = np.array(self.setting.microbatches, dtype=np.float64)
        return replace(
            every,
            microbatches=np.where(np.isfinite(every.microbatches), every.microbatches, shares[every.replica]),
            backward_seconds=every.backward_seconds - again[every.stage] * every.forward_seconds,
        )

    def _recomputed_share(self, stage: int, prior: Costs | None) -> float:
        """Of a stage's forward, what its backward contains of it."""
        layout, count = self.setting.layout, self.setting.recomputed_layers[stage]
        held = layout.stage_layers(stage)
        if not count:
            return 0.0
        if prior is None:
            return count / len(held)
        chunks = range(stage, layout.chunks, layout.stages)
        whole = sum(part.forward_seconds for chunk in chunks for part in prior.chunk(layout, chunk))
        return sum(prior.layers[layer].forward_seconds for layer in held[:count]) / whole

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """[S] the most that a rank of each stage held."""
        return self._peaks(np.inf)

    @property
    def first_peak_bytes(self) -> tuple[float, ...]:
        """[S] likewise, under the first setting: a move holds more for a moment, and what counts is the most so far."""
        return self._peaks(self.settings.first_steps[1] if self.settings.changed else np.inf)

    def _peaks(self, before_step: float) -> tuple[float, ...]:
        peaks, stages, steps = (
            np.asarray(self.training.stages[name], dtype=np.float64) for name in ("peak_memory_bytes", "stage", "step")
        )
        early = steps < before_step
        return tuple(float(np.max(peaks[early & (stages == stage)], initial=0)) for stage in range(self.shape.pipeline))

    def stage_costs(self, speeds: Floats) -> Costs:
        """Of a model that nobody describes: what each stage takes, in equal shares on its layers; no bytes."""
        layout = self.setting.layout
        held = [len(layout.stage_layers(stage)) for stage in range(self.shape.pipeline)]
        forward, backward = self._typical(speeds) / np.maximum(held, 1)
        parts = [Part(ahead, back / 2, back / 2, 0.0, 0.0, 0.0) for ahead, back in zip(forward, backward, strict=True)]
        nothing = Part(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        return Costs(
            layers=tuple(parts[stage] for stage in layout.owners),
            embedding=nothing if held[0] else parts[0],
            head=nothing if held[-1] else parts[-1],
            boundary_bytes=0.0,
        )

    def _typical(self, speeds: Floats) -> Floats:
        """[2, S] forward and backward of a microbatch at speed 1: medians over steps, means over replicas."""
        samples = self.samples(None)
        work = np.zeros((2, *speeds.shape))
        for replica, stage in self.matrix.places:
            own = (samples.replica == replica) & (samples.stage == stage)
            columns = (
                np.stack([samples.forward_seconds[own], samples.backward_seconds[own]]) / samples.microbatches[own]
            )
            work[:, replica, stage] = np.median(columns, axis=1) * speeds[replica, stage]
        return np.asarray(work.mean(axis=1))


def observed(title: str, profile: Profile) -> Observed:
    """The attempt of a profile. Raises PlanError where it does not tell enough."""
    training = profile.training
    if training is None:
        raise PlanError(f"{title}: no training is recorded: trimtab did not start this job; plan a job.toml instead")
    job = job_of(title, training)
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
    settings, first_setting, setting = _settings(title, training, job, shape)
    counts = matrix.complete & _timed(training, matrix) & settings.counts(matrix.steps)
    whole = np.flatnonzero(counts)[WARM_UP_STEPS:]
    if len(whole) < LEAST_STEPS:
        since = "the last reshape and its" if settings.changed else "a"
        raise PlanError(
            f"{title}: {len(whole)} whole steps are recorded after {since} warm-up of {WARM_UP_STEPS}, and "
            f"{LEAST_STEPS} are needed: let it run longer"
        )
    return Observed(
        title=title,
        training=training,
        running=int(training.attributes["exit_code"]) == -1 and not (profile.nodes and not profile.missing_nodes),
        job=job,
        shape=shape,
        settings=settings,
        first_setting=first_setting,
        setting=setting,
        matrix=matrix,
        rows=whole[-job.balance.window_steps * job.balance.trigger_windows :],
    )


def _settings(title: str, training: TrainingProfile, job: Job, shape: Shape) -> tuple[Settings, Setting, Setting]:
    """All, the first and the last: without a table, those of the job."""
    try:
        settings = settings_of(training)
        found = settings.settings or (setting_of(job, shape),)
    except ValueError as error:  # a JobError is one, too
        raise PlanError(f"{title}: {error}: it is damaged") from error
    for setting in found:
        if obstacle := setting.obstacle(job, shape):
            raise PlanError(f"{title}: {setting} is recorded, but {obstacle}: it is damaged")
    return settings, found[0], found[-1]


def _timed(training: TrainingProfile, matrix: StageMatrix) -> npt.NDArray[np.bool_]:
    """[S] whether a step and its stages took a time that can be reckoned with."""
    seconds = np.asarray(training.steps["duration_seconds"], dtype=np.float64)
    return np.asarray(np.isfinite(seconds) & (seconds > 0) & (matrix.compute_seconds > 0).all(axis=1))


def job_of(title: str, training: TrainingProfile) -> Job:
    """The job of an attempt, as it was started. Raises PlanError."""
    try:
        return job_from_json(str(training.attributes["job"]))
    except (JobError, ValueError, AttributeError, TypeError) as error:
        raise PlanError(f"{title}: its job cannot be read: {error}") from error
