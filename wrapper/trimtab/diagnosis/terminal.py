"""A diagnosis for a terminal, readable from 60 columns on; plain text where the output is no terminal."""

from collections.abc import Iterator
from typing import TextIO

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trimtab.balance.diagnosing.findings import NONE, Diagnosis
from trimtab.diagnosis.answer import Answer
from trimtab.terminal import bullet, show_parts
from trimtab.wording import listed, milliseconds, percent, plain

LEAST_SHARE = 0.0005
"""Smaller ones would be shown as none."""


def show(answer: Answer, output: TextIO) -> None:
    """Print it."""
    show_parts(_parts(answer), output)


def _parts(answer: Answer) -> Iterator[RenderableType]:
    yield _figures(answer)
    yield Text("\nEvidence", style="bold")
    for each in answer.diagnosis.evidence:
        yield Padding(bullet(each.text), (0, 0, 0, 2))


def _figures(answer: Answer) -> Table:
    found = answer.diagnosis
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    second = f", then {found.secondary}" if found.secondary else ""
    note = f"{second} (confidence {found.confidence:.0%}){_of_what(found)}"
    table.add_row("Cause", Text(found.cause, style="bold").append(note, "not bold"))
    if found.places:
        table.add_row("Where", Text(_where(answer)))
    ideal = f"{found.slowdown_ratio:.2f} times the ideal {milliseconds(found.ideal_seconds)} ms (both simulated)"
    table.add_row("Step", f"{milliseconds(found.step_seconds)} ms, {ideal}")
    shares = sorted(found.shares.items(), key=lambda item: -item[1])
    if shown := [f"{name} {percent(share)}" for name, share in shares if share >= LEAST_SHARE]:
        table.add_row("Slowdown", f"by {', '.join(shown)}")
    return table


def _of_what(found: Diagnosis) -> str:
    """How much the cause is one of: stages that are nearly level have one too."""
    if found.cause == NONE:
        return ""
    slowdown_ratio = found.slowdown_ratio - 1
    return f" of a slowdown by {percent(slowdown_ratio)}" if slowdown_ratio >= LEAST_SHARE else ", which slows no step"


def _where(answer: Answer) -> str:
    stages = listed([f"stage {stage} of replica {replica}" for replica, stage in answer.diagnosis.places])
    ranks = f"rank{'s' if len(answer.ranks) > 1 else ''} {listed([str(rank) for rank in answer.ranks], 32)}"
    nodes = f", on {listed([plain(node) for node in answer.nodes])}" if answer.nodes else ""
    return f"{stages} ({ranks}){nodes}"
