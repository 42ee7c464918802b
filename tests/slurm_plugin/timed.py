"""Runs a hook, and notes how it ended and how long it took: LOG SECONDS COMMAND...

Beside it, from the same moment on, runs what a hook is bounded by: something that never ends, killed after SECONDS.
How much later than that it has gone is how late this machine is.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time

log, limit, *command = sys.argv[1:]
begin = time.monotonic()
never = ["/usr/bin/timeout", "-s", "KILL", limit, "/bin/sleep", "60"]
bound = subprocess.Popen(never, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
took = {}


def wait():
    bound.wait()
    took["bound"] = time.monotonic() - begin


waiter = threading.Thread(target=wait)
waiter.start()
code = subprocess.run(command).returncode
took["hook"] = time.monotonic() - begin
if took["hook"] < float(limit) - 0.2:
    os.killpg(bound.pid, signal.SIGKILL)  # it need not be known: timeout leads a group of its own
waiter.join()
late = max(0.0, took["bound"] - float(limit))
entry = {"code": code, "seconds": took["hook"], "late_seconds": late, "environment": dict(os.environ)}
with open(log, "a") as file:  # noqa: PTH123
    file.write(json.dumps(entry) + "\n")
sys.exit(code)
