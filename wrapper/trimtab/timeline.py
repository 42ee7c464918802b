"""Simulations -> one HTML file with a picture of each: what every stage does when.

Each operation is a bar, as long as there are few enough to be seen and drawn; of more, the share of time that each
stage is busy is drawn instead, in spans of equal length. Times are in milliseconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from trimtab import document, wording
from trimtab.balance.pipeline.simulate import Operations, Simulation
from trimtab.balance.plan import Floats

MOST_BARS = 6_000
"""Of all pictures of a page: with more it would open slowly, and a bar would be narrower than a line."""
SPANS = 600


@dataclass(frozen=True)
class Picture:
    """One simulation to draw."""

    title: str
    simulation: Simulation
    note: str = ""
    """A sentence below the title: plan and assumptions."""


def write(path: Path, title: str, pictures: Sequence[Picture]) -> None:
    """Write the page. Raises OSError, and ModuleNotFoundError where plotly is not installed."""
    document.write(path, render(title, pictures))


def render(title: str, pictures: Sequence[Picture]) -> str:
    """The page as text. All pictures have the same scale of time, so that they can be compared."""
    from plotly.offline import get_plotlyjs

    longest = max(picture.simulation.duration_seconds for picture in pictures)
    bars = sum(len(picture.simulation.operations.kind) for picture in pictures) <= MOST_BARS
    charts = [
        {"longest": longest * 1e3, "stages": len(picture.simulation.busy_seconds)}
        | (_bars(picture.simulation) if bars else _spans(picture.simulation, longest))
        for picture in pictures
    ]
    return document.render(
        "trimtab",
        "timeline.html.j2",
        scripts=[get_plotlyjs(), document.resource("trimtab", "timeline.js")],
        styles=[document.resource("trimtab.report", "page.css"), document.resource("trimtab", "timeline.css")],
        data=charts,
        title=title,
        pictures=[(picture, _caption(picture.simulation, bars, longest)) for picture in pictures],
    )


def _caption(simulation: Simulation, bars: bool, longest: float) -> str:
    least, most = (f"{ratio:.1%}" for ratio in (simulation.bubble_ratio.min(), simulation.bubble_ratio.max()))
    said = (
        f"{wording.milliseconds(simulation.duration_seconds)} ms; stages are idle for "
        f"{least if least == most else f'{least} to {most}'} of it."
    )
    if bars:
        return said
    return (
        f"{said} {len(simulation.operations.kind):,} operations are too many for a bar each: the color is the share of "
        f"time in which a stage is busy, in spans of {wording.milliseconds(longest / SPANS)} ms."
    )


def _bars(simulation: Simulation) -> dict[str, Any]:
    """One group of bars for each kind of operation and each chunk of a stage."""
    run = simulation.operations
    turns = (run.chunk.max() + 1) // len(simulation.busy_seconds)
    names = {"F": "forward", "B": "backward"}
    if "W" in run.kind:
        names = {"F": "forward", "B": "input gradients", "W": "weight gradients"}
    groups = []
    for kind, turn in product(names, range(turns)):
        chosen = (run.kind == kind) & (run.chunk // len(simulation.busy_seconds) == turn)
        groups.append(
            {
                "name": names[kind] + (f" ({turn + 1} of {turns} chunks)" if turns > 1 else ""),
                "kind": kind,
                "shade": turn / max(1, turns - 1),
                "stage": run.stage[chosen].tolist(),
                "microbatch": run.microbatch[chosen].tolist(),
                "start": _milliseconds(run.start_seconds[chosen]),
                "length": _milliseconds((run.end_seconds - run.start_seconds)[chosen]),
            }
        )
    return {"bars": groups}


def _spans(simulation: Simulation, longest: float) -> dict[str, Any]:
    """[stage][span] busy share."""
    width = longest / SPANS
    return {
        "spans": [
            [round(ratio, 3) for ratio in busy_ratio(simulation.operations, stage, width).tolist()]
            for stage in range(len(simulation.busy_seconds))
        ]
    }


def busy_ratio(run: Operations, stage: int, width: float) -> Floats:
    """[SPANS] share of each span in which a stage runs an operation: those of a stage never overlap."""
    own = run.stage == stage
    edges = width * np.arange(SPANS + 1)
    start, end = run.start_seconds[own], run.end_seconds[own]
    before = np.concatenate([[0.0], np.cumsum(end - start)])
    # Busy until each edge: all operations that have begun, less what is left of the last of them.
    begun = np.searchsorted(start, edges, side="right")
    ends = np.concatenate([[0.0], end])[begun]
    busy = before[begun] - np.maximum(ends - edges, 0.0)
    return np.asarray(np.diff(busy) / width, dtype=np.float64)


def _milliseconds(seconds: Floats) -> list[float]:
    return [float(f"{value:.6g}") for value in (seconds * 1e3).tolist()]
