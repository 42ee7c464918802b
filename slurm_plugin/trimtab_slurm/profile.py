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

import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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


class ProfileError(ValueError):
    """A file that is no profile: names it, and says what it is."""


_UNITS = ("seconds", "bytes", "ratio", "watts", "joules", "celsius", "hertz", "count")


def write(path: Path, written: Profile) -> None:
    """Write a profile whole, or not at all: readers see the file before, or this one. Readable by its owner alone."""
    import h5py

    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    os.close(descriptor)
    temporary = Path(name)
    try:
        with h5py.File(temporary, "w", locking=False) as file:
            file.attrs.update(
                schema=SCHEMA,
                cluster=written.cluster,
                job_id=written.job_id,
                user=written.user,
                start_seconds=written.start_seconds,
                end_seconds=written.end_seconds,
                restart_count=written.restart_count,
                expected_nodes=list(written.expected_nodes),
                missing_nodes=list(written.missing_nodes),
            )
            for node in written.nodes:
                _write_node(file.create_group(f"nodes/{node.node}"), node)
            if written.training:
                _write_training(file.create_group("training"), written.training)
        with temporary.open("rb") as whole:
            os.fsync(whole.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read(path: Path) -> Profile:
    """The profile in a file. Raises ProfileError for a file that is none, damaged, or of a later version."""
    import h5py

    try:
        with h5py.File(path, "r", locking=False) as file:
            schema = int(file.attrs["schema"])
            if schema > SCHEMA:
                raise ProfileError(
                    f"{path} has layout {schema}; this trimtab knows up to {SCHEMA}: install a newer one"
                )
            return _read(file)
    except FileNotFoundError:
        raise ProfileError(f"{path} does not exist") from None
    except (OSError, KeyError, RuntimeError) as error:
        raise ProfileError(f"{path} is no profile, or damaged: {error}") from error


def _write_node(group: Any, node: NodeProfile) -> None:
    group.attrs.update(
        start_seconds=node.start_seconds,
        end_seconds=node.end_seconds,
        sampler_period_seconds=node.sampler_period_seconds,
    )
    expected = max(1.0, (node.end_seconds - node.start_seconds) / node.sampler_period_seconds)
    for device in node.devices:
        below = group.create_group(f"devices/{device.uuid}")
        below.attrs.update(
            kind=device.kind,
            model=device.model,
            index=device.index,
            driver=device.driver,
            coverage_ratio=min(1.0, len(device.samples["time_seconds"]) / expected),
        )
        _write_table(below, device.samples)
        for column, reason in device.absent.items():
            below[column].attrs["absent"] = reason
    _write_events(group, node.events)


def _write_training(group: Any, training: TrainingProfile) -> None:
    group.attrs.update(start_seconds=training.start_seconds, end_seconds=training.end_seconds)
    settings = group.create_group("attributes")
    settings.attrs.update(training.attributes)
    for name in ("steps", "stages", "ranks"):
        _write_table(group.create_group(name), getattr(training, name))
    _write_events(group, training.events)


def _write_events(group: Any, events: Iterable[Event]) -> None:
    listed = list(events)
    _write_table(
        group.create_group("events"),
        {
            "time_seconds": np.array([event.time_seconds for event in listed], dtype=np.float64),
            "kind": np.array([event.kind for event in listed], dtype=np.str_),
            "text": np.array([event.text for event in listed], dtype=np.str_),
        },
    )


def _write_table(group: Any, table: Mapping[str, Column]) -> None:
    import h5py

    for name, column in table.items():
        text = column.dtype.kind == "U"
        data = column.astype(object) if text else column
        storage = {} if not len(column) else {"chunks": True, "shuffle": not text, "compression": "gzip"}
        kind = h5py.string_dtype() if text else column.dtype
        dataset = group.create_dataset(name, data=data, dtype=kind, **storage)
        unit = name.rpartition("_")[2]
        dataset.attrs["units"] = unit if unit in _UNITS else "text" if text else "count"


def _read(file: Any) -> Profile:
    attributes = file.attrs
    nodes = file.get("nodes", {})
    return Profile(
        cluster=str(attributes["cluster"]),
        job_id=int(attributes["job_id"]),
        user=str(attributes["user"]),
        start_seconds=float(attributes["start_seconds"]),
        end_seconds=float(attributes["end_seconds"]),
        restart_count=int(attributes["restart_count"]),
        expected_nodes=tuple(str(node) for node in attributes["expected_nodes"]),
        nodes=tuple(_read_node(name, group) for name, group in nodes.items()),
        training=_read_training(file["training"]) if "training" in file else None,
    )


def _read_node(name: str, group: Any) -> NodeProfile:
    devices = group.get("devices", {})
    return NodeProfile(
        node=name,
        start_seconds=float(group.attrs["start_seconds"]),
        end_seconds=float(group.attrs["end_seconds"]),
        sampler_period_seconds=float(group.attrs["sampler_period_seconds"]),
        devices=tuple(_read_device(uuid, device) for uuid, device in devices.items()),
        events=_read_events(group),
    )


def _read_device(uuid: str, group: Any) -> DeviceProfile:
    return DeviceProfile(
        uuid=uuid,
        kind=str(group.attrs["kind"]),
        model=str(group.attrs["model"]),
        index=int(group.attrs["index"]),
        driver=str(group.attrs["driver"]),
        samples=_read_table(group),
        absent={name: str(data.attrs["absent"]) for name, data in group.items() if "absent" in data.attrs},
    )


def _read_training(group: Any) -> TrainingProfile:
    return TrainingProfile(
        start_seconds=float(group.attrs["start_seconds"]),
        end_seconds=float(group.attrs["end_seconds"]),
        attributes={name: _plain(value) for name, value in group["attributes"].attrs.items()},
        steps=_read_table(group["steps"]),
        stages=_read_table(group["stages"]),
        ranks=_read_table(group["ranks"]),
        events=_read_events(group),
    )


def _read_events(group: Any) -> tuple[Event, ...]:
    table = _read_table(group["events"])
    rows = zip(table["time_seconds"], table["kind"], table["text"], strict=True)
    return tuple(Event(float(moment), str(kind), str(text)) for moment, kind, text in rows)


def _read_table(group: Any) -> Table:
    return {
        name: data.asstr()[()].astype(np.str_) if data.attrs["units"] == "text" else data[()]
        for name, data in group.items()
    }


def _plain(value: Any) -> str | int | float:
    plain: str | int | float = value.item() if isinstance(value, np.generic) else value
    return plain
