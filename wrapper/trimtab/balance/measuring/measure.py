"""What each part of the model costs and how fast each place is, from the compute that the ranks report.

`stage_seconds` takes the speeds of replicas and the workload out of the samples; `part_seconds` takes what remains of
each stage apart. What the samples leave open is decided by assumptions, and each that was needed is told.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, starmap

import numpy as np

from trimtab.balance.measuring.part_seconds import PROBE_ERROR, Booleans, PartSeconds, contents, measure_parts
from trimtab.balance.measuring.samples import Samples, samples_of
from trimtab.balance.measuring.stage_seconds import StageSeconds, measure_stage, usable, workload
from trimtab.balance.plan import Costs, Floats, Part, Place
from trimtab.protocol import Layout

__all__ = ["Measured", "Samples", "costs_of", "measure", "samples_of"]

_BY_DEFINITION = 1e-9
"""Of a speed, an error that is rounding alone: the speed is 1 because the others are beside it."""


@dataclass(frozen=True)
class Measured:
    """Seconds of one microbatch of the typical workload on a device of speed 1, and the speed of each place.

    The parts [L + 2] are the embedding, the layers, the head. NaN: neither measured nor to be assumed.
    """

    forward_seconds: Floats
    backward_seconds: Floats
    forward_error_ratio: Floats
    """[L + 2] Relative standard error, the assumptions granted; NaN: too few steps to tell; infinite: of 0."""
    backward_error_ratio: Floats
    speeds: Floats
    """[R, S] NaN: the place has no usable report under the newest layout."""
    speed_error_ratio: Floats
    """[R, S] Relative standard error; NaN: assumed, as what others are measured beside is, or too few steps to tell."""
    tokens: float
    """Of one microbatch of the typical workload; NaN where reports have none."""
    squared_lengths: float
    told_apart: bool
    """Whether on each stage the layers' cost and the devices' speed are told apart."""
    assumptions: tuple[str, ...]
    """A sentence for each thing that is not measured."""


def measure(
    samples: Samples,
    layouts: Sequence[Layout],
    prior: Costs | None = None,
    probe_seconds: Mapping[Place, float] | None = None,
) -> Measured:
    """Costs of the parts and speeds of the places, from the samples of a window.

    The prior counts by its ratios alone: of layers to each other, of embedding and head to a layer. A probe is what the
    same computation took on each place. Raises ValueError where the layouts are not of one model and pipeline, where
    the prior or the samples do not fit them, or where no sample is usable.
    """
    _check(samples, layouts, prior)
    good = usable(samples)
    if not len(good.step):
        raise ValueError("no stage has a step with both forward and backward time: there is nothing to measure")
    work = workload(good)
    replicas, layers = int(samples.replica.max()) + 1, sum(layouts[0].layers)
    stages = [measure_stage(good, work, stage, replicas) for stage in np.unique(good.stage).tolist()]
    probes = _speeds_by_probe(stages, probe_seconds or {})
    parts = measure_parts(stages, layouts, _ratios(prior, layers), probes)
    with np.errstate(divide="ignore", invalid="ignore"):  # a part held at 0
        error_ratio = parts.errors / parts.seconds
    assumed = {group[0] for group in parts.groups if len(group) == 1}
    lone = any(stages[index].replicas == 1 for group in parts.groups for index in group)
    linked = len(parts.groups) == 1 and not assumed
    speeds, errors = np.full((2, replicas, layouts[0].stages), np.nan)
    for index, stage in enumerate(stages):
        speeds[:, stage.stage] = np.exp(stage.log_speeds + parts.log_speeds[index])
        if stage.replicas > 1 or index not in assumed:
            errors[:, stage.stage] = np.sqrt(stage.speed_variances + parts.speed_variances[index])
    errors[errors < _BY_DEFINITION] = np.nan
    return Measured(
        forward_seconds=parts.seconds[0],
        backward_seconds=parts.seconds[1],
        forward_error_ratio=error_ratio[0],
        backward_error_ratio=error_ratio[1],
        speeds=speeds,
        speed_error_ratio=errors,
        tokens=work.tokens,
        squared_lengths=work.squared_lengths,
        told_apart=linked or not lone,
        assumptions=(
            *_of_workload(good, stages),
            *_of_places(samples, stages, layouts[0].stages),
            *_of_speeds(stages, parts.groups, probes),
            *_of_parts(parts, stages, layouts, prior is not None),
        ),
    )


def costs_of(measured: Measured, prior: Costs) -> Costs:
    """The prior's bytes and parameters with the measured seconds; backward is halved as the prior halves it.

    Raises ValueError where a part was not measured: then `measure` was not given the prior.
    """
    parts = (prior.embedding, *prior.layers, prior.head)
    columns = zip(parts, measured.forward_seconds.tolist(), measured.backward_seconds.tolist(), strict=True)
    embedding, *layers, head = starmap(_with_seconds, columns)
    return replace(prior, layers=tuple(layers), embedding=embedding, head=head)


def _with_seconds(part: Part, forward: float, backward: float) -> Part:
    if not (np.isfinite(forward) and np.isfinite(backward)):
        raise ValueError("a part was not measured: measure with the prior, which says what to assume")
    input_share = part.backward_input_seconds / part.backward_seconds if part.backward_seconds > 0 else 0.0
    return replace(
        part,
        forward_seconds=forward,
        backward_input_seconds=backward * input_share,
        backward_weight_seconds=backward * (1 - input_share),
    )


def _check(samples: Samples, layouts: Sequence[Layout], prior: Costs | None) -> None:
    if len({(layout.stages, sum(layout.layers)) for layout in layouts}) != 1:
        raise ValueError("the layouts of a window must have the same number of layers and of stages")
    layers = sum(layouts[0].layers)
    if prior is not None and len(prior.layers) != layers:
        raise ValueError(f"the prior has {len(prior.layers)} layers, the layouts have {layers}")
    for name, values in ("stage", layouts[0].stages), ("layout", len(layouts)):
        column = getattr(samples, name)
        if len(column) and not 0 <= column.min() <= column.max() < values:
            raise ValueError(f"samples: {name} {column.max()} is not one of 0 to {values - 1}")


def _speeds_by_probe(stages: Sequence[StageSeconds], probe_seconds: Mapping[Place, float]) -> dict[int, float]:
    """Log speed of the typical replica of the stages that were probed, by index; the typical probe is speed 1."""
    probes = {place: seconds for place, seconds in probe_seconds.items() if np.isfinite(seconds) and seconds > 0}
    if not probes:
        return {}
    reference = sorted(probes.values())[(len(probes) - 1) // 2]
    found = {}
    for index, stage in enumerate(stages):
        logs = [
            np.log(reference / seconds) - stage.log_speeds[replica]
            for (replica, at), seconds in probes.items()
            if at == stage.stage and replica < len(stage.log_speeds) and np.isfinite(stage.log_speeds[replica])
        ]
        if logs:
            found[index] = float(np.median(logs))
    return found


def _ratios(prior: Costs | None, layers: int) -> Floats:
    """[2, L + 2] What each part takes forward and backward, in units of the mean layer; NaN: not known."""
    if prior is None:
        return np.pad(np.ones((2, layers)), ((0, 0), (1, 1)), constant_values=np.nan)
    parts = (prior.embedding, *prior.layers, prior.head)
    seconds: Floats = np.array([[part.forward_seconds for part in parts], [part.backward_seconds for part in parts]])
    mean: Floats = seconds[:, 1:-1].mean(axis=1, keepdims=True)
    return seconds / mean


def _of_workload(samples: Samples, stages: Sequence[StageSeconds]) -> Iterable[str]:
    if not np.any(samples.microbatches > 0):
        yield "The reports do not tell microbatches: seconds are those of a replica's whole step."
    if not np.any(samples.tokens > 0):
        yield "The reports do not tell tokens: every microbatch counts as the same work."
    elif not np.all(samples.squared_lengths > 0):
        yield "Not all reports tell squared lengths: the workload counts by tokens alone."
    if confounded := [stage.stage for stage in stages if stage.lengths_open]:
        yield (
            f"{_name('Stage', confounded)}: squared lengths vary too little apart from the replicas to tell what they "
            "cost: the workload counts by tokens alone."
        )


def _of_places(samples: Samples, stages: Sequence[StageSeconds], pipeline: int) -> Iterable[str]:
    by_stage = {stage.stage: stage.log_speeds for stage in stages}
    absent = np.full(int(samples.replica.max()) + 1, np.nan)
    for stage in range(pipeline):
        missing = np.flatnonzero(np.isnan(by_stage.get(stage, absent))).tolist()
        if missing:
            yield f"{_name('Replica', missing)} sent no usable report of stage {stage}: the speed there is not known."
    if unsure := [stage.stage for stage in stages if not np.isfinite(stage.covariance).all()]:
        yield f"{_name('Stage', unsure)}: too few steps to tell errors."


def _of_speeds(
    stages: Sequence[StageSeconds], groups: Sequence[Sequence[int]], probes: Mapping[int, float]
) -> Iterable[str]:
    alone = [stages[group[0]] for group in groups if len(group) == 1]
    if lone := [stage.stage for stage in alone if stage.replicas == 1]:
        yield (
            f"{_name('Stage', lone)}: measured on one replica, so that the cost of layers and the speed of the device "
            "cannot be told apart; the speed is taken as 1."
        )
    if several := [stage.stage for stage in alone if stage.replicas > 1]:
        yield (
            f"{_name('Stage', several)}: the median speed of the replicas (of two: the faster) is taken as 1; what "
            "slows all of them alike is read as the cost of layers."
        )
    for group in groups:
        if len(group) > 1:
            names = _name("Stage", [stages[index].stage for index in group])
            yield f"{names}: moved layers tell the speeds beside each other; the median one is taken as 1."
    if probes:
        names = _name("Stage", [stages[index].stage for index in probes])
        yield f"{names}: the speed in training is taken to be that in the probe, within {PROBE_ERROR:.0%}."


def _of_parts(
    parts: PartSeconds, stages: Sequence[StageSeconds], layouts: Sequence[Layout], has_prior: bool
) -> Iterable[str]:
    by_samples, by_layers, at_last = (np.asarray(opened.any(axis=0)) for opened in parts.opened)
    seen: Booleans = np.any(
        [contents(layouts[layout])[stage.stage] for stage in stages for layout in stage.layouts], axis=0
    )
    alike = "in the prior's proportions" if has_prior else "as if all were alike"
    shared = by_samples & seen & ~at_last
    names = ["the embedding", *map(str, range(len(shared) - 2)), "the head"]
    newest = contents(layouts[max(layout for stage in stages for layout in stage.layouts)])
    for end, stage in (0, 0), (-1, -1):
        held = np.flatnonzero(newest[stage, 1:-1] * shared[1:-1])
        if by_layers[end] and not at_last[end]:
            yield f"{names[end].capitalize()} is taken to cost the prior's proportion of the typical layer."
        elif by_samples[end] and not by_layers[end] and held.size:
            yield (
                f"{_name('Layer', held)}: taken to cost what the typical layer does, {alike}; {names[end]} is what "
                f"remains of stage {stage % len(newest)}."
            )
            shared[1 + held] = False
    if (layers := np.flatnonzero(shared[1:-1])).size:
        yield f"{_name('Layer', layers)}: only sums are measured, of the layers of a stage; shared out {alike}."
    if (layers := np.flatnonzero((~seen & ~at_last)[1:-1])).size:
        yield f"{_name('Layer', layers)}: in no usable report; taken to cost what the typical layer does, {alike}."
    if at_last.any():
        ends = [names[end] for end in (0, -1) if at_last[end]]
        layers = np.flatnonzero(at_last[1:-1])
        unmeasured = " and ".join([*ends, *([_name("layer", layers)] if layers.size else [])])
        yield f"{unmeasured.capitalize()}: these layouts do not tell them apart; without a prior they are not known."
    for direction, part in sorted(parts.negative):
        what = names[part] if part in (0, len(names) - 1) else f"layer {names[part]}"
        yield (
            f"Less than nothing remained of a stage's {('forward', 'backward')[direction]} time for {what}: taken "
            + ("in the prior's proportion." if has_prior else "as 0." if what in names else "as the typical layer.")
        )


def _name(noun: str, numbers: Iterable[int]) -> str:
    """ "Stage", (0, 1, 2, 5) -> "Stages 0-2, 5"."""
    runs = groupby(enumerate(numbers), key=lambda item: item[1] - item[0])
    spans = [[number for _, number in run] for _, run in runs]
    texts = [f"{span[0]}-{span[-1]}" if len(span) > 1 else f"{span[0]}" for span in spans]
    return f"{noun}{'s' if len(texts) > 1 or '-' in texts[0] else ''} {', '.join(texts)}"
