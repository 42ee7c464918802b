"""The hooks as slurmd runs them: their scripts, by sh, without an environment, real samplers and real tasks."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from trimtab_slurm import journal, proc, resolve
from trimtab_slurm.hooks import DEADLINE_SECONDS, KILL_SECONDS, hook_script
from trimtab_slurm.profile import read
from trimtab_slurm.settings import NodeSettings, render

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="slurmd runs its hooks as root")

RECORDED = Path(__file__).parent / "data" / "prolog-22.05.8.env"
"""What a real prolog saw, of another user and job."""
HARD_SECONDS = 2.0
"""What a hook may take, and by how much more a busy machine is late is added: see timed.py."""
TIMED = Path(__file__).parent / "timed.py"
BUSY = "while :; do :; done"


class Node:
    """A node with trimtab's hooks: everything below one directory."""

    def __init__(self, directory, hook_processes):
        self._hook_processes = hook_processes
        self.directory = directory
        self.config = directory / "node.toml"
        self.python = sys.executable
        self.settings = NodeSettings(str(directory / "journals"), str(directory / "profiles"), 0.1)
        self.config.write_text(render(self.settings))
        lines = RECORDED.read_text().splitlines()
        self.environment = dict(line.split("=", 1) for line in lines)
        self.job = directory / "profiles" / "sandbox" / self.environment["SLURM_JOB_ID"]

    def hook(self, which, wrap=(), **changes):
        """Run a hook: it must say nothing, exit 0, in time, and hold no descriptor of its caller's. Its seconds."""
        script = self.directory / which
        script.write_text(hook_script(which, self.python, self.config, self.directory / "run"))
        log = self.directory / "hooks.log"
        timed = [sys.executable, "-I", "-S", TIMED, log, str(KILL_SECONDS), *wrap, "/bin/sh", script]
        # As slurmd does: it reads until nobody holds the other end of the pipe.
        done = subprocess.run(timed, env=self.environment | changes, capture_output=True, timeout=30)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
        entry = json.loads(log.read_text().splitlines()[-1])
        assert entry["seconds"] < HARD_SECONDS + entry["late_seconds"]
        return entry["seconds"]

    def prolog(self, **changes):
        return self.hook("prolog", **changes)

    def epilog(self, **changes):
        self.hook("epilog", SLURM_SCRIPT_CONTEXT="epilog_slurmd", SLURM_JOB_EXIT_CODE2="0:9", **changes)

    @property
    def sampler(self):
        """The process id of the sampler of the job, as the prolog noted it."""
        return json.loads((self.state / "sampler.json").read_text())["pid"]

    @property
    def state(self):
        return self.directory / "run" / "n1" / self.environment["SLURM_JOB_ID"]

    @property
    def journals(self):
        return sorted((self.directory / "journals").glob("*.journal"))

    def part(self):
        """The node's part, once there is no journal any more."""
        _until(lambda: not self.journals)
        (path,) = (self.job / "parts").glob("[!.]*.h5")
        return read(path)

    def processes(self):
        """What the hooks have started, and still runs."""
        return self._hook_processes(self.config, self.directory / "journals")


