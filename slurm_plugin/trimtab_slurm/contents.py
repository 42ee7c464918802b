"""What a profile holds, and what its figures rest on: the unit of each, and how much of it is there. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.float64] | npt.NDArray[np.float32] | npt.NDArray[np.int64] | npt.NDArray[np.str_]
Table = Mapping[str, Column]
"""Columns of equal length by name."""


@dataclass(frozen=True)
class Event:
    """Something that happened at a moment: a text, not a figure."""

    time_seconds: float
    kind: str
    text: str


@dataclass(frozen=True)
class DeviceProfile:
    """One device's series of samples."""

    uuid: str
    kind: str
    """cpu: the processes of one task; gpu: a whole GPU; mig: a MIG instance."""
    model: str
    index: int
    driver: str
    samples: Table
    """time_seconds (ascending) and one column for each figure, NaN where there was none."""
    absent: Mapping[str, str] = field(default_factory=dict)
    """Column -> why it is NaN where it is; a column whose reason is not known is not named."""
    pci: str = ""
    """Bus id; empty for what is on no bus of its own."""
    parent_uuid: str = ""
    """The GPU that a MIG instance is part of."""
    processes: Table = field(default_factory=dict)
    """time_seconds, pid, memory_used_bytes: one row a change, which holds until the next of the same process; 0 bytes:
    it has gone, NaN: not known. Empty where no process was seen."""


@dataclass(frozen=True)
class NodeProfile:
    """What one node recorded of one attempt."""

    node: str
    start_seconds: float
    end_seconds: float
    sampler_period_seconds: float
    devices: tuple[DeviceProfile, ...]
    events: tuple[Event, ...]


@dataclass(frozen=True)
class TrainingProfile:
    """What the ranks reported to the wrapper. Tables are as `profile` lays them out."""

    start_seconds: float
    end_seconds: float
    attributes: dict[str, str | int | float]
    """shape (tensor, pipeline, data), nodes (text "n1,n2"), exit_code, outcome (a sentence), trigger_ratio,
    window_steps, job (its JSON). Older files lack nodes."""
    steps: Table
    """step, time_seconds, duration_seconds, loss, gradient_norm, learning_rate, tokens, microbatch_size,
    global_batch_size, consumed_samples."""
    stages: Table
    """step, replica, stage, forward_seconds, backward_seconds, microbatches, tokens, squared_lengths (sum over the
    documents of the square of their length in tokens), peak_memory_bytes. Older files lack microbatches and
    squared_lengths."""
    ranks: Table
    """rank, node, local_rank, device (uuid), tensor_rank, pipeline_rank, data_rank, layers (text "0-3"), parameters."""
    events: tuple[Event, ...]
    probes: Table = field(default_factory=dict)
    """step (taken before it), rank, seconds (of a matrix product that is the same on all ranks). Empty where none was
    asked for."""
    settings: Table = field(default_factory=dict)
    """step (the first under it), layout (as Megatron-core writes it), microbatches (of each replica, text "8|8"),
    recomputed_layers (of each stage, likewise). Empty in older files."""
    orders: Table = field(default_factory=dict)
    """number, step, time_seconds, kind, before, after, reason, before_seconds, predicted_seconds, measured_seconds,
    cost_seconds, moved_bytes, outcome. Empty where none was given."""
    checkpoints: Table = field(default_factory=dict)
    """step, time_seconds, duration_seconds, size_bytes, directory. Empty where none was saved."""


@dataclass(frozen=True)
class _Attempt:
    """Which attempt of which job a file is of."""

    cluster: str
    job_id: int
    user: str
    start_seconds: float
    end_seconds: float
    restart_count: int
    expected_nodes: tuple[str, ...]
    """Nodes of the allocation, as the hooks saw it."""
    sluid: str = field(default="", kw_only=True)
    """Slurm's own unique id of the job, from 25.11 on."""
    attempt_number: int = field(default=0, kw_only=True)
    """Place among the job's recorded attempts, from 1; 0 in a part, which knows of no other."""
    previous: str = field(default="", kw_only=True)
    """Name of the file of the recorded attempt before; empty: there is none."""

    def _fields(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(_Attempt)}


@dataclass(frozen=True)
class Header(_Attempt):
    """What tells profiles of one job apart, and what each holds."""

    nodes: tuple[str, ...]
    """Names of the nodes whose part is in it."""
    parts: frozenset[str] = frozenset()
    """`profile.part_id` of each part that it was made of; of a part, its own."""

    @property
    def missing_nodes(self) -> tuple[str, ...]:
        """Nodes of the allocation whose part is not here."""
        present = set(self.nodes)
        return tuple(node for node in self.expected_nodes if node not in present)


@dataclass(frozen=True)
class Profile(_Attempt):
    """One attempt of one job, whole."""

    nodes: tuple[NodeProfile, ...]
    training: TrainingProfile | None
    """Of several, the last."""
    events: tuple[Event, ...] = ()
    """Of the file itself: which parts could not be used."""
    earlier_trainings: tuple[TrainingProfile, ...] = ()
    """Those before `training`, oldest first: ranks may be started anew within an attempt, as on fewer nodes."""

    @property
    def header(self) -> Header:
        """What is in it, without the figures."""
        return Header(**self._fields(), nodes=tuple(node.node for node in self.nodes))

    @property
    def missing_nodes(self) -> tuple[str, ...]:
        """Nodes of the allocation whose part is not here."""
        return self.header.missing_nodes


class ProfileError(ValueError):
    """A file that is no profile, or none that can be read: names it, the reason, and the way out."""


UNITS = (
    "bytes_per_second",
    "faults_per_second",
    "seconds",
    "bytes",
    "bits",
    "ratio",
    "cores",
    "watts",
    "joules",
    "celsius",
    "hertz",
    "count",
)
"""What a column's name may end in, the longer first."""


def units(name: str, kind: str) -> str:
    """The unit of a column, from its name's end: `power_watts` -> watts.

    Without one, whole numbers (dtype kind "i") count, real ones are dimensionless ("1"), and texts have no unit.
    """
    for unit in UNITS:
        if name == unit or name.endswith(f"_{unit}"):
            return unit.replace("_per_second", "/second")
    return {"i": "count", "f": "1"}.get(kind, "")


def coverage_ratio(device: DeviceProfile, node: NodeProfile, column: str = "time_seconds") -> float:
    """Values of a column that are there over samples that the sampling period asks for, at most 1.

    NaN where none is asked for: of a task that was never sampled.
    """
    expected = _expected_samples(device, node)
    if not expected:
        return math.nan
    return min(1.0, int(np.isfinite(device.samples.get(column, ())).sum()) / expected)


def _expected_samples(device: DeviceProfile, node: NodeProfile) -> int:
    """A GPU is there from first to last; a task comes and goes, and is asked for between its own samples.

    A node's part begins before its first sample, by what it takes to start a sampler, and ends with or after its last.
    What is sampled every period then has a sample for each whole period, and one however short the part is.
    """
    if device.kind == "cpu":
        times = device.samples["time_seconds"]
        return int(float(times[-1] - times[0]) / node.sampler_period_seconds) + 1 if len(times) else 0
    return max(1, int((node.end_seconds - node.start_seconds) / node.sampler_period_seconds))
