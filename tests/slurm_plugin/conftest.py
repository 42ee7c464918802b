"""What the tests of the node side share: an attempt, a journal, the parts of profiles."""

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trimtab_slurm import journal
from trimtab_slurm.attempt import Attempt
from trimtab_slurm.contents import DeviceProfile, Event, NodeProfile, Profile, TrainingProfile
from trimtab_slurm.detach import KEPT_DESCRIPTOR
from trimtab_slurm.profile import read
from trimtab_slurm.settings import NodeSettings, render

START_SECONDS = 1_780_000_000.0
SYSLOG = "/dev/log"


@pytest.fixture
def attempt():
    return Attempt(
        cluster="lab",
        job_id=7,
        start_seconds=START_SECONDS,
        node="n1",
        user="ann",
        uid=1000,
        gid=1001,
        restart_count=0,
        expected_nodes=("n1", "n2"),
        gpu_variables={"SLURM_JOB_GPUS": "0,1"},
    )


@pytest.fixture
def open_path():
    """An empty directory that other users can enter, as they cannot pytest's own."""
    directory = Path(tempfile.mkdtemp(prefix="trimtab-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def make_part():
    """A function that makes the part of a node, or of the training where `node` is empty."""

    def make(node="n1", start=0.0, end=60.0, restart_count=0, expected=("n1", "n2"), uuids=("gpu-a",)):
        times = START_SECONDS + np.arange(start, end + 0.5)
        devices = [
            DeviceProfile(
                uuid=uuid,
                kind="gpu",
                model="H100",
                index=index,
                driver="NVML 12",
                samples={
                    "time_seconds": times,
                    "power_watts": 300.0 + np.sin(times),
                    "temperature_celsius": np.full(len(times), np.nan),
                },
                absent={"temperature_celsius": "not supported"},
            )
            for index, uuid in enumerate(uuids)
        ]
        events = (Event(START_SECONDS + start, "prolog", f"{node}: Größe"),)
        whole = NodeProfile(node, START_SECONDS + start, START_SECONDS + end, 1.0, tuple(devices), events)
        return Profile(
            cluster="lab",
            job_id=7,
            user="ann",
            start_seconds=START_SECONDS + start,
            end_seconds=START_SECONDS + end,
            restart_count=restart_count,
            expected_nodes=expected,
            nodes=(whole,) if node else (),
            training=None if node else make_training(START_SECONDS + start, START_SECONDS + end),
        )

    return make


def make_training(start, end):
    return TrainingProfile(
        start_seconds=start,
        end_seconds=end,
        attributes={"tensor": 2, "outcome": "trained", "trigger_ratio": 0.1},
        steps={"step": np.array([1, 2]), "loss": np.array([2.5, np.nan])},
        stages={"step": np.array([], dtype=np.int64), "forward_seconds": np.array([])},
        ranks={"rank": np.array([0, 1]), "node": np.array(["n1", "n2-longer"])},
        events=(),
        probes={"step": np.array([5, 5]), "rank": np.array([0, 1]), "seconds": np.array([0.25, 0.5])},
        settings={"step": np.array([1]), "layout": np.array(["Ett|ttL"]), "microbatches": np.array(["8|8"])},
        orders={"number": np.array([1]), "kind": np.array(["checkpoint"]), "moved_bytes": np.array([np.nan])},
        checkpoints={"step": np.array([2]), "duration_seconds": np.array([1.5]), "size_bytes": np.array([1 << 40])},
    )


def assert_same(one, other):
    """Equal dataclasses, arrays and NaN included."""
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype or one.dtype.kind == other.dtype.kind == "U"
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_same(value, other[key])
    elif isinstance(one, tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    elif hasattr(one, "__dataclass_fields__"):
        assert_same(vars(one), vars(other))
    else:
        assert one == other


@pytest.fixture(name="assert_same")
def _assert_same():
    return assert_same


class NvmlStub:
    """A libnvidia-ml.so.1 of a test's own, and the script that it goes by: see nvml/stub.c."""

    def __init__(self, directory, compiled):
        self.library = directory / "libnvidia-ml.so.1"
        shutil.copy(compiled, self.library)
        self.script("")

    def script(self, text):
        """Go by these lines from now on; processes that have it loaded too."""
        fresh = self.library.with_name("script.new")
        fresh.write_text(text)
        fresh.replace(self.library.with_name("script"))

    @staticmethod
    def gpus(count):
        """The lines of so many GPUs, GPU-0 and on, minor numbers as indices."""
        lines = [
            f"gpu {index} GPU-{index} {index} 00000000:{16 + index:02X}:00.0 NVIDIA_H100" for index in range(count)
        ]
        return "\n".join(["driver 570.86.15", *lines, ""])


@pytest.fixture(scope="session")
def compile_nvml(tmp_path_factory):
    """A function that compiles the stub, with options of cc, and gives the library's path."""
    compiler = shutil.which("cc") or pytest.skip("no C compiler (cc) to compile the NVML stub with")

    def compiled(*options):
        path = tmp_path_factory.mktemp("nvml") / "stub.so"
        flags = ("-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1")
        subprocess.run(
            [compiler, *flags, *options, "-o", path, Path(__file__).parent / "nvml/stub.c", "-lpthread", "-ldl"],
            check=True,
        )
        return path

    return compiled


@pytest.fixture(scope="session")
def compiled_nvml(compile_nvml):
    """The stub's compiled library."""
    return compile_nvml()


@pytest.fixture
def nvml_stub(compiled_nvml, tmp_path_factory):
    """A stub of NVML, for `nvml_library` in a node.toml: without GPUs until `script` gives it some."""
    return NvmlStub(tmp_path_factory.mktemp("nvml"), compiled_nvml)


class Syslog:
    """What is said in syslog from the moment on when a test asks for it; `lines`: None where a daemon has it."""

    def __init__(self, lines, unread):
        self._lines = lines
        self._begin = len(lines or ())
        self._unread = unread

    def said(self, *words, seconds=10.0):
        """Assert that one line holds all these words. A test's last assertion: it skips where a daemon has syslog."""
        if self._lines is None:
            pytest.skip("all but syslog was checked: a daemon listens at /dev/log, which only one can")
        deadline = time.monotonic() + seconds
        while not any(all(word in line for word in ("trimtab", *words)) for line in self._lines[self._begin :]):
            assert time.monotonic() < deadline, (words, self._lines[self._begin :])
            time.sleep(0.05)

    @contextlib.contextmanager
    def unread(self):
        """Nobody reads the log, and its queue is full."""
        if self._lines is None:
            pytest.skip("a daemon listens at /dev/log, which only one can")
        self._unread.set()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as full:
            full.connect(SYSLOG)
            with contextlib.suppress(BlockingIOError):
                while True:
                    full.send(b"<31>filler")
        yield
        self._unread.clear()


@pytest.fixture(scope="session")
def _syslog():
    """Everything that this machine's processes say in syslog, as it comes in, and an event that it is to be left."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(SYSLOG)
        except ConnectionRefusedError:
            Path(SYSLOG).unlink()  # of a session that was killed
        except OSError:
            pass
        else:
            yield None, None
            return
    lines, unread, over = [], threading.Event(), threading.Event()

    def listen():
        while not over.is_set():
            if unread.is_set():
                over.wait(0.05)
            elif select.select([log], [], [], 0.05)[0]:
                lines.append(log.recv(1 << 16).decode(errors="replace"))

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.bind(SYSLOG)
        listener = threading.Thread(target=listen)
        listener.start()
        yield lines, unread
        Path(SYSLOG).unlink()
        over.set()
        listener.join()


@pytest.fixture
def syslog(_syslog):
    """Syslog as this test finds it."""
    return Syslog(*_syslog)


@pytest.fixture
def start_task():
    """A function that starts a process as the task of a rank of an attempt on its node."""
    started = []

    def start(of, rank):
        environment = {"SLURM_JOB_ID": str(of.job_id), "SLURMD_NODENAME": of.node, "SLURM_CLUSTER_NAME": of.cluster}
        environment |= {"SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank)}
        started.append(subprocess.Popen(["/bin/sleep", "1000"], env=environment))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


class SamplerProcess:
    """A real sampler, started as the prolog does, with a journal and directories of its own."""

    def __init__(self, directory, attempt, period, fault="", program=("-m", "trimtab_slurm.sampler"), options=()):
        self.state, self.profiles, self.config = directory / "state", directory / "profiles", directory / "node.toml"
        self.state.mkdir()
        self.settings = NodeSettings(profile_root=str(self.profiles), fault=fault)
        self.config.write_text(render(self.settings))
        self.path, writer = journal.create(directory / "journals", attempt, period)
        arguments = [*program, *options, self.path, self.state, self.config]
        self.pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", *map(str, arguments)],
            {"LANG": "C.UTF-8"},
            file_actions=[(os.POSIX_SPAWN_DUP2, writer.descriptor, KEPT_DESCRIPTOR)],
            setsigmask=[signal.SIGTERM],
        )
        os.close(writer.descriptor)
        self.status = None

    def journal(self):
        """What is in the journal now."""
        return journal.parse(self.path.read_bytes())

    def faults(self):
        return [text for _, kind, text in self.journal().events if kind == "fault"]

    def stands_still(self):
        """Whether nothing is written any more, as far as 10 periods show."""
        before = self.path.stat().st_size
        time.sleep(0.2)
        return self.path.stat().st_size == before

    def signal(self, number):
        os.kill(self.pid, number)

    def wait(self):
        """How it ended, as a wait status."""
        if self.status is None:
            _, self.status = os.waitpid(self.pid, 0)
        return self.status

    def part(self):
        """The node's part of a profile that its collector makes."""
        until(lambda: not self.path.exists())
        (path,) = self.profiles.rglob("parts/[!.]*.h5")
        return read(path).nodes[0]


@pytest.fixture
def start_sampler(tmp_path, attempt):
    """A function that starts a sampler, of an attempt of this process's user that holds no GPU."""
    started = []
    own = replace(attempt, uid=os.getuid(), gid=os.getgid(), gpu_variables={})

    def start(of=own, period=0.02, **how):
        process = SamplerProcess(Path(tempfile.mkdtemp(dir=tmp_path)), of, period, **how)
        started.append(process)
        return process

    start.attempt = own
    yield start
    for process in started:
        if process.status is None:
            process.signal(signal.SIGKILL)
            process.wait()


def until(condition, seconds=60.0):
    """Wait for what comes sooner or later."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(name="until")
def _until():
    return until


@pytest.fixture(scope="session")
def hook_processes():
    """A function that gives the ids of the processes that hooks have started, by their node.toml and journals."""

    def seen(config, journals):
        """By its arguments, or, while it has none yet, by its journal."""
        return [
            int(entry.name)
            for entry in Path("/proc").iterdir()
            if entry.name.isdigit() and (bytes(config) in _arguments(entry) or _kept(entry).startswith(str(journals)))
        ]

    # Twice: while it is looked, one may have started another, and ended.
    return lambda config, journals: seen(config, journals) or seen(config, journals)


def _arguments(entry):
    try:
        return (entry / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def _kept(entry):
    """What a process that a hook has started has open."""
    try:
        return str((entry / "fd" / str(KEPT_DESCRIPTOR)).readlink())
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
