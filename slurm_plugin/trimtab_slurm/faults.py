"""Where the node's processes say what goes wrong: syslog. They have no terminal, and no file of their own."""

import os
import sys
import time
from contextlib import suppress
from types import TracebackType

SYSLOG = "/dev/log"
_WARNING, _INFO = 3 << 3 | 4, 3 << 3 | 6  # of the facility LOG_DAEMON
_LONGEST_BYTES = 4096
_who = ""


def introduce(who: str) -> None:
    """Say once whose this process's warnings are: which part of trimtab, of which job, on which node."""
    global _who
    _who = f"{who}: "


def warn(text: str) -> None:
    """Say something that an admin should see."""
    _say(_WARNING, text)


def tell(text: str) -> None:
    """Say something that an admin may look for."""
    _say(_INFO, text)


def _say(priority: int, text: str) -> None:
    """Never waits, and never fails: syslog(3) would wait for a full queue."""
    import socket  # late: there is hardly ever anything to say

    line = "".join(char if char.isprintable() else "?" for char in _who + text)
    stamp = time.strftime("%b %e %H:%M:%S")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as log, suppress(OSError):
        log.connect(SYSLOG)
        log.send(f"<{priority}>{stamp} trimtab[{os.getpid()}]: {line}".encode(errors="replace")[:_LONGEST_BYTES])


def report_uncaught(who: str) -> None:
    """As `introduce`; and let an exception that ends this process be said in one line, with where it was raised."""
    introduce(who)

    def report(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        warn(describe(error))

    sys.excepthook = report


def describe(error: BaseException) -> str:
    """One line: what was raised, and where."""
    where, place = error.__traceback__, ""
    while where is not None:
        place = f"{where.tb_frame.f_code.co_filename}:{where.tb_lineno}"
        where = where.tb_next
    return f"{type(error).__name__}: {error} ({place})"
