"""An attempt's samples as they come: append-only, checksummed records, so that a kill loses at most the last ones.

A record is `length, crc32, kind, payload`, little endian. Kinds: A the attempt (JSON, first), D a device (JSON), S a
sample (device number, time, one double for each of its columns), V an event (JSON), E the end (JSON). Standard library
only.
"""

import json
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HEAD = struct.Struct("<IIc")
_SAMPLE = struct.Struct("<Id")
_LONGEST_PAYLOAD = 1 << 20


@dataclass(frozen=True)
class Record:
    """One intact record; `body` for all kinds but samples, the other three for those."""

    kind: str
    body: dict[str, Any]
    device: int = -1
    time_seconds: float = 0.0
    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class Damage:
    """Where a journal stops making sense."""

    offset: int
    lost_bytes: int


class Journal:
    """Open for appending, by one sampler. Each record is in the file when the call returns."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)

    def write(self, kind: str, body: dict[str, Any]) -> None:
        """Append a record of any kind but a sample."""
        self._append(kind.encode(), json.dumps(body).encode())

    def sample(self, device: int, time_seconds: float, values: Sequence[float]) -> None:
        """Append a sample: the values of a device's columns, in their order."""
        self._append(b"S", _SAMPLE.pack(device, time_seconds) + struct.pack(f"<{len(values)}d", *values))

    def close(self) -> None:
        """Make it durable, and let go."""
        os.fsync(self._descriptor)
        os.close(self._descriptor)

    def _append(self, kind: bytes, payload: bytes) -> None:
        os.write(self._descriptor, _HEAD.pack(len(payload), zlib.crc32(kind + payload), kind) + payload)


def read(path: Path) -> Iterator[Record | Damage]:
    """Every intact record in order; a Damage in the end where the file is torn or altered."""
    content = path.read_bytes()
    offset = 0
    while offset < len(content):
        record, size = _parse(content, offset)
        if record is None:
            yield Damage(offset, len(content) - offset)
            return
        yield record
        offset += size


def _parse(content: bytes, offset: int) -> tuple[Record | None, int]:
    if len(content) - offset < _HEAD.size:
        return None, 0
    length, checksum, kind = _HEAD.unpack_from(content, offset)
    payload = content[offset + _HEAD.size : offset + _HEAD.size + length]
    if length > _LONGEST_PAYLOAD or len(payload) < length or zlib.crc32(kind + payload) != checksum:
        return None, 0
    size = _HEAD.size + length
    if kind != b"S":
        return Record(kind.decode("latin-1"), json.loads(payload)), size
    device, time_seconds = _SAMPLE.unpack_from(payload)
    values = struct.unpack(f"<{(length - _SAMPLE.size) // 8}d", payload[_SAMPLE.size :])
    return Record("S", {}, device, time_seconds, values), size
