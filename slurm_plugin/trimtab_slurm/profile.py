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

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

SCHEMA = 1
_SIGNATURE = b"\x89HDF\r\n\x1a\n"

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

    def _fields(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(_Attempt)}


@dataclass(frozen=True)
class Header(_Attempt):
    """What tells profiles of one job apart, and what each holds."""

    nodes: tuple[str, ...]
    """Names of the nodes whose part is in it."""
    parts: frozenset[str] = frozenset()
    """`part_id` of what was merged into it; empty for a part itself."""

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
    "ratio",
    "cores",
    "watts",
    "joules",
    "celsius",
    "hertz",
    "count",
)
"""What a column's name may end in, the longer first."""

CHUNK_ROWS = 4096


def units(name: str, kind: str) -> str:
    """The unit of a column, from its name's end: `power_watts` -> watts.

    Without one, whole numbers (dtype kind "i") count, real ones are dimensionless ("1"), and texts have no unit.
    """
    for unit in UNITS:
        if name == unit or name.endswith(f"_{unit}"):
            return unit.replace("_per_second", "/second")
    return {"i": "count", "f": "1"}.get(kind, "")


def coverage_ratio(device: DeviceProfile, node: NodeProfile) -> float:
    """Samples of a device over those that the sampling period asks for, at most 1.

    Asked for during the whole of the node's part; of a task, which comes and goes, from its first to its last sample.
    """
    times = device.samples["time_seconds"]
    if not len(times):
        return 0.0
    span = times[-1] - times[0] if device.kind == "cpu" else node.end_seconds - node.start_seconds
    return min(1.0, len(times) / (int(float(span) / node.sampler_period_seconds) + 1))


def write(path: Path, profile: Profile) -> None:
    """Write a profile, 0600: whole or not at all, whatever happens meanwhile. Raises OSError."""
    with _replacing(path) as file:
        _write_header(file, profile.header)
        for node in profile.nodes:
            _write_node(file, node)
        if profile.training is not None:
            _write_training(file, profile.training)


def read(path: Path) -> Profile:
    """Read a profile whole. Raises ProfileError for what is none, or cannot be read."""
    with _reading(path) as file:
        header = _read_header(file)
        training = _read_training(file["training"]) if "training" in file else None
        nodes = tuple(_read_node(name, file["nodes"][name]) for name in header.nodes)
        return Profile(**header._fields(), nodes=nodes, training=training)


def read_header(path: Path) -> Header:
    """Read what tells a profile from others, and no figures. Raises as `read`."""
    with _reading(path) as file:
        return _read_header(file)


def part_id(path: Path) -> str:
    """A part as it is now: its file's name, and when that was written. Raises FileNotFoundError."""
    return f"{path.name}@{path.stat().st_mtime_ns}"


def merge(parts: Sequence[Path], target: Path) -> None:
    """Write the parts of one attempt as one profile. Raises as `read` and `write`.

    Its time is from the first start to the last end. A node with two parts (its sampler was started anew) keeps all
    samples and events of both; of two training parts the later is kept.
    """
    ids = frozenset(map(part_id, parts))  # before they are read: what is written meanwhile is then known to be missing
    headers = {part: read_header(part) for part in parts}
    ordered = sorted(parts, key=lambda part: headers[part].start_seconds)
    expected = dict.fromkeys(node for part in ordered for node in headers[part].expected_nodes)
    holders: dict[str, list[Path]] = {}
    for part in ordered:
        for node in headers[part].nodes:
            holders.setdefault(node, []).append(part)
    merged = replace(
        headers[ordered[0]],
        end_seconds=max(header.end_seconds for header in headers.values()),
        expected_nodes=tuple(expected),
        nodes=tuple(holders),
        parts=ids,
    )
    with _replacing(target) as file:
        _write_header(file, merged)
        for node, paths in sorted(holders.items()):
            if len(paths) == 1:
                with _reading(paths[0]) as source:  # copied as it is: neither unpacked nor held in memory
                    source.copy(f"nodes/{node}", file["nodes"])
            else:
                found = [_node_of(path, node) for path in paths]
                _write_node(file, _joined(found))
        for part in reversed(ordered):
            with _reading(part) as source:
                if "training" in source:
                    source.copy("training", file)
                    break


def _node_of(path: Path, name: str) -> NodeProfile:
    with _reading(path) as file:
        return _read_node(name, file["nodes"][name])


