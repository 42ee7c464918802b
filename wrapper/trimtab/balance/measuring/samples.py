"""What stages took in steps, as columns: the form in which reports and profiles are measured."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from trimtab.balance.plan import Floats

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Samples:
    """Columns [N]: one stage of one replica in one step. Raises ValueError where their lengths differ."""

    step: Integers
    replica: Integers
    stage: Integers
    forward_seconds: Floats
    """Compute, summed over the step's microbatches; 0 or NaN: not measured."""
    backward_seconds: Floats
    microbatches: Floats
    """NaN: not known."""
    tokens: Floats
    squared_lengths: Floats
    """Sum over the documents of the square of their length in tokens; NaN: not known."""
    layout: Integers
    """Index of the layout of the step."""

    def __post_init__(self) -> None:
        for column in fields(self):
            if np.shape(getattr(self, column.name)) != (len(self.step),):
                raise ValueError(f"samples: the column {column.name} does not hold {len(self.step)} values")

    def select(self, which: npt.NDArray[np.bool_]) -> "Samples":
        """The rows for which `which` [N] is true."""
        return Samples(*(getattr(self, column.name)[which] for column in fields(self)))


def samples_of(stages: Mapping[str, npt.ArrayLike], changes: Sequence[int] = ()) -> Samples:
    """From the columns of a profile's table of stages.

    `changes` are the first steps of the second layout and of those after it. Microbatches and squared lengths are NaN
    where the table lacks them, as that of an older profile does. Raises KeyError where it lacks another column.
    """
    step = np.asarray(stages["step"], dtype=np.int64)
    absent = np.full(len(step), np.nan)
    return Samples(
        step=step,
        replica=np.asarray(stages["replica"], dtype=np.int64),
        stage=np.asarray(stages["stage"], dtype=np.int64),
        forward_seconds=np.asarray(stages["forward_seconds"], dtype=np.float64),
        backward_seconds=np.asarray(stages["backward_seconds"], dtype=np.float64),
        microbatches=np.asarray(stages.get("microbatches", absent), dtype=np.float64),
        tokens=np.asarray(stages["tokens"], dtype=np.float64),
        squared_lengths=np.asarray(stages.get("squared_lengths", absent), dtype=np.float64),
        layout=np.searchsorted(np.asarray(changes, dtype=np.int64), step, side="right").astype(np.int64),
    )


def parse_spans(text: str) -> tuple[int, ...]:
    """ "0-3,8" -> (0, 1, 2, 3, 8); an empty text: no layer. Raises ValueError for a text of another form."""
    if not re.fullmatch(r"(\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*)?", text, re.ASCII):
        raise ValueError(f'layers {text!r} are not written as "0-3,8"')
    spans = (span.partition("-") for span in text.split(",") if span)
    return tuple(layer for first, _, last in spans for layer in range(int(first), int(last or first) + 1))
