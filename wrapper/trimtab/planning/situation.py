"""From a profile, or from a job file that has never run, to a situation to decide in. Pure."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from trimtab.balance.deciding.situation import NO_TOLL, Fault, Shapes, Situation, Toll
from trimtab.balance.detect import Detection, detect
from trimtab.balance.diagnosing.findings import Diagnosis
from trimtab.balance.measuring.measure import costs_of, measure
from trimtab.balance.model.accelerators import ACCELERATORS, Accelerator
from trimtab.balance.model.placement import Cluster
from trimtab.balance.pipeline.calibrate import overheads_seconds, stages_at_once
from trimtab.balance.pipeline.memory import stage_memory_bytes
from trimtab.balance.plan import Costs, Floats, Hardware, ParameterMemory
from trimtab.diagnosis.answer import Answer as Diagnosed
from trimtab.planning import devices
from trimtab.planning.model import Model, measured_vocabulary, vocabulary_size
from trimtab.planning.observed import Observed, PlanError
from trimtab.protocol import Job
from trimtab.simulation.sentences import assumptions as taken_for_granted
from trimtab.wording import milliseconds, plural
from trimtab_slurm.devices.cpu import TASK_PREFIX

APART_RATIO = 0.25
"""From this difference on it is said that what is predicted and what was measured are apart."""
UNKNOWN_ENDS = "the model is the provider's own: what its embedding and head cost beside its layers is not known"


@dataclass(frozen=True)
class Case:
    """A situation, and how it was come by."""

    title: str
    job: Job
    situation: Situation
    nodes: int
    gpus_per_node: int
    """The most of a node."""
    gpu: str
    """By the name that `ACCELERATORS` has; empty: not known."""
    assumptions: tuple[str, ...]
    """A sentence for each thing that is not measured."""
    ended: bool = True
    """Whether nothing runs: then a change is for the next run."""
    detection: Detection | None = None
    """None: nothing has run."""
    diagnosis: Diagnosis | None = None
    measured_steps: int = 0
    needed_bytes: tuple[float, ...] = ()
    """[S] the most that a rank of each stage held; where nothing has run, would hold."""
    device_bytes: tuple[float, ...] = ()
    """[S] what its device holds; infinite: not known."""
    probed: bool = False
    """Whether the devices' speed was measured apart from the model."""

    @property
    def placement(self) -> str:
        """What it runs on, in words."""
        devices = plural(self.gpus_per_node, "rank" if self.gpu == "cpu" else "GPU")
        name = f" ({ACCELERATORS[self.gpu].name})" if self.gpu else " (of a kind not known)"
        return f"{plural(self.nodes, 'node')} x {devices}{name}"


def from_job(title: str, job: Job, nodes: int, gpus_per_node: int, gpu: str) -> Case:
    """Of a job that has not run, on accelerators by the name that `ACCELERATORS` has. Raises PlanError, JobError."""
    if job.model.provider:
        raise PlanError(
            f"{title}: what the layers of a provider's own model cost is not known before they have run: run some "
            "steps, and plan the job"
        )
    ranks, accelerator = nodes * gpus_per_node, ACCELERATORS[gpu]
    model = Model(job, job.shape(ranks), Cluster(accelerator, ranks, gpus_per_node), vocabulary_size(job))
    appraiser, current = model.appraiser, model.current
    situation = Situation(
        costs=appraiser.costs(model.configuration),
        memory=appraiser.memory(model.shape),
        hardware=replace(
            appraiser.hardware(model.configuration), links=model.links, overhead_seconds=current.overhead_seconds
        ),
        plan=model.plan,
        shape=model.shape,
        asked=True,
        seconds_left=job.train.steps * current.estimate.step_seconds,
        shapes=replace(model.shapes(), memory_bytes=accelerator.memory_bytes),
        recomputes=False,
        live=False,
        toll=NO_TOLL,
    )
    assumptions = [f"Nothing has run: all times are worked out for {accelerator.name}."]
    assumptions += [f"{text[:1].upper()}{text[1:]}." for text in taken_for_granted(appraiser)]
    if job.data.tokenizer not in ("bpe", "bytes"):
        assumptions.append(f"The tokenizer has {job.data.vocabulary_size:,} tokens, as data.vocabulary_size says.")
    return Case(
        title=title,
        job=job,
        situation=situation,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        gpu=gpu,
        assumptions=tuple(assumptions),
        needed_bytes=current.memory_bytes,
        device_bytes=situation.hardware.memory_bytes,
    )


