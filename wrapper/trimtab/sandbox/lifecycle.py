"""A sandbox's life: brought up, and taken down. Everything it is lies in one directory.

Changes are made one at a time, under a lock on the directory itself.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from trimtab.sandbox import config, daemons, machine, processes
from trimtab.sandbox.config import Places, SandboxError, Spec
from trimtab.sandbox.processes import Process
from trimtab.sandbox.record import Sandbox, find, lock, plain
from trimtab_slurm import settings
from trimtab_slurm.hooks import hook_script

CANCEL_SECONDS = 15.0
"""How long jobs are waited for after they were cancelled: what they do when told to end, and their epilogs."""
RECORD_SECONDS = 30.0
"""How long the nodes' profiles may take to be written after the last job has ended."""
GRACE_SECONDS = 5.0
"""Between SIGTERM and SIGKILL."""


def up(directory: Path, spec: Spec) -> tuple[Sandbox, bool]:
    """The sandbox of a directory, and whether it was brought up by this call; one that is whole is left as it is.

    Raises SandboxError, with nothing left behind, when it cannot be brought up.
    """
    directory = plain(directory)
    Places(directory).check(spec)
    machine.check()
    with signals_raise():
        while True:
            with lock(directory, create=True):
                found = find(directory)
                if found and not found.lost:
                    return found, False
                if found:
                    _take_down(found)
                    continue  # the lock has gone with the directory
                if any(directory.iterdir()):
                    raise SandboxError(f"{directory} is not empty and holds no sandbox; choose another with --dir")
                empty = Sandbox(directory, spec, ())
                empty.write()
                try:
                    return _bring_up(empty), True
                except BaseException:
                    _take_down(find(directory) or empty)
                    raise


def down(directory: Path) -> bool:
    """Take down what is in a directory; whether there was anything. Safe to call at any time, and twice."""
    directory = plain(directory)
    if find(directory) is None:
        return False
    with lock(directory, create=False) as held:
        found = find(directory) if held else None
        if found:
            _take_down(found)
        return found is not None


def _bring_up(sandbox: Sandbox) -> Sandbox:
    spec, places = sandbox.spec, Places(sandbox.directory)
    ports = machine.free_ports(1 + spec.nodes)
    _write_files(spec, places, ports)
    sandbox = daemons.start(sandbox, "munged")
    daemons.wait(sandbox, places.munge_socket.exists, "munged has not opened its socket")
    for name in ("slurmctld", *spec.node_names):
        sandbox = daemons.start(sandbox, name)
    daemons.wait(sandbox, lambda: machine.accepts(ports[0]), "slurmctld does not listen")
    daemons.wait(sandbox, lambda: _all_idle(sandbox), "the nodes have not come up")
    return sandbox


def _write_files(spec: Spec, places: Places, ports: tuple[int, ...]) -> None:
    places.munge.mkdir(mode=0o755)
    key = os.open(places.munge / "key", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(key, "wb") as file:
        file.write(os.urandom(128))
    for directory in (places.log("n1").parent, places.controller_state, places.spool("n1").parent):
        directory.mkdir()
    for index in range(spec.gpus):
        machine.make_device(places.gpu(index), index)
    host = socket.gethostname().partition(".")[0]
    places.slurm_conf.write_text(config.slurm_conf(spec, places, host, ports))
    (places.directory / "gres.conf").write_text(config.gres_conf(spec, places))
    (places.directory / "cgroup.conf").write_text(config.CGROUP_CONF)
    places.node_config.write_text(settings.render(config.node_settings(spec, places)))
    for which in ("prolog", "epilog"):
        places.hook(which).write_text(hook_script(which, sys.executable, places.node_config, places.samplers))
        places.hook(which).chmod(0o755)


def _all_idle(sandbox: Sandbox) -> bool:
    states = daemons.node_states(sandbox)
    return len(states) == sandbox.spec.nodes and set(states.values()) == {"IDLE"}


def _take_down(sandbox: Sandbox) -> None:
    """End everything and remove the directory. Not to be disturbed: a signal waits until it is done."""
    places = Places(sandbox.directory)
    with daemons.signals_wait():
        if not {"munged", "slurmctld"} & set(sandbox.lost):
            _end_jobs(sandbox)
        nodes = [daemon for daemon in sandbox.daemons if daemon.name in sandbox.spec.node_names]
        processes.stop(nodes, GRACE_SECONDS)
        for _ in range(2):  # a sampler that is stopped leaves a collector
            processes.stop(processes.on_nodes(places), GRACE_SECONDS)
        for name in ("slurmctld", "munged"):
            processes.stop([daemon for daemon in sandbox.daemons if daemon.name == name], GRACE_SECONDS)
        shutil.rmtree(sandbox.directory)


def _end_jobs(sandbox: Sandbox) -> None:
    """Cancel every job; let their epilogs run, and their profiles be written."""
    for partition in config.PARTITIONS:
        _ask(sandbox, ["scancel", f"--partition={partition}"])
    deadline = time.monotonic() + CANCEL_SECONDS
    while time.monotonic() < deadline and _ask(sandbox, ["squeue", "--noheader"]).strip():
        time.sleep(0.1)
    deadline = time.monotonic() + RECORD_SECONDS
    while time.monotonic() < deadline and _recorders(sandbox):
        time.sleep(0.1)


def _recorders(sandbox: Sandbox) -> list[Process]:
    """What the hooks started, and still runs."""
    return [process for process in processes.on_nodes(Places(sandbox.directory)) if process.name == processes.RECORDER]


def _ask(sandbox: Sandbox, command: Sequence[str]) -> str:
    """The output of one of Slurm's commands; empty when it fails: taking down goes on."""
    with suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(
            command, env=sandbox.environment, capture_output=True, text=True, timeout=CANCEL_SECONDS
        ).stdout
    return ""


@contextmanager
def signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP end this process as Ctrl-C does: through its `except` and `finally` clauses."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    caught = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in caught}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
