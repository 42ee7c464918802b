"""The journal of one attempt on one node: records appended as they happen, of which a kill loses none that is written.

A file is a sequence of records: length and CRC-32 of what follows, kind, payload. Each record is one write to a file
opened for appending, so hook and sampler can write at the same time. Reading stops at the first record that is not
intact and says so. Times are the monotonic clock's, which nobody sets; the header ties them to UTC. Standard library
only.

A write is over when the kernel has it, and survives whatever happens to processes. The kernel brings it to disk within
some 30 s, and that is what a power failure costs. Nothing asks it to hurry: on a disk that the job writes to as well,
that would be waited for by the sampler, and by the job.
"""

import errno
import fcntl
import io
import json
import os
import struct
import time
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from trimtab_slurm import directories
from trimtab_slurm.attempt import Attempt

SCHEMA = 1
SUFFIX = ".journal"
HEADER, DEVICE, SAMPLE, EVENT, END, PROCESS = range(1, 7)

_FRAME = struct.Struct("<IIB")  # length of the payload, CRC-32 of kind and payload, kind
_SAMPLE = struct.Struct("<Id")  # device number, monotonic time; one double for each of the device's columns follows
_PROCESS = struct.Struct("<IdQd")  # device number, monotonic time, process id, bytes of the device's memory
_LONGEST_BYTES = 1 << 20


class JournalError(ValueError):
    """A file that holds no journal: without a header, or with records that no sampler writes."""


@dataclass
class DeviceRecord:
    """One device's identity, and its samples."""

    uuid: str
    kind: str
    model: str
    index: int
    driver: str
    columns: tuple[str, ...]
    absent: dict[str, str] = field(default_factory=dict)
    """Column -> why it had no value, when that was last said."""
    pci: str = ""
    parent_uuid: str = ""
    times: "array[float]" = field(default_factory=lambda: array("d"))
    """UTC, seconds since 1970, of each sample."""
    values: "array[float]" = field(default_factory=lambda: array("d"))
    """Of the first sample one for each column, of the second, and so on: a job of a week has a hundred million."""
    processes: list[tuple[float, int, float]] = field(default_factory=list)
    """UTC, process id, bytes of the device's memory that it holds from then on: 0 when it has gone, NaN: not known."""

    @property
    def rows(self) -> list[tuple[float, ...]]:
        """The values of each sample."""
        width = len(self.columns)
        return [tuple(self.values[place : place + width]) for place in range(0, len(self.values), width)]


@dataclass
class Journal:
    """Everything intact in a journal. Times are UTC, seconds since 1970."""

    attempt: Attempt
    period_seconds: float
    start_seconds: float
    """When the prolog made it."""
    end_seconds: float
    """Of the last record."""
    devices: list[DeviceRecord]
    events: list[tuple[float, str, str]]
    """Time, kind, text."""
    ended: bool
    """Whether the sampler came to its end."""
    damage: str
    """What is wrong with the rest of the file; empty where there is none."""
    offset_seconds: float = 0.0
    """UTC minus the monotonic clock, when the prolog made it: the clock may have been set since."""
    profile_root: str = ""
    staff_group: str = ""
    """As node.toml said when the prolog made it; empty profile_root: not known."""


class Writer:
    """Appends to an open journal."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def device(self, number: int, record: DeviceRecord) -> None:
        """Introduce a device before its first sample, or say anew what it has no values for."""
        keys = ("uuid", "kind", "model", "index", "driver", "columns", "absent", "pci", "parent_uuid")
        self._append(DEVICE, _json({"number": number, **{key: getattr(record, key) for key in keys}}))

    def samples(self, samples: Sequence[tuple[int, float, Sequence[float]]]) -> None:
        """Append (device number, monotonic time, values in the order of its columns), all in one write."""
        self._write(
            b"".join(
                _record(SAMPLE, _SAMPLE.pack(number, monotonic) + struct.pack(f"<{len(values)}d", *values))
                for number, monotonic, values in samples
            )
        )

    def processes(self, changes: Sequence[tuple[int, float, int, float]]) -> None:
        """Append (device number, monotonic time, process id, bytes): what processes hold from now on."""
        self._write(b"".join(_record(PROCESS, _PROCESS.pack(*change)) for change in changes))

    def event(self, kind: str, text: str, monotonic: float | None = None) -> None:
        """Append something that happened just now, or at a moment of the monotonic clock."""
        happened = time.monotonic() if monotonic is None else monotonic
        self._append(EVENT, _json({"monotonic": happened, "kind": kind, "text": text}))

    def end(self) -> None:
        """Append that the sampler came to its end."""
        self._append(END, _json({"monotonic": time.monotonic()}))

    def _append(self, kind: int, payload: bytes) -> None:
        self._write(_record(kind, payload))

    def _write(self, content: bytes) -> None:
        """Raises OSError, which names the file."""
        before = os.fstat(self.descriptor).st_size
        try:
            written = os.write(self.descriptor, content)
            if written < len(content):  # what follows half a record could not be read
                os.ftruncate(self.descriptor, before)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise OSError(
                error.errno, error.strerror, str(Path(f"/proc/self/fd/{self.descriptor}").readlink())
            ) from error


def create(
    directory: Path, attempt: Attempt, period_seconds: float, profile_root: str = "", staff_group: str = ""
) -> tuple[Path, Writer]:
    """Make the journal of an attempt that begins now, locked, its header written. Raises OSError.

    `profile_root`, `staff_group`: where node.toml would have the profile, for a collector that cannot believe it then.
    The lock belongs to the open file: it is held while this process, or one that inherits the descriptor, lives.
    """
    name = f"{attempt.cluster}.{attempt.job_id}.{attempt.node}.{time.time_ns()}{SUFFIX}"
    below = directories.open_own(directory, 0o700)
    try:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o600, dir_fd=below)
    finally:
        os.close(below)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    writer = Writer(descriptor)
    header = {
        "schema": SCHEMA,
        "attempt": attempt.to_dict(),
        "period_seconds": period_seconds,
        "profile_root": profile_root,
        "staff_group": staff_group,
        "monotonic": time.monotonic(),
        "realtime": time.time(),
    }
    writer._append(HEADER, _json(header))
    return directory / name, writer


def open_existing(path: Path) -> int:
    """A descriptor to read and append with. Raises OSError, FileNotFoundError where it has been collected."""
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)


def lock(descriptor: int) -> bool:
    """Take the lock of a journal; False where its sampler, or a collector, holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def orphans(directory: Path, job_id: int | None = None, node: str | None = None) -> list[Path]:
    """Journals (of one job, on one node, or all) that nobody holds: no sampler lives, and nobody is collecting them."""
    found = []
    for path in sorted(directory.glob(f"*.{job_id or '*'}.{node or '*'}.*{SUFFIX}")):
        try:
            descriptor = open_existing(path)
        except OSError:
            continue  # collected meanwhile, or nothing that we would follow
        if lock(descriptor):
            found.append(path)
        os.close(descriptor)
    return found