@pytest.fixture
def node(open_path, hook_processes):
    made = Node(open_path, hook_processes)
    yield made
    for pid in made.processes():
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def task(node):
    """A function that starts a shell command as a task of the job, as its user."""
    started = []

    def start(rank, command=BUSY):
        environment = {name: node.environment[name] for name in ("SLURM_JOB_ID", "SLURMD_NODENAME")}
        process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            env=environment | {"SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank)},
            user=int(node.environment["SLURM_JOB_UID"]),
            group=int(node.environment["SLURM_JOB_GID"]),
            extra_groups=[],
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_job_has_the_real_figures_of_its_tasks(node, task):
    running = [task(0), task(3, "exec sleep 1000")]  # exec: a child of the shell would outlive its kill
    time.sleep(0.5)  # a task that is just starting has no memory yet, and takes CPU: of one this old that is little
    node.prolog()
    assert node.job.stat().st_uid == 4711
    time.sleep(1.5)
    for process in running:
        process.kill()
        process.wait()
    node.epilog()
    part = node.part()
    assert (part.cluster, part.job_id, part.user, part.restart_count) == ("sandbox", 2, "trainer", 0)
    assert part.expected_nodes == ("n1", "n2")
    assert part.missing_nodes == ("n2",)
    (recorded,) = part.nodes
    assert [device.uuid for device in recorded.devices] == ["cpu-n1-task0", "cpu-n1-task3"]
    busy, idle = (device.samples for device in recorded.devices)
    assert len(busy["time_seconds"]) >= 5
    assert (busy["time_seconds"][1:] > busy["time_seconds"][:-1]).all()
    assert part.start_seconds <= busy["time_seconds"][0] <= busy["time_seconds"][-1] <= part.end_seconds
    assert abs(part.end_seconds - time.time()) < 60
    for samples in (busy, idle):  # the last sample may come too close to the one before for a rate
        samples["utilization_cores"] = samples["utilization_cores"][~np.isnan(samples["utilization_cores"])]
    assert 0 < busy["utilization_cores"].max() < 1.5  # one thread; clock ticks are coarse for 0.1 s
    assert len(set(busy["utilization_cores"])) > 1
    assert (busy["cpu_seconds"][1:] >= busy["cpu_seconds"][:-1]).all()
    assert busy["cpu_seconds"][-1] > busy["cpu_seconds"][0]
    assert idle["utilization_cores"].max() < 0.1
    assert busy["memory_used_bytes"].min() > 1e5
    kinds = [event.kind for event in recorded.events]
    assert kinds == ["prolog", "sampler", "fault", "epilog", "sampler"]
    assert recorded.events[2].text.startswith("GPU driver not found: 2 GPUs held (0, 1), not measured: ")
    assert recorded.events[3].text == "job exit code 0:9"
    for path in (node.job, node.job / "parts", *(node.job / "parts").iterdir()):
        assert (path.stat().st_uid, path.stat().st_mode & 0o077) == (4711, 0)
    _until(lambda: node.processes() == [])
    assert not node.state.exists()


def test_a_sampler_holds_its_journal_and_nothing_else(node):
    node.prolog()
    _until(lambda: node.journals and b"started" in node.journals[0].read_bytes())
    kept = {"0": "/dev/null", "1": "/dev/null", "2": "/dev/null", "3": str(node.journals[0])}
    _until(lambda: _descriptors(node.sampler) == kept)  # but for the moments when it reads /proc itself
    status = Path(f"/proc/{node.sampler}/status").read_text()
    assert proc.read_stat(node.sampler).session not in (0, os.getsid(0))
    assert int(status.partition("VmRSS:")[2].split()[0]) < 40_000  # kB: neither numpy nor h5py
    assert node.journals[0].stat().st_mode & 0o777 == 0o600
    node.epilog()
    node.part()


def test_a_job_that_is_over_at_once_has_a_profile(node):
    node.prolog()
    node.epilog()  # before Python has started
    (recorded,) = node.part().nodes
    assert [event.kind for event in recorded.events if event.kind != "fault"].count("sampler") == 2


def test_a_sampler_that_was_killed_leaves_what_it_had_written(node, task):
    node.prolog()
    task(0)
    _until(lambda: len(_journal(node).devices) and len(_journal(node).devices[0].rows) > 3)
    os.kill(node.sampler, signal.SIGKILL)
    _until(lambda: proc.read_stat(node.sampler) is None)
    expected = len(_journal(node).devices[0].rows)
    node.epilog()
    (recorded,) = node.part().nodes
    assert len(recorded.devices[0].samples["time_seconds"]) == expected
    assert recorded.events[-1].text == "ended without a word: killed, or the node went down"
    assert "epilog" in [event.kind for event in recorded.events]


def test_what_a_crashed_node_left_is_collected_by_the_next_prolog(node):
    node.prolog()
    os.kill(node.sampler, signal.SIGKILL)
    shutil.rmtree(node.directory / "run")  # a reboot
    (left,) = node.journals
    node.prolog(SLURM_JOB_ID="3")
    assert left.exists()  # who has just written to it may still be at it
    os.utime(left, (0, 0))
    node.prolog(SLURM_JOB_ID="4")
    _until(lambda: not left.exists())
    assert len(list((node.job / "parts").glob("*.h5"))) == 1
    for job in ("3", "4"):
        node.epilog(SLURM_JOB_ID=job)
    _until(lambda: not node.journals)


def test_one_jobs_end_does_not_touch_another_jobs_sampler(node):
    node.prolog()
    mine = node.sampler
    node.prolog(SLURM_JOB_ID="20")
    node.prolog(SLURMD_NODENAME="n10")
    node.epilog(SLURM_JOB_ID="20")
    node.epilog(SLURMD_NODENAME="n10")
    _until(lambda: len(node.journals) == 1)
    assert proc.read_stat(mine) is not None
    node.epilog()
    _until(lambda: proc.read_stat(mine) is None)


def test_a_prolog_that_runs_again_leaves_the_sampler_at_work(node):
    node.prolog()
    first = node.sampler
    node.prolog()
    assert node.sampler == first
    assert len(node.journals) == 1
    node.epilog()
    (recorded,) = node.part().nodes
    assert [event.text for event in recorded.events if event.kind == "prolog"] == [
        "job 2 of trainer on n1",
        "ran again; the sampler of this attempt goes on",
    ]


def test_the_next_attempt_ends_a_sampler_whose_epilog_never_ran(node):
    node.prolog()
    first = node.sampler
    node.prolog(SLURM_JOB_RESTART_COUNT="1")
    _until(lambda: proc.read_stat(first) is None)
    node.epilog(SLURM_JOB_RESTART_COUNT="2")
    _until(lambda: not node.journals)
    found = sorted(read(path).restart_count for path in (node.job / "parts").glob("*.h5"))
    assert found in ([0, 1], [1])  # two starts in one second share a name


def test_an_epilog_without_a_prolog_and_one_that_runs_again_do_nothing(node):
    node.epilog()
    node.prolog()
    for _ in range(3):
        node.epilog()
    node.part()
    _until(lambda: node.processes() == [])


def test_a_sampler_that_took_a_dead_ones_id_is_not_killed(node):
    node.prolog()
    record = json.loads((node.state / "sampler.json").read_text())
    _until(lambda: proc.seconds_since_boot() * proc.TICKS_PER_SECOND > record["start_ticks"] + 1)
    other = subprocess.Popen(["/bin/sleep", "1000"])
    (node.state / "sampler.json").write_text(json.dumps(record | {"pid": other.pid}))
    node.epilog()
    assert other.poll() is None
    other.kill()
    other.wait()
    _until(lambda: not node.journals)  # its own sampler ends, since its state has vanished


@pytest.mark.parametrize(
    "fault",
    ["state is a file", "state is a link", "state is another's", "journals are a file", "profiles are a file"],
)
def test_directories_that_cannot_be_used_fail_no_hook(node, fault):
    which, _, what = fault.partition(" ")
    place = node.directory / {"state": "run"}.get(which, which)
    if what.endswith("file"):
        place.write_text("")
    elif what.endswith("link"):
        (node.directory / "elsewhere").mkdir()
        place.symlink_to(node.directory / "elsewhere")
    else:
        place.mkdir()
        os.chown(place, 4711, 4711)
    node.prolog()
    node.epilog()
    if which == "state":
        assert node.journals == []
        assert list(place.resolve().iterdir() if place.is_dir() else []) == []
    if which == "profiles":
        _until(lambda: node.processes() == [])
        (left,) = node.journals  # nothing is lost: it is collected when the place can be written to
        assert "profile directory: " in str(_journal(node).events)
        place.unlink()
        os.utime(left, (0, 0))
        node.prolog(SLURM_JOB_ID="3")
        _until(lambda: not left.exists())
        node.epilog(SLURM_JOB_ID="3")
        _until(lambda: not node.journals)


@pytest.mark.parametrize("place", ["run", "journals", "profiles"])
def test_a_read_only_disk_fails_no_hook(node, place):
    (node.directory / place).mkdir()
    mount = f'mount -t tmpfs -o ro none {node.directory}/{place} && exec "$@"'
    for which in ("prolog", "epilog"):
        node.hook(which, wrap=["unshare", "--mount", "sh", "-c", mount, "sh"])
    _until(lambda: node.processes() == [])


def test_a_prolog_that_was_cut_short_leaves_a_part_all_the_same(node):
    node.prolog()
    os.kill(node.sampler, signal.SIGKILL)
    (node.state / "sampler.json").unlink()
    node.epilog()
    assert node.part().nodes[0].events[0].kind == "prolog"
    assert not node.state.exists()


def test_a_full_disk_keeps_no_sampler_alive(node):
    (node.directory / "journals").mkdir(mode=0o700)
    mounted = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "none", node.directory / "journals"]
    subprocess.run(mounted, check=True)
    try:
        node.prolog()
        sampler = node.sampler
        with contextlib.suppress(OSError), (node.directory / "journals/filler").open("wb") as filler:
            filler.write(bytes(1 << 17))
        node.epilog()
        _until(lambda: proc.read_stat(sampler) is None)
    finally:
        _until(lambda: node.processes() == [])
        subprocess.run(["umount", node.directory / "journals"], check=True)


