"""Seconds, bytes and moved bytes of a stage, for many choices of its layers at once. Pure.

A choice is a row: where each of the stage's v chunks starts and ends, [N, v] global layer ids each, the ends past the
last. Sums over a chunk are differences of prefix sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from trimtab.balance.pipeline.memory import in_flight_mixes
from trimtab.balance.plan import Costs, Floats, Hardware, ParameterMemory, Schedule
from trimtab.protocol import Layout

Cuts = npt.NDArray[np.int64]
Recompute = Literal["none", "full", "fit"]
"""None of the layers, all, or of each stage as few as its memory needs, counted from its first."""
ROUNDING_BYTES = 0.5
"""Sums of bytes that are apart by less are equal."""


@dataclass(frozen=True)
class Problem:
    """What is to be shared out, and over what."""

    costs: Costs
    memory: ParameterMemory
    hardware: Hardware
    schedule: Schedule
    stages: int
    virtual: int
    microbatches: int
    recompute: Recompute
    current: Layout | None


class StageCosts:
    """The costs of any layers on any stage of a problem; seconds are those of one microbatch."""

    def __init__(self, problem: Problem) -> None:
        self.stages, self.virtual = problem.stages, problem.virtual
        self.recompute = problem.recompute
        costs, layers = problem.costs, problem.costs.layers
        forward = np.array([layer.forward_seconds for layer in layers])
        compute = np.array([layer.compute_seconds for layer in layers])
        self.layer_seconds: Floats = compute + forward if self.recompute == "full" else compute
        """[L] on a device of speed 1; where recompute is "fit", without recomputing."""
        self.work = _prefix(self.layer_seconds)
        """[L + 1] seconds of the layers before each, on a device of speed 1."""
        self.again = _prefix(forward)
        """[L + 1] likewise, of recomputing them."""
        self.speeds: Floats = problem.hardware.speeds.min(axis=0)
        """[S] of the slowest replica."""
        self._capacity = np.array(problem.hardware.memory_bytes, dtype=np.float64)
        self._static = _prefix([layer.parameters * problem.memory.total_bytes for layer in layers])
        self._kept = _prefix([layer.activation_bytes for layer in layers])
        self._kept_recomputed = _prefix([layer.recomputed_bytes for layer in layers])
        self._largest_saved = _range_maxima([layer.activation_bytes - layer.recomputed_bytes for layer in layers])
        self._end_static = np.zeros(self.stages)
        self._end_kept = np.zeros((self.stages, self.virtual))
        self._end_seconds = np.zeros((self.stages, self.virtual))
        for stage, chunk, part in ((0, 0, costs.embedding), (-1, -1, costs.head)):
            self._end_static[stage] += part.parameters * problem.memory.total_bytes
            self._end_kept[stage, chunk] += part.activation_bytes
            self._end_seconds[stage, chunk] += part.compute_seconds
        self.end_seconds: Floats = self._end_seconds.sum(axis=1)
        """[S] of embedding and head, on a device of speed 1."""
        self._mixes = [
            in_flight_mixes(problem.schedule, self.stages, self.virtual, stage, problem.microbatches)
            for stage in range(self.stages)
        ]
        # Whole bytes: their sums are exact, so plans that move as much as one another are equal.
        sizes = np.rint([layer.parameters * problem.memory.moved_bytes for layer in layers])
        self.smallest_bytes = float(sizes.min())
        """What the smallest layer takes along."""
        owners = np.array(problem.current.owners) if problem.current else None
        self._arriving = [
            _prefix(np.zeros_like(sizes) if owners is None else np.where(owners == stage, 0.0, sizes))
            for stage in range(self.stages)
        ]

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.layer_seconds)

    def budgets(self, limit_seconds: float) -> Floats:
        """[S] seconds that each stage has for layers, on a device of speed 1, where none may take longer than that."""
        return limit_seconds * self.speeds - self.end_seconds

    def settle(self, stage: int, starts: Cuts, ends: Cuts) -> tuple[Floats, Cuts]:
        """[N] seconds of a stage at its speed, infinite where it does not fit; [N] how many layers it recomputes."""
        if self.recompute == "fit":
            recomputed, fits = self._fewest_recomputed(stage, starts, ends)
        else:
            recomputed = (ends - starts).sum(axis=1) if self.recompute == "full" else np.zeros(len(starts), np.int64)
            fits = self.lacking_bytes(stage, starts, ends, recomputed) <= ROUNDING_BYTES
        seconds = (self.work[ends] - self.work[starts]).sum(axis=1) + self.end_seconds[stage]
        if self.recompute == "fit":
            seconds += (self.again[_splits(starts, ends, recomputed)] - self.again[starts]).sum(axis=1)
        return np.where(fits, seconds / self.speeds[stage], np.inf), recomputed

    def _fewest_recomputed(self, stage: int, starts: Cuts, ends: Cuts) -> tuple[Cuts, npt.NDArray[np.bool_]]:
        held = (ends - starts).sum(axis=1)
        # No fewer than without the layer that is there once more: what is kept only falls, so halving finds them.
        recomputed, most = np.zeros_like(held), held.copy()
        while (recomputed < most).any():
            middle = (recomputed + most) // 2
            short = self.lacking_bytes(stage, starts, ends, middle, transient=False) > ROUNDING_BYTES
            recomputed, most = (
                np.where(short & (recomputed < most), middle + 1, recomputed),
                np.where(short, most, middle),
            )
        fits = np.zeros(len(held), np.bool_)
        rows = np.arange(len(held))
        while len(rows):
            lacking = self.lacking_bytes(stage, starts[rows], ends[rows], recomputed[rows])
            fits[rows] = lacking <= ROUNDING_BYTES
            rows = rows[~fits[rows]]
            recomputed[rows] += 1
            rows = rows[recomputed[rows] <= held[rows]]
        return np.where(fits, recomputed, 0), fits

    def lacking_bytes(
        self, stage: int, starts: Cuts, ends: Cuts, recomputed: Cuts, *, transient: bool = True
    ) -> Floats:
        """[N] by how much the peak of a stage exceeds its memory: `memory.stage_memory_bytes`, row by row."""
        if np.isposinf(self._capacity[stage]):
            return np.full(len(starts), -np.inf)
        splits = _splits(starts, ends, recomputed)
        static = (self._static[ends] - self._static[starts]).sum(axis=1) + self._end_static[stage]
        kept = self._kept[ends] - self._kept[splits] + self._kept_recomputed[splits] - self._kept_recomputed[starts]
        activations = ((kept + self._end_kept[stage]) @ self._mixes[stage].T).max(axis=1)
        lacking: Floats = static + activations - self._capacity[stage]
        return lacking + self._largest_saved[starts, splits].max(axis=1) if transient else lacking

    def arriving_bytes(self, stage: int, starts: Cuts, ends: Cuts) -> Floats:
        """[N] of the layers that are on another stage now."""
        arriving: Floats = (self._arriving[stage][ends] - self._arriving[stage][starts]).sum(axis=1)
        return arriving

    def unevenness(self, stage: int, starts: Cuts, ends: Cuts) -> Floats:
        """[N] sum of the squared seconds of a stage's chunks: least where chunks are alike."""
        chunks = self.work[ends] - self.work[starts] + self._end_seconds[stage]
        squares: Floats = ((chunks / self.speeds[stage]) ** 2).sum(axis=1)
        return squares


