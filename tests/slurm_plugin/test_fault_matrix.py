"""Every fault that is known from the field, under a real slurmd: the job runs, the node stays in service, and the fault
is said. docs/faults.md has the same rows for admins.

Each row has a directory of its own, with the hooks, their node.toml and all that they keep: slurmd's prolog and epilog
are links to the row's, run through timed.py.
"""

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from trimtab import sandbox as boxes
from trimtab_slurm import collect, journal, proc
from trimtab_slurm.hooks import KILL_SECONDS, hook_script
from trimtab_slurm.profile import read
from trimtab_slurm.settings import NodeSettings, render

pytestmark = pytest.mark.slurm

HARD_SECONDS = 2.0
"""What a hook may take, and by how much more a busy machine is late is added: see timed.py."""
TIMED = Path(__file__).parent / "timed.py"
LOST, MISMATCH = 15, 18
"""nvmlReturn_t: NVML_ERROR_GPU_IS_LOST, NVML_ERROR_LIB_RM_VERSION_MISMATCH."""


@pytest.fixture(scope="module")
def box(slurm_installed):
    """A Slurm of one node, for this module alone: its hooks are changed from test to test."""
    directory = Path(tempfile.mkdtemp(prefix="trimtab-"))
    directory.chmod(0o755)
    yield boxes.up(directory, boxes.Spec(nodes=1))[0]
    boxes.down(directory)
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def row(box, tmp_path):
    """The node as a row of the matrix finds it: well, with hooks and directories of its own."""
    made = Row(box)
    yield made
    made.release()


