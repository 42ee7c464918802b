"""Where the node's processes say what goes wrong: syslog. They have no terminal, and no file of their own."""

import sys
import syslog
from types import TracebackType


def warn(text: str) -> None:
    """Say something that an admin should see."""
    syslog.openlog("trimtab", syslog.LOG_PID, syslog.LOG_DAEMON)
    syslog.syslog(syslog.LOG_WARNING, text.replace("\0", ""))


def report_uncaught(name: str) -> None:
    """From here on, let an exception that ends this process be said in one line, with where it was raised."""

    def report(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        warn(f"{name}: {describe(error)}")

    sys.excepthook = report


def describe(error: BaseException) -> str:
    """One line: what was raised, and where."""
    where, place = error.__traceback__, ""
    while where is not None:
        place = f"{where.tb_frame.f_code.co_filename}:{where.tb_lineno}"
        where = where.tb_next
    return f"{type(error).__name__}: {error} ({place})"
