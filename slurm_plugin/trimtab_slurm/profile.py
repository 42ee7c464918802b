"""The profile of one attempt as an HDF5 file. The only module that knows its layout.

    /                       attributes: schema, cluster, job_id, start_seconds, ...
    /nodes/<node>/devices/<uuid>/{time_seconds, utilization_ratio, ...}
    /nodes/<node>/devices/<uuid>/processes/{time_seconds, pid, memory_used_bytes}
    /nodes/<node>/events/{time_seconds, kind, text}
    /training/steps/{step, time_seconds, ...}      one row a step
    /training/stages/{step, replica, stage, ...}   one row a step, replica and stage
    /training/ranks/{rank, node, device, ...}      one row a rank
    /training/probes/{step, rank, seconds}         one row a probe and rank
    /training/settings/{step, layout, ...}         one row a setting, by the first step under it
    /training/orders/{number, step, kind, ...}     one row an order of the wrapper
    /training/checkpoints/{step, ...}              one row a checkpoint that was saved
    /training/events/{time_seconds, kind, text}
    /earlier_trainings/<number>/...                as /training: those before it, from 1
    /events/{time_seconds, kind, text}             of the file itself

A column's name ends in its unit, and its `units` attribute repeats it. A value that is not there is NaN. Times are UTC,
seconds since 1970.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trimtab_slurm import hdf5
from trimtab_slurm.contents import (
    Column,
    DeviceProfile,
    Event,
    Header,
    NodeProfile,
    Profile,
    ProfileError,
    Table,
    TrainingProfile,
    coverage_ratio,
)
from trimtab_slurm.hdf5 import child, clean, has

SCHEMA = 1
_DEVICE_TEXTS = ("uuid", "kind", "model", "driver", "pci", "parent_uuid")
_OPTIONAL_TABLES = ("probes", "settings", "orders", "checkpoints")
"""Of a training; missing where they would be empty, and in files of versions that did not have them."""
_EARLIER = "earlier_trainings"
_LATEST_SECONDS = 253_402_300_799.0
"""The end of the year 9999, and of calendars."""


def write(path: Path, profile: Profile) -> None:
    """Write a profile: whole or not at all, whatever happens meanwhile. Raises OSError."""
    with hdf5.replacing(path) as file:
        nodes = file.create_group("nodes")
        for node in profile.nodes:
            _write_node(nodes, node)
        if profile.training is not None:
            _write_training(file.create_group("training"), profile.training)
        for number, training in enumerate(profile.earlier_trainings, start=1):
            _write_training(file.create_group(f"{_EARLIER}/{number}"), training)
        _write_header(file, profile.header, profile.events)


@contextmanager
def opened(path: Path) -> Iterator[Profile]:
    """A profile whose devices' columns are read when they are asked for, each time anew: a large job's fill memory.

    They can be asked for within the context alone. Raises ProfileError for what is none, or cannot be read, then too.
    """
    with _reading(path) as file:
        header = _read_header(file, path)
        training = _read_training(child(file, "training")) if has(file, "training") else None
        earlier = child(file, _EARLIER) if has(file, _EARLIER) else {}
        nodes = child(file, "nodes")
        yield Profile(
            **header._fields(),
            nodes=tuple(_open_node(name, child(nodes, name)) for name in header.nodes),
            training=training,
            events=_read_events(child(file, "events")) if has(file, "events") else (),
            earlier_trainings=tuple(_read_training(child(earlier, number)) for number in sorted(earlier, key=int)),
        )


def read(path: Path) -> Profile:
    """Read a profile whole. Raises ProfileError for what is none, or cannot be read."""
    with opened(path) as profile:
        return replace(profile, nodes=tuple(map(_read_node, profile.nodes)))


def read_header(path: Path) -> Header:
    """Read what tells a profile from others, and no figures. Raises as `read`."""
    with _reading(path) as file:
        return _read_header(file, path)


def part_id(path: Path) -> str:
    """A part as it is now: its file's name, and when that was written. Raises FileNotFoundError."""
    return f"{path.name}@{path.lstat().st_mtime_ns}"


