"""From a profile, or from a job file that has never run, to a situation to decide in. Pure."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from trimtab.balance.deciding.situation import NO_TOLL, Fault, Shapes, Situation, Toll
from trimtab.balance.detect import Detection
from trimtab.balance.diagnosing.findings import Diagnosis
from trimtab.balance.measuring.measure import costs_of, measure
from trimtab.balance.model.accelerators import ACCELERATORS, Accelerator
from trimtab.balance.model.placement import Cluster
from trimtab.balance.pipeline.calibrate import overheads_seconds, stages_at_once
from trimtab.balance.pipeline.memory import stage_memory_bytes
from trimtab.balance.plan import Costs, Floats, Hardware, ParameterMemory, Plan
from trimtab.diagnosis.answer import Answer as Diagnosed
from trimtab.planning.devices import Equipment
from trimtab.planning.model import Model, measured_vocabulary, vocabulary_size
from trimtab.planning.observed import Observed, PlanError
from trimtab.protocol import Job, Setting
from trimtab.simulation.sentences import assumptions as taken_for_granted
from trimtab.wording import milliseconds, plural

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


def from_run(run: Observed, diagnosed: Diagnosed, equipment: Equipment, detection: Detection) -> Case:
    """Of an attempt that ran, or runs. Raises PlanError where it does not tell enough."""
    job, setting, diagnosis = run.job, run.setting, diagnosed.diagnosis
    model = _model(run, equipment)
    prior = None if job.model.provider else model.appraiser.costs(model.configuration)
    try:
        measured = measure(run.samples(prior), [setting.layout], prior, diagnosed.probed)
    except ValueError as error:
        raise PlanError(f"{run.title}: {error}") from error
    costs = costs_of(measured, prior) if prior else run.stage_costs(measured.speeds)
    memory = model.appraiser.memory(run.shape)
    situation = Situation(
        costs=costs,
        memory=memory,
        hardware=_hardware(run, model, costs, memory, measured.speeds, equipment),
        plan=_plan(model, setting),
        shape=run.shape,
        step_seconds=run.step_seconds,
        triggered=detection.triggered,
        fault=Fault(diagnosis.cause, tuple(sorted(diagnosis.places))),
        confidence=diagnosis.confidence,
        live=run.running,
        lasting_seconds=_lasting_seconds(run, detection),
        utilization_ratio=equipment.utilization_ratio,
        asked=True,
        seconds_left=_seconds_left(run),
        uneven_data_ratio=next((cost.saving_ratio for cost in diagnosis.causes if cost.cause == "data"), None),
        shapes=_shapes(run, model, equipment.accelerator) if prior else None,
        nodes=diagnosed.nodes_of,
        unsplit="" if prior else UNKNOWN_ENDS,
        toll=Toll() if run.running else NO_TOLL,
    )
    known = equipment.accelerator
    return Case(
        title=run.title,
        job=job,
        situation=situation,
        nodes=len(np.unique(run.training.ranks["node"])),
        gpus_per_node=model.cluster.gpus_per_node,
        gpu=next((name for name, each in ACCELERATORS.items() if each == known), ""),
        assumptions=(*measured.assumptions, *_assumptions(run, model, situation, equipment)),
        ended=not run.running,
        detection=detection,
        diagnosis=diagnosis,
        measured_steps=len(run.rows),
        needed_bytes=run.peak_bytes,
        device_bytes=equipment.memory_bytes,
        probed=bool(diagnosed.probed),
    )


def _model(run: Observed, equipment: Equipment) -> Model:
    ranks_per_node = int(np.unique(run.training.ranks["node"], return_counts=True)[1].max())
    cluster = Cluster(equipment.likely, run.shape.world_size, ranks_per_node)
    return Model(run.job, run.shape, cluster, measured_vocabulary(run.job, run.training) or vocabulary_size(run.job))


def _plan(model: Model, setting: Setting) -> Plan:
    return Plan(setting.layout, model.configuration.schedule, setting.microbatches, setting.recomputed_layers)


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


def _hardware(
    run: Observed, model: Model, costs: Costs, memory: ParameterMemory, speeds: Floats, equipment: Equipment
) -> Hardware:
    """As measured; what a step takes beside its simulated pipeline is what every plan has to bear.

    CPU ranks that are more than their cores share them where no more stages were seen to compute at once than fit onto
    these cores. Memory is what devices hold, less what they were seen to hold beside what is predicted.
    """
    predicted_bytes = stage_memory_bytes(costs, memory, _plan(model, run.first_setting))
    beside_bytes = np.maximum(0.0, np.subtract(run.first_peak_bytes, predicted_bytes))
    memory_bytes = tuple(np.subtract(equipment.memory_bytes, beside_bytes).tolist())
    bare = Hardware(speeds, memory_bytes, model.links)
    seconds, forward, backward = run.step_compute
    at_once, cores = stages_at_once(seconds.tolist(), forward, backward), equipment.cores
    if model.on_cpus and cores and run.shape.world_size > cores and at_once <= cores / run.shape.tensor:
        bare = replace(bare, stages_at_once=at_once)
    plan = _plan(model, run.setting)
    beside = overheads_seconds(seconds.tolist(), forward, backward, plan, bare, costs.boundary_bytes)
    return replace(bare, overhead_seconds=max(0.0, float(np.median(beside))))


def _lasting_seconds(run: Observed, detection: Detection) -> float:
    if detection.since_step is None:
        return 0.0
    return float(run.time_seconds[-1] - run.time_seconds[np.searchsorted(run.matrix.steps, detection.since_step)])


def _seconds_left(run: Observed) -> float:
    """To the last step; of an attempt that has ended, those of a whole run like it."""
    done = int(run.matrix.steps[-1]) if run.running else 0
    return max(0, run.job.train.steps - done) * run.step_seconds


def _assumptions(run: Observed, model: Model, situation: Situation, equipment: Equipment) -> Iterator[str]:
    accelerator, toll = model.cluster.accelerator.name, situation.toll
    if equipment.accelerator is None:
        yield f"What the devices are is not known: the model's parts are in the proportions that {accelerator} has."
    if situation.hardware.links:
        yield f"Links are as fast as those of {accelerator}."
    if not all(map(math.isfinite, situation.hardware.memory_bytes)):
        yield "How much the devices hold is not known: every plan is taken to fit."
    else:
        predicted_bytes = stage_memory_bytes(situation.costs, situation.memory, _plan(model, run.first_setting))
        yield from _of_memory(run.first_peak_bytes, predicted_bytes)
    if situation.shapes:
        yield f"What another shape would bring is worked out by the model of {accelerator}, not measured."
    if math.isfinite(situation.hardware.stages_at_once):
        yield (
            f"The ranks share {equipment.cores} cores, on which {situation.hardware.stages_at_once:.2f} stages "
            "computed at once: as many would in every plan."
        )
    elif not situation.hardware.overhead_seconds:
        yield "The simulated pipeline takes longer than the measured step: gains are those of the simulation."
    if run.running:
        yield "Nobody has said how the attempt ended: it is taken to run, to its last step."
        yield (
            f"Moving layers takes {toll.reshape_seconds:g} s and the time of the bytes at "
            f"{toll.moved_bytes_per_second / 1e9:g} GB/s, a requeue {toll.restart_seconds:g} s."
        )


def _of_memory(seen_bytes: tuple[float, ...], predicted_bytes: tuple[float, ...]) -> Iterator[str]:
    for stage, (seen, predicted) in enumerate(zip(seen_bytes, predicted_bytes, strict=True)):
        if predicted and abs(seen / predicted - 1) > APART_RATIO:
            yield (
                f"Stage {stage} held {seen / 2**30:.1f} GiB, and {predicted / 2**30:.1f} GiB are predicted: other "
                "plans are taken to be apart as much."
            )
