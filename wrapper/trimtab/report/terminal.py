"""Summary -> tables for a terminal, readable from 80 columns on; plain text where the output is no terminal."""

from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trimtab.report.attempts import (
    attempt_details,
    chain_sentences,
    goodput_shares,
    place_in_chain,
    state_and_sentence,
    steps_of,
)
from trimtab.report.figures import (
    OTHER,
    Share,
    chosen,
    device_name,
    gravest_first,
    holds,
    key_figures,
    least_used_first,
    models,
    shape,
    slowest_first,
    step_shares,
)
from trimtab.report.orders import (
    became,
    changes,
    counts,
    earlier_orders,
    innermost,
    settings_compared,
    step_range,
    why,
    worth,
)
from trimtab.report.summary import Attempt, Device, Order, Stack, Summary, Training
from trimtab.terminal import bullet, ruled_table, show_parts
from trimtab.wording import (
    clock,
    data_size,
    duration,
    milliseconds,
    moment,
    number_spans,
    percent,
    plain,
    plural,
    watts,
)

MOST_ROWS = 32
"""Of a table; of longer ones the rows that matter are shown, and how many are left out is said."""
STATE_STYLES = {"finished": "bold green", "failed": "bold red", "stopped": "bold yellow", "unknown": "bold yellow"}


def show(summary: Summary, output: TextIO) -> None:
    """Print the report of one attempt."""
    show_parts(_parts(summary), output)


def _parts(summary: Summary) -> Iterator[RenderableType]:
    yield from _headline(summary)
    yield from _section("What to change", [bullet(finding.text) for finding in summary.findings])
    yield from _section("Warnings", [bullet(warning, "yellow") for warning in summary.warnings])
    training = summary.training
    before = [Text(earlier, style="dim")] if (earlier := earlier_orders(summary)) else []
    orders = [_orders(summary, training.orders)] if training and training.orders else []
    yield from _section("What trimtab did", [*before, *orders])
    if training and len(training.settings) > 1:
        compared = settings_compared(training)
        yield from _section("Settings", [*([Text(compared)] if compared else []), _settings(training)])
    if training and training.stages:
        yield from _section(_stages_title(training), [_stages(training)])
    if training and training.shares:
        yield from _section("Where the time of a step went", [_shares(step_shares(training)), Text(OTHER, style="dim")])
    if summary.devices:
        yield from _section(_devices_title(summary.devices), [_devices(summary.devices, bool(summary.ranks))])
    if summary.events:
        yield from _section("Events", [_events(summary)])
    if training and training.stacks:
        yield from _section("Where the ranks were when they hung", [_stacks(training.stacks)])
    if len(summary.attempts) > 1:
        told = [bullet(sentence) for sentence in chain_sentences(summary)]
        yield from _section("Attempts", [_attempts(summary.attempts, summary.attempt_number), *told])
    if summary.chain:
        shares = goodput_shares(summary.chain.goodput)
        yield from _section("Where the time of the attempts went", [_shares(shares)])


def _section(title: str, parts: Sequence[RenderableType]) -> Iterator[RenderableType]:
    if parts:
        yield Text(f"\n{title}", style="bold")
        yield from (Padding(part, (0, 0, 0, 2), expand=False) for part in parts)


def _headline(summary: Summary) -> Iterator[RenderableType]:
    outcome = summary.outcome
    line = Text(f"Job {summary.job_id} ", style="bold")
    end = Text(plain(state_and_sentence(outcome.state, outcome.sentence)))
    end.stylize(STATE_STYLES.get(outcome.state, "bold"), 0, len(outcome.state))
    line.append(end)
    if outcome.exit_code not in (None, 0, -1):
        line.append(f" (exit code {outcome.exit_code})")
    yield line
    about = f"{plain(summary.user)} on {plain(summary.cluster)}, {moment(summary.start_seconds)} UTC"
    restarts = f", restart {summary.restart_count}" if summary.restart_count else ""
    yield Text(f"{about}{restarts}, for {duration(summary.duration_seconds)}", style="dim")
    if place := place_in_chain(summary):
        yield Text(plain(place[:1].upper() + place[1:], 200), style="dim")
    if summary.training:
        yield Text(shape(summary.training), style="dim")
        yield Padding(_key_figures(summary.training), (1, 0, 0, 2), expand=False)


def _key_figures(training: Training) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for figure in key_figures(training):
        value = Text(f"{figure.value} {figure.unit}".rstrip(), style="bold")
        table.add_row(figure.name, value.append(f"  {figure.note}", style="not bold"))
    return table


def _stages_title(training: Training) -> str:
    return f"Stages (milliseconds of compute a step, medians of the last {plural(training.window_steps, 'step')})"


def _stages(training: Training) -> RenderableType:
    table = ruled_table()
    replicas = training.data > 1
    columns = [*(["replica"] if replicas else []), "stage", "forward", "backward", "compute"]
    for column in [*columns, "rest of step", "memory"]:
        table.add_column(column, justify="right")
    table.add_column("layers", overflow="fold")
    imbalance = training.imbalance
    shown = chosen(training.stages, slowest_first, MOST_ROWS)
    for stage in shown:
        slowest = (
            imbalance and imbalance.triggered and (stage.replica, stage.stage) == (imbalance.replica, imbalance.stage)
        )
        table.add_row(
            *([str(stage.replica)] if replicas else []),
            str(stage.stage),
            milliseconds(stage.forward_seconds),
            milliseconds(stage.backward_seconds),
            milliseconds(stage.compute_seconds),
            percent(stage.not_computing_ratio),
            data_size(stage.peak_memory_bytes),
            plain(holds(stage)),
            style="yellow" if slowest else "",
        )
    _left_out(table, len(training.stages) - len(shown), "stages that compute less")
    return table