@pytest.mark.parametrize("config", ["missing", "in no directory", "another's", "faulty"])
def test_without_a_config_that_can_be_believed_the_defaults_apply(node, config):
    """In a mount namespace of its own, where the defaults' directories are the test's."""
    if config == "missing":
        node.config.unlink()
    elif config == "in no directory":
        node.config = node.directory / "no" / "node.toml"
    elif config == "another's":
        os.chown(node.config, 4711, 0)
    else:
        node.config.write_text("profile_root = 3")
    kept = node.directory / "default"
    (kept / "lib").mkdir(parents=True)
    bind = f'mount --bind {kept}/lib /var/lib && exec "$@"'
    wrap = ["unshare", "--mount", "sh", "-c", bind, "sh"]
    node.hook("prolog", wrap=wrap)
    node.hook("epilog", wrap=wrap)
    parts = kept / "lib/trimtab/profiles/sandbox/2/parts"
    _until(lambda: parts.exists() and list(parts.glob("[!.]*.h5")))
    (path,) = parts.glob("[!.]*.h5")
    faults = [event.text for event in read(path).nodes[0].events if event.kind == "fault"]
    assert faults[0].startswith("the defaults apply: ")
    _until(lambda: node.processes() == [])


@pytest.mark.parametrize("python", ["/nowhere/python", "/etc/passwd", "/bin/false"])
def test_a_broken_python_fails_no_hook(node, python):
    node.python = python
    node.prolog()
    node.epilog()
    assert node.journals == []


