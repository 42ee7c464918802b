"""Profile and Summary -> one HTML file that holds everything it shows and loads nothing."""

import html
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trimtab import document, wording
from trimtab.report import series
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
from trimtab.report.find import Recorded
from trimtab.report.orders import (
    became,
    changes,
    counts,
    earlier_orders,
    settings_compared,
    step_range,
    stood_still,
    why,
)
from trimtab.report.summary import Device, Rank, Summary
from trimtab_slurm.contents import Profile

MOST_ROWS = 2_000
"""Of a table: with more the page would open slowly; --json has all."""
MOST_STACKS = 64
"""Places at which ranks hung: the first are those of the fewest ranks."""


def write(path: Path, recorded: Recorded) -> None:
    """Write the page; whoever reads meanwhile sees the old file or the new one, never a half.

    Raises OSError, ReportError, and as `render` does.
    """
    with recorded.profile() as profile:
        text = render(profile, recorded.summary)
    document.write(path, text)


def render(profile: Profile, summary: Summary) -> str:
    """The page as text. Raises ModuleNotFoundError where plotly is not installed."""
    from plotly.offline import get_plotlyjs

    charts = _charts(profile, summary)
    rows = list(_device_rows(summary))
    stages = summary.training.stages if summary.training else ()
    return document.render(
        "trimtab.report",
        "page.html.j2",
        scripts=[get_plotlyjs(), document.resource("trimtab.report", "page.js")],
        styles=[document.resource("trimtab.report", "page.css")],
        data=charts,
        summary=summary,
        training=summary.training,
        figures=tuple(key_figures(summary.training)) if summary.training else (),
        shares=step_shares(summary.training) if summary.training else (),
        other=OTHER,
        shape=shape,
        place=place_in_chain(summary),
        earlier_orders=earlier_orders(summary),
        orders=(summary.training.orders if summary.training else ())[-MOST_ROWS:],
        settings=list(enumerate(summary.training.settings, start=1))[-MOST_ROWS:] if summary.training else [],
        compared=settings_compared(summary.training) if summary.training else "",
        became=became,
        changes=changes,
        why=why,
        stood_still=stood_still,
        step_range=step_range,
        counts=counts,
        stacks=(summary.training.stacks if summary.training else ())[:MOST_STACKS],
        number_spans=wording.number_spans,
        chain_told=tuple(chain_sentences(summary)),
        chain_shares=goodput_shares(summary.chain.goodput) if summary.chain else (),
        steps_of=steps_of,
        attempt_details=attempt_details,
        state_and_sentence=state_and_sentence,
        holds=holds,
        device_name=device_name,
        stages=chosen(stages, slowest_first, MOST_ROWS),
        stages_left_out=len(stages) - MOST_ROWS,
        rows=chosen(rows, lambda row: least_used_first(row.device), MOST_ROWS),
        rows_left_out=len(rows) - MOST_ROWS,
        models=models(summary.devices),
        gpus=any(device.kind in ("gpu", "mig") for device in summary.devices),
        events=chosen(summary.events, gravest_first, MOST_ROWS),
        events_left_out=len(summary.events) - MOST_ROWS,
        charts=charts,
        thinning=_thinning(summary),
        heat_caption=_heat_caption(charts["devices"]),
    )


@dataclass(frozen=True)
class DeviceRow:
    """A rank on its device, or a device without one."""

    rank: Rank | None
    device: Device


def _device_rows(summary: Summary) -> Iterator[DeviceRow]:
    by_uuid = {device.uuid: device for device in summary.devices}
    for rank in summary.ranks:
        yield DeviceRow(rank, by_uuid[rank.device])
    for device in summary.devices:
        if not device.ranks:
            yield DeviceRow(None, device)


def _charts(profile: Profile, summary: Summary) -> dict[str, Any]:
    """What the charts draw; a chart that would be empty is None."""
    charts: dict[str, Any] = dict.fromkeys(("stages", "loss", "imbalance", "devices", "chain"))
    charts["marks"] = [asdict(mark) for mark in series.marks(profile.training)] if profile.training else []
    training = profile.training
    if training and summary.training and summary.training.measured_steps:
        window = int(training.attributes["window_steps"])
        charts["stages"] = _lines(series.stage_lines(training))
        charts["loss"] = _lines((series.loss_line(training), series.throughput_line(training)))
        if imbalance := series.imbalance_lines(training, window):
            trigger = float(training.attributes["trigger_ratio"]) * 100
            charts["imbalance"] = {"lines": _lines(imbalance), "trigger_percent": trigger}
    if heat := series.heat_map(profile, summary):
        charts["devices"] = asdict(heat) | {"labels": [_label(label) for label in heat.labels]}
    if (chain := summary.chain) and any(value is not None for value in chain.loss.loss):
        charts["chain"] = {
            "loss": asdict(chain.loss),
            "repeated": [asdict(curve) for curve in chain.repeated],
            "resumed": chain.resumed_steps,
        }
    return charts


def _lines(lines: tuple[series.Line, ...]) -> list[dict[str, Any]] | None:
    drawn = [asdict(line) for line in lines if any(value is not None for value in line.y)]
    return drawn or None


def _thinning(summary: Summary) -> str:
    steps = summary.training.measured_steps if summary.training else 0
    if steps <= series.MOST_POINTS:
        return ""
    return " Of each span of steps, the smallest and the largest value are drawn."


def _heat_caption(heat: dict[str, Any] | None) -> str:
    if heat is None:
        return ""
    shared = f"Each row stands for {heat['row_devices']} devices, by the least used of them. "
    return (
        f"{shared if heat['row_devices'] > 1 else ''}Mean utilization in spans of "
        f"{wording.duration(heat['bin_seconds'])}; blank where there is no sample."
    )


def _label(text: str) -> str:
    """Plotly reads some tags in its labels."""
    return html.escape(wording.plain(text, 60))