def merge(
    parts: Mapping[Path, Header], target: Path, unusable: Mapping[Path, str], attempt_number: int, previous: str
) -> dict[Path, str]:
    """Write the parts of one attempt as one profile; returns which were left out, and why. Raises OSError.

    `parts` with their headers, as `read_header` gives them; `unusable`: parts that have none, with the reason. A part
    that turns out to be damaged within is left out too, and an event names each of them. The attempt's time is from the
    first start to the last end. A node with two parts (its sampler was started anew) keeps all samples and events of
    both; of several training parts the last is the file's training, the others are the earlier ones.
    """
    ordered = sorted(parts, key=lambda part: (parts[part].start_seconds, part.name))
    end_seconds = max(header.end_seconds for header in parts.values())
    left_out = dict(unusable)
    with hdf5.replacing(target) as file:
        nodes = file.create_group("nodes")
        for node, holders in sorted(_holders(ordered, parts).items()):
            _merge_node(nodes, node, holders, left_out)
        for part in ordered:
            if part not in left_out:
                _merge_training(file, part, left_out)
        merged = replace(
            parts[ordered[0]],
            end_seconds=end_seconds,
            expected_nodes=tuple(dict.fromkeys(node for part in ordered for node in parts[part].expected_nodes)),
            attempt_number=attempt_number,
            previous=previous,
            nodes=tuple(nodes),
            parts=frozenset[str]().union(*(header.parts for header in parts.values()), map(part_id, unusable)),
        )
        events = [Event(end_seconds, "part", f"left out: {reason}") for _, reason in sorted(left_out.items())]
        _write_header(file, merged, events)
    return left_out


def _holders(ordered: Sequence[Path], parts: Mapping[Path, Header]) -> dict[str, list[Path]]:
    """Which parts each node has, oldest first."""
    holders: dict[str, list[Path]] = {}
    for part in ordered:
        for node in parts[part].nodes:
            holders.setdefault(node, []).append(part)
    return holders


def _merge_node(nodes: Any, node: str, holders: Sequence[Path], left_out: dict[Path, str]) -> None:
    """Put one node's parts into the group `nodes`; those that cannot be used are added to `left_out`."""
    found = []
    for part in holders:
        with _leaving_out(part, left_out), _reading(part) as source:
            group = child(child(source, "nodes"), node)
            found.append(_read_node(_open_node(node, group)))
            if len(holders) == 1:
                source.copy(group, nodes, node)
                return
    if found:
        _write_node(nodes, _joined(found))


def _merge_training(file: Any, part: Path, left_out: dict[Path, str]) -> None:
    """Put a part's training into the file, if it has one; what was there becomes the latest of the earlier ones."""
    with _leaving_out(part, left_out), _reading(part) as source:
        if has(source, "training"):
            group = child(source, "training")
            _read_training(group)
            if has(file, "training"):
                file.move("training", f"{_EARLIER}/{len(file.get(_EARLIER, ())) + 1}")
            source.copy(group, file, "training")


@contextmanager
def _leaving_out(part: Path, left_out: dict[Path, str]) -> Iterator[None]:
    """Where a part cannot be used, go on without it.

    What is copied as it is, is read all the same: one part that is damaged must not make the whole file unreadable.
    """
    try:
        yield
    except ProfileError as error:
        left_out[part] = str(error)


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
    return replace(
        second,
        samples=_joined_tables(first.samples, second.samples),
        absent={**first.absent, **second.absent},
        processes=_joined_tables(first.processes, second.processes),
    )


def _joined_tables(first: Table, second: Table) -> Table:
    """The rows of both by time; NaN where one has no such column."""
    if not (first and second):
        return first or second
    columns: dict[str, npt.NDArray[Any]] = {}
    for name in dict.fromkeys([*first, *second]):
        pair = [table.get(name, np.full(len(table["time_seconds"]), np.nan, np.float32)) for table in (first, second)]
        columns[name] = np.concatenate(pair)
    order = np.argsort(columns["time_seconds"], kind="stable")
    return {name: column[order] for name, column in columns.items()}


