"""Processes that slurmd does not know of: what a hook starts and does not wait for. Standard library only."""

import os
from collections.abc import Callable

KEPT_DESCRIPTOR = 3
"""What a detached process keeps of its starter's descriptors, if anything."""


def detach(action: Callable[[], None], keep: int | None = None) -> int:
    """Run `action` in a process of its own session, which init adopts when this one ends; returns its id.

    It keeps one descriptor of this process's, as KEPT_DESCRIPTOR, and no other: slurmd waits until nobody holds its
    pipes, and kills the hook's session.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            os.chdir("/")
            _close_descriptors(keep)  # the writer too: that it is let go of says that all this is done
            action()
        finally:
            os._exit(0)  # never back into the code of the hook, which its own process runs
    os.close(writer)
    os.read(reader, 1)
    os.close(reader)
    return child


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
    highest = max(map(int, os.listdir("/proc/self/fd")))  # noqa: PTH208
    os.closerange(first, highest + 1)
