"""Profile -> Summary. Pure."""

import json
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from trimtab.balance.detect import imbalance_ratio
from trimtab.outcome import ExitCode
from trimtab.report.advice import findings
from trimtab.report.devices import device_warnings, devices
from trimtab.report.gaps import median, most
from trimtab.report.stages import Floats, Rows, StageMatrix, StepTimes, stage_matrix, step_times
from trimtab.report.summary import (
    SCHEMA,
    Cost,
    Event,
    Imbalance,
    Outcome,
    Rank,
    Stage,
    StepShares,
    Summary,
    Training,
)
from trimtab.wording import listed, plural
from trimtab_slurm.contents import Profile, TrainingProfile


def summarize(profile: Profile) -> Summary:
    """The figures of one attempt."""
    ranks = _ranks(profile.training)
    summary = Summary(
        schema=SCHEMA,
        cluster=profile.cluster,
        job_id=profile.job_id,
        user=profile.user,
        restart_count=profile.restart_count,
        start_seconds=profile.start_seconds,
        end_seconds=profile.end_seconds,
        duration_seconds=max(0.0, profile.end_seconds - profile.start_seconds),
        outcome=outcome(profile),
        training=_training(profile.training) if profile.training else None,
        devices=devices(profile, ranks),
        ranks=ranks,
        expected_nodes=profile.expected_nodes,
        missing_nodes=profile.missing_nodes,
        events=_events(profile),
        warnings=(),
        findings=(),
        attempt_number=profile.attempt_number,
        previous=profile.previous,
    )
    warnings = (*_training_warnings(profile.training), *_node_warnings(profile, summary))
    return replace(summary, warnings=warnings, findings=findings(summary))


def outcome(profile: Profile) -> Outcome:
    """How the attempt ended."""
    if profile.training is None:
        nodes = plural(len(profile.nodes), "node")
        return Outcome("recorded", f"recorded on {nodes}; the profile holds no training part", None)
    attributes = profile.training.attributes
    exit_code = int(attributes["exit_code"])
    states = {ExitCode.TRAINED: "finished", ExitCode.STOPPED: "stopped", -1: "unknown"}
    return Outcome(states.get(exit_code, "failed"), str(attributes["outcome"]), exit_code)


def _training(training: TrainingProfile) -> Training:
    attributes, steps = training.attributes, training.steps
    number, ranks = steps["step"], len(training.ranks["rank"])
    duration = np.asarray(steps["duration_seconds"], dtype=np.float64)
    tokens = np.asarray(steps["tokens"], dtype=np.float64)
    loss = np.asarray(steps["loss"], dtype=np.float64)
    has_loss = np.flatnonzero(np.isfinite(loss))
    matrix = stage_matrix(training)
    window_steps = int(attributes["window_steps"])
    # Failed jobs end on a step that some stages never reported: the window is the last steps that all have.
    whole = np.flatnonzero(matrix.complete & (duration > 0))
    window = whole[-window_steps:]
    stages = _stages(training, matrix, window, duration)
    job = json.loads(str(attributes["job"]))
    virtual = int(job["parallel"]["virtual"])
    passes = _passes(training, virtual)

    def times(rows: Rows) -> StepTimes:
        return step_times(matrix.compute_seconds[rows], matrix.places, passes[rows])

    return Training(
        tensor=int(attributes["tensor"]),
        pipeline=int(attributes["pipeline"]),
        data=int(attributes["data"]),
        ranks=ranks,
        duration_seconds=max(0.0, training.end_seconds - training.start_seconds),
        first_step=int(number[0]) if len(number) else None,
        last_step=int(number[-1]) if len(number) else None,
        measured_steps=len(number),
        planned_steps=int(job["train"]["steps"]),
        first_loss=float(loss[has_loss[0]]) if len(has_loss) else None,
        last_loss=float(loss[has_loss[-1]]) if len(has_loss) else None,
        last_loss_step=int(number[has_loss[-1]]) if len(has_loss) else None,
        tokens=int(np.nansum(tokens)),
        tokens_per_second=median(tokens[duration > 0] / duration[duration > 0]),
        step_seconds=median(duration),
        window_steps=len(window),
        own_model=bool(job["model"]["provider"]),
        virtual=virtual,
        stages=stages,
        imbalance=_imbalance(stages, float(attributes["trigger_ratio"]), len(window)),
        shares=_shares(times(window), duration[window]) if len(window) else None,
        cost=_cost(times(whole), duration[whole], ranks) if len(whole) and len(stages) > 1 else None,
    )


