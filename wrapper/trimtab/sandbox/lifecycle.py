"""A sandbox's life: brought up, looked at, taken down. Everything it is lies in one directory.

What is started is recorded at once, by process identity, so that whatever happens to the command that started it, a
later one can end it. Changes are made one at a time, under a lock on the directory itself.
"""

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from trimtab.sandbox import config, machine, processes
from trimtab.sandbox.config import Places, SandboxError, Spec
from trimtab.sandbox.processes import Process
from trimtab_slurm import settings
from trimtab_slurm.cluster import CommandLineClient, SlurmError
from trimtab_slurm.hooks import hook_script

START_SECONDS = 90.0
"""Two seconds where the machine is idle."""
CANCEL_SECONDS = 15.0
"""How long jobs are waited for after they were cancelled: KillWait, and the epilog."""
RECORD_SECONDS = 30.0
"""How long the nodes' profiles may take to be written after the last job has ended."""
GRACE_SECONDS = 5.0
"""Between SIGTERM and SIGKILL."""
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Sandbox:
    """A sandbox as it was recorded, whole or not."""

    directory: Path
    spec: Spec
    daemons: tuple[Process, ...]

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment, for the sandbox: of another Slurm's job no variable is left."""
        others = ("SLURM", "SBATCH_", "SALLOC_", "SRUN_")
        places = Places(self.directory)
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith(others)},
            "SLURM_CONF": str(places.slurm_conf),
            "TRIMTAB_NODE_CONFIG": str(places.node_config),
        }

    @property
    def lost(self) -> tuple[str, ...]:
        """Names of the daemons that do not run (any more); empty when it is whole."""
        running = {daemon.name for daemon in self.daemons if processes.alive(daemon)}
        return tuple(name for name in ("munged", "slurmctld", *self.spec.node_names) if name not in running)


def default_directory() -> Path:
    """The directory of this user's sandbox, unless told."""
    return Path(f"/tmp/trimtab-sandbox-{os.getuid()}")


def find(directory: Path) -> Sandbox | None:
    """The sandbox that is recorded in a directory. Raises SandboxError when its record cannot be read."""
    directory = _plain(directory)
    record = Places(directory).state
    try:
        values = json.loads(record.read_text(encoding="utf-8"))
        daemons = tuple(Process(**daemon) for daemon in values["daemons"])
        return Sandbox(directory, Spec(**values["spec"]), daemons)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise SandboxError(f"{record} is no record of a sandbox ({error}); remove {directory} by hand") from error


def up(directory: Path, spec: Spec) -> tuple[Sandbox, bool]:
    """The sandbox of a directory, and whether it was brought up by this call; one that is whole is left as it is.

    Raises SandboxError, with nothing left behind, when it cannot be brought up.
    """
    directory = _plain(directory)
    Places(directory).check(spec)
    machine.check()
    with signals_raise():
        while True:
            with _lock(directory, create=True):
                found = find(directory)
                if found and not found.lost:
                    return found, False
                if found:
                    _take_down(found)
                    continue  # the lock has gone with the directory
                if any(directory.iterdir()):
                    raise SandboxError(f"{directory} is not empty and holds no sandbox; choose another with --dir")
                starting = _Starting(directory, spec)
                try:
                    starting.start()
                except BaseException:
                    _take_down(starting.sandbox)
                    raise
                return starting.sandbox, True


def down(directory: Path) -> bool:
    """Take down what is in a directory; whether there was anything. Safe to call at any time, and twice."""
    directory = _plain(directory)
    if find(directory) is None:
        return False
    with _lock(directory, create=False) as held:
        found = find(directory) if held else None
        if found:
            _take_down(found)
        return found is not None


def node_states(sandbox: Sandbox) -> dict[str, str]:
    """Node -> state; empty while the controller does not answer."""
    try:
        return CommandLineClient(sandbox.environment).node_states()
    except SlurmError:
        return {}