def from_profile(run: Observed, diagnosed: Diagnosed) -> Case:
    """Of an attempt that ran, or runs. Raises PlanError where its profile does not tell enough."""
    job, profile, diagnosis = run.job, run.profile, diagnosed.diagnosis
    known = devices.accelerator_of(device for node in profile.nodes for device in node.devices)
    model = _model(run, known or _likely_accelerator(run))
    prior = None if job.model.provider else model.appraiser.costs(model.configuration)
    try:
        measured = measure(run.samples, [run.layout], prior, diagnosed.probed)
    except ValueError as error:
        raise PlanError(f"{run.title}: {error}") from error
    costs = costs_of(measured, prior) if prior else run.stage_costs(measured.speeds)
    memory = model.appraiser.memory(run.shape)
    hardware = _hardware(run, model, costs, memory, measured.speeds)
    detection = detect(run.matrix.compute_seconds, run.matrix.steps.tolist(), run.matrix.places, job.balance)
    begin_seconds = run.time_seconds[run.rows[0]] - run.step_seconds
    situation = Situation(
        costs=costs,
        memory=memory,
        hardware=hardware,
        plan=model.plan,
        shape=run.shape,
        step_seconds=run.step_seconds,
        triggered=detection.triggered,
        fault=Fault(diagnosis.cause, tuple(sorted(diagnosis.places))),
        confidence=diagnosis.confidence,
        live=run.running,
        lasting_seconds=_lasting_seconds(run, detection),
        utilization_ratio=devices.utilization_ratio(profile, begin_seconds, run.time_seconds[run.rows[-1]]),
        asked=True,
        seconds_left=_seconds_left(run),
        uneven_data_ratio=next((cost.saving_ratio for cost in diagnosis.causes if cost.cause == "data"), None),
        shapes=_shapes(run, model, known) if prior else None,
        nodes=diagnosed.nodes_of,
        recomputes=False,
        unsplit="" if prior else UNKNOWN_ENDS,
        toll=Toll() if run.running else NO_TOLL,
    )
    return Case(
        title=run.title,
        job=job,
        situation=situation,
        nodes=len(np.unique(run.training.ranks["node"])),
        gpus_per_node=model.cluster.gpus_per_node,
        gpu=next((name for name, each in ACCELERATORS.items() if each == model.cluster.accelerator), "")
        if known
        else "",
        assumptions=(*measured.assumptions, *_assumptions(run, model, situation, known)),
        ended=not run.running,
        detection=detection,
        diagnosis=diagnosis,
        measured_steps=len(run.rows),
        needed_bytes=run.peak_bytes,
        device_bytes=devices.memory_bytes(profile, run.training),
        probed=bool(diagnosed.probed),
    )


def _likely_accelerator(run: Observed) -> Accelerator:
    """For the proportions of a model's parts, where the devices were not recorded or are of a kind not known."""
    recorded = any(node.devices for node in run.profile.nodes)
    on_cpus = not recorded and str(run.training.ranks["device"][0]).startswith(TASK_PREFIX)
    return ACCELERATORS["cpu" if on_cpus else "h100"]


def _model(run: Observed, accelerator: Accelerator) -> Model:
    ranks_per_node = int(np.unique(run.training.ranks["node"], return_counts=True)[1].max())
    cluster = Cluster(accelerator, run.shape.world_size, ranks_per_node)
    return Model(run.job, run.shape, cluster, measured_vocabulary(run.job, run.training) or vocabulary_size(run.job))


def _shapes(run: Observed, model: Model, known: Accelerator | None) -> Shapes:
    """Worked out by the model, which is in doubt where it is far from what was measured of the current shape."""
    shapes = model.shapes()
    predicted_seconds = shapes.current.estimate.step_seconds
    doubt = "" if known else "what the devices are is not known"
    if abs(predicted_seconds / run.step_seconds - 1) > APART_RATIO:
        doubt = (
            f"of the current shape the model says {milliseconds(predicted_seconds)} ms a step, and "
            f"{milliseconds(run.step_seconds)} ms are measured: what it says of others is no better"
        )
    return replace(shapes, memory_bytes=known.memory_bytes if known else math.inf, doubt=doubt)


