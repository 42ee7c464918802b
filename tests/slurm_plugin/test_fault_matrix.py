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
from trimtab.sandbox.config import Places
from trimtab_slurm import collect, journal, proc
from trimtab_slurm.hooks import KILL_SECONDS, hook_script
from trimtab_slurm.profile import read
from trimtab_slurm.settings import NodeSettings, render

pytestmark = pytest.mark.slurm

HARD_SECONDS = 2.0
"""What a hook may take, and by how much more a busy machine is late is added: see timed.py."""
TIMED = Path(__file__).parent / "timed.py"
PACKAGES = Path(collect.__file__).parent.parent
"""Where the hooks import trimtab from."""
PERIOD_SECONDS = 0.2
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
def row(box, hook_processes):
    """The node as a row of the matrix finds it: well, with hooks and directories of its own."""
    made = Row(box, hook_processes)
    try:
        yield made
        made.ended()
    finally:
        made.release()


class Row:
    """What a row does to the node, and what it sees there."""

    def __init__(self, box, hook_processes):
        self._hook_processes = hook_processes
        self._box = box
        self._mounted = []
        self._slurmctld = Places(box.directory).log("slurmctld")
        self._begin = self._slurmctld.stat().st_size
        self.directory = Path(tempfile.mkdtemp(prefix="row-", dir=box.directory))
        self.directory.chmod(0o755)
        self.config = self.directory / "node.toml"
        self.log = self.directory / "hooks.log"
        self.state, self.journals, self.profiles = (self.directory / name for name in ("run", "journals", "profiles"))
        self.settings = NodeSettings(str(self.journals), str(self.profiles), PERIOD_SECONDS)
        self.configure()
        self.hooks()

    def configure(self, **changes):
        """Write node.toml."""
        self.settings = dataclasses.replace(self.settings, **changes)
        self.config.write_text(render(self.settings))

    def hooks(self, python=sys.executable, change=str, epilogs=1):
        """Make slurmd's hooks this row's: with another Python, a script that is changed, an epilog that runs again."""
        for which in ("prolog", "epilog"):
            script = self.directory / which
            script.write_text(change(hook_script(which, str(python), self.config, self.state)))
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

    def disk(self, directory):
        """Put a file system in the place of a directory that can be frozen: who writes to it then waits."""
        image = self.directory / f"{directory.name}.ext4"
        with image.open("wb") as file:
            file.truncate(8 << 20)
        subprocess.run(["mkfs.ext4", "-q", image], check=True)
        try:
            self.mount(directory, "-o", "loop", image)
        except subprocess.CalledProcessError:
            pytest.skip("this machine has no loop devices, on one of which a file system would hang")

    @contextlib.contextmanager
    def frozen(self, directory):
        """A disk on which nobody can write while this lasts."""
        subprocess.run(["fsfreeze", "-f", directory], check=True)
        try:
            yield
        finally:
            subprocess.run(["fsfreeze", "-u", directory], check=True)

    def _slurm(self, *command):
        return subprocess.run(command, env=self._box.environment, capture_output=True, text=True, timeout=120)

    @contextlib.contextmanager
    def job(self, *options, gpus=2, alone=True):
        """A job that runs while this lasts, and must then end well; its id. `alone`: the node must be idle then."""
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
        if alone:
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
        """Assert that the node is and was in service, and that all hooks exited 0, in time, without PATH and HOME."""
        node = until(lambda: idle(self._slurm("scontrol", "--oneliner", "show", "node", "n1").stdout))
        assert "Reason=" not in node
        assert b"drain" not in self._slurmctld.read_bytes()[self._begin :].lower()
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
        return self._hook_processes(self.config, self.journals)

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
        """Leave nothing behind, whatever has failed."""
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.ended()
        for directory in reversed(self._mounted):
            subprocess.run(["umount", directory], check=True)
        self._slurm("scontrol", "update", "NodeName=n1", "State=RESUME")  # refused where it is in service


def idle(node):
    """What scontrol says of a node; nothing where it is not idle."""
    return node if "State=IDLE " in node else ""


def settled(path):
    """Whether a file grows no more."""
    before = path.stat().st_size
    time.sleep(5 * PERIOD_SECONDS)
    return path.stat().st_size == before


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


def test_an_installation_that_is_gone(row, syslog):
    row.hooks(change=lambda text: text.replace(repr(str(PACKAGES)), "'/nowhere'"))
    with row.job() as job:
        assert not row.journals.exists()
    syslog.said(f"prolog of job {job} on n1: exit code 1 from {sys.executable}")


