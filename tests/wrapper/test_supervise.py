"""A process that outlives the wrapper."""

import os
import signal
import subprocess
import sys

import pytest

CHILD = """
import os, signal, sys, time
from trimtab.supervise import outlive
ended = outlive()
if ended is not None:
    print("outlived", ended, flush=True)
    sys.exit(0)
{work}
"""


def supervised(work):
    return subprocess.Popen(
        [sys.executable, "-c", CHILD.format(work=work)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )


@pytest.mark.parametrize(
    ("work", "told"), [("sys.exit(75)", 75), ("os.kill(os.getpid(), signal.SIGKILL)", -9), ("raise ValueError", 1)]
)
def test_it_learns_how_the_work_ended(work, told):
    process = supervised(work)
    output, _ = process.communicate(timeout=30)
    assert output == f"outlived {told}\n"
    assert process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
def test_a_signal_waits_until_the_work_has_its_handlers_and_ends_neither(number):
    work = f"""
signal.signal({int(number)}, lambda *_: (print("heard", flush=True), sys.exit(5)))
print("ready", flush=True)
time.sleep(0.5)
print("has its handlers", flush=True)
signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT))
time.sleep(30)
"""
    process = supervised(work)
    assert process.stdout.readline() == "ready\n"
    os.kill(process.pid, number)
    output, _ = process.communicate(timeout=30)
    assert output == "has its handlers\nheard\noutlived 5\n"
