"""What each part of the model takes, from what stages take under layouts: the second of two regressions.

Under a layout a stage's seconds, on a device of its speed, are the sum of its parts':

    sum of the parts / speed = seconds of the stage

for forward and backward, which share the speed. The equations are settled in an order, each set deciding only what
those before it leave open:

1. the typical speed is 1, of each stage that was not probed; of stages whose speeds moved layers tell beside each
   other's, of one of them;
2. the samples, and probes;
3. layers cost in the proportions of the prior, beside a typical layer; without a prior, alike;
4. embedding and head cost in the prior's proportion to the typical layer.

With stages between the first and the last, 3 decides embedding and head too: they are the rest of their stage.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trimtab.balance.measuring.regression import OrderedLeastSquares
from trimtab.balance.measuring.stage_seconds import StageSeconds
from trimtab.balance.plan import Floats
from trimtab.protocol import Layout

PROBE_ERROR = 0.02
"""Standard error of a stage's speed as a probe tells it: training is not all matrix products."""
COST_TOLERANCE = 0.1
"""Of a layer. What layouts tell of a cost with a larger error is left to the assumptions, which are nearer."""
SPEED_TOLERANCE = 0.025
"""Likewise of a stage's speed, where moved layers tell it beside another's: their ratio is then known to 5 %."""
UNKNOWN_ERROR = 0.05
"""Relative error that a stage's seconds count with where theirs is larger, or not known: there is nothing else to tell
its parts by."""
_LEAST_ERROR = 1e-6
_ALIKE = 0.02
"""Layers that differ by less count alike in what the typical layer costs; of others the dear ones count less, since
what is odd is slow."""
_LEAST_RATIO = 0.05
"""Of a layer: a prior of embedding or head is taken to be wrong in proportion to itself, or to this."""
_ROUNDS = 30
_SETTLED, _NEARLY_SETTLED = 1e-9, 1e-3
_MOST_LOG_SPEED = 3.0
"""Speeds that go further apart are no speeds, but an iteration that gets lost."""
_SAME_SHIFT = 1e-5

Booleans = npt.NDArray[np.bool_]
Opened = tuple[Booleans, ...]
Groups = tuple[tuple[int, ...], ...]
Held = frozenset[tuple[int, int]]


@dataclass(frozen=True)
class PartSeconds:
    """Parts [P = L + 2] are the embedding, the layers, the head; [2, P] is forward and backward."""

    seconds: Floats
    """[2, P] NaN where open to the end."""
    errors: Floats
    """[2, P] Their standard errors, in seconds; NaN where too few steps tell them."""
    log_speeds: Floats
    """[stages measured] Of the typical replica of each."""
    speed_variances: Floats
    groups: Groups
    """Stages measured, by index, whose speeds are known beside each other's only."""
    opened: Opened
    """[2, P] each: what was open after each of the sets 2 to 4."""
    negative: Held
    """(direction, part) for which less than nothing was left: held at the prior's proportion, or at 0."""


def measure_parts(
    stages: Sequence[StageSeconds], layouts: Sequence[Layout], ratios: Floats, probes: Mapping[int, float]
) -> PartSeconds:
    """Seconds of the parts. `ratios` [2, P] are a prior's, to a layer; `probes` log speeds of stages by index."""
    equations = _Equations(stages, np.stack([contents(layout) for layout in layouts]), ratios, probes)
    held: dict[tuple[int, int], float] = {}
    while True:
        answer, opened, groups = equations.settle(frozenset(held))
        costs = answer.solution[: 2 * equations.parts, 0].reshape(2, -1)
        variances = equations.variances(answer.solution[:, 1:])
        errors = np.sqrt(variances[: costs.size]).reshape(2, -1)
        below = np.argwhere((costs < 0) & ~opened[-1]).tolist()
        negative = {(d, part): errors[d, part] for d, part in below if (d, part) not in held}
        if not negative:
            break
        held |= negative  # with the error they had: what they are held at is no surer
    for key, error in held.items():
        errors[key] = error
    unit = equations.unit[:, None]
    speeds = slice(costs.size, costs.size + len(stages))
    return PartSeconds(
        seconds=np.where(opened[-1], np.nan, costs * unit),
        errors=errors * unit,
        log_speeds=answer.solution[speeds, 0],
        speed_variances=variances[speeds],
        groups=groups,
        opened=opened,
        negative=frozenset(held),
    )


def contents(layout: Layout) -> Floats:
    """[S, P] 1 where a stage holds a part."""
    held = np.zeros((layout.stages, sum(layout.layers) + 2))
    held[0, 0] = held[-1, -1] = 1
    held[layout.owners, np.arange(1, held.shape[1] - 1)] = 1
    return held


