"""Doing something as another user, in a process of its own: what a user owns is read and written by that user alone."""

import os
import resource
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path

from trimtab_slurm import faults

LONGEST_SECONDS = 900.0
"""A process of a user can be stopped by that user."""
MOST_MEMORY_BYTES = 1 << 30
"""What it may take beside what this process has: files of a user can be made to unpack into more than there is."""
_LONGEST_ANSWER_BYTES = 4096


def as_user(uid: int, gid: int, action: Callable[[], object]) -> None:
    """Do something as another user, where this process is root; as it is and at once, where it is not.

    Raises OSError with what went wrong there.
    """
    if os.geteuid() != 0 or uid == 0:
        action()
        return
    # What is imported late elsewhere: the user may not be able to read where it is installed.
    import socket  # noqa: F401

    import h5py  # noqa: F401

    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            _limit_memory()
            os.setgroups([])
            os.setgid(gid)
            os.setuid(uid)
            action()
            status = 0
        except (OSError, ValueError, RuntimeError, MemoryError, ImportError) as error:
            os.write(writer, faults.describe(error).encode()[:_LONGEST_ANSWER_BYTES])
        finally:
            os._exit(status)
    os.close(writer)
    try:
        text = _answer(reader)
    except TimeoutError as error:
        os.kill(child, signal.SIGKILL)
        text = str(error)
    finally:
        os.close(reader)
    _, status = os.waitpid(child, 0)
    if status:
        raise OSError(f"as user {uid}: {text or 'ended without a word'}")


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + MOST_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _answer(reader: int) -> str:
    """What the child says until it ends. Raises TimeoutError."""
    deadline, answer = time.monotonic() + LONGEST_SECONDS, b""
    while (left := deadline - time.monotonic()) > 0 and select.select([reader], [], [], left)[0]:
        said = os.read(reader, _LONGEST_ANSWER_BYTES)
        if not said:
            return answer.decode(errors="replace")
        answer += said
    raise TimeoutError(f"not done within {LONGEST_SECONDS:g} s")
