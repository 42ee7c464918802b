"""Processes that slurmd does not know of: what a hook starts and does not wait for. Standard library only."""

import os
from collections.abc import Callable
from pathlib import Path

KEPT_DESCRIPTOR = 3
"""What a detached process keeps of its starter's descriptors, if anything."""


def detach(action: Callable[[], None], keep: int | None = None) -> int:
    """Run `action` in a process of its own session, which init adopts; returns its id.

    It keeps one descriptor of this process's, as KEPT_DESCRIPTOR, and no other: slurmd waits until nobody holds its
    pipes, and kills the hook's session.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            grandchild = os.fork()
            if grandchild:
                os.write(writer, str(grandchild).encode())
            else:
                _close_descriptors(keep)
                os.chdir("/")
                action()
        finally:
            os._exit(0)  # never back into the code of the hook, which its own process runs
    os.close(writer)
    answer = os.read(reader, 32)
    os.close(reader)
    os.waitpid(child, 0)
    return int(answer)


def _close_descriptors(keep: int | None) -> None:
    null = os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    first = KEPT_DESCRIPTOR
    if keep is not None:
        os.dup2(keep, KEPT_DESCRIPTOR)
        os.set_inheritable(KEPT_DESCRIPTOR, True)  # which dup2 leaves alone when it is that very one
        first += 1
    # Those that are open, not all up to the limit, which can be a thousand million.
    highest = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    os.closerange(first, highest + 1)
