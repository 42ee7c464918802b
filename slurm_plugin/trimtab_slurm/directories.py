"""Directories that root may write below, and the one of each job, which belongs to its user. Standard library only.

A configured directory itself must be no symlink, belong to this process's user, and be writable to no other; what is
above it is the admin's choice. Below it everything is opened relative to the directory above, following no symlink.
"""

import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags that open a directory, and nothing else."""
PARTS = "parts"
"""Where the parts are, below a job's directory."""
OWN_MODE = 0o700
STAFF_MODE = 0o2750
"""What is made below inherits the group: staff_group may read it."""


def job_directory(profile_root: Path, cluster: str, job_id: int) -> Path:
    """Where the profiles of a job are."""
    return profile_root / cluster / str(job_id)


def open_own(path: Path, mode: int) -> int:
    """A descriptor of a directory that only this process's user can write to, made where it is missing.

    Raises OSError where it cannot be made, is no directory, or another user could write to it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    return _opened_own(path, mode, None)


def open_own_below(directory: int, name: str, mode: int) -> int:
    """As `open_own`, for a name in an open directory."""
    return _opened_own(name, mode, directory)


def staff_gid(group: str) -> tuple[int | None, str]:
    """The id of staff_group, None where there is none; and why, where one was named. May ask a directory server."""
    import grp  # not in every hook

    if not group:
        return None, ""
    try:
        return grp.getgrnam(group).gr_gid, ""
    except (KeyError, OSError):
        return None, f"staff_group {group!r} is no group on this node: the profile can be read by its user alone"


def make_job_directory(
    profile_root: Path, cluster: str, job_id: int, uid: int, gid: int, staff: int | None = None
) -> Path:
    """The directory of a job with its PARTS, which belong to its user, made where it is missing.

    0700; readable by the group `staff` where one is given. A directory of that name that belongs to someone else is an
    earlier job's, whose id has been used again: it is moved aside. Raises OSError.
    """
    root = open_own(profile_root, 0o755)
    wanted = job_directory(profile_root, cluster, job_id)
    try:
        above = open_own_below(root, cluster, 0o755)
        try:
            _make_for_user(above, str(job_id), uid, gid, staff)
        finally:
            os.close(above)
    except OSError as error:
        if error.errno is None:
            raise  # ours, in words
        # By the whole name of what could not be made, not by that of something on the way.
        raise OSError(error.errno, error.strerror, str(wanted)) from error
    finally:
        os.close(root)
    return wanted


def _make_for_user(above: int, name: str, uid: int, gid: int, staff: int | None) -> None:
    try:
        if os.stat(name, dir_fd=above, follow_symlinks=False).st_uid == uid:
            return
        os.rename(name, f"{name}.before-{time.time_ns()}", src_dir_fd=above, dst_dir_fd=above)
    except FileNotFoundError:
        pass
    # Given away before it has its name: another node must not take it for an earlier job's, and what is made below it
    # is made before its user can put anything there.
    fresh = f".{name}-{os.uname().nodename}-{time.time_ns()}"
    with _opened_new(above, fresh) as made, _opened_new(made, PARTS) as parts:
        for descriptor in (parts, made):
            os.fchown(descriptor, uid, gid if staff is None else staff)
            os.fchmod(descriptor, OWN_MODE if staff is None else STAFF_MODE)
    try:
        os.rename(fresh, name, src_dir_fd=above, dst_dir_fd=above)
    except OSError as error:
        os.rmdir(f"{fresh}/{PARTS}", dir_fd=above)
        os.rmdir(fresh, dir_fd=above)
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise  # else another node was first, and its directory is in use already


@contextmanager
def _opened_new(above: int, name: str) -> Iterator[int]:
    os.mkdir(name, OWN_MODE, dir_fd=above)
    descriptor = os.open(name, DIRECTORY, dir_fd=above)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def doubt(path: Path) -> str:
    """Why a directory is not one that only this process's user can write to (any more); empty where it is."""
    try:
        return _doubt(path, path.lstat())
    except OSError as error:
        return f"{path}: {error.strerror}"


def _opened_own(name: str | Path, mode: int, directory: int | None) -> int:
    try:
        os.mkdir(name, mode, dir_fd=directory)
        made = True
    except FileExistsError:
        made = False
    descriptor = os.open(name, DIRECTORY, dir_fd=directory)
    if made:
        os.fchmod(descriptor, mode)  # whatever the umask
    if found := _doubt(name, os.fstat(descriptor)):
        os.close(descriptor)
        raise PermissionError(found)
    return descriptor


def _doubt(name: str | Path, status: os.stat_result) -> str:
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022:
        return ""
    return (
        f"{name} could be written to by another user (owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}); "
        f"it must be a directory that belongs to user {os.geteuid()}, and have mode go-w"
    )