def test_no_run_bit_on_what_kills_a_python_that_hangs(row, gpus, syslog):
    timeout = row.program("timeout", "", 0o644)
    row.hooks(change=lambda text: text.replace("/usr/bin/timeout", str(timeout)))
    with row.job() as job:
        row.sampled(job)
    assert row.faults(job) == []  # the job's profile lacks nothing
    syslog.said(f"prolog of job {job} on n1: {timeout} cannot be run")


def test_no_run_bit_on_what_writes_to_syslog(row):
    logger, kernel_log = row.program("logger", "", 0o644), row.directory / "kmsg"
    python = row.program("python", "#!/bin/sh\nexit 1\n")
    row.hooks(
        python, change=lambda text: text.replace("/usr/bin/logger", str(logger)).replace("/dev/kmsg", str(kernel_log))
    )
    with row.job() as job:
        pass
    assert kernel_log.read_text().strip() == f"<28>trimtab: epilog of job {job} on n1: exit code 1 from {python}"


def test_a_syslog_that_nobody_reads(row, gpus, syslog):
    row.configure(staff_group="no such group")  # something to be said by the hooks themselves
    with syslog.unread(), row.job():
        pass
    row.hooks(python="/bin/false")  # and by their script
    with syslog.unread(), row.job():
        pass


@pytest.mark.parametrize("python", ["/nowhere/python", "/bin/false"], ids=["missing", "broken"])
def test_a_sampler_that_cannot_start(row, syslog, python):
    row.configure(python=python)
    with row.job() as job:
        row.journal(job)
    row.ended()
    faults = row.recovered(job)
    assert f"the sampler, process {faults[-1].split()[3]} has died" == faults[-1]
    if python.startswith("/nowhere"):
        assert faults[0] == f"sampler: {python}: No such file or directory"
        syslog.said(f"prolog of job {job} on n1: {faults[0]}")
    syslog.said(f"epilog of job {job} on n1: {faults[-1]}")


# The driver


def test_no_nvml(row, syslog):
    with row.job() as job:
        row.sampled(job)
    (fault,) = row.faults(job)
    assert fault.startswith("GPU driver not found: 2 GPUs held (0,1), not measured: ".replace("0,1", "0, 1"))
    syslog.said(f"job {job} on n1: {fault}")


def test_an_nvml_of_another_version_than_the_driver(row, gpus, syslog):
    gpus.script(f"{gpus.gpus(2)}fail * Init {MISMATCH}\n")
    with row.job() as job:
        row.sampled(job)
    (fault,) = row.faults(job)
    assert fault.startswith(
        "GPU driver does not work: 2 GPUs held (0, 1), not measured: NVML: the library is of another"
    )
    syslog.said(f"job {job} on n1: {fault}")


def test_a_gpu_that_is_lost_while_the_job_runs(row, gpus, syslog):
    with row.job() as job:
        row.sampled(job, 4)  # two of each
        gpus.script(f"{gpus.gpus(2)}fail 1 * {LOST}\n")
        until(lambda: b"fault" in row.journal(job).read_bytes())
        row.sampled(job, 4)
    fault, *more = row.faults(job)
    assert "GPU-1" in fault
    assert more == []
    (profile,) = row.parts(job)
    kept, lost = (device.samples["time_seconds"] for device in profile.nodes[0].devices)
    assert len(kept) > len(lost) >= 2
    syslog.said(f"job {job} on n1: {fault}")


@pytest.mark.parametrize("call", ["* Init", "1 *"], ids=["at the start", "of one GPU while the job runs"])
def test_a_call_of_the_driver_that_hangs(row, gpus, syslog, call):
    with row.job() if call == "1 *" else contextlib.nullcontext() as job:
        if job:
            row.sampled(job, 2)
        gpus.script(f"{gpus.gpus(2)}delay {call} 3600\n")
        if job:
            row.sampled(job, 4)
    if not job:
        with row.job() as job:
            until(lambda: b"started" in row.journal(job).read_bytes())
    (fault,) = row.faults(job)
    assert "no answer in the last" in fault
    assert fault.startswith("GPU-1" if call == "1 *" else "the drivers")
    syslog.said(f"job {job} on n1: {fault}")


# Disks and directories


def test_a_disk_of_the_journals_that_is_full(row, syslog):
    row.mount(row.journals, "-t", "tmpfs", "-o", "size=16k,mode=0700", "none")
    row.fill(row.journals)
    with row.job() as job:
        pass
    assert row.parts(job) == []
    syslog.said(f"prolog of job {job} on n1: ", "No space left on device")