class Shortage(StageCosts):
    """Lacking bytes in the place of seconds: what is searched for where nothing fits."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.work = np.zeros_like(self.work)
        self.end_seconds = np.zeros_like(self.end_seconds)

    def settle(self, stage: int, starts: Cuts, ends: Cuts) -> tuple[Floats, Cuts]:
        """[N] how many bytes a stage lacks that recomputes all it may; [N] how many layers that are."""
        held = (ends - starts).sum(axis=1)
        recomputed = np.zeros_like(held) if self.recompute == "none" else held
        return np.maximum(self.lacking_bytes(stage, starts, ends, recomputed), 0.0), recomputed


def _prefix(values: Sequence[float] | Floats) -> Floats:
    return np.concatenate([[0.0], np.cumsum(values)])


def _range_maxima(values: Sequence[float]) -> Floats:
    """[L + 1, L + 1] the largest of values[i:j], at least 0."""
    layers = len(values)
    ahead = np.where(np.tri(layers, dtype=np.bool_).T, np.asarray(values, dtype=np.float64), 0.0)
    maxima = np.zeros((layers + 1, layers + 1))
    maxima[:layers, 1:] = np.maximum.accumulate(np.maximum(ahead, 0.0), axis=1)
    return maxima


def _splits(starts: Cuts, ends: Cuts, recomputed: Cuts) -> Cuts:
    """[N, v] the first layer of each chunk that is not recomputed, where so many of the stage's first layers are."""
    sizes = ends - starts
    before = np.cumsum(sizes, axis=1) - sizes
    splits: Cuts = np.clip(starts + recomputed[:, None] - before, starts, ends)
    return splits