def _hardware(run: Observed, model: Model, costs: Costs, memory: ParameterMemory, speeds: Floats) -> Hardware:
    """As measured; what a step takes beside its simulated pipeline is what every plan has to bear.

    CPU ranks that are more than their cores share them where no more stages were seen to compute at once than fit onto
    these cores.
    """
    bare = Hardware(speeds, _memory_bytes(run, stage_memory_bytes(costs, memory, model.plan)), model.links)
    seconds, forward, backward = run.step_compute
    at_once = stages_at_once(seconds.tolist(), forward, backward)
    if model.on_cpus and run.cores and run.shape.world_size > run.cores and at_once <= run.cores / run.shape.tensor:
        bare = replace(bare, stages_at_once=at_once)
    beside = overheads_seconds(seconds.tolist(), forward, backward, model.plan, bare, costs.boundary_bytes)
    return replace(bare, overhead_seconds=max(0.0, float(np.median(beside))))


def _memory_bytes(run: Observed, predicted_bytes: tuple[float, ...]) -> tuple[float, ...]:
    """[S] what devices hold, less what they were seen to hold beside what is predicted."""
    totals = devices.memory_bytes(run.profile, run.training)
    beside = (max(0.0, seen - predicted) for seen, predicted in zip(run.peak_bytes, predicted_bytes, strict=True))
    return tuple(total - more for total, more in zip(totals, beside, strict=True))


def _lasting_seconds(run: Observed, detection: Detection) -> float:
    if detection.since_step is None:
        return 0.0
    return float(run.time_seconds[-1] - run.time_seconds[np.searchsorted(run.matrix.steps, detection.since_step)])


def _seconds_left(run: Observed) -> float:
    """To the last step; of an attempt that has ended, those of a whole run like it."""
    done = int(run.matrix.steps[-1]) if run.running else 0
    return max(0, run.job.train.steps - done) * run.step_seconds


def _assumptions(run: Observed, model: Model, situation: Situation, known: Accelerator | None) -> Iterator[str]:
    accelerator, toll = model.cluster.accelerator.name, situation.toll
    if known is None:
        yield f"What the devices are is not known: the model's parts are in the proportions that {accelerator} has."
    if situation.hardware.links:
        yield f"Links are as fast as those of {accelerator}."
    if not all(map(math.isfinite, situation.hardware.memory_bytes)):
        yield "How much the devices hold is not known: every plan is taken to fit."
    else:
        yield from _of_memory(run, stage_memory_bytes(situation.costs, situation.memory, situation.plan))
    if situation.shapes:
        yield f"What another shape would bring is worked out by the model of {accelerator}, not measured."
    if math.isfinite(situation.hardware.stages_at_once):
        yield (
            f"The ranks share {run.cores} cores, on which {situation.hardware.stages_at_once:.2f} stages computed at "
            "once: as many would in every plan."
        )
    elif not situation.hardware.overhead_seconds:
        yield "The simulated pipeline takes longer than the measured step: gains are those of the simulation."
    if run.running:
        yield "Nobody has said how the attempt ended: it is taken to run, to its last step."
        yield (
            f"Moving layers takes {toll.reshape_seconds:g} s and the time of the bytes at "
            f"{toll.moved_bytes_per_second / 1e9:g} GB/s, a requeue {toll.restart_seconds:g} s."
        )


def _of_memory(run: Observed, predicted_bytes: tuple[float, ...]) -> Iterator[str]:
    for stage, (seen, predicted) in enumerate(zip(run.peak_bytes, predicted_bytes, strict=True)):
        if predicted and abs(seen / predicted - 1) > APART_RATIO:
            yield (
                f"Stage {stage} held {seen / 2**30:.1f} GiB, and {predicted / 2**30:.1f} GiB are predicted: other "
                "plans are taken to be apart as much."
            )
