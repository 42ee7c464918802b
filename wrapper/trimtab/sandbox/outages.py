"""Outages of a sandbox on purpose: its controller or a whole node is gone at once, and comes back when it is told to.

Everything else is Slurm's own doing: it finds out after its SlurmdTimeout, takes the node for down, requeues its jobs,
and takes it back once its slurmd registers again.
"""

from pathlib import Path

from trimtab.sandbox import daemons, processes
from trimtab.sandbox.config import Places, SandboxError
from trimtab.sandbox.record import Sandbox, find, lock, plain


def kill(directory: Path, name: str) -> None:
    """Kill "slurmctld", or a node by its name: its slurmd and everything that runs on it, without a word to anyone."""
    with lock(plain(directory), create=False):
        sandbox = _find(directory, name)
        killed = [daemon for daemon in sandbox.daemons if daemon.name == name]
        # slurmd first: what it could still start is found then. Twice: a process may have been starting another.
        processes.kill(killed)
        if name in sandbox.spec.node_names:
            for _ in range(2):
                processes.kill(processes.on_nodes(Places(sandbox.directory), name))


def restart(directory: Path, name: str) -> None:
    """Start what was killed again, with the state that it left; returns once Slurm counts on it.

    Raises SandboxError when it does not come back.
    """
    with lock(plain(directory), create=False), daemons.signals_wait():
        sandbox = daemons.start(_find(directory, name), name)
        running = Sandbox(sandbox.directory, sandbox.spec, sandbox.daemons[-1:])  # others may be down: their business
        if name == "slurmctld":
            daemons.wait(running, lambda: bool(daemons.node_states(sandbox)), "slurmctld does not answer")
        else:
            daemons.wait(running, lambda: _counts(daemons.node_states(sandbox).get(name, "DOWN")), f"{name} is down")


def _find(directory: Path, name: str) -> Sandbox:
    sandbox = find(directory)
    if sandbox is None:
        raise SandboxError(f"there is no sandbox in {directory}")
    choices = ("slurmctld", *sandbox.spec.node_names)
    if name not in choices:
        raise SandboxError(f"{name!r} is not in this sandbox; choose from {', '.join(choices)}")
    return sandbox


def _counts(state: str) -> bool:
    """Whether jobs can be on a node in this state; *: it does not respond."""
    return "DOWN" not in state and not state.endswith("*") and "NOT_RESPONDING" not in state