def read(descriptor: int) -> Journal:
    """All intact records of an open journal. Raises JournalError."""
    with os.fdopen(os.dup(descriptor), "rb") as file:
        return _read(file)


def parse(content: bytes) -> Journal:
    """As `read`, of the file's bytes."""
    return _read(io.BytesIO(content))


def _read(file: BinaryIO) -> Journal:
    try:
        return _assembled(_Records(file))
    except JournalError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError, struct.error) as error:
        raise JournalError(f"records that do not fit each other: {type(error).__name__}: {error}") from error


def _assembled(records: "_Records") -> Journal:
    intact = iter(records)
    kind, payload = next(intact, (0, b""))
    if kind != HEADER:
        raise JournalError(records.damage or "no header")
    header = json.loads(payload)
    if header["schema"] > SCHEMA:
        raise JournalError(f"schema {header['schema']} is newer than this version's {SCHEMA}")
    offset = header["realtime"] - header["monotonic"]
    journal = Journal(
        attempt=Attempt.from_dict(header["attempt"]),
        period_seconds=header["period_seconds"],
        start_seconds=header["realtime"],
        offset_seconds=offset,
        end_seconds=header["realtime"],
        devices=[],
        events=[],
        ended=False,
        damage="",
        profile_root=str(header["profile_root"]),
        staff_group=str(header["staff_group"]),
    )
    devices: dict[int, DeviceRecord] = {}
    for kind, payload in intact:
        if kind == SAMPLE:
            seconds = _add_sample(devices, payload) + offset
        elif kind == PROCESS:
            number, monotonic, pid, size = _PROCESS.unpack(payload)
            seconds = monotonic + offset
            devices[number].processes.append((seconds, pid, size))
        else:
            body = json.loads(payload)
            if kind == DEVICE:
                _introduce(devices, body)
                continue
            seconds = body["monotonic"] + offset
            if kind == EVENT:
                journal.events.append((seconds, body["kind"], body["text"]))
            journal.ended |= kind == END
        journal.end_seconds = max(journal.end_seconds, seconds)
    journal.devices = list(devices.values())
    for device in journal.devices:
        device.times = array("d", (monotonic + offset for monotonic in device.times))
    journal.damage = records.damage
    return journal


def _introduce(devices: dict[int, DeviceRecord], body: dict[str, Any]) -> None:
    number, columns = body.pop("number"), tuple(body.pop("columns"))
    if number in devices:
        devices[number].absent = body["absent"]
    else:
        devices[number] = DeviceRecord(columns=columns, **body)


def _add_sample(devices: Mapping[int, DeviceRecord], payload: bytes) -> float:
    number, monotonic = _SAMPLE.unpack_from(payload)
    device = devices[number]
    device.times.append(monotonic)
    device.values.extend(struct.unpack_from(f"<{len(device.columns)}d", payload, _SAMPLE.size))
    return float(monotonic)


class _Records:
    """Kind and payload of the records up to the first damaged one."""

    def __init__(self, file: BinaryIO) -> None:
        self.damage = ""
        """What is wrong with that one, once all before are read; empty: there is none."""
        self._file = file
        self._size = file.seek(0, io.SEEK_END)
        file.seek(0)

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        count = position = 0
        while position < self._size:
            kind, payload, trouble = self._next()
            if trouble:
                self.damage = f"{trouble} after {count} records, at byte {position} of {self._size}"
                return
            yield kind, payload
            count += 1
            position += _FRAME.size + len(payload)

    def _next(self) -> tuple[int, bytes, str]:
        """Kind, payload, and what is wrong with it."""
        frame = self._file.read(_FRAME.size)
        if len(frame) < _FRAME.size:
            return 0, b"", "cut off"
        length, checksum, kind = _FRAME.unpack(frame)
        if length > _LONGEST_BYTES or not HEADER <= kind <= PROCESS:
            return kind, b"", "garbage"
        payload = self._file.read(length)
        if len(payload) < length:
            return kind, payload, "cut off"
        return kind, payload, "wrong checksum" if zlib.crc32(payload, kind) != checksum else ""


def _record(kind: int, payload: bytes) -> bytes:
    return _FRAME.pack(len(payload), zlib.crc32(payload, kind), kind) + payload


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()
