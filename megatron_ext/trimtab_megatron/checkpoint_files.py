"""Checkpoints on a disk: when one counts, which are sound, which are kept. No ranks and no torch.

A checkpoint is a directory `step-00000020`. It counts once its `complete.json` is there, which is written last and
names every other file with its size and the CRC-32 of each of its blocks: what a kill leaves behind is never taken
for one, and what a disk has lost is noticed.
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

COMPLETE = "complete.json"
BLOCK_BYTES = 64 << 20
"""Blocks are summed by themselves, so that ranks can share out a large file."""
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class FileSum:
    """What a file was when it was written."""

    size_bytes: int
    crc32: tuple[int, ...]
    """Of each block."""


@dataclass(frozen=True)
class Complete:
    """The content of complete.json."""

    step: int
    consumed_samples: int
    model: dict[str, Any]
    """What a model has to have in common with it to go on from it."""
    shape: str
    """What it was saved at: to be told, never to be used."""
    files: dict[str, FileSum] = field(default_factory=dict)
    """By their names; empty in checkpoints of before there were sums."""
    samples: dict[str, Any] = field(default_factory=dict)
    """What the order of samples has to have in common with its own; empty in checkpoints of before it was kept."""

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(file.size_bytes for file in self.files.values())


@dataclass(frozen=True)
class Block:
    """One block of one file, and what it has to sum up to."""

    file: str
    number: int
    crc32: int


class DamagedError(Exception):
    """A checkpoint that cannot be gone on from; the text is the reason."""


def checkpoints(directory: Path) -> list[Path]:
    """All that are there, complete or not, from the oldest to the newest."""
    if not directory.is_dir():
        return []
    return sorted(entry for entry in directory.iterdir() if re.fullmatch(r"step-\d{8}", entry.name))


def checkpoint_path(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return directory / f"step-{step:08d}"


def is_complete(checkpoint: Path) -> bool:
    """Whether its save came to its end."""
    return (checkpoint / COMPLETE).exists()


def begin(target: Path, ours: Collection[str]) -> None:
    """An empty directory for a new checkpoint; what interrupted saves have left beside it goes.

    Only what is named among `ours` is removed: anything else is what another run is writing at this moment. Raises
    OSError, also where that is the target itself.
    """
    for remains in checkpoints(target.parent):
        if remains.name in ours and remains != target and not is_complete(remains):
            shutil.rmtree(remains, ignore_errors=True)  # what resists now may not the next time
    if target.exists():
        if target.name not in ours:
            raise FileExistsError(f"{target} is there, but not of this run: another one writes to the same directory")
        remove(target)
    target.mkdir(parents=True)
    sync_directory(target.parent)


def finish(target: Path, complete: Complete) -> None:
    """Make a checkpoint count, now that all its files are on the disk."""
    sync_directory(target)
    content = asdict(complete)
    write(target / COMPLETE, json.dumps({**content, "crc32": _content_crc32(content)}, indent=1).encode())
    sync_directory(target.parent)


def prune(directory: Path, step: int, keep: int, rejected: Collection[str]) -> None:
    """Once the checkpoint of a step is complete: keep as many of the newest, up to that step; the others go.

    Those that were rejected as damaged do not count, and are left until a run has passed them. Incomplete ones are
    `begin`'s to remove: they may be what another run is writing.
    """
    passed = [save for save in checkpoints(directory) if save <= checkpoint_path(directory, step)]
    kept = [save for save in passed if is_complete(save) and save.name not in rejected][-keep:]
    for save in passed:
        if is_complete(save) and save not in kept:
            remove(save)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint, which from the first moment on does not count."""
    (checkpoint / COMPLETE).unlink(missing_ok=True)
    shutil.rmtree(checkpoint)


def read_complete(checkpoint: Path) -> Complete:
    """What a checkpoint says of itself. Raises DamagedError where it is incomplete, or lacks some of its bytes."""
    try:
        content = json.loads((checkpoint / COMPLETE).read_text())
        if "files" not in content:
            return Complete(**content)
        sound = content.pop("crc32") == _content_crc32(content)
        files = {name: FileSum(file["size_bytes"], tuple(file["crc32"])) for name, file in content["files"].items()}
        complete = Complete(**{**content, "files": files})
    except FileNotFoundError:
        raise DamagedError("its save was interrupted") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{COMPLETE} cannot be read ({type(error).__name__}: {error})") from error
    if not sound:
        raise DamagedError(f"{COMPLETE} is not what was written")
    for name, file in complete.files.items():
        try:
            size = (checkpoint / name).stat().st_size
        except OSError as error:
            raise DamagedError(f"{name} cannot be read ({error.strerror})") from error
        if size != file.size_bytes:
            raise DamagedError(f"{name} has {size} bytes, not {file.size_bytes}")
    return complete


def blocks(complete: Complete) -> list[Block]:
    """All blocks of all files."""
    return [
        Block(name, number, crc32) for name, file in complete.files.items() for number, crc32 in enumerate(file.crc32)
    ]


def check_blocks(checkpoint: Path, share: Iterable[Block]) -> None:
    """Read some blocks. Raises DamagedError at the first that is not what was written."""
    for block in share:
        try:
            crc32 = _block_crc32(checkpoint / block.file, block.number)
        except OSError as error:
            raise DamagedError(f"{block.file} cannot be read ({error.strerror})") from error
        if crc32 != block.crc32:
            first = block.number * BLOCK_BYTES
            raise DamagedError(f"{block.file} is not what was written, from byte {first} to {first + BLOCK_BYTES}")


def sum_files(checkpoint: Path, prefixes: tuple[str, ...]) -> dict[str, FileSum]:
    """Sums of the files whose names begin with one of these. Raises OSError."""
    sums = {}
    for file in sorted(checkpoint.iterdir()):
        if file.name.startswith(prefixes):
            size = file.stat().st_size
            sums[file.name] = FileSum(
                size, tuple(_block_crc32(file, number) for number in range(-(-size // BLOCK_BYTES)))
            )
    return sums


def write(path: Path, content: bytes) -> None:
    """Write a small file: after a crash it is whole, or it is not there. Raises OSError."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    with unfinished.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Bring the names in a directory onto the disk. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _block_crc32(path: Path, number: int) -> int:
    crc32 = 0
    with path.open("rb", buffering=0) as file:
        file.seek(number * BLOCK_BYTES)
        left = BLOCK_BYTES
        while left and (piece := file.read(min(left, _PIECE_BYTES))):
            crc32 = zlib.crc32(piece, crc32)
            left -= len(piece)
    return crc32


def _content_crc32(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