def test_a_disk_of_the_journals_that_becomes_full(row, gpus, syslog):
    row.mount(row.journals, "-t", "tmpfs", "-o", "size=64k,mode=0700", "none")
    with row.job() as job:
        row.sampled(job)
        row.fill(row.journals)
        until(lambda: settled(row.journal(job)))  # its last page is full too
        (row.journals / "filler").unlink()
        row.sampled(job)
    faults = row.faults(job)
    assert faults[0].startswith("journal: ")
    assert faults[-1] == "journal: can be written to again"
    syslog.said(f"job {job} on n1: {faults[0]}")


def test_a_disk_of_the_profiles_that_is_full(row, gpus, syslog):
    row.mount(row.profiles, "-t", "tmpfs", "-o", "size=16k,mode=0755", "none")
    row.fill(row.profiles)
    with row.job() as job:
        row.sampled(job)
    row.ended()
    (row.profiles / "filler").unlink()
    row.mount(row.profiles, "-t", "tmpfs", "-o", "mode=0755", "none")  # a larger one
    (fault, *_) = row.recovered(job)
    assert "No space left on device" in fault
    syslog.said(f"job {job} on n1: ", "No space left on device")


@pytest.mark.parametrize("place", ["state", "journals", "profiles"])
@pytest.mark.parametrize("fault", ["read-only", "another's", "writable to all", "a file"])
def test_a_directory_that_cannot_be_used(row, gpus, syslog, place, fault):
    directory = getattr(row, place)
    if fault == "a file":
        directory.write_text("")
    else:
        directory.mkdir(mode=0o755)
    if fault == "read-only":
        row.mount(directory, "-t", "tmpfs", "-o", "ro,mode=0755", "none")
        said = "Read-only file system"
    elif fault == "another's":
        os.chown(directory, 4711, 4711)
        said = "could be written to by another user (owner 4711, mode 0755)"
    elif fault == "writable to all":
        directory.chmod(0o777)
        said = "could be written to by another user (owner 0, mode 0777)"
    else:
        said = "Not a directory"
    with row.job() as job:
        if place == "profiles":
            row.sampled(job)
    row.ended()
    if place == "profiles":
        if fault == "a file":
            directory.unlink()
        elif fault == "read-only":
            subprocess.run(["mount", "-o", "remount,rw", directory], check=True)
        else:
            os.chown(directory, 0, 0)
            directory.chmod(0o755)
        faults = row.recovered(job)
        assert all(said in fault for fault in faults)
        assert faults
    else:
        assert row.parts(job) == []
    syslog.said(f"job {job} on n1: ", said)


def test_a_state_directory_that_others_may_write_to_from_now_on(row, gpus, syslog):
    with row.job() as job:
        row.sampled(job)
        row.state.chmod(0o777)
    row.ended()  # its epilog could not tell it
    (profile,) = row.parts(job)
    assert f"{row.state} could be written to by another user" in profile.nodes[0].events[-1].text
    syslog.said(f"epilog of job {job} on n1: ", "could be written to by another user (owner 0, mode 0777)")


@pytest.mark.parametrize("place", ["state", "journals", "profiles"])
def test_a_file_system_that_hangs(row, gpus, syslog, place):
    """Beyond the reach of SIGKILL, as a dead file server is."""
    row.disk(getattr(row, place))
    with row.frozen(getattr(row, place)), row.job() as job:
        if place == "profiles":
            row.sampled(job)
    if place == "profiles":
        (fault,) = row.faults(job)
        assert fault == f"profile directory: {row.profiles} did not answer within 0.3 s"
        syslog.said(f"prolog of job {job} on n1: {fault}")
    else:
        row.ended()
        syslog.said(f"prolog of job {job} on n1: exit code 137 from {sys.executable}")


def test_a_disk_of_the_journals_that_hangs_while_the_job_runs(row, gpus, syslog):
    row.disk(row.journals)
    with contextlib.ExitStack() as stack:
        with row.job() as job:
            row.sampled(job)
            stack.enter_context(row.frozen(row.journals))
        assert row.processes()
    assert row.parts(job)[0].nodes  # its epilog was killed, and the sampler has ended all the same
    syslog.said(f"epilog of job {job} on n1: exit code 137 from {sys.executable}")


def test_a_fault_that_node_toml_asks_for(row, gpus, syslog):
    row.configure(fault="lost:1@0.5")
    with row.job() as job:
        until(lambda: b"is lost" in row.journal(job).read_bytes())
    assert row.faults(job) == ["injected: lost:1@0.5, if there is a device 1", "injected: GPU-1 is lost"]
    syslog.said(f"sampler of job {job} on n1: injected: GPU-1 is lost")