def _write_header(file: Any, header: Header, events: Sequence[Event]) -> None:
    file.attrs.update(
        {
            "schema": SCHEMA,
            "cluster": clean(header.cluster),
            "job_id": header.job_id,
            "user": clean(header.user),
            "start": datetime.fromtimestamp(header.start_seconds, UTC).isoformat(timespec="seconds"),
            "start_seconds": header.start_seconds,
            "end_seconds": header.end_seconds,
            "restart_count": header.restart_count,
            # As one text: an attribute that is an array ends at 64 kB, and there are clusters with more nodes.
            "expected_nodes": ",".join(header.expected_nodes),
            "missing_nodes": ",".join(header.missing_nodes),
        }
    )
    optional = {
        "sluid": clean(header.sluid),
        "attempt_number": header.attempt_number,
        "previous": header.previous,
        "parts": ",".join(sorted(header.parts)),
    }
    file.attrs.update({name: value for name, value in optional.items() if value})
    _write_events(file, events)


def _read_header(file: Any, path: Path) -> Header:
    attributes = {name: hdf5.plain(value) for name, value in file.attrs.items()}
    start_seconds, end_seconds = float(attributes["start_seconds"]), float(attributes["end_seconds"])
    if not 0 <= start_seconds <= end_seconds <= _LATEST_SECONDS:
        raise ValueError(f"it is said to be from {start_seconds} to {end_seconds} s")
    expected = tuple(filter(None, str(attributes["expected_nodes"]).split(",")))
    places = {node: place for place, node in enumerate(expected)}
    parts = frozenset(filter(None, str(attributes.get("parts", "")).split(",")))
    return Header(
        cluster=str(attributes["cluster"]),
        job_id=int(attributes["job_id"]),
        user=str(attributes["user"]),
        start_seconds=start_seconds,
        end_seconds=end_seconds,
        restart_count=int(attributes["restart_count"]),
        expected_nodes=expected,
        sluid=str(attributes.get("sluid", "")),
        attempt_number=int(attributes.get("attempt_number", 0)),
        previous=str(attributes.get("previous", "")),
        nodes=tuple(sorted(child(file, "nodes"), key=lambda node: (places.get(node, len(places)), node))),
        # Of the file that is open: by now its name may be another's.
        parts=parts or frozenset([f"{path.name}@{os.fstat(file.id.get_vfd_handle()).st_mtime_ns}"]),
    )


def _write_node(nodes: Any, node: NodeProfile) -> None:
    group = nodes.create_group(node.node)
    group.attrs["start_seconds"] = node.start_seconds
    group.attrs["end_seconds"] = node.end_seconds
    group.attrs["sampler_period_seconds"] = node.sampler_period_seconds
    devices = group.create_group("devices")
    for device in node.devices:
        # A MIG instance's uuid of older drivers holds slashes, which would make groups.
        _write_device(devices.create_group(device.uuid.replace("/", "_")), device, node)
    _write_events(group, node.events)


def _write_device(group: Any, device: DeviceProfile, node: NodeProfile) -> None:
    group.attrs.update({name: clean(getattr(device, name)) for name in _DEVICE_TEXTS})
    group.attrs["index"] = device.index
    attributes: dict[str, dict[str, Any]] = {}
    for name, column in device.samples.items():
        attributes[name] = {"coverage_ratio": coverage_ratio(device, node, name)}
        if name in device.absent and not _is_whole(column):
            attributes[name]["absent"] = clean(device.absent[name])
    hdf5.write_table(group, device.samples, attributes)
    if device.processes:
        hdf5.write_table(group.create_group("processes"), device.processes)


def _is_whole(column: Column) -> bool:
    return bool(len(column) and np.isfinite(column).all())