class Row:
    """What a row does to the node, and what it sees there."""

    def __init__(self, box):
        self._box = box
        self._mounted = []
        self.directory = Path(tempfile.mkdtemp(prefix="row-", dir=box.directory))
        self.directory.chmod(0o755)
        self.config = self.directory / "node.toml"
        self.log = self.directory / "hooks.log"
        self.state, self.journals, self.profiles = (self.directory / name for name in ("run", "journals", "profiles"))
        self.settings = NodeSettings(str(self.state), str(self.journals), str(self.profiles), 0.2)
        self.configure()
        self.hooks()

    def configure(self, **changes):
        """Write node.toml."""
        self.settings = dataclasses.replace(self.settings, **changes)
        self.config.write_text(render(self.settings))

    def hooks(self, python=sys.executable, change=str, epilogs=1):
        """Make slurmd's hooks this row's: with another Python, or a script that is changed, or that runs several times."""
        for which in ("prolog", "epilog"):
            script = self.directory / which
            script.write_text(change(hook_script(which, str(python), self.config)))
            timed = f"{sys.executable} -I -S {TIMED} {self.log} {KILL_SECONDS} /bin/sh {script}"
            lines = [timed] * (epilogs if which == "epilog" else 1)
            fresh = self._box.directory / f"{which}.new"
            fresh.write_text("#!/bin/sh\nset -e\n" + "\n".join(lines) + "\n")
            fresh.chmod(0o755)
            fresh.replace(self._box.directory / which)

    def program(self, name, text, mode=0o755):
        """A program of the row's own; its path."""
        path = self.directory / name
        path.write_text(text)
        path.chmod(mode)
        return path

    def mount(self, directory, *options):
        """Put a file system in the place of a directory, which is root's alone."""
        directory.mkdir(mode=0o700, exist_ok=True)
        subprocess.run(["mount", *options, directory], check=True)
        self._mounted.append(directory)

    def fill(self, directory):
        """Leave no space on the file system of a directory."""
        with contextlib.suppress(OSError), (directory / "filler").open("wb", buffering=0) as filler:
            while filler.write(bytes(4096)):
                pass

    @contextlib.contextmanager
    def frozen(self, directory):
        """A file system in the place of a directory, on which nobody can write until this is over: they wait, and cannot
        be killed."""
        image = self.directory / f"{directory.name}.ext4"
        with image.open("wb") as file:
            file.truncate(8 << 20)
        subprocess.run(["mkfs.ext4", "-q", image], check=True)
        try:
            self.mount(directory, "-o", "loop", image)
        except subprocess.CalledProcessError:
            pytest.skip("this machine has no loop devices, of which one is frozen here")
        subprocess.run(["fsfreeze", "-f", directory], check=True)
        try:
            yield
        finally:
            subprocess.run(["fsfreeze", "-u", directory], check=True)

    def _slurm(self, *command):
        return subprocess.run(command, env=self._box.environment, capture_output=True, text=True, timeout=120)

    @contextlib.contextmanager
    def job(self, *options, gpus=2):
        """A job that runs while this lasts, and must then end well; its id."""
        done = Path(tempfile.mktemp(prefix="done-", dir=self.directory))
        command = f"echo $SLURM_JOB_ID; while [ ! -e {done} ]; do sleep 0.05; done"
        running = subprocess.Popen(
            ["srun", "-N1", f"--gpus-per-node={gpus}", *options, "/bin/sh", "-c", command],
            env=self._box.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield int(running.stdout.readline())
        finally:
            done.touch()
            _, complaint = running.communicate(timeout=120)
        assert running.returncode == 0, complaint
        self.idle()

    def batch(self, script):
        """Submit a job, and wait until it has left the queue; its id."""
        path = self.program("batch", f"#!/bin/sh\n{script}\n")
        submitted = self._slurm("sbatch", "--parsable", "--gpus-per-node=2", "--output=/dev/null", str(path))
        assert submitted.returncode == 0, submitted.stderr
        until(lambda: not self._slurm("squeue", "--noheader", f"--jobs={submitted.stdout.strip()}").stdout)
        self.idle()
        return int(submitted.stdout)

    def idle(self):
        """Assert that the node is in service, and that every hook has exited 0, in time, without PATH and HOME."""
        until(lambda: "State=IDLE " in self._slurm("scontrol", "--oneliner", "show", "node", "n1").stdout)
        assert "Reason=" not in self._slurm("scontrol", "--oneliner", "show", "node", "n1").stdout
        entries = [json.loads(line) for line in self.log.read_text().splitlines()]
        assert {entry["environment"]["SLURM_SCRIPT_CONTEXT"] for entry in entries} == {"prolog_slurmd", "epilog_slurmd"}
        for entry in entries:
            assert entry["code"] == 0
            assert entry["seconds"] < HARD_SECONDS + entry["late_seconds"]
            assert not {"PATH", "HOME"} & entry["environment"].keys()

    def sampler(self, job):
        """The process id of a job's sampler."""
        return json.loads((self.state / "n1" / str(job) / "sampler.json").read_text())["pid"]

    def journal(self, job):
        """The path of a job's journal; there is one."""
        (path,) = self.journals.glob(f"sandbox.{job}.n1.*.journal")
        return path

    def samples(self, job):
        """How many samples a job's journal has."""
        return sum(len(device.rows) for device in journal.parse(self.journal(job).read_bytes()).devices)

    def sampled(self, job, count=1):
        """Wait for this many samples more."""
        wanted = self.samples(job) + count
        until(lambda: self.samples(job) >= wanted)

    def ended(self):
        """Wait until nothing that the hooks started runs."""
        until(lambda: not self.processes())

    def processes(self):
        """What the hooks have started, and still runs."""
        return [
            int(entry.name)
            for entry in Path("/proc").iterdir()
            if entry.name.isdigit() and bytes(self.config) in arguments(entry)
        ]

    def parts(self, job):
        """The profiles of a job's attempts, once nothing of ours runs any more."""
        self.ended()
        return [read(path) for path in sorted((self.profiles / "sandbox" / str(job)).glob("*.h5"))]

    def faults(self, job):
        """The text of the fault events of a job's one profile."""
        (profile,) = self.parts(job)
        (node,) = profile.nodes
        return [event.text for event in node.events if event.kind == "fault"]

    def recovered(self, job):
        """As `faults`, of a profile that could not be written before: as the next boot does it."""
        self.ended()
        assert collect.recover(self.settings) == []
        return self.faults(job)

    def release(self):
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.ended()
        for directory in reversed(self._mounted):
            subprocess.run(["umount", directory], check=True)
        self._slurm("scontrol", "update", "NodeName=n1", "State=RESUME")  # refused where it is in service


def arguments(entry):
    try:
        return (entry / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return result


@pytest.fixture
def gpus(row, nvml_stub):
    """Two GPUs, by the stub of NVML."""
    nvml_stub.script(nvml_stub.gpus(2))
    row.configure(nvml_library=str(nvml_stub.library))
    return nvml_stub


def test_nothing_is_wrong(row, gpus):
    with row.job() as job:
        row.sampled(job, 4)
    assert row.faults(job) == []


# The interpreter, and what starts it


@pytest.mark.parametrize(
    ("text", "mode", "code"),
    [
        (None, 0, 127),
        ("#!/bin/sh\n", 0o644, 126),
        ("#!/bin/sh\nexit 1\n", 0o755, 1),
        ("#!/bin/sh\nexec sleep 60\n", 0o755, 137),
    ],
    ids=["no virtual environment", "no run bit", "broken", "hangs"],
)
def test_a_python_that_cannot_run_the_hooks(row, syslog, text, mode, code):
    python = row.directory / "python"
    if text:
        row.program("python", text, mode)
    row.hooks(python=python)
    with row.job() as job:
        assert not row.journals.exists()
    row.ended()
    for which in ("prolog", "epilog"):
        syslog.said(f"{which} of job {job} on n1: exit code {code} from {python}")