# Prologs, epilogs and attempts


def test_an_epilog_without_a_prolog(row):
    row.hooks(change=lambda text: text if "epilog" in text else "#!/bin/sh\n")
    with row.job() as job:
        pass
    assert row.parts(job) == []


def test_an_epilog_that_runs_three_times(row, gpus):
    row.hooks(epilogs=3)
    with row.job() as job:
        row.sampled(job)
    assert row.faults(job) == []
    assert not (row.state / "n1" / str(job)).exists()


def test_a_sampler_that_is_killed(row, gpus, syslog):
    with row.job() as job:
        row.sampled(job, 4)
        sampler, samples = row.sampler(job), row.samples(job)
        os.kill(sampler, signal.SIGKILL)
        until(lambda: proc.read_stat(sampler) is None)
    (fault,) = row.faults(job)
    assert fault == f"the sampler, process {sampler}, has died"
    (profile,) = row.parts(job)
    assert sum(len(device.samples["time_seconds"]) for device in profile.nodes[0].devices) >= samples
    syslog.said(f"epilog of job {job} on n1: {fault}")


@pytest.mark.parametrize("damage", ["truncated", "garbage at its end", "garbage at its beginning"])
def test_a_journal_that_is_damaged(row, gpus, syslog, damage):
    with row.job() as job:
        row.sampled(job, 6)
        sampler, path = row.sampler(job), row.journal(job)
        os.kill(sampler, signal.SIGKILL)
        until(lambda: proc.read_stat(sampler) is None)
        content = path.read_bytes()
        noise = random.Random(0).randbytes(4096)
        kept = {"truncated": content[:-5], "garbage at its end": content + noise}.get(damage, noise + content)
        path.write_bytes(kept)
    row.ended()
    if damage.endswith("beginning"):
        assert row.parts(job) == []
        assert path.with_suffix(".damaged").stat().st_size >= len(kept)
        syslog.said(path.name, "cannot be used, and is kept as .damaged")
        return
    (profile,) = row.parts(job)
    (node,) = profile.nodes
    assert min(len(device.samples["time_seconds"]) for device in node.devices) >= 2
    (said,) = [event.text for event in node.events if event.text.startswith("damaged: ")]
    syslog.said(f"job {job} on n1: ", said)


@pytest.mark.parametrize("clock", ["right", "set back an hour after the first attempt began"])
def test_two_attempts_of_one_job(row, gpus, syslog, clock):
    """slurmd's clock, and this machine's, cannot be set here: the first attempt's prolog sees one that is ahead."""
    if clock != "right":
        ahead = (
            "import os, time; real, ns = time.time, time.time_ns; "
            "hour = 3600 * (os.environ['SLURM_JOB_RESTART_COUNT'] == '0'); "
            "time.time = lambda: real() + hour; time.time_ns = lambda: ns() + hour * 10**9"
        )
        row.hooks(row.program("python", f'#!/bin/sh\nexec {sys.executable} -I -S -c "{ahead}\n$4"\n'))
    job = row.batch('[ -n "$SLURM_RESTART_COUNT" ] && exec sleep 1; sleep 1; scontrol requeue $SLURM_JOB_ID; sleep 60')
    attempts = sorted(row.parts(job), key=lambda profile: profile.restart_count)
    assert [profile.restart_count for profile in attempts] == [0, 1]
    for profile in attempts:
        (node,) = profile.nodes  # by its own clock: the attempt's start can be the controller's word
        assert 0.5 < node.end_seconds - node.start_seconds < 60
        for device in node.devices:
            times = device.samples["time_seconds"]
            assert node.start_seconds <= times[0] < times[-1] <= node.end_seconds
    if clock != "right":
        (fault,) = [event.text for event in attempts[0].nodes[0].events if event.kind == "fault"]
        assert fault.startswith("the clock was set by -3600 s")
        syslog.said(f"job {job} on n1: {fault}")


def test_the_end_of_one_job_does_not_touch_another_jobs_sampler(row, gpus):
    with row.job(gpus=1) as kept:
        with row.job(gpus=1, alone=False) as ended:
            row.sampled(ended)
            sampler = row.sampler(ended)
        until(lambda: proc.read_stat(sampler) is None)
        row.sampled(kept, 3)
    assert [row.faults(job) for job in (kept, ended)] == [[], []]


def test_a_job_that_opts_out(row, gpus):
    with row.job("--comment=a demo, trimtab=off") as job:
        pass
    assert not (row.profiles / "sandbox" / str(job)).exists()
    assert not (row.state / "n1" / str(job)).exists()
    assert not row.journals.exists()
