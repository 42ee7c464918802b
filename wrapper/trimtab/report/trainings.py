"""The trainings of one attempt, each as a profile of its own: ranks may be started anew in the same allocation. Pure.

The first begins with the attempt, the last ends with it, and what was sampled in between is of the one that was
running: a sample counts once at most. What happened on a node is of the last one that had begun there.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from trimtab_slurm.contents import Column, NodeProfile, Profile, Table, TrainingProfile


@dataclass(frozen=True)
class _Span:
    """What is later than `begin_seconds`, and not later than `end_seconds`; UTC."""

    begin_seconds: float
    end_seconds: float

    def holds(self, time_seconds: float) -> bool:
        return self.begin_seconds < time_seconds <= self.end_seconds


def number_of_trainings(profile: Profile) -> int:
    """Of how many a report can be given: where there is none, of the attempt itself."""
    return len(profile.earlier_trainings) + 1


def only(profile: Profile, place: int) -> Profile:
    """One training of an attempt, by its place from 0, with the nodes that it ran on, in its time alone.

    Columns of devices are cut when they are asked for. An attempt with one training or none is as it is.
    """
    if not profile.earlier_trainings or profile.training is None:
        return profile
    trainings = (*profile.earlier_trainings, profile.training)
    training, later = trainings[place], trainings[place + 1 :]
    span = _Span(training.start_seconds if place else -math.inf, training.end_seconds if later else math.inf)
    expected, devices = _nodes_of(training, profile), set(training.ranks["device"].tolist())

    def told(node: NodeProfile) -> _Span:
        """Whose events are this training's: it tells of a node that was given back to the end."""
        following = (each.start_seconds for each in later if node.node in _nodes_of(each, profile))
        return replace(span, end_seconds=next(following, math.inf))

    return replace(
        profile,
        start_seconds=max(profile.start_seconds, span.begin_seconds),
        end_seconds=min(profile.end_seconds, span.end_seconds),
        expected_nodes=expected,
        nodes=tuple(
            _within(node, span, told(node), devices)
            for node in profile.nodes
            if node.node in expected and node.start_seconds < span.end_seconds and node.end_seconds > span.begin_seconds
        ),
        training=training,
        earlier_trainings=(),
    )


def _nodes_of(training: TrainingProfile, profile: Profile) -> tuple[str, ...]:
    """On which it was started; where it does not say, all of the allocation."""
    ran_on = str(training.attributes.get("nodes", "")).split(",")
    return tuple(node for node in profile.expected_nodes if node in ran_on) or profile.expected_nodes


def _within(node: NodeProfile, span: _Span, told: _Span, own: set[str]) -> NodeProfile:
    """A node's part in a span of time, and its events of another. A task of another training has no sample there, and
    is not one of its `own`."""
    cut = [replace(device, samples=_Rows(device.samples, span)) for device in node.devices]
    return replace(
        node,
        start_seconds=max(node.start_seconds, span.begin_seconds),
        end_seconds=min(node.end_seconds, span.end_seconds),
        devices=tuple(
            device
            for device in cut
            if device.kind != "cpu" or device.uuid in own or len(device.samples["time_seconds"])
        ),
        events=tuple(event for event in node.events if told.holds(event.time_seconds)),
    )


class _Rows(Mapping[str, Column]):
    """The rows of a table of samples within a span of time; a column is read when it is asked for."""

    def __init__(self, samples: Table, span: _Span) -> None:
        self._samples, self._span = samples, span

    @cached_property
    def _rows(self) -> slice:
        bounds = (self._span.begin_seconds, self._span.end_seconds)
        return slice(*np.searchsorted(self._samples["time_seconds"], bounds, side="right"))

    def __getitem__(self, name: str) -> Column:
        return self._samples[name][self._rows]

    def __iter__(self) -> Iterator[str]:
        return iter(self._samples)

    def __len__(self) -> int:
        return len(self._samples)