def _open_node(name: str, group: Any) -> NodeProfile:
    devices = child(group, "devices")
    found = [_open_device(child(devices, device)) for device in devices]
    return NodeProfile(
        node=name,
        start_seconds=float(group.attrs["start_seconds"]),
        end_seconds=float(group.attrs["end_seconds"]),
        sampler_period_seconds=float(group.attrs["sampler_period_seconds"]),
        devices=tuple(sorted(found, key=lambda device: (device.index, device.uuid))),
        events=_read_events(child(group, "events")),
    )


def _open_device(group: Any) -> DeviceProfile:
    return DeviceProfile(
        **{name: str(group.attrs[name]) for name in _DEVICE_TEXTS},
        index=int(group.attrs["index"]),
        samples=hdf5.Columns(group),
        absent=_Reasons(group),
        processes=hdf5.Columns(child(group, "processes")) if has(group, "processes") else {},
    )


class _Reasons(Mapping[str, str]):
    """The attribute `absent` of the columns of a device, read when it is asked for."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getitem__(self, name: str) -> str:
        reason = child(self._group, name).attrs.get("absent") if has(self._group, name) else None
        if reason is None:
            raise KeyError(name)
        return str(reason)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._group if "absent" in child(self._group, name).attrs)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _read_node(node: NodeProfile) -> NodeProfile:
    """A node that has been opened, with everything in memory."""
    return replace(node, devices=tuple(map(_read_device, node.devices)))


def _read_device(device: DeviceProfile) -> DeviceProfile:
    samples = dict(device.samples)
    doubtful = (name for name, column in samples.items() if not _is_whole(column))
    return replace(
        device,
        samples=samples,
        absent={name: device.absent[name] for name in doubtful if name in device.absent},
        processes=dict(device.processes),
    )


def _write_training(group: Any, training: TrainingProfile) -> None:
    for name, value in training.attributes.items():
        group.attrs[name] = clean(value) if isinstance(value, str) else value
    group.attrs["start_seconds"] = training.start_seconds
    group.attrs["end_seconds"] = training.end_seconds
    for name in ("steps", "stages", "ranks"):
        hdf5.write_table(group.create_group(name), getattr(training, name))
    for name in _OPTIONAL_TABLES:
        if table := getattr(training, name):
            hdf5.write_table(group.create_group(name), table)
    _write_events(group, training.events)


def _read_training(group: Any) -> TrainingProfile:
    attributes = {name: hdf5.plain(value) for name, value in group.attrs.items()}
    return TrainingProfile(
        start_seconds=float(attributes.pop("start_seconds")),
        end_seconds=float(attributes.pop("end_seconds")),
        attributes=attributes,
        steps=hdf5.read_table(child(group, "steps")),
        stages=hdf5.read_table(child(group, "stages")),
        ranks=hdf5.read_table(child(group, "ranks")),
        events=_read_events(child(group, "events")),
        **{name: hdf5.read_table(child(group, name)) for name in _OPTIONAL_TABLES if has(group, name)},
    )


def _write_events(group: Any, events: Sequence[Event]) -> None:
    table: Table = {
        "time_seconds": np.array([event.time_seconds for event in events], dtype=np.float64),
        "kind": np.array([event.kind for event in events], dtype=np.str_),
        "text": np.array([event.text for event in events], dtype=np.str_),
    }
    hdf5.write_table(group.create_group("events"), table)


def _read_events(group: Any) -> tuple[Event, ...]:
    table = hdf5.read_table(group)
    columns = (table[name].tolist() for name in ("time_seconds", "kind", "text"))
    return tuple(Event(*row) for row in zip(*columns, strict=True))


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    with hdf5.reading(path) as file:
        schema = file.attrs.get("schema")
        if schema is None:
            raise ProfileError(f"{path} is no profile, or damaged: it has no schema")
        if schema > SCHEMA:
            raise ProfileError(
                f"{path} has schema {schema}, this trimtab reads up to {SCHEMA}: use the version that wrote it"
            )
        yield file
