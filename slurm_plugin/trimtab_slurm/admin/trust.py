"""Who could have written what root runs: a path is as safe as every directory and link on the way to it."""

import errno
import os
import shlex
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MOST_LINKS = 40
"""As many as Linux follows."""


@dataclass(frozen=True)
class Opening:
    """A file, directory or link that a user can change who should not."""

    path: Path
    uid: int
    mode: int

    def __str__(self) -> str:
        return f"{self.path} (owner {self.uid}, mode {self.mode:04o})"

    @property
    def mend(self) -> str:
        """The command that closes it."""
        return f"chown -h root:root {shlex.quote(str(self.path))} && chmod go-w {shlex.quote(str(self.path))}"


def opening(path: Path) -> Opening | None:
    """The first component of a path that another user than root and this process's could replace; None where none.

    Links are followed, and count themselves. Sticky directories such as /tmp let nobody replace what is another's.
    Raises OSError where the path cannot be followed.
    """
    for step in _steps(path):
        status = step.lstat()
        closed = stat.S_ISLNK(status.st_mode) or (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX)
        if status.st_uid not in (0, os.geteuid()) or (status.st_mode & 0o022 and not closed):
            return Opening(step, status.st_uid, stat.S_IMODE(status.st_mode))
    return None


def opening_below(directory: Path) -> Opening | None:
    """As `opening`, of a directory and everything in it."""
    found = opening(directory)
    for path in sorted(directory.rglob("*")):
        with suppress(FileNotFoundError):  # Python replaces what it has compiled at any time
            found = found or opening(path)
    return found


def _steps(path: Path) -> Iterator[Path]:
    """Every directory and link on the way to a path, and the file itself."""
    current, links = Path("/"), 0
    left = list(reversed(path.absolute().parts[1:]))
    yield current
    while left:
        name = left.pop()
        if name == "..":
            current = current.parent
            continue
        yield current / name
        if not (current / name).is_symlink():
            current /= name
            continue
        links += 1
        if links > MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = (current / name).readlink()
        if target.is_absolute():
            current, target = Path("/"), target.relative_to("/")
        left.extend(reversed(target.parts))