@pytest.mark.parametrize("python", ["/nowhere/python", "/bin/false"])
def test_an_epilog_whose_python_fails_ends_the_sampler_all_the_same(node, python):
    node.prolog()
    other = node.state.with_name("3")
    other.mkdir()
    node.python = python
    for wrong in ({"SLURM_JOB_ID": "*"}, {"SLURM_JOB_ID": "../n1/2"}, {"SLURMD_NODENAME": "n1/2/.."}):
        node.epilog(**wrong)
    assert node.state.exists()
    node.epilog()
    assert not node.state.exists()
    assert other.exists()
    (recorded,) = node.part().nodes
    assert f"{node.state} has vanished" in recorded.events[-1].text


def test_an_epilog_finds_what_the_prolog_left_whatever_has_become_of_node_toml(node):
    node.prolog()
    node.config.write_text("oops = 3")
    node.epilog()
    recorded = node.part().nodes[0]  # where node.toml said when the job began
    assert [event.text for event in recorded.events if event.kind == "epilog"] == ["job exit code 0:9"]
    assert "unknown key oops" in str(recorded.events)
    assert not node.state.exists()


@pytest.mark.parametrize("python", ["/nowhere/python", "/bin/false"])
def test_a_sampler_that_does_not_start_leaves_the_hooks_events(node, python):
    node.config.write_text(render(dataclasses.replace(node.settings, python=python)))
    node.prolog()
    node.epilog()
    _until(lambda: node.processes() == [])
    start = ["fault"] if python.startswith("/nowhere") else []
    assert [kind for _, kind, _ in _journal(node).events] == ["prolog", *start, "fault", "epilog"]


