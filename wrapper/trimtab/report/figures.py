"""The report's figures in words, the same in terminal and page. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from trimtab.report.summary import Device, Stage, Summary, Training
from trimtab.report.wording import count, duration, milliseconds, percent, plural, real


@dataclass(frozen=True)
class Figure:
    """One of the figures that a report begins with."""

    name: str
    value: str
    unit: str
    note: str


def key_figures(training: Training) -> Iterator[Figure]:
    """The figures that a report begins with; those that were not measured are left out."""
    if imbalance := training.imbalance:
        slowest = f"stage {imbalance.stage}" + (f" of replica {imbalance.replica}" if training.data > 1 else "")
        note = f"{slowest} is the slowest; the trigger is {imbalance.trigger_ratio:.0%}"
        yield Figure("Imbalance", percent(imbalance.ratio), "", note)
    if cost := training.cost:
        note = (
            f"{cost.imbalance_device_hours:,.3g} device-hours, {percent(cost.imbalance_ratio)} of the steps; estimated"
        )
        yield Figure("Cost of imbalance", duration(cost.imbalance_seconds), "", note)
    if training.tokens_per_second is not None:
        note = f"median; {count(training.tokens)} tokens in all"
        yield Figure("Throughput", count(training.tokens_per_second), "tokens/s", note)
        yield Figure("Step time", milliseconds(training.step_seconds), "ms", "median")
    if training.first_loss is not None:
        at = f" (at step {training.last_loss_step})" if training.last_loss_step != training.last_step else ""
        yield Figure("Loss", real(training.last_loss), "", f"last step{at}; {real(training.first_loss)} at first")
    resumed = f"; this attempt began at step {training.first_step}" if (training.first_step or 1) > 1 else ""
    yield Figure("Steps", f"{training.measured_steps:,}", "", f"of {training.planned_steps:,}{resumed}")


def place_in_chain(summary: Summary) -> str:
    """Which of the job's attempts this is, and how the one before it ended; empty where there was none."""
    if summary.attempt_number < 2:
        return ""
    number = f"attempt {summary.attempt_number}"
    if not summary.attempts:
        return f"{number}; the one before is in {summary.previous}"
    before = summary.attempts[summary.attempt_number - 2]
    return f"{number} of {len(summary.attempts)}; the one before {before.state}: {before.sentence}"


def shape(training: Training) -> str:
    """How the model was spread."""
    spread = f"TP{training.tensor} × PP{training.pipeline} × DP{training.data}"
    return f"{spread}, {plural(training.ranks, 'rank')}"


@dataclass(frozen=True)
class Share:
    """A part of a step's time."""

    key: str
    name: str
    ratio: float


def step_shares(training: Training) -> tuple[Share, ...]:
    """The parts of a step's time; empty where no step was measured whole."""
    if training.shares is None:
        return ()
    shares = training.shares
    parts = (
        Share("compute", "compute", shares.compute_ratio),
        Share("imbalance", "imbalance", shares.imbalance_ratio),
        Share("fill", "filling and draining the pipeline", shares.fill_ratio),
        Share("other", "other", shares.other_ratio),
    )
    return parts if len(training.stages) > 1 else (parts[0], parts[3])


def holds(stage: Stage) -> str:
    """What a stage holds: "4-7 + LM head"."""
    parts = [stage.layers] if stage.layers else []
    parts += ["embedding"] if stage.embedding else []
    parts += ["LM head"] if stage.head else []
    return " + ".join(parts) or "none"


def device_name(device: Device) -> str:
    """The shortest name that tells a device from the others of its node."""
    if device.index is None:
        return device.uuid
    if device.kind == "cpu":
        return f"processes of task {device.index}"
    return f"{device.kind} {device.index}, {device.model}" if device.model else f"{device.kind} {device.index}"
