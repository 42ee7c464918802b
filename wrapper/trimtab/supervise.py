"""A process that does nothing but outlive the wrapper: whoever kills that one shall not end the job.

It is what the batch script is: it hands on the signals that Slurm sends, and takes the wrapper's exit code for its own.
"""

import contextlib
import os
import signal

HANDED_ON = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


def outlive() -> int | None:
    """Fork. In the child, which is to do the work, returns None; in this process, once the child has ended, how.

    That is its exit code, or -n after signal n. In the child HANDED_ON are blocked: it lets them through once it has
    handlers for them. Call it before there are threads.
    """
    # Until the handlers are there a signal must not end this process, nor be lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDED_ON)
    child = os.fork()
    if child == 0:
        return None
    for number in HANDED_ON:
        signal.signal(number, lambda received, _: _hand_on(child, received))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDED_ON)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def _hand_on(child: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.kill(child, number)
