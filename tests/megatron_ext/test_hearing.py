"""A rank that is told to end tells the wrapper, and trains on."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

RANK = """
import sys, threading
from trimtab_megatron.hearing import on_sigterm
on_sigterm(lambda: print("told", flush=True))
print("ready", flush=True)
held = threading.Lock()
held.acquire()
held.acquire(timeout={seconds})  # as in a collective: no handler of Python's runs meanwhile
print("went on", flush=True)
"""


@contextmanager
def waiting_rank(seconds):
    path = os.pathsep.join(str(Path(__file__).parents[2] / name) for name in ("megatron_ext", "wrapper", "kernels"))
    command = [sys.executable, "-c", RANK.format(seconds=seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}) as rank:
        assert rank.stdout.readline() == "ready\n"
        yield rank
        rank.kill()


def test_each_sigterm_is_told_at_once_though_the_main_thread_waits():
    with waiting_rank(seconds=60) as rank:
        for _ in range(2):
            rank.send_signal(signal.SIGTERM)
            assert rank.stdout.readline() == "told\n"
        assert rank.poll() is None


def test_the_main_thread_goes_on_afterwards():
    with waiting_rank(seconds=1) as rank:
        rank.send_signal(signal.SIGTERM)
        assert sorted(rank.communicate(timeout=60)[0].splitlines()) == ["told", "went on"]
        assert rank.returncode == 0