def _stages(
    training: TrainingProfile, matrix: StageMatrix, window: Rows, duration_seconds: Floats
) -> tuple[Stage, ...]:
    pipeline = int(training.attributes["pipeline"])
    table, ranks = training.stages, training.ranks
    layers = dict(zip(ranks["pipeline_rank"].tolist(), ranks["layers"].tolist(), strict=True))
    stages = []
    for column, (replica, stage) in enumerate(matrix.places):
        compute = matrix.compute_seconds[window, column]
        own = (table["replica"] == replica) & (table["stage"] == stage)
        stages.append(
            Stage(
                replica=replica,
                stage=stage,
                layers=str(layers.get(stage, "")),
                embedding=stage == 0,
                head=stage == pipeline - 1,
                forward_seconds=median(matrix.forward_seconds[window, column]),
                backward_seconds=median(matrix.backward_seconds[window, column]),
                compute_seconds=median(compute),
                not_computing_ratio=median(np.clip(1 - compute / duration_seconds[window], 0, 1)),
                peak_memory_bytes=most(np.asarray(table["peak_memory_bytes"], dtype=np.float64)[own]),
            )
        )
    return tuple(stages)


def _imbalance(stages: tuple[Stage, ...], trigger_ratio: float, measured_steps: int) -> Imbalance | None:
    seconds = [stage.compute_seconds or 0.0 for stage in stages]
    if len(seconds) < 2 or np.median(seconds) <= 0:
        return None
    slowest = stages[int(np.argmax(seconds))]
    ratio = imbalance_ratio(seconds)
    return Imbalance(ratio, slowest.replica, slowest.stage, trigger_ratio, ratio >= trigger_ratio, measured_steps)


def _passes(training: TrainingProfile, virtual: int) -> Floats:
    """[S] microbatches of a replica times model chunks of a stage."""
    steps = training.steps
    samples = np.asarray(steps["global_batch_size"], dtype=np.float64) / int(training.attributes["data"])
    return np.maximum(1.0, samples / np.asarray(steps["microbatch_size"], dtype=np.float64)) * virtual


def _shares(times: StepTimes, duration_seconds: Floats) -> StepShares:
    parts = [float(part.sum()) for part in (times.compute_seconds, times.fill_seconds, times.imbalance_seconds)]
    # Where the model's three parts exceed the step, they are shares of their own sum, and nothing is left over.
    whole = max(float(duration_seconds.sum()), sum(parts))
    compute, fill, imbalance = (part / whole for part in parts)
    return StepShares(compute, fill, imbalance, max(0.0, 1 - compute - fill - imbalance))


def _cost(times: StepTimes, duration_seconds: Floats, ranks: int) -> Cost:
    seconds = float(times.imbalance_seconds.sum())
    share = seconds / float(duration_seconds.sum())
    return Cost(seconds, seconds * ranks / 3600, share, len(duration_seconds))


def _ranks(training: TrainingProfile | None) -> tuple[Rank, ...]:
    if training is None:
        return ()
    table = training.ranks
    keys = ("rank", "node", "device", "tensor_rank", "pipeline_rank", "data_rank", "layers", "parameters")
    return tuple(Rank(*row) for row in zip(*(table[key].tolist() for key in keys), strict=True))


def _events(profile: Profile) -> tuple[Event, ...]:
    events = [
        Event(event.time_seconds, node.node, event.kind, event.text) for node in profile.nodes for event in node.events
    ]
    events += [Event(event.time_seconds, "profile", event.kind, event.text) for event in profile.events]
    if profile.training:
        events += [Event(event.time_seconds, "training", event.kind, event.text) for event in profile.training.events]
    return tuple(sorted(events, key=lambda event: event.time_seconds))


def _training_warnings(training: TrainingProfile | None) -> Iterator[str]:
    if training is None:
        return
    loss, number = np.asarray(training.steps["loss"], dtype=np.float64), training.steps["step"]
    if not len(number):
        yield "no step was completed"
    elif not np.isfinite(loss).any():
        yield "no step has a finite loss"
    elif len(lost := np.flatnonzero(~np.isfinite(loss))):
        steps = plural(len(lost), "step")
        yield f"the loss is NaN, infinite or missing in {steps}, the first of them step {number[lost[0]]}"


def _node_warnings(profile: Profile, summary: Summary) -> Iterator[str]:
    if not profile.nodes:
        yield "no node left a record: there are no device figures (are trimtab's hooks installed on this cluster?)"
    elif summary.missing_nodes:
        yield f"no record of {plural(len(summary.missing_nodes), 'node')}: {listed(list(summary.missing_nodes))}"
    short = [node for node in profile.nodes if node.end_seconds - node.start_seconds < node.sampler_period_seconds]
    if short:
        yield (
            f"shorter than the sampling period of {short[0].sampler_period_seconds:g} s on "
            f"{listed([node.node for node in short])}: device figures rest on a sample or two"
        )
    bare = [node.node for node in profile.nodes if not node.devices]
    if bare:
        yield f"no device was measured on {listed(bare)}; where a reason is known, it is among the events"
    yield from device_warnings(summary)
