"""Profile -> Summary. Pure."""

import json
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from trimtab.balance.measure import imbalance_ratio
from trimtab.outcome import ExitCode
from trimtab.report.advice import findings
from trimtab.report.figures import device_name
from trimtab.report.stages import Floats, Rows, StageMatrix, StepTimes, stage_matrix, step_times
from trimtab.report.summary import (
    SCHEMA,
    Cost,
    Device,
    Event,
    Imbalance,
    Outcome,
    Rank,
    Stage,
    StepShares,
    Summary,
    Throttling,
    Training,
)
from trimtab.report.wording import listed, percent, plural
from trimtab_slurm.contents import DeviceProfile, NodeProfile, Profile, Table, TrainingProfile, coverage_ratio
from trimtab_slurm.devices.nvml_events import CHOSEN_CLOCKS, POWER_CAP, reason_name

_COLUMNS = (
    "time_seconds",
    "utilization_ratio",
    "memory_used_bytes",
    "sm_active_ratio",
    "power_watts",
    "throttle_reasons_bits",
)
LOW_COVERAGE_RATIO = 0.9
"""Below this share of the expected samples, a device's figures are not those of the whole attempt."""
THROTTLED_RATIO = 0.05
"""From this share of a GPU's samples on it is said that it was throttled, unless by its power cap, as many are."""


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
        devices=_devices(profile, ranks),
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
        tokens_per_second=_median(tokens[duration > 0] / duration[duration > 0]),
        step_seconds=_median(duration),
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
                forward_seconds=_median(matrix.forward_seconds[window, column]),
                backward_seconds=_median(matrix.backward_seconds[window, column]),
                compute_seconds=_median(compute),
                not_computing_ratio=_median(np.clip(1 - compute / duration_seconds[window], 0, 1)),
                peak_memory_bytes=_most(np.asarray(table["peak_memory_bytes"], dtype=np.float64)[own]),
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


def _devices(profile: Profile, ranks: tuple[Rank, ...]) -> tuple[Device, ...]:
    users: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        users[rank.device].append(rank.rank)
    recorded = [
        _device(node, device, tuple(users.get(device.uuid, ()))) for node in profile.nodes for device in node.devices
    ]
    seen = {device.uuid for device in recorded}
    present = {node.node for node in profile.nodes}
    unseen = {rank.device: rank.node for rank in ranks if rank.device not in seen}
    for uuid, node in unseen.items():
        reason = "the node's recorder did not see it" if node in present else "the node left no record"
        recorded.append(Device(node, uuid, "", "", None, tuple(users[uuid]), None, None, None, 0, None, reason))
    places = {node: place for place, node in enumerate(profile.expected_nodes)}

    def order(device: Device) -> tuple[int, str, tuple[int, ...], int]:
        return places.get(device.node, len(places)), device.node, device.ranks or (1 << 30,), device.index or 0

    return tuple(sorted(recorded, key=order))


def _device(node: NodeProfile, device: DeviceProfile, ranks: tuple[int, ...]) -> Device:
    # From a file, each look at a column reads it, and all columns of all devices may not fit into memory.
    found = ((name, device.samples.get(name)) for name in _COLUMNS)
    samples = {name: column for name, column in found if column is not None}
    device = replace(device, samples=samples)
    utilization = _figures(samples, "utilization_ratio")
    known = int(np.isfinite(utilization).sum())
    reason = "" if known else device.absent.get("utilization_ratio", "")
    if not known and not reason:
        period = f"{node.sampler_period_seconds:g} s"
        reason = "no value in any sample" if len(utilization) else f"no sample; the sampling period is {period}"
    covered = coverage_ratio(device, node, "utilization_ratio" if known else "time_seconds")
    throttled, reasons = _throttling(_figures(samples, "throttle_reasons_bits"))
    return Device(
        node=node.node,
        uuid=device.uuid,
        kind=device.kind,
        model=device.model,
        index=device.index,
        ranks=ranks,
        utilization_mean_ratio=_mean(utilization),
        utilization_max_ratio=_most(utilization),
        memory_max_bytes=_most(_figures(samples, "memory_used_bytes")),
        samples=len(utilization),
        coverage_ratio=None if math.isnan(covered) else covered,
        no_data=reason,
        pci=device.pci,
        sm_active_mean_ratio=_mean(_figures(samples, "sm_active_ratio")),
        power_mean_watts=_mean(_figures(samples, "power_watts")),
        throttled_ratio=throttled,
        throttling=reasons,
    )


def _throttling(bits: Floats) -> tuple[float | None, tuple[Throttling, ...]]:
    """The share of samples with any reason to throttle, and of those with each, the most frequent first."""
    known = bits[(bits >= 0) & (bits < 1 << 32)]
    if not len(known):
        return None, ()
    active = known.astype(np.int64) & ~CHOSEN_CLOCKS
    shares = ((reason_name(1 << place), float((active >> place & 1).mean())) for place in range(32))
    found = [Throttling(*share) for share in shares if share[1]]
    return float((active != 0).mean()), tuple(sorted(found, key=lambda reason: -reason.ratio))


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
    yield from _device_warnings(summary)


def _device_warnings(summary: Summary) -> Iterator[str]:
    covered = [(device.coverage_ratio, device) for device in summary.devices if device.coverage_ratio is not None]
    if low := [each for each in covered if each[0] < LOW_COVERAGE_RATIO]:
        ratio, least = min(low, key=lambda each: each[0])
        yield (
            f"{plural(len(low), 'device')} with less than {LOW_COVERAGE_RATIO:.0%} of the expected samples, the least "
            f"{device_name(least)} on {least.node} with {percent(ratio)}"
        )
    slowed = [(each, device) for device in summary.devices for each in device.throttling if each.reason != POWER_CAP]
    if often := [pair for pair in slowed if pair[0].ratio >= THROTTLED_RATIO]:
        most, device = max(often, key=lambda pair: pair[0].ratio)
        yield (
            f"{plural(len({id(device) for _, device in often}), 'device')} throttled in at least "
            f"{THROTTLED_RATIO:.0%} of the samples, the power cap aside, the most {device_name(device)} on "
            f"{device.node} with {percent(most.ratio)}: {most.reason}"
        )
    if xids := [event for event in summary.events if event.kind == "xid"]:
        nodes = list(dict.fromkeys(event.source for event in xids))
        yield f"{plural(len(xids), 'XID error')} on {listed(nodes)}: see the events"


def _figures(samples: Table, column: str) -> Floats:
    """A column of figures; a device that does not give one has a column of NaN, or none."""
    if column in samples:
        return np.asarray(samples[column], dtype=np.float64)
    return np.full(len(next(iter(samples.values()), ())), np.nan)


def _finite(values: Floats) -> Floats:
    return values[np.isfinite(values)]


def _median(values: Floats) -> float | None:
    return float(np.median(finite)) if len(finite := _finite(values)) else None


def _mean(values: Floats) -> float | None:
    return float(finite.mean()) if len(finite := _finite(values)) else None


def _most(values: Floats) -> float | None:
    return float(finite.max()) if len(finite := _finite(values)) else None
