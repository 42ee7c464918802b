"""Run one command in a sandbox, and take the sandbox down after it, if it was brought up for it."""

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from trimtab.sandbox.config import Spec
from trimtab.sandbox.daemons import ENDING_SIGNALS
from trimtab.sandbox.lifecycle import down, signals_raise, up

NOT_FOUND = 127
"""Exit code where the command does not exist, as in shells."""


def run(directory: Path, spec: Spec, command: Sequence[str]) -> int:
    """Run a command in the sandbox of a directory; its exit code, or 128 + n when signal n ended it.

    A sandbox that is up is used as it is, and left up.
    """
    started = False
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        with signals_raise():
            sandbox, started = up(directory, spec)
            # From here on a signal is the command's business: it waits to be passed on, and interrupts nothing.
            signal.pthread_sigmask(signal.SIG_BLOCK, (*ENDING_SIGNALS, signal.SIGCHLD))
        return _see_through(list(command), sandbox.environment)
    finally:
        if started:
            down(directory)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _see_through(command: list[str], environment: Mapping[str, str]) -> int:
    try:
        # Python ignores SIGPIPE, which the command must not inherit.
        pid = os.posix_spawnp(command[0], command, environment, setsigmask=(), setsigdef=(signal.SIGPIPE,))
    except OSError as error:
        print(f"trimtab: {command[0]}: {error.strerror}", file=sys.stderr)
        return NOT_FOUND
    while True:
        received = signal.sigwaitinfo((*ENDING_SIGNALS, signal.SIGCHLD))
        # A Ctrl-C at the terminal comes from the kernel (no sender), to the command as well.
        if received.si_signo != signal.SIGCHLD and received.si_pid:
            os.kill(pid, received.si_signo)
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
