"""The report's figures in words, and which rows matter, the same in terminal and page. Pure."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from trimtab.report.orders import step_range
from trimtab.report.summary import Device, Event, Stage, Training
from trimtab.wording import count, duration, milliseconds, percent, plural, real

Item = TypeVar("Item")

OTHER = "Other is what the model leaves: communication, optimizer, data, and on shared processors the other processes."
"""Of the parts of a step's time."""


@dataclass(frozen=True)
class Share:
    """A part of a step's time."""

    key: str
    name: str
    ratio: float


@dataclass(frozen=True)
class Figure:
    """One of the figures that a report begins with."""

    name: str
    value: str
    unit: str
    note: str


def key_figures(training: Training) -> Iterator[Figure]:
    """The figures that a report begins with; those that were not measured are left out.

    Of a run whose setting changed, those that depend on it are of the latest one, and say of which steps.
    """
    current, changed = training.settings[training.setting], len(training.settings) > 1
    resumed = (training.first_step or 1) > 1
    since = f" of {step_range(current)}" if changed else ""
    if imbalance := training.imbalance:
        slowest = f"stage {imbalance.stage}" + (f" of replica {imbalance.replica}" if training.data > 1 else "")
        window = f"; of steps {training.window_first_step}-{training.window_last_step}"
        note = f"{slowest} is the slowest; the trigger is {imbalance.trigger_ratio:.0%}{window}"
        yield Figure("Imbalance", percent(imbalance.ratio), "", note)
    if cost := training.cost:
        of = step_range(current) if changed else "the steps"
        note = f"{_device_time(cost.imbalance_device_hours)}, {percent(cost.imbalance_ratio)} of {of}; estimated"
        yield Figure("Cost of imbalance", duration(cost.imbalance_seconds), "", note)
    if training.tokens_per_second is not None:
        note = f"median{since}; {count(training.tokens)} tokens in all"
        yield Figure("Throughput", count(training.tokens_per_second), "tokens/s", note)
        yield Figure("Step time", milliseconds(training.step_seconds), "ms", f"median{since}")
    if training.first_loss is not None:
        at = f" (at step {training.last_loss_step})" if training.last_loss_step != training.last_step else ""
        first = "at this attempt's first" if resumed else "at first"
        yield Figure("Loss", real(training.last_loss), "", f"last step{at}; {real(training.first_loss)} {first}")
    began = f"; this attempt began at step {training.first_step}" if resumed else ""
    yield Figure("Steps", f"{training.measured_steps:,}", "", f"of {training.planned_steps:,}{began}")


def _device_time(hours: float) -> str:
    """0.25 -> "0.25 device-hours"; of less than a minute, in device-seconds."""
    return f"{hours * 3600:.1f} device-seconds" if hours * 60 < 1 else f"{hours:,.3g} device-hours"


def shape(training: Training) -> str:
    """How the model was spread."""
    spread = f"TP{training.tensor} × PP{training.pipeline} × DP{training.data}"
    return f"{spread}, {plural(training.ranks, 'rank')}"


def step_shares(training: Training) -> tuple[Share, ...]:
    """The parts of a step's time, but those that are nothing; empty where no step was measured whole."""
    if training.shares is None:
        return ()
    shares = training.shares
    parts = (
        Share("compute", "compute", shares.compute_ratio),
        Share("imbalance", "imbalance", shares.imbalance_ratio),
        Share("waiting", "waiting for replicas with more microbatches", shares.unequal_ratio),
        Share("fill", "filling and draining the pipeline", shares.fill_ratio),
        Share("other", "other", shares.other_ratio),
    )
    return tuple(part for part in parts if part.ratio > 0)


def holds(stage: Stage) -> str:
    """What a stage holds: "4-7 + LM head"."""
    parts = [stage.layers] if stage.layers else []
    parts += ["embedding"] if stage.embedding else []
    parts += ["LM head"] if stage.head else []
    return " + ".join(parts) or "none"


def device_name(device: Device) -> str:
    """A name that tells a device from the others of its node: of a GPU, the uuid's beginning, as in the events."""
    if device.index is None:
        return device.uuid
    if device.kind == "cpu":
        return f"processes of task {device.index}"
    begins = re.match(r"(GPU|MIG)-[0-9a-f]{8}(?=-)", device.uuid)
    return f"{device.kind} {device.index}, {begins[0] if begins else device.uuid}"


def models(devices: Sequence[Device]) -> str:
    """What the GPUs are, in a list."""
    return ", ".join(sorted({device.model for device in devices if device.kind != "cpu" and device.model}))


def chosen(items: Sequence[Item], key: Callable[[Item], float], most: int) -> list[Item]:
    """All items, or those with the smallest keys, in the order in which they came."""
    least = sorted(range(len(items)), key=lambda index: key(items[index]))[:most]
    return [items[index] for index in sorted(least)]


def slowest_first(stage: Stage) -> float:
    """Which stages matter most, as a key for `chosen`."""
    return -(stage.compute_seconds or 0.0)


def least_used_first(device: Device) -> float:
    """Which devices matter most, as a key for `chosen`."""
    return device.utilization_mean_ratio or 0.0


def gravest_first(event: Event) -> float:
    """Which events matter most, as a key for `chosen`: that recording began and ended as it should is said last."""
    routine = event.kind in ("prolog", "epilog")
    routine |= event.kind == "sampler" and event.text.startswith(("started", "stopped"))
    if routine:
        return 2.0
    return float(event.kind not in ("fault", "xid", "failed", "hang"))