def _shares(shares: Sequence[Share]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right")
    table.add_column()
    for share in shares:
        table.add_row(percent(share.ratio), share.name)
    return table


def _devices_title(devices: Sequence[Device]) -> str:
    names = plain(models(devices), 200)
    return f"Devices ({names})" if names else "Devices"


def _devices(devices: Sequence[Device], ranked: bool) -> RenderableType:
    """`ranked`: whether ranks are known."""
    gpus = any(device.kind != "cpu" for device in devices if device.kind)
    table = ruled_table()
    table.add_column("node", overflow="fold")
    if ranked:
        table.add_column("rank", justify="right")
    table.add_column("device", overflow="fold")
    figures = ("used", "SM", "memory", "power", "slowed") if gpus else ("mean", "max", "memory")
    for column in (*figures, "covered"):
        table.add_column(column, justify="right", no_wrap=True)
    for device in (shown := chosen(devices, least_used_first, MOST_ROWS)):
        used = percent(device.utilization_mean_ratio) if not device.no_data else "no data"
        memory = data_size(device.memory_max_bytes)
        about = (
            (used, percent(device.sm_active_mean_ratio), memory, watts(device.power_mean_watts))
            if gpus
            else (used, percent(device.utilization_max_ratio), memory)
        )
        slowed = (percent(device.throttled_ratio),) if gpus else ()
        names = (plain(device.node), *((ranks(device),) if ranked else ()), plain(device_name(device)))
        table.add_row(*names, *about, *slowed, percent(device.coverage_ratio))
        if device.no_data:
            table.add_row(*[""] * (len(names) - 1), Text(plain(device.no_data), style="dim"))
    _left_out(table, len(devices) - len(shown), "devices that were used more")
    return table


def ranks(device: Device) -> str:
    """The ranks of a device."""
    return ",".join(map(str, device.ranks)) or "-"


def _events(summary: Summary) -> RenderableType:
    table = ruled_table()
    table.add_column("UTC", no_wrap=True)
    for column in ("from", "kind", "event"):
        table.add_column(column, overflow="fold")
    shown = chosen(summary.events, gravest_first, MOST_ROWS)
    for event in shown:
        table.add_row(clock(event.time_seconds), plain(event.source), plain(event.kind), plain(event.text, 300))
    _left_out(table, len(summary.events) - len(shown), "more events")
    return table


def _orders(summary: Summary, orders: Sequence[Order]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    shown = orders[-MOST_ROWS:]
    for order in shown:
        text = Text(plain(order.kind), style="bold")
        text.append(plain(f": {changed}" if (changed := changes(order)) else "", 300), style="not bold")
        text.append(f" ({plain(became(order, summary), 300)})", style="not bold")
        for line in (plain(why(order), 300), worth(order)):
            text.append(f"\n{line}" if line else "", style="not bold dim")
        table.add_row(str(order.number), f"step {order.step}", text)
    _left_out(table, len(orders) - len(shown), "earlier orders")
    return table


def _settings(training: Training) -> RenderableType:
    table = ruled_table()
    recomputed = any(any(setting.recomputed_layers) for setting in training.settings)
    table.add_column("", justify="right")
    table.add_column("steps", no_wrap=True)
    for column in ("step", "imbalance", "cost"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("layers", "microbatches", *(["recomputed"] if recomputed else [])):
        table.add_column(column, overflow="fold")
    shown = list(enumerate(training.settings, start=1))[-MOST_ROWS:]
    for number, setting in shown:
        table.add_row(
            str(number),
            step_range(setting).removeprefix("steps "),
            milliseconds(setting.step_seconds) + (" ms" if setting.step_seconds is not None else ""),
            percent(setting.imbalance_ratio),
            duration(setting.cost.imbalance_seconds) if setting.cost else "-",
            counts(setting.layers),
            counts(setting.microbatches),
            *([counts(setting.recomputed_layers)] if recomputed else []),
            style="bold" if number - 1 == training.setting else "",
        )
    _left_out(table, len(training.settings) - len(shown), "earlier settings")
    return table


def _stacks(stacks: Sequence[Stack]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for stack in stacks[:MOST_ROWS]:
        table.add_row(plural(len(stack.ranks), "rank"), plain(f"{number_spans(stack.ranks)}: {innermost(stack)}", 300))
    _left_out(table, len(stacks) - MOST_ROWS, "more places")
    return table


def _attempts(attempts: Sequence[Attempt], shown: int) -> RenderableType:
    table = ruled_table()
    table.add_column("attempt", justify="right")
    table.add_column("start, UTC", no_wrap=True)
    table.add_column("for", justify="right", no_wrap=True)
    table.add_column("steps", no_wrap=True)
    table.add_column("end", overflow="fold")
    for attempt in attempts:
        end = Text(plain(state_and_sentence(attempt.state, attempt.sentence), 300))
        if details := attempt_details(attempt):
            end.append(f"\n{plain(details, 300)}", style="not bold dim")
        table.add_row(
            str(attempt.number),
            moment(attempt.start_seconds),
            duration(attempt.duration_seconds),
            steps_of(attempt),
            end,
            style="bold" if attempt.number == shown else "",
        )
    return table


def _left_out(table: Table, number: int, what: str) -> None:
    if number > 0:
        table.caption = f"{number:,} {what} are in --html and --json"
        table.caption_justify = "left"