class _Starting:
    """A sandbox while it is being brought up."""

    def __init__(self, directory: Path, spec: Spec) -> None:
        self.sandbox = Sandbox(directory, spec, ())
        self._places = Places(directory)
        self._environment = self.sandbox.environment
        self._record()

    def start(self) -> None:
        spec, places = self.sandbox.spec, self._places
        ports = machine.free_ports(1 + spec.nodes)
        self._write_files(ports)
        self._spawn(
            "munged",
            "--foreground",
            f"--socket={places.munge_socket}",
            f"--key-file={places.munge}/key",
            f"--pid-file={places.munge}/pid",
            f"--seed-file={places.munge}/seed",
        )
        self._wait(places.munge_socket.exists, "munged has not opened its socket")
        self._spawn("slurmctld", "-D")
        for node in spec.node_names:
            self._spawn("slurmd", "-D", "-N", node, name=node)
        self._wait(lambda: machine.accepts(ports[0]), "slurmctld does not listen")
        self._wait(self._all_idle, "the nodes have not come up")

    def _write_files(self, ports: tuple[int, ...]) -> None:
        spec, places = self.sandbox.spec, self._places
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

    def _spawn(self, program: str, *arguments: str, name: str = "") -> None:
        """Start a daemon in a session of its own, and record it."""
        name = name or program
        # A signal between the start and the record would leave a daemon that nobody knows of.
        with _signals_wait() as before:
            with self._places.output(name).open("wb") as output:
                started = subprocess.Popen(
                    [machine.find_binary(program) or program, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=self._places.directory,
                    env=self._environment,
                    start_new_session=True,
                    preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before),
                )
            started.returncode = 0  # it outlives this process: keep Python from warning that nobody waited for it
            process = processes.identify(name, started.pid)
            if process is None:
                raise SandboxError(f"{name} ended at once:\n{self._tail(name)}")
            self.sandbox = Sandbox(self.sandbox.directory, self.sandbox.spec, (*self.sandbox.daemons, process))
            self._record()

    def _record(self) -> None:
        values = {"spec": asdict(self.sandbox.spec), "daemons": [asdict(daemon) for daemon in self.sandbox.daemons]}
        fresh = self._places.state.with_suffix(".new")
        fresh.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        fresh.replace(self._places.state)

    def _wait(self, condition: Callable[[], bool], complaint: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not condition():
            for daemon in self.sandbox.daemons:
                if not processes.alive(daemon):
                    raise SandboxError(f"{daemon.name} has ended:\n{self._tail(daemon.name)}")
            if time.monotonic() > deadline:
                logs = "\n".join(self._tail(name) for name in ("slurmctld", "n1"))
                raise SandboxError(f"{complaint} within {START_SECONDS:g} s:\n{logs}")
            time.sleep(0.05)

    def _all_idle(self) -> bool:
        states = node_states(self.sandbox)
        return len(states) == self.sandbox.spec.nodes and set(states.values()) == {"IDLE"}

    def _tail(self, name: str) -> str:
        with suppress(FileNotFoundError):
            lines = self._places.output(name).read_text(errors="replace").splitlines()
            return "\n".join(f"  {line}" for line in lines[-15:])
        return ""


def _take_down(sandbox: Sandbox) -> None:
    """End everything and remove the directory. Not to be disturbed: a signal waits until it is done."""
    places = Places(sandbox.directory)
    with _signals_wait():
        if not {"munged", "slurmctld"} & set(sandbox.lost):
            _end_jobs(sandbox)
        nodes = [daemon for daemon in sandbox.daemons if daemon.name in sandbox.spec.node_names]
        processes.stop(nodes, GRACE_SECONDS)
        for _ in range(2):  # a sampler that is stopped leaves a collector
            processes.stop(processes.on_nodes(places), GRACE_SECONDS)
        for daemon in reversed([daemon for daemon in sandbox.daemons if daemon not in nodes]):
            processes.stop([daemon], GRACE_SECONDS)
        shutil.rmtree(sandbox.directory)


def _end_jobs(sandbox: Sandbox) -> None:
    """Cancel every job; let their epilogs run, and their profiles be written."""
    _ask(sandbox, ["scancel", "--partition=main"])
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


def _plain(directory: Path) -> Path:
    """The absolute path as the kernel spells it; but a link itself stays one, to be refused."""
    directory = directory.absolute()
    return directory if directory.is_symlink() else directory.resolve()


@contextmanager
def _lock(directory: Path, *, create: bool) -> Iterator[bool]:
    """Hold the directory alone; yields whether it exists. Raises SandboxError for one that is not this user's own."""
    while True:
        if create:
            directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        try:
            handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            yield False
            return
        except OSError as error:
            raise SandboxError(f"{directory} is no directory of ours: {error.strerror}") from error
        try:
            status = os.fstat(handle)
            if status.st_uid != os.getuid() or status.st_mode & 0o022:
                raise SandboxError(
                    f"{directory} is another user's, or others may write to it; choose another with --dir"
                )
            fcntl.flock(handle, fcntl.LOCK_EX)
            if directory.exists() and os.path.samestat(status, directory.stat()):
                yield True
                return
        finally:
            os.close(handle)


@contextmanager
def _signals_wait() -> Iterator[set[int | signal.Signals]]:
    """Signals that would end this process wait until it is done; yields the mask from before, for a child."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
