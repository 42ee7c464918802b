"""Which steps of a run were taken under which setting: figures of two settings are never mixed. Pure."""

from dataclasses import dataclass

import numpy as np

from trimtab.protocol import Layout, Setting
from trimtab.report.stages import Floats, Rows
from trimtab_slurm.contents import TrainingProfile


@dataclass(frozen=True)
class Span:
    """The steps of one setting."""

    first_step: int
    """The first that was to run under it, whether it was measured or not."""
    layers: tuple[int, ...]
    """Of each model chunk; empty: not recorded."""
    microbatches: tuple[int, ...]
    """Of each replica; empty: not recorded."""
    recomputed_layers: tuple[int, ...]
    """Of each stage; empty: not recorded."""
    rows: Rows
    """Of the table of steps."""


def spans(training: TrainingProfile) -> tuple[Span, ...]:
    """Ascending, at least one; what ran is not known of steps before the first that is recorded.

    What changes nothing is no other setting.
    """
    step, table = np.asarray(training.steps["step"], dtype=np.int64), training.settings
    if not table or not len(table["step"]):
        return (Span(int(step[0]) if len(step) else 1, (), (), (), np.arange(len(step))),)
    columns = (table[name].tolist() for name in ("step", "layout", "microbatches", "recomputed_layers"))
    changes: list[tuple[int, str, str, str]] = []
    for row in sorted(zip(*columns, strict=True)):
        if not changes or changes[-1][1:] != row[1:]:
            changes.append(row)
    # [S] the place of each step's setting among the changes; -1: before anybody said what ran.
    of = np.searchsorted([first for first, *_ in changes], step, side="right") - 1
    known = tuple(
        Span(
            first,
            tuple(part.count("t") for part in layout.split("|")),
            _counts(microbatches),
            _counts(recomputed),
            np.flatnonzero(of == place),
        )
        for place, (first, layout, microbatches, recomputed) in enumerate(changes)
    )
    before = np.flatnonzero(of < 0)
    return (Span(int(step[0]), (), (), (), before), *known) if len(before) else known


def passes(training: TrainingProfile, found: tuple[Span, ...], virtual: int) -> Floats:
    """[S, R] microbatches of each replica, times model chunks of a stage, in each step."""
    steps, replicas = training.steps, int(training.attributes["data"])
    samples = np.asarray(steps["global_batch_size"], dtype=np.float64) / replicas
    equal = samples / np.asarray(steps["microbatch_size"], dtype=np.float64)
    counts = np.tile(equal[:, None], (1, replicas))
    for span in found:
        if len(span.microbatches) == replicas:
            counts[span.rows] = span.microbatches
    return np.maximum(1.0, counts) * virtual


def loads(training: TrainingProfile, found: tuple[Span, ...]) -> Floats:
    """[S, R] what each replica had to do in each step over the mean because microbatches could not be shared out
    equally; 1 where nothing is recorded."""
    replicas, stages = int(training.attributes["data"]), int(training.attributes["pipeline"])
    shares = np.ones((len(training.steps["step"]), replicas))
    for span in found:
        if len(span.microbatches) == replicas:
            setting = Setting(Layout(span.layers, stages), span.microbatches, span.recomputed_layers)
            shares[span.rows] = setting.loads
    return shares


def _counts(text: str) -> tuple[int, ...]:
    """ "8|8" -> (8, 8)."""
    return tuple(int(count) for count in text.split("|"))
