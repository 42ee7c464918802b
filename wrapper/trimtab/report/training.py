"""What the ranks reported -> the figures of the training. Pure.

Figures of speed, imbalance and cost are of the steps of one setting; the headline's are of the latest that was
measured.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np

from trimtab.balance.detect import imbalance_ratio
from trimtab.balance.plan import Place
from trimtab.protocol import Layout
from trimtab.report.gaps import median, most
from trimtab.report.spans import Span, loads, passes, spans
from trimtab.report.stages import Floats, Rows, StageMatrix, StepTimes, stage_matrix, step_times
from trimtab.report.summary import Cost, Imbalance, Order, Setting, Stack, Stage, StepShares, Training
from trimtab.stacks import shared_stacks
from trimtab.wording import number_spans
from trimtab_slurm.contents import Table, TrainingProfile


def training_figures(training: TrainingProfile) -> Training:
    """The figures of one attempt. Raises ValueError where its tables contradict each other."""
    attributes, steps = training.attributes, training.steps
    number, ranks = steps["step"], len(training.ranks["rank"])
    duration = _floats(steps, "duration_seconds")
    loss = _floats(steps, "loss")
    has_loss = np.flatnonzero(np.isfinite(loss))
    matrix = stage_matrix(training)
    _refuse_other_places(training, matrix)
    found = spans(training)
    # Failed jobs end on a step that some stages never reported: what counts are the steps that all have.
    whole = matrix.complete & (duration > 0)
    current = max((place for place, span in enumerate(found) if len(span.rows)), default=0)
    rows = found[current].rows
    window = rows[whole[rows]][-int(attributes["window_steps"]) :]
    stages = _stages(training, matrix, found[current], window)
    job = json.loads(str(attributes["job"]))
    virtual = int(job["parallel"]["virtual"])
    counts, shares = passes(training, found, virtual), loads(training, found)
    relative = matrix.relative_seconds(shares)

    def times(of: Rows) -> StepTimes:
        return step_times(matrix.compute_seconds[of], matrix.places, counts[of], shares[of])

    def setting(span: Span) -> Setting:
        own = span.rows[whole[span.rows]]
        compute = np.median(relative[own], axis=0).tolist() if len(own) else []
        return Setting(
            first_step=span.first_step,
            last_step=int(number[span.rows[-1]]) if len(span.rows) else None,
            layers=span.layers,
            microbatches=span.microbatches,
            recomputed_layers=span.recomputed_layers,
            measured_steps=len(span.rows),
            step_seconds=median(duration[span.rows]),
            tokens_per_second=_tokens_per_second(steps, span.rows),
            imbalance_ratio=imbalance_ratio(compute) if len(compute) > 1 and np.median(compute) > 0 else None,
            cost=_cost(times(own), duration[own], ranks) if len(compute) > 1 else None,
        )

    settings = tuple(map(setting, found))
    return Training(
        tensor=int(attributes["tensor"]),
        pipeline=int(attributes["pipeline"]),
        data=int(attributes["data"]),
        ranks=ranks,
        duration_seconds=max(0.0, training.end_seconds - training.start_seconds),
        first_step=int(number[0]) if len(number) else None,
        last_step=int(number[-1]) if len(number) else None,
        measured_steps=len(number),
        planned_steps=int(job["train"]["steps"]),
        first_loss=float(loss[has_loss[0]]) if len(has_loss) else None,
        last_loss=float(loss[has_loss[-1]]) if len(has_loss) else None,
        last_loss_step=int(number[has_loss[-1]]) if len(has_loss) else None,
        tokens=int(np.nansum(_floats(steps, "tokens"))),
        setting=current,
        tokens_per_second=settings[current].tokens_per_second,
        step_seconds=settings[current].step_seconds,
        window_steps=len(window),
        window_first_step=int(number[window[0]]) if len(window) else None,
        window_last_step=int(number[window[-1]]) if len(window) else None,
        own_model=bool(job["model"]["provider"]),
        virtual=virtual,
        stages=stages,
        imbalance=_imbalance(matrix.places, relative[window], float(attributes["trigger_ratio"])),
        shares=_shares(times(window), duration[window]) if len(window) else None,
        cost=settings[current].cost,
        settings=settings,
        orders=tuple(_orders(training.orders)),
        checkpoints=len(training.checkpoints["step"]) if training.checkpoints else 0,
        checkpoint_directory=str(job["train"]["checkpoint_directory"]),
        stacks=tuple(Stack(shared.ranks, shared.text) for shared in shared_stacks(training.events)),
    )


def _refuse_other_places(training: TrainingProfile, matrix: StageMatrix) -> None:
    replicas, stages = int(training.attributes["data"]), int(training.attributes["pipeline"])
    for replica, stage in matrix.places:
        if not (0 <= replica < replicas and 0 <= stage < stages):
            raise ValueError(f"stage {stage} of replica {replica} reported, of {replicas} replicas of {stages} stages")


def _stages(training: TrainingProfile, matrix: StageMatrix, span: Span, window: Rows) -> tuple[Stage, ...]:
    pipeline = int(training.attributes["pipeline"])
    table, duration_seconds = training.stages, _floats(training.steps, "duration_seconds")
    peaks = _floats(table, "peak_memory_bytes")
    layers = _layers(training, span)
    stages = []
    for column, (replica, stage) in enumerate(matrix.places):
        compute = matrix.compute_seconds[window, column]
        own = (table["replica"] == replica) & (table["stage"] == stage)
        stages.append(
            Stage(
                replica=replica,
                stage=stage,
                layers=layers.get(stage, ""),
                embedding=stage == 0,
                head=stage == pipeline - 1,
                forward_seconds=median(matrix.forward_seconds[window, column]),
                backward_seconds=median(matrix.backward_seconds[window, column]),
                compute_seconds=median(compute),
                not_computing_ratio=median(np.clip(1 - compute / duration_seconds[window], 0, 1)),
                peak_memory_bytes=most(peaks[own]),
            )
        )
    return tuple(stages)


def _layers(training: TrainingProfile, span: Span) -> dict[int, str]:
    """What each stage held; where no setting was recorded, what its ranks began with."""
    ranks, pipeline = training.ranks, int(training.attributes["pipeline"])
    if span.layers:
        layout = Layout(span.layers, pipeline)
        return {stage: number_spans(layout.stage_layers(stage)) for stage in range(pipeline)}
    return dict(zip(ranks["pipeline_rank"].tolist(), map(str, ranks["layers"].tolist()), strict=True))


def _imbalance(places: tuple[Place, ...], relative_seconds: Floats, trigger_ratio: float) -> Imbalance | None:
    """Of the places' medians over the steps of the window, [W, P]."""
    if len(places) < 2 or not len(relative_seconds):
        return None
    seconds = np.median(relative_seconds, axis=0)
    if np.median(seconds) <= 0:
        return None
    replica, stage = places[int(np.argmax(seconds))]
    ratio = imbalance_ratio(seconds)
    return Imbalance(ratio, replica, stage, trigger_ratio, ratio >= trigger_ratio, len(relative_seconds))


