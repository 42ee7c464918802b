"""The profile of one attempt as an HDF5 file. The only module that knows its layout.

    /                       attributes: schema, cluster, job_id, start_seconds, ...
    /nodes/<node>/devices/<uuid>/{time_seconds, utilization_ratio, ...}
    /nodes/<node>/events/{time_seconds, kind, text}
    /training/steps/{step, time_seconds, ...}      one row a step
    /training/stages/{step, replica, stage, ...}   one row a step, replica and stage
    /training/ranks/{rank, node, device, ...}      one row a rank
    /training/events/{time_seconds, kind, text}

Columns, not compound rows: chunked, shuffled, gzip. A column's name ends in its unit, and its `units` attribute
repeats it. A value that is not there is NaN. Times are UTC, seconds since 1970.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

SCHEMA = 1

Column = npt.NDArray[np.float64] | npt.NDArray[np.int64] | npt.NDArray[np.str_]
Table = dict[str, Column]
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
    absent: dict[str, str] = field(default_factory=dict)
    """Column -> why it holds no value at all."""


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
    """What the ranks reported to the wrapper. Tables are as the module's head lays them out."""

    start_seconds: float
    end_seconds: float
    attributes: dict[str, str | int | float]
    """shape (tensor, pipeline, data), exit_code, outcome (a sentence), trigger_ratio, window_steps, job (its JSON)."""
    steps: Table
    """step, time_seconds, duration_seconds, loss, gradient_norm, learning_rate, tokens, microbatch_size,
    global_batch_size, consumed_samples."""
    stages: Table
    """step, replica, stage, forward_seconds, backward_seconds, tokens, peak_memory_bytes."""
    ranks: Table
    """rank, node, local_rank, device (uuid), tensor_rank, pipeline_rank, data_rank, layers (text "0-3"), parameters."""
    events: tuple[Event, ...]


@dataclass(frozen=True)
class Profile:
    """One attempt of one job, whole."""

    cluster: str
    job_id: int
    user: str
    start_seconds: float
    end_seconds: float
    restart_count: int
    expected_nodes: tuple[str, ...]
    """Nodes of the allocation, as the hooks saw it."""
    nodes: tuple[NodeProfile, ...]
    training: TrainingProfile | None

    @property
    def missing_nodes(self) -> tuple[str, ...]:
        """Nodes of the allocation whose part is not here."""
        present = {node.node for node in self.nodes}
        return tuple(node for node in self.expected_nodes if node not in present)