class _Equations:
    """Unknowns: costs [2 P] in units of a layer, forward then backward; log speed of each stage; typical layer [2]."""

    def __init__(
        self, stages: Sequence[StageSeconds], contents: Floats, ratios: Floats, probes: Mapping[int, float]
    ) -> None:
        self.stages, self.contents, self.ratios, self.probes = stages, contents, ratios, probes
        self.parts = contents.shape[2]
        self.typical = 2 * self.parts + len(stages)
        self.unknowns = self.typical + 2
        self.dependent = sum(len(stage.log_seconds) for stage in stages) + len(probes)
        self.unit = self._unit()

    def settle(self, held: Held) -> tuple[OrderedLeastSquares, Opened, Groups]:
        """All equations in order: with speeds assumed first, then with those free that moved layers tell."""
        alone: Groups = tuple((index,) for index in range(len(self.stages)) if index not in self.probes)
        answer, opened, _ = self._settle(held, alone, np.zeros(self.unknowns))
        groups = self._groups(held, answer.solution[:, 0])
        if groups != alone:
            freed, reopened, settled = self._settle(held, groups, answer.solution[:, 0])
            if settled:
                return freed, reopened, groups
        return answer, opened, alone

    def _settle(self, held: Held, groups: Groups, solution: Floats) -> tuple[OrderedLeastSquares, Opened, bool]:
        """Again and again, as speeds and the weights of layers settle; whether they did."""
        tolerances = np.full(self.unknowns, np.inf)
        tolerances[: 2 * self.parts] = COST_TOLERANCE
        for _ in range(_ROUNDS):
            answer, before = OrderedLeastSquares(self.unknowns, 1 + self.dependent), solution
            answer.settle(*self._held(held))
            answer.settle(*self._assumed_speeds(groups, solution))
            answer.settle(*self._samples(solution), tolerances)
            opened = [self._opened(answer)]
            for rows, targets in (self._layers(solution), self._ends()):
                answer.settle(rows, targets)
                opened.append(self._opened(answer))
            solution = answer.solution[:, 0]
            change = float(np.abs(solution - before).max())
            speeds = solution[2 * self.parts : self.typical]
            if change < _SETTLED or np.abs(speeds).max() > _MOST_LOG_SPEED:
                break
        return answer, tuple(opened), change < _NEARLY_SETTLED

    def variances(self, slopes: Floats) -> Floats:
        """[unknowns] from their slopes [unknowns, dependent] by the samples and probes.

        If stages err each for itself, or if in a step all err together: the larger.
        """
        steps = np.unique(np.concatenate([stage.steps for stage in self.stages]))
        total, by_step, first = np.zeros(len(slopes)), np.zeros((len(steps), len(slopes))), 0
        for stage in self.stages:
            own = slopes[:, first : first + len(stage.covariance)]
            touched = np.abs(own).max(axis=1) > _SETTLED
            total[touched] += np.einsum("ij,jk,ik->i", own[touched], stage.covariance, own[touched])
            by_step[np.ix_(np.isin(steps, stage.steps), touched)] += stage.influences @ own[touched].T
            first += len(stage.covariance)
        of_samples = np.maximum(total, (by_step**2).sum(axis=0))
        return np.asarray(of_samples + (slopes[:, first:] ** 2).sum(axis=1) * PROBE_ERROR**2)

    def _unit(self) -> Floats:
        """[2] About the seconds of a layer."""
        layers: Floats = np.nan_to_num(self.ratios)
        units: list[Floats] = [
            np.exp(stage.log_seconds[2 * row : 2 * row + 2]) / held
            for stage in self.stages
            for row, layout in enumerate(stage.layouts)
            if (held := layers @ self.contents[layout, stage.stage]).min() > 0
        ]
        units = units or [np.exp(stage.log_seconds[:2]) for stage in self.stages]
        return np.asarray(np.median(units, axis=0))

    def _opened(self, answer: OrderedLeastSquares) -> Booleans:
        return np.array([answer.is_open(unknown) for unknown in range(2 * self.parts)]).reshape(2, -1)

    def _samples(self, solution: Floats) -> tuple[Floats, Floats]:
        """Stages' seconds and probes, each in units of its error, made linear at the speeds found so far."""
        blocks, targets, first = [], [], 1
        for index, stage in enumerate(self.stages):
            speed = 2 * self.parts + index
            rows = np.zeros((len(stage.log_seconds), self.unknowns))
            for row, log_seconds in enumerate(stage.log_seconds.tolist()):
                direction = row % 2
                held = self.contents[stage.layouts[row // 2], stage.stage]
                scale = self.unit[direction] / np.exp(log_seconds + solution[speed])
                rows[row, direction * self.parts : (direction + 1) * self.parts] = held * scale
            # Sum of parts / (seconds x speed) = 1; its slope by the logarithm of speed is that of scaling the parts, so
            # that scaling both stays open whatever the noise.
            rows[:, speed] = -(rows @ solution) if solution.any() else -1
            values = np.zeros((len(rows), 1 + self.dependent))
            values[:, 0] = 1 + rows[:, speed] * solution[speed]
            values[:, first : first + len(rows)] = np.eye(len(rows))
            first += len(rows)
            whiten = np.linalg.inv(np.linalg.cholesky(_weighable(stage.covariance)))
            blocks.append(whiten @ rows)
            targets.append(whiten @ values)
        for number, (index, log_speed) in enumerate(self.probes.items()):
            rows, values = np.zeros((1, self.unknowns)), np.zeros((1, 1 + self.dependent))
            rows[0, 2 * self.parts + index] = 1 / PROBE_ERROR
            values[0, [0, first + number]] = log_speed / PROBE_ERROR, 1 / PROBE_ERROR
            blocks.append(rows)
            targets.append(values)
        return np.concatenate(blocks), np.concatenate(targets)

    def _groups(self, held: Held, solution: Floats) -> Groups:
        """Stages whose speeds the samples leave open, together those that may only be shifted alike."""
        answer = OrderedLeastSquares(self.unknowns, 1 + self.dependent)
        answer.settle(*self._held(held))
        tolerances = np.full(self.unknowns, COST_TOLERANCE)
        tolerances[2 * self.parts :] = SPEED_TOLERANCE
        answer.settle(*self._samples(solution), tolerances)
        shifts = answer.open[2 * self.parts : self.typical]
        groups: list[list[int]] = []
        for index in range(len(self.stages)):
            if not answer.is_open(2 * self.parts + index):
                continue
            for group in groups:
                if np.allclose(shifts[group[0]], shifts[index], atol=_SAME_SHIFT):
                    group.append(index)
                    break
            else:
                groups.append([index])
        return tuple(map(tuple, groups))

    def _assumed_speeds(self, groups: Groups, solution: Floats) -> tuple[Floats, Floats]:
        """The median stage of each group has speed 1; of an even number, the faster of the two in the middle."""
        rows = np.zeros((len(groups), self.unknowns))
        for row, group in enumerate(groups):
            ordered = sorted(group, key=lambda index: -solution[2 * self.parts + index])
            rows[row, 2 * self.parts + ordered[(len(ordered) - 1) // 2]] = 1
        return rows, self._zeros(rows)

    def _layers(self, solution: Floats) -> tuple[Floats, Floats]:
        """Each layer costs its ratio of the typical layer, by Huber's weights."""
        parts = [(direction, part) for direction in (0, 1) for part in range(1, self.parts - 1)]
        rows = np.stack([self._proportion(*key) for key in parts])
        apart = rows @ solution
        weights = np.minimum(1.0, _ALIKE / np.maximum(np.abs(apart), _ALIKE))
        weights[apart > _ALIKE] /= 2
        rows *= np.sqrt(weights)[:, None]
        return rows, self._zeros(rows)

    def _ends(self) -> tuple[Floats, Floats]:
        """Embedding and head cost their ratios of the typical layer, where there is a prior."""
        ends = [(d, part) for d in (0, 1) for part in (0, self.parts - 1) if np.isfinite(self.ratios[d, part])]
        rows = [self._proportion(*key) / (self.ratios[key] + _LEAST_RATIO) for key in ends]
        stacked = np.array(rows).reshape(len(rows), self.unknowns)
        return stacked, self._zeros(stacked)

    def _held(self, held: Held) -> tuple[Floats, Floats]:
        rows = np.array([self._proportion(*key) for key in sorted(held)]).reshape(len(held), self.unknowns)
        return rows, self._zeros(rows)

    def _proportion(self, direction: int, part: int) -> Floats:
        """The equation: cost of a part - its ratio x the typical layer = 0."""
        row = np.zeros(self.unknowns)
        row[direction * self.parts + part] = 1
        row[self.typical + direction] = -np.nan_to_num(self.ratios[direction, part])
        return row

    def _zeros(self, rows: Floats) -> Floats:
        return np.zeros((len(rows), 1 + self.dependent))


def _weighable(covariance: Floats) -> Floats:
    if not np.isfinite(covariance).all():
        return np.eye(len(covariance)) * UNKNOWN_ERROR**2
    shrink = min(1.0, UNKNOWN_ERROR**2 / max(float(np.diagonal(covariance).max()), _LEAST_ERROR**2))
    return covariance * shrink + np.eye(len(covariance)) * _LEAST_ERROR**2
