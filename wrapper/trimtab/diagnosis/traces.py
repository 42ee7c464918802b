"""A trace in the format of ByteDance's StragglerAnalysis (Parquet, sizes in YAML) -> durations. Needs pyarrow, pyyaml.

One row is an operation of one rank; of each tensor-parallel group one rank is recorded. `forward-compute` and
`backward-compute` are a microbatch on a model chunk; sends and receives pair by their order on a link.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trimtab.balance.diagnosing.durations import Durations
from trimtab.balance.diagnosing.robust import median
from trimtab.balance.plan import Floats, Place

WHOLE_COLUMNS = ("dp_rank", "stage", "rank", "step", "seq_id", "mb_id", "gmc")
REAL_COLUMNS = ("start_ts", "duration")
SIZES = ("dp_size", "pp_size", "vpp_size", "tp_size", "world_size")
MOST_CELLS = 1 << 26
"""Microbatches x chunks x replicas x steps; a file that claims more has a wrong number in it."""

_Rows = Mapping[str, npt.NDArray[Any]]
_ROW = "row"
"""Beside the file's columns: the number of the row in it, from 0."""


class TraceError(ValueError):
    """A file that is no such trace, or a damaged one: names it, the column or key, the reason, and the way out."""


@dataclass(frozen=True)
class Trace:
    """What a trace says."""

    durations: Durations
    ranks: Mapping[Place, tuple[int, ...]]
    """All ranks of a place, those that were not recorded included."""
    absent: tuple[Place, ...]
    """Places without a single row."""


@dataclass(frozen=True)
class _Sizes:
    replicas: int
    stages: int
    virtual: int
    group: int
    """Ranks of a place."""


def load(trace_file: Path, meta_file: Path) -> Trace:
    """Read a trace. Raises TraceError, and ModuleNotFoundError where pyarrow or pyyaml is not installed."""
    sizes = _sizes(meta_file)
    rows = _rows(trace_file)
    try:
        return _trace(rows, sizes)
    except ValueError as error:
        raise TraceError(f"{trace_file}: {error}") from error