@pytest.mark.parametrize("environment", [{}, {"SLURM_JOB_ID": "x"}, {"SLURMD_NODENAME": "../../etc"}])
def test_an_environment_that_names_no_attempt_fails_no_hook(node, environment):
    node.environment = node.environment | environment if environment else {}
    node.prolog()
    node.epilog()
    assert node.journals == []


def test_a_broken_installation_fails_no_hook(node, monkeypatch):
    package = node.directory / "trimtab_slurm"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "hooks.py").write_text("raise SystemExit(3)")
    monkeypatch.setattr("trimtab_slurm.hooks.__file__", str(package / "hooks.py"))
    node.prolog()
    node.epilog()
    assert node.journals == []


def test_an_installation_that_python_cannot_compile_into_is_used_as_it_is(node, monkeypatch):
    package = node.directory / "trimtab_slurm"
    shutil.copytree(Path(journal.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr("trimtab_slurm.hooks.__file__", str(package / "hooks.py"))
    read_only = f'mount --bind -o ro {package} {package} && exec "$@"'
    node.hook("prolog", wrap=["unshare", "--mount", "sh", "-c", read_only, "sh"])
    assert node.sampler
    node.hook("epilog")
    node.part()


@pytest.mark.parametrize(
    ("change", "gpus", "profiled"),
    [
        ({"partitions": ("gpu", "main")}, "0", True),
        ({"partitions": ("gpu",)}, "0", False),
        ({"minimum_gpus": 2}, "0,1", True),
        ({"minimum_gpus": 2}, "0", False),
        ({"minimum_gpus": 1}, None, False),
        ({"opt_out": "private"}, "0", False),
        ({"opt_out": ""}, "0", True),
    ],
)
def test_node_toml_says_which_jobs_are_profiled(node, syslog, change, gpus, profiled):
    node.config.write_text(render(dataclasses.replace(node.settings, **change)))
    for name in resolve.VARIABLES:
        node.environment.pop(name, None)
    if gpus is not None:
        node.environment["SLURM_JOB_GPUS"] = gpus
    node.prolog(SLURM_JOB_PARTITION="main", SLURM_JOB_COMMENT="private")
    assert len(node.journals) == profiled
    node.epilog()
    _until(lambda: node.processes() == [])
    assert (node.job / "parts").exists() == profiled
    if not profiled:
        syslog.said("prolog of job 2 on n1: the job is not profiled: ")


def test_what_went_wrong_is_in_syslog_on_one_line(node, syslog):
    node.config.write_text('"a\\nb" = 1')
    node.environment["SLURM_JOB_ID"] = "7\n8"
    node.prolog()
    syslog.said("prolog of job 7?8 on n1: the defaults apply: ", "unknown key a?b")
    syslog.said("prolog of job 7?8 on n1: AttemptError: SLURM_JOB_ID='7\\n8' is no number")


def test_a_python_that_hangs_is_killed(node):
    python = node.directory / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    node.python = str(python)
    node.prolog()


def test_a_hook_that_hangs_gives_up(node):
    """A state directory that does not answer: opening a FIFO in the place of the sampler's record waits for ever."""
    node.state.mkdir(parents=True, mode=0o700)
    os.mkfifo(node.state / "sampler.json")
    assert node.prolog() > DEADLINE_SECONDS


def test_the_script_starts_python_isolated_whatever_its_path_is(node):
    python = node.directory / "it's a python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@" >"$0.arguments"\n')
    python.chmod(0o755)
    node.python, node.config = str(python), Path("/etc/trim tab/node's.toml")
    node.prolog()
    *options, code = (node.directory / "it's a python.arguments").read_text().splitlines()
    assert options == ["-I", "-S", "-c"]
    assert code.endswith(f"""main('prolog', "/etc/trim tab/node's.toml", '{node.directory}/run')""")


def _journal(node):
    (path,) = node.journals
    return journal.parse(path.read_bytes())


def _descriptors(pid):
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found[entry.name] = str(entry.readlink())
    return found


def _until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
