"""Profile -> Summary. Pure."""

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from trimtab.outcome import ExitCode
from trimtab.report.advice import findings
from trimtab.report.devices import device_warnings, devices
from trimtab.report.gaps import missing_spans
from trimtab.report.summary import SCHEMA, Event, Outcome, Rank, Summary, Training
from trimtab.report.training import training_figures
from trimtab.stacks import EVENT_KIND as STACK
from trimtab.wording import listed, plural, span_list
from trimtab_slurm.contents import Column, Profile, TrainingProfile


def summarize(profile: Profile) -> Summary:
    """The figures of one attempt."""
    training = training_figures(profile.training) if profile.training else None
    ranks = tuple(_ranks(profile.training, training)) if profile.training and training else ()
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
        training=training,
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
    """How the attempt ended: without a training, as the epilogs have it."""
    if profile.training is None:
        nodes = plural(len(profile.nodes), "node")
        exit_code = _exit_code(profile)
        state = "failed" if exit_code else "recorded"
        return Outcome(state, f"recorded on {nodes}; the profile holds no training part", exit_code)
    attributes = profile.training.attributes
    exit_code = int(attributes["exit_code"])
    states = {ExitCode.TRAINED: "finished", ExitCode.STOPPED: "stopped", -1: "unknown"}
    return Outcome(states.get(exit_code, "failed"), str(attributes["outcome"]), exit_code)


def _exit_code(profile: Profile) -> int | None:
    """The job's, by its epilogs (Slurm's "exit code:signal"); None: none was told, or it was ended by a signal."""
    told = (event.text for node in profile.nodes for event in node.events if event.kind == "epilog")
    ended = [re.fullmatch(r"job exit code (\d+):0", text) for text in told]
    return max((int(found[1]) for found in ended if found), default=None)


def shape_name(training: TrainingProfile) -> str:
    """How the model was spread: "TP2 × PP4 × DP1"."""
    tensor, pipeline, data = (int(training.attributes[name]) for name in ("tensor", "pipeline", "data"))
    return f"TP{tensor} × PP{pipeline} × DP{data}"


def carried_out(training: TrainingProfile) -> int:
    """How many orders were carried out."""
    return int((training.orders["outcome"] == "carried out").sum()) if training.orders else 0


def _ranks(training: TrainingProfile, figures: Training) -> Iterator[Rank]:
    """With the layers that their stage holds now: the table has those that they began with."""
    held = {stage.stage: stage.layers for stage in figures.stages}
    table = training.ranks
    keys = ("rank", "node", "device", "tensor_rank", "pipeline_rank", "data_rank", "layers", "parameters")
    for row in zip(*(table[key].tolist() for key in keys), strict=True):
        rank = Rank(*row)
        yield replace(rank, layers=held.get(rank.pipeline_rank, rank.layers))


def _events(profile: Profile) -> tuple[Event, ...]:
    events = [
        Event(event.time_seconds, node.node, event.kind, event.text) for node in profile.nodes for event in node.events
    ]
    events += [Event(event.time_seconds, "profile", event.kind, event.text) for event in profile.events]
    if profile.training:
        told = (event for event in profile.training.events if event.kind != STACK)
        events += [Event(event.time_seconds, "training", event.kind, event.text) for event in told]
    return tuple(sorted(events, key=lambda event: event.time_seconds))


def _training_warnings(training: TrainingProfile | None) -> Iterator[str]:
    if training is None:
        return
    loss, number = np.asarray(training.steps["loss"], dtype=np.float64), training.steps["step"]
    yield from _step_warnings(number)
    if not len(number):
        yield "no step was completed"
    elif not np.isfinite(loss).any():
        yield "no step has a finite loss"
    elif len(lost := np.flatnonzero(~np.isfinite(loss))):
        steps = plural(len(lost), "step")
        yield f"the loss is NaN, infinite or missing in {steps}, the first of them step {number[lost[0]]}"


def _step_warnings(number: Column) -> Iterator[str]:
    steps, times = np.unique(np.asarray(number, dtype=np.int64), return_counts=True)
    if len(twice := steps[times > 1]):
        yield f"{plural(len(twice), 'step')} recorded more than once, the first of them step {twice[0]}"
    if missing := missing_spans(steps):
        count = sum(last - first + 1 for first, last in missing)
        yield f"{plural(count, 'step')} without a record: {span_list(missing)}"


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
