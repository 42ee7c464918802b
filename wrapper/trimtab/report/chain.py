"""All attempts of a job as one run: what counts of each, one loss curve, and where the time went. Pure.

A step counts in the last attempt that took it: what an earlier one did after the checkpoint that a later one resumed
from was lost, and is what the later one repeats.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from trimtab.report.gaps import missing_spans
from trimtab.report.series import MOST_POINTS, thinned
from trimtab.report.stages import Floats
from trimtab.report.summary import Attempt, Chain, Curve, Goodput
from trimtab.wording import plural, span_list
from trimtab_slurm.contents import TrainingProfile


@dataclass(frozen=True)
class Run:
    """What one attempt took, each [S]; steps ascend."""

    step: npt.NDArray[np.int64]
    loss: Floats
    end_seconds: Floats
    """UTC, when each ended."""
    duration_seconds: Floats
    saves: npt.NDArray[np.float64]
    """[C, 2] of each checkpoint: UTC when it was complete, how long training stood still."""


def run_of(training: TrainingProfile) -> Run:
    """What counts of an attempt's training here. A step that is recorded twice counts once, the last time."""
    step = np.asarray(training.steps["step"], dtype=np.int64)
    last = np.flatnonzero(np.diff(step, append=step[-1:] + 1) > 0)
    loss, ended, took = (
        np.asarray(training.steps[name], dtype=np.float64)[last]
        for name in ("loss", "time_seconds", "duration_seconds")
    )
    table = training.checkpoints or {"time_seconds": np.empty(0), "duration_seconds": np.empty(0)}
    saves = np.stack(
        [np.asarray(table[name], dtype=np.float64) for name in ("time_seconds", "duration_seconds")], axis=1
    )
    return Run(step[last], loss, ended, took, saves)


def linked(attempts: Sequence[Attempt], runs: Sequence[Run | None]) -> tuple[tuple[Attempt, ...], Chain | None]:
    """The attempts with what they waited, repeated and lost; the chain, where there are several.

    `attempts` in the order of their start, each with its run; None: it has no training, or cannot be read.
    """
    counting = _counting(runs)
    found: list[Attempt] = []
    end_seconds: float | None = None
    taken = np.empty(0, dtype=np.int64)
    for attempt, run, counts in zip(attempts, runs, counting, strict=True):
        start_seconds, duration_seconds = attempt.start_seconds, attempt.duration_seconds
        if start_seconds is not None and duration_seconds is not None:
            waited = None if end_seconds is None else max(0.0, start_seconds - end_seconds)
            attempt = replace(attempt, waited_seconds=waited)
            end_seconds = start_seconds + duration_seconds
        if run is not None and len(run.step):
            attempt = replace(
                attempt,
                first_step=int(run.step[0]),
                last_step=int(run.step[-1]),
                repeated_steps=int(np.isin(run.step, taken).sum()),
                lost_steps=int((~counts).sum()),
            )
            taken = np.union1d(taken, run.step)
        found.append(attempt)
    listed_attempts = tuple(found)
    if len(attempts) < 2:
        return listed_attempts, None
    joined, repeated = _curves(runs, counting)
    return listed_attempts, Chain(
        goodput=_goodput(listed_attempts, runs, counting),
        loss=joined,
        repeated=repeated,
        resumed_steps=tuple(
            (attempt.number, attempt.first_step) for attempt in found[1:] if attempt.first_step is not None
        ),
        largest_loss_difference=_largest_difference(runs),
        notes=tuple(_notes(listed_attempts, runs, taken)),
    )


def _counting(runs: Sequence[Run | None]) -> list[npt.NDArray[np.bool_]]:
    """Of each run, [S] whether no later one took the step again."""
    later = np.empty(0, dtype=np.int64)
    counting = []
    for run in reversed(runs):
        step = run.step if run is not None else np.empty(0, dtype=np.int64)
        counting.append(~np.isin(step, later))
        later = np.union1d(later, step)
    return counting[::-1]


