"""The hooks as slurmd runs them: the real script, in the environment of a real hook, with nothing else in it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trimtab_slurm import collect, profile, settings
from trimtab_slurm.hooks import hook_script
from trimtab_slurm.journal import Record, read

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="hooks run as root")

BUSY = "import time\nwhile True:\n    sum(range(10000))\n"


class Node:
    """A node's hooks and directories, and the environment that slurmd would give them."""

    def __init__(self, directory: Path, python: str = sys.executable):
        self.directory = directory
        self.config = directory / "node.toml"
        self.profiles = directory / "profiles"
        self.config.write_text(
            settings.render(
                settings.NodeSettings(
                    state_directory=str(directory / "run"),
                    journal_directory=str(directory / "journals"),
                    profile_root=str(self.profiles),
                    sampler_period_seconds=0.1,
                )
            )
        )
        for which in ("prolog", "epilog"):
            self.script(which).write_text(hook_script(which, python, self.config))
            self.script(which).chmod(0o755)

    def script(self, which: str) -> Path:
        return self.directory / which

    def environment(self, job_id: int, **more: str) -> dict[str, str]:
        return {
            "SLURM_JOB_ID": str(job_id),
            "SLURM_JOB_UID": "0",
            "SLURM_JOB_GID": "0",
            "SLURM_JOB_USER": "root",
            "SLURM_CLUSTER_NAME": "c",
            "SLURM_JOB_GPUS": "0,1",
            "SLURM_NODELIST": "n1",
            "SLURMD_NODENAME": "n1",
        } | more

    def hook(self, which: str, job_id: int, **more: str) -> None:
        """Run a hook: it must succeed within its deadline, whatever else is the case."""
        ended = subprocess.run(
            [self.script(which)], env=self.environment(job_id, **more), timeout=4, capture_output=True
        )
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")

    def task(self, job_id: int) -> subprocess.Popen:
        environment = {
            "SLURM_PROCID": "0",
            "SLURM_STEP_NODELIST": "n1",
            "SLURM_TASK_PID": "1",
            "SLURM_CPUS_PER_TASK": "1",
        }
        return subprocess.Popen([sys.executable, "-c", BUSY], env=self.environment(job_id) | environment)

    def sampler_pid(self, job_id: int) -> int:
        (pid_file,) = (self.directory / "run" / "n1").glob(f"{job_id}-*.pid")
        return int(pid_file.read_text().split()[0])

    def wait_for_samples(self, job_id: int, count: int = 8) -> None:
        """Return when the journal of a job holds some samples of a device."""
        deadline = time.monotonic() + 30
        sampled = 0
        while sampled < count:
            assert time.monotonic() < deadline, "nothing was sampled"
            time.sleep(0.05)
            for path in self.directory.glob(f"journals/n1/{job_id}-*.journal"):
                sampled = sum(isinstance(record, Record) and record.kind == "S" for record in read(path))

    def profile(self, job_id: int, seconds: float = 20) -> profile.Profile:
        """The job's only merged profile, once it is there."""
        deadline = time.monotonic() + seconds
        while not (found := list((self.profiles / "c" / str(job_id)).glob("*.h5"))):
            assert time.monotonic() < deadline, "no profile came"
            time.sleep(0.05)
        (path,) = found
        return profile.read(path)


@pytest.fixture
def node(tmp_path):
    made = Node(tmp_path)
    yield made
    for pid_file in tmp_path.glob("run/*/*.pid"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid_file.read_text().split()[0]), signal.SIGKILL)


@pytest.fixture
def busy(node):
    tasks = []

    def start(job_id):
        tasks.append(node.task(job_id))
        return tasks[-1]

    yield start
    for task in tasks:
        task.kill()
        task.wait()


