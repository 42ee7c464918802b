"""The main job on a real Slurm: submitted, trained, profiled, reported; and the ways in which it ends early."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trimtab_slurm import profile

pytest.importorskip("torch", reason="training needs torch and Megatron-core: pip install 'trimtab[train]'")
pytest.importorskip("megatron.core", reason="training needs Megatron-core: pip install 'trimtab[train]'")

pytestmark = [pytest.mark.slurm, pytest.mark.mcore]

JOB = """
[model]
layers = 6
hidden_size = 64
attention_heads = 4
sequence_length = 64
[parallel]
tensor = 2
pipeline = 2
layout = "Ettttt|tL"
[batch]
microbatch_size = 2
global_batch_size = 8
[train]
steps = {steps}
warmup_steps = 1
learning_rate = 1e-2
[data]
tokenizer = "bytes"
[balance]
window_steps = 8
[requeue]
enabled = false
"""
WARM_UP_STEPS, WINDOWS_STEPS = 5, 3 * 8
"""Before the first window, and of the windows that it takes for an imbalance to count."""
STEPS = WARM_UP_STEPS + 3 * WINDOWS_STEPS
"""On a busy machine, one window or another is too noisy to count."""


class Submitted:
    """A job of four ranks on two nodes that was submitted with --follow."""

    def __init__(self, sandbox, directory: Path, steps: int):
        self.sandbox, self.directory = sandbox, directory
        (directory / "job.toml").write_text(JOB.format(steps=steps))
        options = ["--template", "cpu-demo", "--nodes", "2", "--gpus-per-node", "2", "--time", "0:10:00", "--follow"]
        with (directory / "followed").open("w") as followed:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "trimtab", "submit", "job.toml", *options],
                cwd=directory,
                env=sandbox.environment,
                stdout=followed,
                stderr=subprocess.STDOUT,
            )

    @property
    def text(self) -> str:
        return (self.directory / "followed").read_text()

    @property
    def job_id(self) -> str:
        return re.search(r"submitted job (\d+)", self.text)[1]

    def until(self, pattern: str, seconds: float = 180) -> None:
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.text):
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.1)

    def end(self, seconds: float = 180) -> int:
        return self.process.wait(seconds)

    def report(self) -> dict:
        command = [sys.executable, "-m", "trimtab", "report", self.job_id, "--json"]
        shown = subprocess.run(
            command, cwd=self.directory, env=self.sandbox.environment, capture_output=True, text=True, check=True
        )
        return json.loads(shown.stdout)

    def ranks(self) -> dict[int, int]:
        """Rank -> process id, of this job."""
        found = {}
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                environment = dict(
                    entry.split("=", 1) for entry in (directory / "environ").read_text().split("\0") if "=" in entry
                )
                command = (directory / "cmdline").read_text()
            except (OSError, UnicodeDecodeError):
                continue
            mine = (
                environment.get("SLURM_JOB_ID") == self.job_id
                and environment.get("SLURM_CONF") == self.sandbox.environment["SLURM_CONF"]
            )
            if (
                mine
                and "\0-m\0trimtab_megatron" in command
                and "SLURM_TASK_PID" in environment
                and "srun" not in command
            ):
                found[int(environment["SLURM_PROCID"])] = int(directory.name)
        return found


@pytest.fixture
def submit(sandbox, tmp_path):
    jobs = []

    def start(steps):
        jobs.append(Submitted(sandbox, tmp_path, steps))
        return jobs[-1]

    yield start
    for job in jobs:
        if job.process.poll() is None:
            job.process.kill()
            job.process.wait()
        sandbox.run("scancel", "--quiet", job.job_id)
        deadline = time.monotonic() + 60
        while sandbox.run("squeue", "--noheader").stdout.strip():
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert job.ranks() == {}, "a rank was left behind"


def assert_idle(sandbox):
    deadline = time.monotonic() + 30
    while set(sandbox.run("sinfo", "--noheader", "--format=%T").stdout.split()) != {"idle"}:
        assert time.monotonic() < deadline, sandbox.run("sinfo", "-R").stdout
        time.sleep(0.2)


def test_a_job_trains_and_its_report_holds_every_ranks_device(sandbox, submit):
    job = submit(steps=STEPS)
    assert job.end() == 0, job.text
    report = job.report()
    assert f"trained to step {STEPS}" in json.dumps(report)
    (path,) = (sandbox.directory / "profiles/sandbox" / job.job_id).glob("*.h5")
    recorded = profile.read(path)
    assert recorded.missing_nodes == ()
    steps = recorded.training.steps
    assert steps["step"].tolist() == list(range(1, STEPS + 1))
    assert steps["loss"][0] > 5  # 256 bytes and one end of text: log(257) = 5.5 before anything is learned
    assert steps["loss"][-5:].mean() < steps["loss"][0] - 1
    assert steps["tokens"].tolist() == [8 * 64] * STEPS
    devices = {device.uuid: device for node in recorded.nodes for device in node.devices}
    assert set(recorded.training.ranks["device"]) <= devices.keys()
    for uuid in recorded.training.ranks["device"]:
        samples = devices[uuid].samples
        assert len(set(samples["cpu_seconds"])) > 2
        assert len(set(samples["memory_used_bytes"])) > 2
    assert_uneven_stages_are_noticed(job, recorded.training)
    assert (job.directory / f"trimtab-{job.job_id}.html").stat().st_size > 1e6
    assert_idle(sandbox)


def assert_uneven_stages_are_noticed(job, training):
    """Five layers against one: it is told once, and all ranks are probed when they are warm, and then again."""
    stages = training.stages
    assert set(stages["microbatches"]) == {4}
    assert set(stages["squared_lengths"]) == {8 * 64**2}
    (event,) = (event for event in training.events if event.kind == "imbalance")
    assert re.match(r"since step \d+ stage 0 takes \d\d\.\d% longer", event.text), event.text
    assert f"trimtab: {event.text}" in job.text
    warm, apart = sorted(set(training.probes["step"].tolist()))
    assert WARM_UP_STEPS <= warm < WARM_UP_STEPS + WINDOWS_STEPS <= apart < STEPS
    assert sorted(training.probes["rank"].tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (training.probes["seconds"] > 0).all()


def test_a_killed_rank_is_named_and_the_job_has_a_report(sandbox, submit):
    job = submit(steps=100000)
    job.until(r"step +\d+/")
    os.kill(job.ranks()[2], signal.SIGKILL)
    assert job.end() == 3, job.text
    assert re.search(r"rank 2 \(node n2, stage 1, pid \d+\) vanished after step \d+: it was killed", job.text)
    assert "rank 2" in json.dumps(job.report())
    assert_idle(sandbox)


def test_a_job_that_is_told_to_stop_saves_and_asks_to_be_requeued(sandbox, submit):
    job = submit(steps=100000)
    job.until(r"step +\d+/")
    sandbox.run("scancel", "--batch", "--signal=USR1", job.job_id)
    assert job.end() == 75, job.text
    assert re.search(r"stopped by SIGUSR1 at step \d+ of 100000", job.text)
    assert len(list((job.directory / "checkpoints" / job.job_id).glob("step-*/complete.json"))) == 1
    assert_idle(sandbox)


def test_a_job_of_another_size_is_refused_before_anything_starts(sandbox, tmp_path):
    (tmp_path / "job.toml").write_text(JOB.format(steps=5))
    refused = sandbox.run(
        "srun", "-N1", "--gpus-per-node=2", sys.executable, "-m", "trimtab", "run", "job.toml", cwd=tmp_path
    )
    assert refused.returncode == 2
    assert "needs a multiple of 4 ranks, but the allocation gives 2" in refused.stderr