def _joined(parts: Sequence[NodeProfile]) -> NodeProfile:
    """Several parts of one node, in the order of their start, as one."""
    devices: dict[str, DeviceProfile] = {}
    for device in (device for part in parts for device in part.devices):
        earlier = devices.get(device.uuid)
        devices[device.uuid] = device if earlier is None else _joined_devices(earlier, device)
    return NodeProfile(
        node=parts[0].node,
        start_seconds=parts[0].start_seconds,
        end_seconds=max(part.end_seconds for part in parts),
        sampler_period_seconds=parts[0].sampler_period_seconds,
        devices=tuple(devices.values()),
        events=tuple(sorted((event for part in parts for event in part.events), key=lambda event: event.time_seconds)),
    )


def _joined_devices(first: DeviceProfile, second: DeviceProfile) -> DeviceProfile:
    names = dict.fromkeys([*first.samples, *second.samples])
    missing = [np.full(len(device.samples["time_seconds"]), np.nan) for device in (first, second)]
    columns = {
        name: np.concatenate([first.samples.get(name, missing[0]), second.samples.get(name, missing[1])])
        for name in names
    }
    order = np.argsort(columns["time_seconds"], kind="stable")
    absent = {name: reason for name, reason in first.absent.items() if name in second.absent}
    return replace(second, samples={name: column[order] for name, column in columns.items()}, absent=absent)


def _write_header(file: Any, header: Header) -> None:
    file.attrs.update(
        {
            "schema": SCHEMA,
            "cluster": _clean(header.cluster),
            "job_id": header.job_id,
            "user": _clean(header.user),
            "start": datetime.fromtimestamp(header.start_seconds, UTC).isoformat(timespec="seconds"),
            "start_seconds": header.start_seconds,
            "end_seconds": header.end_seconds,
            "restart_count": header.restart_count,
            # As one text: an attribute that is an array ends at 64 kB, and there are clusters with more nodes.
            "expected_nodes": ",".join(header.expected_nodes),
            "missing_nodes": ",".join(header.missing_nodes),
        }
    )
    if header.parts:
        file.attrs["parts"] = ",".join(sorted(header.parts))
    file.create_group("nodes")


def _read_header(file: Any) -> Header:
    attributes = file.attrs
    expected = tuple(filter(None, str(attributes["expected_nodes"]).split(",")))
    places = {node: place for place, node in enumerate(expected)}
    return Header(
        cluster=str(attributes["cluster"]),
        job_id=int(attributes["job_id"]),
        user=str(attributes["user"]),
        start_seconds=float(attributes["start_seconds"]),
        end_seconds=float(attributes["end_seconds"]),
        restart_count=int(attributes["restart_count"]),
        expected_nodes=expected,
        nodes=tuple(sorted(file["nodes"], key=lambda node: (places.get(node, len(places)), node))),
        parts=frozenset(filter(None, str(attributes.get("parts", "")).split(","))),
    )


def _write_node(file: Any, node: NodeProfile) -> None:
    group = file["nodes"].create_group(node.node)
    group.attrs["start_seconds"] = node.start_seconds
    group.attrs["end_seconds"] = node.end_seconds
    group.attrs["sampler_period_seconds"] = node.sampler_period_seconds
    devices = group.create_group("devices")
    for device in node.devices:
        # A MIG instance's uuid of older drivers holds slashes, which would make groups.
        series = devices.create_group(device.uuid.replace("/", "_"))
        series.attrs["uuid"] = _clean(device.uuid)
        series.attrs["kind"] = device.kind
        series.attrs["model"] = _clean(device.model)
        series.attrs["index"] = device.index
        series.attrs["driver"] = _clean(device.driver)
        series.attrs["absent"] = json.dumps(device.absent)
        series.attrs["coverage_ratio"] = coverage_ratio(device, node)
        _write_table(series, device.samples)
    _write_events(group, node.events)


def _read_node(name: str, group: Any) -> NodeProfile:
    return NodeProfile(
        node=name,
        start_seconds=float(group.attrs["start_seconds"]),
        end_seconds=float(group.attrs["end_seconds"]),
        sampler_period_seconds=float(group.attrs["sampler_period_seconds"]),
        devices=tuple(
            sorted(map(_read_device, group["devices"].values()), key=lambda device: (device.index, device.uuid))
        ),
        events=_read_events(group["events"]),
    )