def test_a_job_is_profiled_from_prolog_to_epilog(node, busy):
    busy(7)
    node.hook("prolog", 7)
    node.wait_for_samples(7)
    node.hook("epilog", 7)
    recorded = node.profile(7)
    assert (recorded.cluster, recorded.job_id, recorded.user, recorded.missing_nodes) == ("c", 7, "root", ())
    (device,) = recorded.nodes[0].devices
    assert (device.uuid, device.kind, device.index) == ("cpu-n1-task0", "cpu", 0)
    # a loop keeps one core busy, as far as the machine gives it one; the first sample has nothing to compare with
    assert device.samples["utilization_ratio"][1:].mean() > 0.1
    assert len(set(device.samples["cpu_seconds"])) > 2
    assert device.samples["memory_used_bytes"].min() > 1e6
    assert any("2 GPUs held (0, 1), not measured" in event.text for event in recorded.nodes[0].events)
    assert list((node.directory / "run" / "n1").iterdir()) == []
    assert list((node.directory / "journals" / "n1").iterdir()) == []


def test_a_job_shorter_than_the_period_has_a_profile(node, busy):
    busy(8)
    node.hook("prolog", 8)
    node.hook("epilog", 8)
    assert len(node.profile(8).nodes[0].devices[0].samples["time_seconds"]) >= 1


def test_one_jobs_end_leaves_the_others_sampler_alone(node):
    node.hook("prolog", 1)
    node.hook("prolog", 11)
    node.hook("epilog", 1)
    node.profile(1)
    os.kill(node.sampler_pid(11), 0)
    node.hook("epilog", 11)
    node.profile(11)


def test_a_killed_sampler_loses_only_what_comes_after(node, busy):
    busy(9)
    node.hook("prolog", 9)
    node.wait_for_samples(9)
    os.kill(node.sampler_pid(9), signal.SIGKILL)
    node.hook("epilog", 9)
    recorded = node.profile(9)
    assert len(recorded.nodes[0].devices[0].samples["time_seconds"]) >= 8
    assert any("the sampler died" in event.text for event in recorded.nodes[0].events)


def test_an_epilog_without_prolog_and_one_too_many(node):
    node.hook("epilog", 5)
    node.hook("prolog", 5)
    node.hook("epilog", 5)
    node.hook("epilog", 5)
    assert len(node.profile(5).nodes) == 1


def test_a_part_that_is_not_there_is_named_as_missing(node):
    node.hook("prolog", 6, SLURM_NODELIST="n[1-2]")
    node.hook("epilog", 6)
    deadline = time.monotonic() + 20
    while not list((node.profiles / "c/6/parts").glob("*.h5")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (path,) = collect.collect_job(node.profiles / "c/6")
    assert profile.read(path).missing_nodes == ("n2",)


def state_is_a_file(node):
    (node.directory / "run").write_text("")


def state_is_anothers_link(node):
    (node.directory / "elsewhere").mkdir()
    (node.directory / "run").symlink_to(node.directory / "elsewhere")


def profiles_is_a_file(node):
    node.profiles.write_text("")


def no_python(node):
    for which in ("prolog", "epilog"):
        node.script(which).write_text(hook_script(which, "/no/such/python", node.config))


def broken_package(node):
    broken = node.directory / "trimtab_slurm"
    broken.mkdir()
    (broken / "__init__.py").write_text("")
    (broken / "hooks.py").write_text("raise SystemExit(3)")
    for which in ("prolog", "epilog"):
        script = node.script(which).read_text()
        node.script(which).write_text(script.replace(str(Path(profile.__file__).parents[1]), str(node.directory)))


def hanging_python(node):
    hanging = node.directory / "python"
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging.chmod(0o755)
    for which in ("prolog", "epilog"):
        node.script(which).write_text(hook_script(which, str(hanging), node.config))


FAULTS = [
    state_is_a_file,
    state_is_anothers_link,
    profiles_is_a_file,
    no_python,
    broken_package,
    hanging_python,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_whatever_is_wrong_the_hooks_succeed_in_time(node, fault):
    fault(node)
    node.hook("prolog", 3)
    node.hook("epilog", 3)
    if fault is state_is_anothers_link:
        assert list((node.directory / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("missing", ["SLURM_JOB_ID", "SLURM_JOB_UID", "SLURMD_NODENAME"])
def test_an_environment_that_names_no_job_starts_nothing(node, missing):
    environment = {name: value for name, value in node.environment(4).items() if name != missing}
    for which in ("prolog", "epilog"):
        assert subprocess.run([node.script(which)], env=environment, timeout=4).returncode == 0
    assert not list(node.directory.glob("run/*/*"))
