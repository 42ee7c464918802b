"""An answer as tables for a terminal, readable from 80 columns on; plain text where the output is no terminal."""

import math
from collections.abc import Iterator
from typing import TextIO

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trimtab.balance.deciding.decide import Considered, Verdict
from trimtab.balance.deciding.words import span_text, split_text
from trimtab.balance.detect import Detection
from trimtab.balance.diagnosing.findings import Diagnosis
from trimtab.planning.answer import Answer
from trimtab.planning.situation import Case
from trimtab.terminal import bullet, console_of, ruled_table
from trimtab.wording import ABSENT, data_size, duration, milliseconds, percent, plain, plural

VERDICT_STYLES = {Verdict.CHOSEN: "bold green", Verdict.WORTH: "green", Verdict.WAITS: "yellow"}


def show(answer: Answer, output: TextIO) -> None:
    """Print what was found, what was considered, and what to do."""
    with console_of(output) as console:
        for part in _parts(answer):
            console.print(part)
        for line in answer.job_lines:
            console.print(Text(f"      {plain(line, 4000)}"), soft_wrap=True)  # to be copied: never broken
        for part in _assumptions(answer.case):
            console.print(part)


def _parts(answer: Answer) -> Iterator[RenderableType]:
    case = answer.case
    yield Text(plain(case.title), style="bold")
    yield Text(_running(case), style="dim")
    yield Padding(_figures(answer), (1, 0, 0, 2), expand=False)
    yield Text("\nWhat could be done", style="bold")
    yield Padding(_considered(answer.decision.considered), (0, 0, 0, 2), expand=False)
    yield Text("\nDecision", style="bold")
    yield Padding(Text(plain(answer.sentence, 4000)), (0, 0, 0, 2))


def _assumptions(case: Case) -> Iterator[RenderableType]:
    if case.assumptions:
        yield Text("\nAssumed, not measured", style="bold")
        for assumption in case.assumptions:
            yield Padding(bullet(assumption), (0, 0, 0, 2))


def _running(case: Case) -> str:
    plan, batch = case.situation.plan, case.job.batch
    es = "" if max(plan.microbatches) == 1 else "es"
    passes = f"{span_text(plan.microbatches)} microbatch{es} of {batch.microbatch_size}"
    return f"{case.situation.shape} on {case.placement}, {plan.schedule}, {passes}, layers {split_text(plan.layout)}"


def _figures(answer: Answer) -> Table:
    case = answer.case
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    situation, nothing = case.situation, answer.decision.considered[0]
    note = f"median of {plural(case.measured_steps, 'step')} after the warm-up" if case.measured_steps else "worked out"
    table.add_row("Step time", _figure(f"{milliseconds(nothing.predicted_step_seconds)} ms", note))
    if situation.hardware.overhead_seconds:
        beside = f"{milliseconds(situation.hardware.overhead_seconds)} ms of a step"
        table.add_row("Beside the pipeline", _figure(beside, "the optimizer, the gradients: every plan bears it"))
    if case.detection:
        table.add_row("Imbalance", _imbalance(case.detection, case))
    if case.diagnosis:
        table.add_row("Cause", _cause(case.diagnosis))
    if all(map(math.isfinite, case.device_bytes)):
        table.add_row("Memory", _memory(case))
    if situation.utilization_ratio is not None:
        below = situation.utilization_ratio < case.job.balance.least_utilization_ratio
        note = f"below {case.job.balance.least_utilization_ratio:.0%}, which asks for a plan" if below else ""
        table.add_row("Devices", _figure(f"{percent(situation.utilization_ratio)} used", note))
    return table


def _figure(value: str, note: str) -> Text:
    return Text(value, style="bold").append(f"  {note}", style="not bold")


def _memory(case: Case) -> Text:
    """Of the stage that is the fullest."""
    shares = [needed / held for needed, held in zip(case.needed_bytes, case.device_bytes, strict=True)]
    stage = shares.index(max(shares))
    needed, held = data_size(case.needed_bytes[stage]), data_size(case.device_bytes[stage])
    return _figure(f"{needed} of {held}", f"on stage {stage}, the fullest" + ("" if max(shares) <= 1 else ": too much"))


def _imbalance(detection: Detection, case: Case) -> Text:
    if detection.ratio is None or detection.lower_ratio is None or detection.place is None:
        return Text(f"not known: no window of {case.job.balance.window_steps} steps is complete")
    replica, stage = detection.place
    of_replica = f" of replica {replica}" if case.situation.shape.data > 1 else ""
    policy = case.job.balance
    needed = f"that takes {plural(policy.trigger_windows, 'window')} on end above {policy.trigger_ratio:.0%}"
    state = f"triggered since step {detection.since_step}" if detection.triggered else f"not triggered: {needed}"
    lower = percent(max(0.0, detection.lower_ratio))
    note = f"stage {stage}{of_replica} is the slowest; with 95 % confidence at least {lower}; {state}"
    return _figure(percent(detection.ratio), note)


def _cause(diagnosis: Diagnosis) -> Text:
    text = _figure(diagnosis.cause, f"confidence {diagnosis.confidence:.0%}")
    for evidence in diagnosis.evidence:
        text.append(f"\n{plain(evidence.text)}", "not bold")
    return text


def _memory_of(one: Considered, now: Considered) -> str:
    """What the fullest stage would need, where that is another figure than now; empty: it is not, or not known."""
    room = one.room
    if room is None or math.isinf(room.held_bytes) or one.verdict is Verdict.NO_ROOM:
        return ""
    if now.room and now.room.needed_bytes == room.needed_bytes:
        return ""
    return f"; {room}"


def _considered(considered: tuple[Considered, ...]) -> Table:
    table = ruled_table()
    table.add_column("change", overflow="fold")
    for column in ("step, ms", "gain", "cost"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for one in considered:
        what = Text(one.kind, style="bold" if one.verdict is Verdict.CHOSEN else "")
        if one.change:
            what.append(f": {plain(one.change, 400)}")
        what.append(f"\n{plain(one.reason, 600)}{_memory_of(one, considered[0])}", style="not bold dim")
        table.add_row(
            what,
            milliseconds(one.predicted_step_seconds),
            percent(one.gain_ratio),
            ABSENT if one.cost_seconds is None else duration(one.cost_seconds),
            Text(one.verdict, style=VERDICT_STYLES.get(one.verdict, "dim")),
        )
    return table
