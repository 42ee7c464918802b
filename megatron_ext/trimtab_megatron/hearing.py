"""Tells the wrapper of a SIGTERM, and trains on: all ranks obey its order at the same step.

When Slurm preempts a job with some grace, its first SIGTERM reaches the ranks alone; the batch script would hear of it
when the grace is over.
"""

import signal
import socket
import threading
from collections.abc import Callable


def on_sigterm(tell: Callable[[], None]) -> None:
    """From now on call `tell` for each SIGTERM, from another thread: the main one may wait for others for long."""
    here, there = socket.socketpair()
    there.setblocking(False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_listen, args=(here, there, tell), daemon=True).start()


def _listen(here: socket.socket, there: socket.socket, tell: Callable[[], None]) -> None:
    """`there` is kept from being closed."""
    while received := here.recv(1):
        if received[0] == signal.SIGTERM:
            tell()
