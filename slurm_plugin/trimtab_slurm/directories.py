"""Directories that root may write below, and the one of each job, which belongs to its user. Standard library only.

A configured directory itself must be no symlink, belong to this process's user, and be writable to no other; what is
above it is the admin's choice. Below it everything is opened relative to the directory above, following no symlink.
"""

import errno
import os
import stat
import time
from pathlib import Path

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags that open a directory, and nothing else."""


def job_directory(profile_root: Path, cluster: str, job_id: int) -> Path:
    """Where the profiles of a job are."""
    return profile_root / cluster / str(job_id)


def open_own(path: Path, mode: int) -> int:
    """A descriptor of a directory that only this process's user can write to, made where it is missing.

    Raises OSError where it cannot be made, is no directory, or another user could write to it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _make(path, mode, None)
    return _checked(path, os.open(path, DIRECTORY))


def open_own_below(directory: int, name: str, mode: int) -> int:
    """As `open_own`, for a name in an open directory."""
    _make(name, mode, directory)
    return _checked(name, os.open(name, DIRECTORY, dir_fd=directory))


def make_job_directory(profile_root: Path, cluster: str, job_id: int, uid: int, gid: int) -> Path:
    """The directory of a job, 0700, which belongs to its user, made where it is missing.

    A directory of that name that belongs to someone else is an earlier job's, whose id has been used again: it is moved
    aside. Raises OSError.
    """
    root = open_own(profile_root, 0o755)
    try:
        above = open_own_below(root, cluster, 0o755)
    finally:
        os.close(root)
    try:
        _make_for_user(above, str(job_id), uid, gid)
    finally:
        os.close(above)
    return job_directory(profile_root, cluster, job_id)


def _make_for_user(above: int, name: str, uid: int, gid: int) -> None:
    try:
        if os.stat(name, dir_fd=above, follow_symlinks=False).st_uid == uid:
            return
        os.rename(name, f"{name}.before-{time.time_ns()}", src_dir_fd=above, dst_dir_fd=above)
    except FileNotFoundError:
        pass
    # Chowned before it has its name: another node must not take it for an earlier job's.
    fresh = f".{name}-{os.uname().nodename}-{os.getpid()}"
    os.mkdir(fresh, 0o700, dir_fd=above)
    made = os.open(fresh, DIRECTORY, dir_fd=above)
    try:
        os.fchown(made, uid, gid)
    finally:
        os.close(made)
    try:
        os.rename(fresh, name, src_dir_fd=above, dst_dir_fd=above)
    except OSError as error:
        os.rmdir(fresh, dir_fd=above)
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise  # else another node was first, and its directory is in use already


def _make(path: str | Path, mode: int, directory: int | None) -> None:
    try:
        os.mkdir(path, mode, dir_fd=directory)
    except FileExistsError:
        return


def _checked(name: str | Path, descriptor: int) -> int:
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        os.close(descriptor)
        raise PermissionError(
            f"{name} could be written to by another user (owner {status.st_uid}, mode "
            f"{stat.S_IMODE(status.st_mode):04o}); it must belong to user {os.geteuid()}, and have mode go-w"
        )
    return descriptor
