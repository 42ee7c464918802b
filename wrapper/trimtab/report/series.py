"""What the charts draw, in a bounded number of points however long or large the job was. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trimtab.report.spans import loads, spans
from trimtab.report.stages import Floats, imbalance_by_step, stage_matrix
from trimtab.report.summary import Device, Summary
from trimtab_slurm.contents import Profile, TrainingProfile

MOST_CELLS = 150_000
"""Of the heat map: some 5 characters each in the page."""
MOST_BINS = 600
MOST_ROWS = 512
"""Of the heat map: more than a screen has lines for would not be seen."""
LONGEST_PERIODS = 1.25
"""A sample that comes later than this after the one before leaves a gap."""
MOST_POINTS = 2_000
"""Of one line."""
MOST_POINTS_OF_A_CHART = 60_000
MOST_MARKS = 40


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    name: str
    x: tuple[float, ...]
    y: tuple[float | None, ...]
    """None: a gap."""


@dataclass(frozen=True)
class Mark:
    """Where another setting began."""

    label: str
    """Its place among the settings, from 1."""
    step: int
    time_seconds: float
    """UTC, when its first step began."""


@dataclass(frozen=True)
class HeatMap:
    """Mean utilization by device, or a few of them, and time."""

    labels: tuple[str, ...]
    """One a row, top to bottom."""
    row_devices: int
    """How many devices share a row; the last row may have fewer. The least used of them counts, bin by bin."""
    time_seconds: tuple[float, ...]
    """UTC, the centers of the bins."""
    bin_seconds: float
    ratios: tuple[tuple[float | None, ...], ...]
    """[row][bin]; None: no sample in this bin."""


def stage_lines(training: TrainingProfile) -> tuple[Line, ...]:
    """Compute of each stage by step, in milliseconds; of a stage with several replicas, the slowest one's."""
    matrix = stage_matrix(training)
    lines = []
    stages = sorted({stage for _, stage in matrix.places})
    limit = min(MOST_POINTS, MOST_POINTS_OF_A_CHART // max(1, len(stages)))
    for stage in stages:
        columns = [column for column, place in enumerate(matrix.places) if place[1] == stage]
        # fmax: a replica that has not reported does not hide the others; all missing is a gap.
        slowest = np.fmax.reduce(matrix.compute_seconds[:, columns], axis=1)
        lines.append(thinned(f"stage {stage}", matrix.steps, slowest * 1000, limit))
    return tuple(lines)


def loss_line(training: TrainingProfile) -> Line:
    """Loss by step."""
    return thinned("loss", training.steps["step"], np.asarray(training.steps["loss"], dtype=np.float64))


def throughput_line(training: TrainingProfile) -> Line:
    """Tokens per second by step."""
    seconds = np.asarray(training.steps["duration_seconds"], dtype=np.float64)
    tokens = np.asarray(training.steps["tokens"], dtype=np.float64)
    rates = np.divide(tokens, seconds, out=np.full(len(seconds), np.nan), where=seconds > 0)
    return thinned("tokens/s", training.steps["step"], rates)


def imbalance_lines(training: TrainingProfile, window_steps: int) -> tuple[Line, ...]:
    """The imbalance of each step, and that of the window which ends at each step, in percent.

    No window reaches back over a change of setting.
    """
    matrix = stage_matrix(training)
    if len(matrix.places) < 2:
        return ()
    found = spans(training)
    complete = matrix.relative_seconds(loads(training, found))[matrix.complete]
    steps = matrix.steps[matrix.complete]
    each = thinned("each step", steps, imbalance_by_step(complete) * 100)
    # A window at every step costs window x places each: at the points drawn is enough.
    ends = np.unique(np.linspace(0, len(steps) - 1, MOST_POINTS).astype(np.intp)) if len(steps) else ()
    firsts = np.searchsorted(steps, [span.first_step for span in found])
    begins = firsts[np.maximum(np.searchsorted(firsts, ends, side="right") - 1, 0)]
    medians = [
        np.median(complete[max(min(begin, end), end + 1 - window_steps) : end + 1], axis=0)
        for begin, end in zip(begins, ends, strict=True)
    ]
    windows = imbalance_by_step(np.reshape(medians, (len(medians), len(matrix.places)))) * 100
    return each, Line(f"last {window_steps} steps", tuple(steps[list(ends)].tolist()), _values(windows))


def marks(training: TrainingProfile) -> tuple[Mark, ...]:
    """Of every setting but the first that has a step; of very many, the latest."""
    steps, found = training.steps, []
    for number, span in enumerate(spans(training), start=1):
        if number > 1 and len(span.rows):
            row = span.rows[0]
            begun = float(steps["time_seconds"][row]) - float(steps["duration_seconds"][row])
            found.append(Mark(str(number), int(steps["step"][row]), begun))
    return tuple(found[-MOST_MARKS:])


def heat_map(profile: Profile, summary: Summary) -> HeatMap | None:
    """Utilization of every device that has any, in the summary's order, over the attempt; None where none has any.

    Of more than MOST_ROWS devices, as many as share a row are next to each other, and the least used of them counts.
    """
    recorded = {(node.node, device.uuid): (node, device) for node in profile.nodes for device in node.devices}
    drawn = [device for device in summary.devices if device.utilization_mean_ratio is not None]
    if not drawn:
        return None
    size = -(-len(drawn) // MOST_ROWS)
    groups = [drawn[first : first + size] for first in range(0, len(drawn), size)]
    period = min(node.sampler_period_seconds for node in profile.nodes)
    bins = max(1, min(int(summary.duration_seconds / period), MOST_BINS, MOST_CELLS // len(groups)))
    width = max(summary.duration_seconds / bins, period)

    def row(device: Device) -> Floats:
        node, found = recorded[device.node, device.uuid]
        times, ratios = (
            np.asarray(found.samples[name], dtype=np.float64) for name in ("time_seconds", "utilization_ratio")
        )
        return _binned(times, ratios, profile.start_seconds, width, bins, node.sampler_period_seconds)

    # One device's columns are in memory at a time. fmin: what one of a group lacks does not hide the others.
    ratios = tuple(_values(np.fmin.reduce([row(device) for device in group]), 3) for group in groups)
    centers = tuple(profile.start_seconds + width * (index + 0.5) for index in range(bins))
    return HeatMap(_distinct([_label(group) for group in groups]), size, centers, width, ratios)


def thinned(name: str, x: npt.NDArray[np.generic], y: Floats, limit: int = MOST_POINTS) -> Line:
    """At most `limit` points: of equal spans of steps, those with the smallest and the largest value."""
    if len(y) <= limit:
        return Line(name, tuple(x.tolist()), _values(y))
    kept: set[int] = set()
    for span in np.array_split(np.arange(len(y)), limit // 2):
        values = y[span]
        if np.isfinite(values).any():
            kept |= {int(span[np.nanargmin(values)]), int(span[np.nanargmax(values)])}
        else:
            kept.add(int(span[0]))
    chosen = sorted(kept)
    return Line(name, tuple(x[chosen].tolist()), _values(y[chosen]))


def _binned(
    time_seconds: Floats, values: Floats, first: float, width: float, bins: int, period_seconds: float
) -> Floats:
    """The mean of the samples in each bin. A sample is of the period before it: where clocks drift past a bin of about
    one period, it takes the sample that follows."""
    known = np.isfinite(values)
    moments, figures = time_seconds[known], values[known]
    places = np.clip(((moments - first) / width).astype(np.intp), 0, bins - 1)
    counts = np.bincount(places, minlength=bins)
    means = np.full(bins, np.nan)
    np.divide(np.bincount(places, figures, bins), counts, out=means, where=counts > 0)
    centers = first + width * (np.arange(bins) + 0.5)
    following = np.searchsorted(moments, centers)
    wait = np.append(moments, np.inf)[following] - centers
    covered = (counts == 0) & (wait <= LONGEST_PERIODS * period_seconds)
    means[covered] = figures[following[covered]]
    return means


def _values(figures: Floats, digits: int = 4) -> tuple[float | None, ...]:
    """Rounded for the page; what is not finite is a gap."""
    return tuple(round(value, digits) if np.isfinite(value) else None for value in figures.tolist())


def _label(devices: Sequence[Device]) -> str:
    """The name of a row: its nodes, then its ranks or its devices."""
    first, last = devices[0], devices[-1]
    nodes = first.node if first.node == last.node else f"{first.node} to {last.node}"
    ranks = sorted(rank for device in devices for rank in device.ranks)
    if ranks:
        return f"{nodes} · " + (f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}")
    return f"{nodes} · " + (f"{first.kind} {first.index}" if len(devices) == 1 else f"{len(devices)} devices")


def _distinct(labels: Sequence[str]) -> tuple[str, ...]:
    """Equal labels would fall on one row of the chart."""
    seen: dict[str, int] = {}
    distinct = []
    for label in labels:
        seen[label] = seen.get(label, 0) + 1
        distinct.append(label if seen[label] == 1 else f"{label} ({seen[label]})")
    return tuple(distinct)
