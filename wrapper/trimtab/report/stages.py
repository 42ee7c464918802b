"""The stages' compute as a matrix, and what imbalance costs a pipeline: the report's formulas. Pure.

Shapes: S steps, P places (a place is one stage of one replica), R replicas.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trimtab_slurm.contents import TrainingProfile

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]
"""Indices of rows, ascending."""


@dataclass(frozen=True)
class StageMatrix:
    """Seconds by step and place; NaN where a stage's report of that step is missing."""

    steps: npt.NDArray[np.int64]
    """[S], as the table of steps has them."""
    places: tuple[tuple[int, int], ...]
    """[P] of (replica, stage), ascending."""
    forward_seconds: Floats
    """[S, P]"""
    backward_seconds: Floats
    """[S, P]"""

    @property
    def compute_seconds(self) -> Floats:
        """[S, P] forward and backward together."""
        return self.forward_seconds + self.backward_seconds

    def relative_seconds(self, loads: Floats) -> Floats:
        """[S, P] compute over what the replica had to do, [S, R] with 1 for the mean: what places are compared by."""
        return self.compute_seconds / loads[:, [replica for replica, _ in self.places]]

    @property
    def complete(self) -> npt.NDArray[np.bool_]:
        """[S] whether every place has reported; the last step of a failed job often has not."""
        return np.asarray(np.isfinite(self.compute_seconds).all(axis=1) & bool(self.places), dtype=np.bool_)


def stage_matrix(training: TrainingProfile) -> StageMatrix:
    """The table of stages, unfolded. Steps ascend in both tables."""
    steps = np.asarray(training.steps["step"], dtype=np.int64)
    table = training.stages
    replica, stage = (np.asarray(table[name], dtype=np.int64) for name in ("replica", "stage"))
    stages = int(np.max(stage, initial=0)) + 1
    places, columns = np.unique(replica * stages + stage, return_inverse=True)
    rows = np.searchsorted(steps, table["step"])
    known = np.append(steps, -1)[rows] == table["step"]
    cells = rows[known], columns[known]
    forward, backward = (np.full((len(steps), len(places)), np.nan) for _ in range(2))
    forward[cells] = table["forward_seconds"][known]
    backward[cells] = table["backward_seconds"][known]
    return StageMatrix(steps, tuple(divmod(place, stages) for place in places.tolist()), forward, backward)


def imbalance_by_step(compute_seconds: Floats) -> Floats:
    """[S] slowest place over median place - 1, from [S, P]; NaN where nothing can be said (see `imbalance`)."""
    ratios = np.full(len(compute_seconds), np.nan)
    if compute_seconds.shape[1] < 2:
        return ratios
    known = np.isfinite(compute_seconds).all(axis=1)
    median = np.median(compute_seconds[known], axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = compute_seconds[known].max(axis=1) / median - 1
    ratios[known] = np.where(median > 0, found, np.nan)
    return ratios


@dataclass(frozen=True)
class StepTimes:
    """The parts of each step's time by the model of a 1F1B pipeline, each [S] in seconds."""

    compute_seconds: Floats
    """What every stage would compute if the same work were spread evenly."""
    fill_seconds: Floats
    """Filling and draining an even pipeline."""
    unequal_seconds: Floats
    """What replicas wait for those that have more to do because microbatches cannot be shared out equally."""
    imbalance_seconds: Floats
    """What the uneven pipeline takes on top of all that."""


def step_times(
    compute_seconds: Floats, places: tuple[tuple[int, int], ...], passes: Floats, loads: Floats
) -> StepTimes:
    """Times of a 1F1B pipeline from the compute of its places, [S, P], rows complete; `passes` and `loads` are [S, R].

    With `passes` microbatches (times model chunks a stage) and stage compute C_s a step, a pipeline takes
    max(C) + (sum(C) - max(C)) / passes: its slowest stage works through all passes, and the others add one pass each
    to fill and drain it (Narayanan et al., 2021, "Efficient Large-Scale Language Model Training on GPU Clusters",
    section 2.2, for even stages). Replicas meet at the end of a step, so the longest counts. An even pipeline has
    C_s = mean(C) everywhere, and as many passes in each replica. Where a replica must have more to do, L times the mean
    (`loads`), it takes (L - 1) mean(C) longer: its compute grows with its passes, and to fill and drain it takes the
    same. What the real one takes longer than that is the cost of imbalance. Communication is left out.
    """
    replicas = np.array([replica for replica, _ in places])
    pipelines = []
    for replica in np.unique(replicas):
        own = compute_seconds[:, replicas == replica]
        slowest = own.max(axis=1)
        pipelines.append(slowest + (own.sum(axis=1) - slowest) / passes[:, replica])
    stages = len(places) // len(pipelines)
    mean = compute_seconds.mean(axis=1)
    fill = mean * (stages - 1) / passes.mean(axis=1)
    # An even pipeline is never the longer one; the maximum only removes the rounding error of equal stages.
    rest = np.maximum(np.max(pipelines, axis=0) - mean - fill, 0.0)
    unequal = np.minimum(mean * (loads.max(axis=1) - 1), rest)
    return StepTimes(mean, fill, unequal, rest - unequal)