def _curves(runs: Sequence[Run | None], counting: Sequence[npt.NDArray[np.bool_]]) -> tuple[Curve, tuple[Curve, ...]]:
    """The curve of the values that count, and one of each attempt's that do not."""
    known = [
        (place, run, counts) for place, (run, counts) in enumerate(zip(runs, counting, strict=True)) if run is not None
    ]
    step = np.concatenate([run.step[counts] for _, run, counts in known] or [np.empty(0, dtype=np.int64)])
    loss = np.concatenate([run.loss[counts] for _, run, counts in known] or [np.empty(0)])
    order = np.argsort(step)
    step, loss = step[order], loss[order]
    # A step without a value leaves a gap in the line, where steps are missing.
    gaps = np.flatnonzero(np.diff(step) > 1) + 1
    step, loss = np.insert(step, gaps, step[gaps] - 1), np.insert(loss, gaps, np.nan)
    lost = [(place, run, ~counts) for place, run, counts in known if not counts.all()]
    limit = max(2, MOST_POINTS // max(1, len(lost)))
    repeated = tuple(_curve(place + 1, run.step[own], run.loss[own], limit) for place, run, own in lost)
    return _curve(0, step, loss, MOST_POINTS), repeated


def _curve(attempt: int, step: npt.NDArray[np.int64], loss: Floats, limit: int) -> Curve:
    line = thinned("", step, loss, limit)
    return Curve(attempt, tuple(int(x) for x in line.x), line.y)


def _goodput(
    attempts: Sequence[Attempt], runs: Sequence[Run | None], counting: Sequence[npt.NDArray[np.bool_]]
) -> Goodput:
    useful = repeated = saving = starting = 0.0
    starts, ends = [], []
    for attempt, run, counts in zip(attempts, runs, counting, strict=True):
        if attempt.start_seconds is None or attempt.duration_seconds is None:
            continue
        end_seconds = attempt.start_seconds + attempt.duration_seconds
        starts.append(attempt.start_seconds)
        ends.append(end_seconds)
        if run is None or not len(run.step):
            starting += attempt.duration_seconds
            continue
        useful += float(np.nansum(run.duration_seconds[counts]))
        repeated += float(np.nansum(run.duration_seconds[~counts]))
        saving += float(np.nansum(run.saves[:, 1]))
        begun, ended = run.end_seconds[0] - run.duration_seconds[0], run.end_seconds[-1]
        # What was saved before the first step or after the last is in the time of saves.
        outside = float(np.nansum(run.saves[(run.saves[:, 0] < begun) | (run.saves[:, 0] > ended), 1]))
        starting += max(0.0, float(begun - attempt.start_seconds + end_seconds - ended) - outside)
    wall = max(ends) - min(starts) if starts else 0.0
    waiting = sum(attempt.waited_seconds or 0.0 for attempt in attempts)
    known = useful + repeated + saving + starting + waiting
    return Goodput(
        wall_seconds=wall,
        useful_seconds=useful,
        repeated_seconds=repeated,
        saving_seconds=saving,
        waiting_seconds=waiting,
        starting_seconds=starting,
        other_seconds=max(0.0, wall - known),
        ratio=min(1.0, useful / wall) if wall else 0.0,
    )


def _largest_difference(runs: Sequence[Run | None]) -> float | None:
    largest: float | None = None
    before: Run | None = None
    for run in runs:
        if run is None:
            continue
        if before is not None:
            _, old, new = np.intersect1d(before.step, run.step, assume_unique=True, return_indices=True)
            old_loss, new_loss = before.loss[old], run.loss[new]
            known = np.isfinite(old_loss) & np.isfinite(new_loss) & (new_loss != 0)
            if known.any():
                apart = np.abs(old_loss[known] / new_loss[known] - 1)
                largest = max(largest or 0.0, float(apart.max()))
        before = run
    return largest


def _notes(attempts: Sequence[Attempt], runs: Sequence[Run | None], taken: npt.NDArray[np.int64]) -> Iterator[str]:
    for attempt, run in zip(attempts, runs, strict=True):
        if attempt.start_seconds is None:
            yield (
                f"attempt {attempt.number} cannot be read: its steps are missing here, and its time counts as waiting"
            )
        elif run is None:
            yield f"attempt {attempt.number} has no training recorded: its time counts as starting"
    missing = missing_spans(taken)
    if len(taken) and taken[0] > 1:
        missing.insert(0, (1, int(taken[0]) - 1))
    if missing:
        count = sum(last - first + 1 for first, last in missing)
        yield f"{plural(count, 'step')} recorded in no attempt of this job: {span_list(missing)}"
