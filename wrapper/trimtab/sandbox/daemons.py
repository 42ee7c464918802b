"""The daemons of a sandbox: each started in a session of its own, and recorded before anything can get lost."""

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from trimtab.sandbox import machine, processes
from trimtab.sandbox.config import Places, SandboxError
from trimtab.sandbox.record import Sandbox
from trimtab_slurm.cluster import CommandLineClient, SlurmError

START_SECONDS = 90.0
"""Two seconds where the machine is idle."""
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def start(sandbox: Sandbox, name: str) -> Sandbox:
    """Start munged, slurmctld, or the slurmd of a node, in place of one of this name that has ended.

    Raises SandboxError, with the end of its output, when it ends at once.
    """
    places = Places(sandbox.directory)
    program, *arguments = _command(sandbox, name)
    # A signal between the start and the record would leave a daemon that nobody knows of.
    with signals_wait() as before:
        with places.output(name).open("wb") as output:
            started = subprocess.Popen(
                [machine.find_binary(program) or program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=sandbox.directory,
                env=sandbox.environment,
                start_new_session=True,
                preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before),
            )
        started.returncode = 0  # it outlives this process: keep Python from warning that nobody waited for it
        process = processes.identify(name, started.pid)
        if process is None:
            raise SandboxError(f"{name} ended at once:\n{_tail(sandbox, name)}")
        others = (daemon for daemon in sandbox.daemons if daemon.name != name)
        sandbox = replace(sandbox, daemons=(*others, process))
        sandbox.write()
    return sandbox


def wait(sandbox: Sandbox, condition: Callable[[], bool], complaint: str) -> None:
    """Wait until a condition holds. Raises SandboxError, with logs, when it never does, or a daemon has ended."""
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        for daemon in sandbox.daemons:
            if not processes.alive(daemon):
                raise SandboxError(f"{daemon.name} has ended:\n{_tail(sandbox, daemon.name)}")
        if time.monotonic() > deadline:
            logs = "\n".join(_tail(sandbox, name) for name in ("slurmctld", "n1"))
            raise SandboxError(f"{complaint} within {START_SECONDS:g} s:\n{logs}")
        time.sleep(0.05)


def node_states(sandbox: Sandbox) -> dict[str, str]:
    """Node -> state; empty while the controller does not answer."""
    try:
        return CommandLineClient(sandbox.environment).node_states()
    except SlurmError:
        return {}


@contextmanager
def signals_wait() -> Iterator[set[int | signal.Signals]]:
    """Signals that would end this process wait until it is done; yields the mask from before, for a child."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _command(sandbox: Sandbox, name: str) -> list[str]:
    places = Places(sandbox.directory)
    if name == "munged":
        return [
            *("munged", "--foreground", f"--socket={places.munge_socket}", f"--key-file={places.munge}/key"),
            *(f"--pid-file={places.munge}/pid", f"--seed-file={places.munge}/seed"),
        ]
    return ["slurmctld", "-D"] if name == "slurmctld" else ["slurmd", "-D", "-N", name]


def _tail(sandbox: Sandbox, name: str) -> str:
    with suppress(FileNotFoundError):
        lines = Places(sandbox.directory).output(name).read_text(errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-15:])
    return ""