def _shares(times: StepTimes, duration_seconds: Floats) -> StepShares:
    modeled = (times.compute_seconds, times.fill_seconds, times.unequal_seconds, times.imbalance_seconds)
    parts = [float(part.sum()) for part in modeled]
    # Where the model's parts exceed the step, they are shares of their own sum, and nothing is left over.
    whole = max(float(duration_seconds.sum()), sum(parts))
    compute, fill, unequal, imbalance = (part / whole for part in parts)
    return StepShares(compute, fill, imbalance, max(0.0, 1 - sum(parts) / whole), unequal)


def _cost(times: StepTimes, duration_seconds: Floats, ranks: int) -> Cost:
    seconds = float(times.imbalance_seconds.sum())
    share = seconds / float(duration_seconds.sum())
    return Cost(seconds, seconds * ranks / 3600, share, len(duration_seconds))


def _tokens_per_second(steps: Table, rows: Rows) -> float | None:
    duration, tokens = _floats(steps, "duration_seconds")[rows], _floats(steps, "tokens")[rows]
    return median(tokens[duration > 0] / duration[duration > 0])


def _orders(table: Table) -> Iterator[Order]:
    """A figure that is not there is None."""
    if not table:
        return
    names = [field.name for field in fields(Order)]
    for row in zip(*(table[name].tolist() for name in names), strict=True):
        known: list[Any] = [None if isinstance(value, float) and not math.isfinite(value) else value for value in row]
        yield Order(*known)


def _floats(table: Table, name: str) -> Floats:
    return np.asarray(table[name], dtype=np.float64)
