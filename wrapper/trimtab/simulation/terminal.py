"""A comparison as tables for a terminal, readable from 80 columns on; plain text where the output is no terminal."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TextIO

from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trimtab.balance.deciding.search import Outcome
from trimtab.balance.deciding.words import span_text
from trimtab.simulation.compare import Comparison
from trimtab.simulation.figures import stage_layers
from trimtab.simulation.needs import LEAST_STAGE_EFFICIENCY, MOST_BUBBLE, Need
from trimtab.simulation.sentences import ONLY_PROPORTIONS, assumptions, fails_where
from trimtab.terminal import bullet, ruled_table, show_parts
from trimtab.wording import ABSENT, count, data_size, percent, plural

MOST_GROUPS = 4
"""Of equal neighbors, in a list of one figure for each stage."""


def show(comparison: Comparison, needs: Sequence[Need], statics: Sequence[Outcome], output: TextIO) -> None:
    """Print it."""
    show_parts(_parts(comparison, needs, statics), output)


def _parts(comparison: Comparison, needs: Sequence[Need], statics: Sequence[Outcome]) -> Iterator[RenderableType]:
    training, cluster = comparison.training, comparison.question.cluster
    yield Text(
        f"{training.sizes.parameters / 1e9:,.2f} billion parameters on {plural(cluster.gpus, 'GPU')} "
        f"({cluster.accelerator.name})",
        style="bold",
    )
    yield Text(
        f"{plural(training.sizes.layers, 'layer')}, a step of {plural(training.global_batch_size, 'sequence')} of "
        f"{plural(training.sizes.sequence_length, 'token')}, optimizer state: {training.optimizer}",
        style="dim",
    )
    if cluster.accelerator.only_proportions:
        yield Text(ONLY_PROPORTIONS)
    yield Padding(_plans(comparison), (1, 0, 0, 2), expand=False)
    ratio = comparison.static.estimate.step_seconds / comparison.chosen.estimate.step_seconds
    tried = comparison.search.considered
    yield Text(
        f"\n  The chosen plan is {ratio:.2f} times as fast as the static one. It is the fastest of "
        f"{plural(len(tried), 'configuration')}; {sum(one.step_seconds is not None for one in tried)} could be faster "
        "than what was known, and were simulated."
    )
    if needs:
        aims = f"a stage efficiency of {LEAST_STAGE_EFFICIENCY:.0%} and a bubble below {MOST_BUBBLE:.0%}"
        yield from _section(f"What it takes for {aims}", [_needs(needs)])
    yield from _section("Where it fails", map(bullet, fails_where(comparison, needs, statics)))
    yield from _section("Assumptions", map(bullet, assumptions(comparison.appraiser)))


def _section(title: str, parts: Iterator[Table] | Sequence[Table]) -> Iterator[RenderableType]:
    yield Text(f"\n{title}", style="bold")
    yield from (Padding(part, (0, 0, 0, 2), expand=False) for part in parts)


def _plans(comparison: Comparison) -> Table:
    shown = [("static", comparison.static), ("chosen", comparison.chosen)]
    if comparison.other:
        pipelined = comparison.other.configuration.shape.pipeline > 1
        shown.append((f"best {'with' if pipelined else 'without'} a pipeline", comparison.other))
    table = ruled_table()
    table.add_column("")
    for title, _ in shown:
        table.add_column(title, justify="right", overflow="fold", style="bold" if title == "chosen" else "")
    columns = [_rows(comparison, outcome) for _, outcome in shown]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    return table


def _rows(comparison: Comparison, outcome: Outcome) -> dict[str, str]:
    configuration, estimate = outcome.configuration, outcome.estimate
    chunks = f" x {configuration.virtual}" if configuration.virtual > 1 else ""
    memory = data_size(max(outcome.memory_bytes))
    rows = {
        "shape": str(configuration.shape),
        "schedule": f"{configuration.schedule}{chunks}" if configuration.shape.pipeline > 1 else ABSENT,
        "microbatches": f"{span_text(configuration.microbatches)} of {configuration.microbatch_size}",
        "layers of stages": _listed(stage_layers(outcome)),
        "of these recomputed": _listed(list(outcome.plan.recomputed_layers)),
        "step": f"{estimate.step_seconds:,.3f} s",
        "beside the pipeline": f"{outcome.overhead_seconds:,.3f} s",
        "stage efficiency": percent(estimate.stage_efficiency_ratio),
        "balance": percent(estimate.balance_ratio),
        "bubble": percent(estimate.bubble_ratio),
        "memory": memory if outcome.fits else f"{memory}: too much",
        "tokens a second": count(comparison.tokens_per_second(outcome)),
    }
    if not comparison.question.cluster.accelerator.only_proportions:
        rows["utilization (MFU)"] = percent(comparison.utilization_ratio(outcome))
    if comparison.question.cluster.latency_seconds:
        rows["order of nodes"] = ", ".join(map(str, outcome.node_order))
    return rows


def _listed(numbers: list[int]) -> str:
    """[10, 10, 9] -> "2 x 10, 9"; many different ones -> "7 to 9"."""
    groups = [(number, len(list(same))) for number, same in groupby(numbers)]
    if len(groups) > MOST_GROUPS:
        return f"{min(numbers)} to {max(numbers)}"
    return ", ".join(f"{length} x {number}" if length > 1 else str(number) for number, length in groups)


def _needs(needs: Sequence[Need]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("TP x PP", no_wrap=True)
    table.add_column("schedule", no_wrap=True)
    for name in ("balance", "microbatches", "efficiency", "bubble", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for need in needs:
        reached = need.reached
        figures = ["never", ABSENT, ABSENT, ABSENT]
        if reached:
            figures = [
                span_text(reached.configuration.microbatches),
                percent(reached.estimate.stage_efficiency_ratio),
                percent(reached.estimate.bubble_ratio),
                data_size(max(reached.memory_bytes)),
            ]
        shape = f"{need.shape.tensor} x {need.shape.pipeline}"
        table.add_row(shape, need.run, percent(need.balance_ratio), *figures, style="" if reached else "dim")
    return table
