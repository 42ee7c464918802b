"""HDF5 files as trimtab keeps them: written whole or not at all, read without locks and without trust.

Tables are groups of columns: one-dimensional datasets of equal length, chunked, gzip. Whoever wrote a file may have
meant harm: what is read is in the file itself, of a kind that `write_table` makes, and no larger than its bytes allow.
"""

import errno
import os
import stat
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from trimtab_slurm.contents import Column, ProfileError, Table, units
from trimtab_slurm.directories import STAFF_MODE

CHUNK_ROWS = 4096
LIBRARY_VERSION = "v110"
"""Of the format: any HDF5 1.10 or newer reads it, and a column costs 0.4 kB beside its values, in older ones 2.6."""

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_MOST_INFLATION = 1032
"""Bytes that deflate can make of one."""


@contextmanager
def replacing(path: Path) -> Iterator[Any]:
    """A new HDF5 file that takes the name `path`, at once, when it is whole and on disk. Raises OSError.

    It is its owner's alone; where its directory is open to a staff group, that group may read it.
    """
    import h5py

    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # O_EXCL, 0600
    try:
        with h5py.File(_same(descriptor), "w", locking=False, libver=(LIBRARY_VERSION, LIBRARY_VERSION)) as file:
            yield file
        if stat.S_IMODE(path.parent.stat().st_mode) == STAFF_MODE:
            os.fchmod(descriptor, 0o640)
        os.fsync(descriptor)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    _sync(path.parent)


@contextmanager
def reading(path: Path) -> Iterator[Any]:
    """An open HDF5 file. What cannot be opened or read becomes a ProfileError."""
    import h5py

    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO would keep us waiting
    except FileNotFoundError as error:
        raise ProfileError(f"{path} does not exist") from error
    except OSError as error:
        raise ProfileError(f"{path} cannot be read: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ProfileError(f"{path} is no profile: it is no regular file")
        if os.pread(descriptor, len(_SIGNATURE), 0) != _SIGNATURE:
            raise ProfileError(f"{path} is no profile, or damaged: it does not begin as an HDF5 file")
        # No lock: NFS and Lustre may not have any, and files are replaced, never changed.
        with h5py.File(_same(descriptor), "r", locking=False) as file:
            yield file
    except ProfileError:
        raise
    except (OSError, KeyError, RuntimeError, TypeError, ValueError, OverflowError, MemoryError) as error:
        if isinstance(error, OSError) and error.errno:
            raise  # the system's own: the disk that a copy goes to is full
        reason = str(error).replace(_same(descriptor), path.name)
        raise ProfileError(f"{path} is no profile, or damaged: {reason}") from error
    finally:
        os.close(descriptor)


def has(group: Any, name: str) -> bool:
    """Whether a group has a member of this name, be it a link: unlike `in`, this follows none.

    Raises ValueError for what is no group.
    """
    return bool(_links(group).exists(name.encode()))


def child(group: Any, name: str) -> Any:
    """A member of a group. Raises ValueError for a link, which could lead to any file that the reader may open, and
    for what is no group."""
    _refuse_link(group, name)
    return group[name]


def _links(group: Any) -> Any:
    from h5py import Group

    if not isinstance(group, Group):
        raise ValueError(f"{group.name} is no group")
    return group.id.links


def _refuse_link(group: Any, name: str) -> None:
    from h5py import h5l

    if _links(group).get_info(name.encode()).type != h5l.TYPE_HARD:
        raise ValueError(f"{group.name}/{name} is a link")


def write_table(group: Any, table: Table, attributes: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """Write columns; each carries its unit, and the `attributes` that are given for it."""
    import h5py

    for name, column in table.items():
        text = column.dtype.kind == "U"
        packed = {"chunks": (min(len(column), CHUNK_ROWS),), "compression": "gzip"} if len(column) else {}
        dataset = group.create_dataset(
            name,
            data=[clean(str(value)) for value in column] if text else column,
            shape=column.shape,
            dtype=h5py.string_dtype() if text else column.dtype,
            shuffle=bool(packed) and not text and _shrinks_shuffled(column[:CHUNK_ROWS]),
            **packed,
        )
        dataset.attrs["units"] = units(name, column.dtype.kind)
        dataset.attrs.update((attributes or {}).get(name, {}))


class Columns(Mapping[str, Column]):
    """The table of a group whose file is open: a column is read when it is asked for, each time anew.

    Raises ValueError for what `write_table` cannot have made.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._length: int | None = None

    def __getitem__(self, name: str) -> Column:
        from h5py import Dataset

        dataset = child(self._group, name) if has(self._group, name) else None
        if not isinstance(dataset, Dataset):
            raise KeyError(name)
        column = _read_column(dataset)
        if self._length not in (None, len(column)):
            raise ValueError(f"{self._group.name}: its columns are of different lengths")
        self._length = len(column)
        return column

    def __iter__(self) -> Iterator[str]:
        from h5py import h5o

        for name in self._group:
            _refuse_link(self._group, name)
            if h5o.get_info(self._group.id, name.encode()).type == h5o.TYPE_DATASET:  # without opening it
                yield name

    def __len__(self) -> int:
        return sum(1 for _ in self)


def read_table(group: Any) -> Table:
    """Read all columns of a group. Raises as `Columns` does."""
    return dict(Columns(group))


def clean(text: str) -> str:
    """A text that HDF5 can hold: UTF-8 without NUL."""
    return text.encode("utf-8", "replace").decode().replace("\0", "")


def plain(value: Any) -> Any:
    """An attribute as Python's own type."""
    return value.item() if isinstance(value, np.generic) else value


def _read_column(dataset: Any) -> Column:
    import h5py

    layout = dataset.id.get_create_plist()
    if layout.get_layout() == h5py.h5d.VIRTUAL or layout.get_external_count():
        raise ValueError(f"{dataset.name}: its values are in another file")
    if dataset.ndim != 1 or not (dataset.dtype.kind in "fiu" or h5py.check_string_dtype(dataset.dtype)):
        raise ValueError(f"{dataset.name} is no column")
    if dataset.nbytes > dataset.id.get_storage_size() * _MOST_INFLATION:
        raise ValueError(f"{dataset.name}: it cannot hold the {len(dataset)} values that it says it does")
    if dataset.dtype.kind == "O":
        return np.array(dataset.asstr()[...], dtype=np.str_)
    column: Column = dataset[...]
    return column


def _shrinks_shuffled(column: Column) -> bool:
    """Whether gzip makes less of all values' first bytes, then all second, and so on, than of one value after another.

    True of what drifts, as counters do; not of what takes one of few values.
    """
    flat = np.ascontiguousarray(column).view(np.uint8)
    shuffled = flat.reshape(len(column), -1).T
    return len(zlib.compress(shuffled.tobytes(), 4)) <= len(zlib.compress(flat.tobytes(), 4))


def _same(descriptor: int) -> str:
    """A name for HDF5, which opens by name, of the very file that is open: another may have taken its own name."""
    return f"/proc/self/fd/{descriptor}"


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # there are network file systems that sync no directory
            raise
    finally:
        os.close(descriptor)