def _read_device(group: Any) -> DeviceProfile:
    return DeviceProfile(
        uuid=str(group.attrs["uuid"]),
        kind=str(group.attrs["kind"]),
        model=str(group.attrs["model"]),
        index=int(group.attrs["index"]),
        driver=str(group.attrs["driver"]),
        samples=_read_table(group),
        absent=json.loads(group.attrs["absent"]),
    )


def _write_training(file: Any, training: TrainingProfile) -> None:
    group = file.create_group("training")
    for name, value in training.attributes.items():
        group.attrs[name] = _clean(value) if isinstance(value, str) else value
    group.attrs["start_seconds"] = training.start_seconds
    group.attrs["end_seconds"] = training.end_seconds
    for name in ("steps", "stages", "ranks"):
        _write_table(group.create_group(name), getattr(training, name))
    _write_events(group, training.events)


def _read_training(group: Any) -> TrainingProfile:
    attributes = {name: _plain(value) for name, value in group.attrs.items()}
    return TrainingProfile(
        start_seconds=float(attributes.pop("start_seconds")),
        end_seconds=float(attributes.pop("end_seconds")),
        attributes=attributes,
        steps=_read_table(group["steps"]),
        stages=_read_table(group["stages"]),
        ranks=_read_table(group["ranks"]),
        events=_read_events(group["events"]),
    )


def _write_table(group: Any, table: Table) -> None:
    import h5py

    for name, column in table.items():
        text = column.dtype.kind == "U"
        dataset = group.create_dataset(
            name,
            data=[_clean(str(value)) for value in column] if text else column,
            shape=column.shape,
            dtype=h5py.string_dtype() if text else column.dtype,
            maxshape=(None,),
            chunks=(max(1, min(len(column), CHUNK_ROWS)),),
            shuffle=True,
            compression="gzip",
        )
        dataset.attrs["units"] = units(name, column.dtype.kind)


def _read_table(group: Any) -> Table:
    return {name: _read_column(dataset) for name, dataset in group.items()}


def _read_column(dataset: Any) -> Column:
    if dataset.dtype.kind == "O":
        return np.array(dataset.asstr()[...], dtype=np.str_)
    column: Column = dataset[...]
    return column


def _write_events(group: Any, events: Sequence[Event]) -> None:
    _write_table(
        group.create_group("events"),
        {
            "time_seconds": np.array([event.time_seconds for event in events], dtype=np.float64),
            "kind": np.array([event.kind for event in events], dtype=np.str_),
            "text": np.array([event.text for event in events], dtype=np.str_),
        },
    )


def _read_events(group: Any) -> tuple[Event, ...]:
    table = _read_table(group)
    columns = (table[name].tolist() for name in ("time_seconds", "kind", "text"))
    return tuple(Event(*row) for row in zip(*columns, strict=True))


def _plain(value: Any) -> Any:
    """An attribute as Python's own type."""
    return value.item() if isinstance(value, np.generic) else value


def _clean(text: str) -> str:
    """A text that HDF5 can hold: UTF-8 without NUL."""
    return text.encode("utf-8", "replace").decode().replace("\0", "")


@contextmanager
def _replacing(path: Path) -> Iterator[Any]:
    """A new HDF5 file that takes the name `path`, at once, when it is whole and on disk."""
    import h5py

    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # O_EXCL, 0600
    try:
        with h5py.File(name, "w", locking=False) as file:
            yield file
        os.fsync(descriptor)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    """An open profile. What HDF5 cannot open or read becomes a ProfileError."""
    import h5py

    try:
        with path.open("rb") as plain:
            signature = plain.read(len(_SIGNATURE))
    except FileNotFoundError as error:
        raise ProfileError(f"{path} does not exist") from error
    except OSError as error:
        raise ProfileError(f"{path} cannot be read: {error.strerror}") from error
    if signature != _SIGNATURE:
        raise ProfileError(f"{path} is no profile, or damaged: it does not begin as an HDF5 file")
    try:
        # No lock: NFS and Lustre may not have any, and files are replaced, never changed.
        with h5py.File(path, "r", locking=False) as file:
            schema = file.attrs.get("schema")
            if schema is None:
                raise ProfileError(f"{path} is no profile, or damaged: it has no schema")
            if schema > SCHEMA:
                raise ProfileError(
                    f"{path} has schema {schema}, this trimtab reads up to {SCHEMA}: use the version that wrote it"
                )
            yield file
    except ProfileError:
        raise
    except (OSError, KeyError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, OSError) and error.errno:
            raise  # the system's own: the disk that a copy goes to is full
        raise ProfileError(f"{path} is no profile, or damaged: {error}") from error