def _sizes(file: Path) -> _Sizes:
    import yaml

    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise TraceError(f"{file}: cannot be read as YAML: {error}") from error
    if not isinstance(values, dict):
        raise TraceError(f"{file}: is no table of sizes: {', '.join(SIZES)}")
    for key in SIZES:
        if key not in values:
            raise TraceError(f"{file}: has no {key}; the sizes are {', '.join(SIZES)}")
        if type(values[key]) is not int or values[key] < 1:
            raise TraceError(f"{file}: {key} must be a whole number above 0, not {values[key]!r:.80}")
    replicas, stages, virtual, tensor, world = (values[key] for key in SIZES)
    if world % (replicas * stages * tensor):
        raise TraceError(
            f"{file}: world_size {world} is no multiple of dp_size {replicas} x pp_size {stages} x tp_size {tensor}"
        )
    return _Sizes(replicas, stages, virtual, world // (replicas * stages))


def _rows(file: Path) -> _Rows:
    """The columns that count, checked one by one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not file.is_file():  # a directory would be read as a dataset
        raise TraceError(f"{file}: {'is no regular file' if file.exists() else 'does not exist'}")
    try:
        with file.open("rb") as source:
            table = pq.read_table(source)
    except (OSError, pa.ArrowException) as error:
        raise TraceError(f"{file}: cannot be read as Parquet: {error}") from error
    if not table.num_rows:
        raise TraceError(f"{file}: has no rows")
    rows: dict[str, npt.NDArray[Any]] = {_ROW: np.arange(table.num_rows)}
    for name in (*WHOLE_COLUMNS, *REAL_COLUMNS, "optype"):
        if table.column_names.count(name) != 1:
            raise TraceError(f"{file}: has no column {name}, or several; it has {', '.join(table.column_names):.200}")
        column = table[name]
        if column.null_count:
            raise TraceError(f"{file}: column {name}: {column.null_count} values are missing")
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        if name in WHOLE_COLUMNS:
            fits, expected = pa.types.is_integer(kind), "whole numbers"
        elif name in REAL_COLUMNS:
            fits, expected = pa.types.is_floating(kind) or pa.types.is_integer(kind), "numbers"
        else:
            fits, expected = pa.types.is_string(kind) or pa.types.is_large_string(kind), "texts"
        if not fits:
            raise TraceError(f"{file}: column {name} holds {column.type}, where {expected} are expected")
        values = column.to_numpy()
        rows[name] = values.astype(np.float64 if name in REAL_COLUMNS else values.dtype)
    return rows


def _trace(rows: _Rows, sizes: _Sizes) -> Trace:
    for name, most in (("dp_rank", sizes.replicas), ("stage", sizes.stages)):
        _check(rows, name, (rows[name] >= 0) & (rows[name] < most), f"0 to {most - 1}, as the sizes say")
    _check(rows, "duration", rows["duration"] >= 0, "at least 0")
    _check(rows, "start_ts", np.isfinite(rows["start_ts"]), "a number")
    steps, step = np.unique(rows["step"], return_inverse=True)
    rows = {**rows, "step": step}
    durations = Durations(
        forward_seconds=_computed(rows, "forward-compute", sizes, len(steps)),
        backward_seconds=_computed(rows, "backward-compute", sizes, len(steps)),
        stages=sizes.stages,
        steps=tuple(steps.tolist()),
        transfer_seconds=_transfers(rows, sizes, len(steps)),
        overhead_seconds=_overhead_seconds(rows, len(steps)),
    )
    recorded = np.stack([rows[name].astype(np.int64) for name in ("dp_rank", "stage", "rank")])
    ranks = {
        (replica, stage): tuple(range(rank, rank + sizes.group))
        for replica, stage, rank in np.unique(recorded, axis=1).T.tolist()
    }
    places = [(replica, stage) for replica in range(sizes.replicas) for stage in range(sizes.stages)]
    return Trace(durations, ranks, tuple(place for place in places if place not in ranks))


def _check(rows: _Rows, name: str, good: npt.NDArray[np.bool_], expected: str) -> None:
    if not good.all():
        first = int(np.argmin(good))
        raise ValueError(
            f"column {name}: {int((~good).sum())} of {len(good)} values are not {expected}; the first is "
            f"{rows[name][first]} in row {rows[_ROW][first]}"
        )


def _picked(rows: _Rows, operation: str) -> _Rows:
    chosen = np.asarray(rows["optype"] == operation)
    return {name: column[chosen] for name, column in rows.items()}


def _computed(rows: _Rows, operation: str, sizes: _Sizes, steps: int) -> Floats:
    """[T, R, C, M] durations of one kind."""
    picked = _picked(rows, operation)
    if not len(picked["step"]):
        raise ValueError(f"column optype: no {operation} in it")
    chunks = sizes.stages * sizes.virtual
    chunk, microbatch, seconds = picked["gmc"].astype(np.int64), picked["mb_id"].astype(np.int64), picked["duration"]
    of_stage = (chunk >= 0) & (chunk < chunks) & (chunk % sizes.stages == picked["stage"])
    _check(picked, "gmc", of_stage, f"a chunk of their stage (0 to {chunks - 1}) for {operation}")
    _check(picked, "mb_id", microbatch >= 0, f"at least 0 for {operation}")
    _check(picked, "duration", np.isfinite(seconds) & (seconds > 0), f"above 0 for {operation}")
    shape = steps, sizes.replicas, chunks, int(microbatch.max()) + 1
    if np.prod(shape, dtype=np.float64) > MOST_CELLS:
        raise ValueError(f"column mb_id or step: {shape[3]} microbatches in {steps} steps are more than can be there")
    cells = picked["step"], picked["dp_rank"].astype(np.int64), chunk, microbatch
    place = np.ravel_multi_index(cells, shape)
    if len(np.unique(place)) < len(place):
        raise ValueError(
            f"column mb_id: a {operation} of a microbatch is there twice; one rank of each place is expected"
        )
    found = np.full(shape, np.nan)
    found[cells] = seconds
    return found


def _transfers(rows: _Rows, sizes: _Sizes, steps: int) -> Floats | None:
    """[T, R, S] what a link typically takes in a step, both ways, waiting excluded; None where nothing was recorded."""
    forward = _transfer(rows, sizes, steps, "forward", np.roll(np.arange(sizes.stages), -1))
    backward = _transfer(rows, sizes, steps, "backward", np.roll(np.arange(sizes.stages), 1))
    # What a stage sends back takes the link that leads on to it.
    both = np.concatenate([forward, np.roll(backward, -1, axis=2)], axis=-1)
    return median(both, -1) if np.isfinite(both).any() else None


def _transfer(rows: _Rows, sizes: _Sizes, steps: int, direction: str, receiver: npt.NDArray[np.intp]) -> Floats:
    """[T, R, S, N] seconds of the n-th transfer from each stage, to its `receiver` [S]; NaN where an end is missing.

    A transfer begins when both its ends have begun. It is over when the first of them is: the other may be held up by
    what it was batched with.
    """
    sent, received = (_picked(rows, f"{direction}-{end}") for end in ("send", "recv"))
    count = max((int(end["seq_id"].max()) + 1 for end in (sent, received) if len(end["seq_id"])), default=1)
    for end in (sent, received):
        _check(end, "seq_id", end["seq_id"] >= 0, f"at least 0 for {direction}-send and -recv")
    shape = steps, sizes.replicas, sizes.stages, count
    if np.prod(shape, dtype=np.float64) > MOST_CELLS:
        raise ValueError(f"column seq_id: {count} transfers in each of {steps} steps are more than can be there")
    starts, ends = zip(*(_grids(end, shape) for end in (sent, received)), strict=True)
    began = np.maximum(starts[0], starts[1][:, :, receiver])
    return np.asarray(np.maximum(np.minimum(ends[0], ends[1][:, :, receiver]) - began, 0.0))


def _grids(rows: _Rows, shape: tuple[int, ...]) -> tuple[Floats, Floats]:
    """When each transfer began and ended."""
    cells = tuple(rows[name].astype(np.int64) for name in ("step", "dp_rank", "stage", "seq_id"))
    start, end = np.full(shape, np.nan), np.full(shape, np.nan)
    start[cells] = rows["start_ts"]
    end[cells] = rows["start_ts"] + rows["duration"]
    return start, end


def _overhead_seconds(rows: _Rows, steps: int) -> float:
    """What a step typically takes beside its computations: from its begin to the first, from the last to its end."""
    computed = np.isin(rows["optype"], ("forward-compute", "backward-compute"))
    spans = [
        _span(rows["step"], rows["start_ts"], rows["duration"], which, steps) for which in (computed | True, computed)
    ]
    return float(np.median(spans[0] - spans[1]))


def _span(
    step: npt.NDArray[np.intp], start: Floats, seconds: Floats, which: npt.NDArray[np.bool_], steps: int
) -> Floats:
    """[T] from the first begin to the last end of the rows that count."""
    first, last = np.full(steps, np.inf), np.full(steps, -np.inf)
    np.minimum.at(first, step[which], start[which])
    np.maximum.at(last, step[which], (start + seconds)[which])
    return np.asarray(last - first)
