"""Seeing a submitted job through."""

import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.wrapper.slurm_states import RUNNING_JOB
from trimtab import follow as following
from trimtab.requeue import act
from trimtab_slurm.cluster import SlurmSilent

WAITING_JOB = replace(RUNNING_JOB, state="PENDING", nodes=(), start_seconds=None)


class Clock:
    """In place of the module `time`: it passes only while one sleeps; `at_each` is what happens then."""

    def __init__(self):
        self.now, self.at_each = 0.0, lambda now: None

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.at_each(self.now)


class Client:
    """A Slurm that knows one job, as `state` has it at a time; `asked` holds when it was asked."""

    def __init__(self, clock, state):
        self.clock, self.state, self.asked = clock, state, []

    def job(self, job_id):
        self.asked.append(self.clock.now)
        return self.state(self.clock.now)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(following, "time", clock)
    return clock


def test_a_controller_that_is_away_for_a_while_ends_nothing(monkeypatch, tmp_path):
    output = tmp_path / "out"
    output.write_text("step 1\n")
    ended = SimpleNamespace(state="COMPLETED", reason="None", stdout=str(output), ended=True)
    answers = iter([SlurmSilent("connection reset"), SlurmSilent("no contact"), ended])

    class Restarted:
        def job(self, job_id):
            answer = next(answers)
            if isinstance(answer, SlurmSilent):
                raise answer
            return answer

    monkeypatch.setattr(act, "FIRST_PAUSE_SECONDS", 0.001)
    shown = []
    assert following.follow(Restarted(), 7, shown.append) is ended
    assert shown == ["step 1\n"]


def test_a_job_that_waits_is_asked_for_less_and_less(clock):
    client = Client(clock, lambda now: WAITING_JOB if now < 600 else replace(WAITING_JOB, state="CANCELLED"))
    following.follow(client, 7, lambda text: None)
    assert client.asked == [*range(0, 30, 2), *range(38, 609, 10)]


def test_the_output_of_a_job_is_shown_at_once_and_its_end_is_seen_soon_though_slurm_is_asked_rarely(clock, tmp_path):
    output, shown_at, end_seconds = tmp_path / "out", [], 1000.5
    job = replace(RUNNING_JOB, stdout=str(output))

    def writes(now):
        if now <= end_seconds:
            with output.open("a") as file:
                file.write(f"step at {now}\n")

    clock.at_each = writes
    client = Client(clock, lambda now: job if now < end_seconds else replace(job, state="COMPLETED"))
    following.follow(client, 7, lambda text: shown_at.append((clock.now, text)))
    assert shown_at == [(now / 2, f"step at {now / 2}\n") for now in range(1, 2002)]
    assert client.asked == [*range(0, 30, 2), *range(38, 999, 10), end_seconds + following.SOON_SECONDS]


def test_slow_steps_do_not_look_like_an_end(clock, tmp_path):
    output = tmp_path / "out"
    job = replace(RUNNING_JOB, stdout=str(output))
    clock.at_each = lambda now: output.write_text("step\n" * int(now / 4))
    client = Client(clock, lambda now: job if now < 100 else replace(job, state="COMPLETED"))
    following.follow(client, 7, lambda text: None)
    assert client.asked == [*range(0, 30, 2), *range(38, 109, 10)]


@pytest.mark.parametrize(
    ("reason", "restart_count", "told"),
    [
        ("Resources", 0, "trimtab: job 7 waits: Resources\n"),
        ("BeginTime", 0, "trimtab: job 7 waits: BeginTime\n"),
        ("BeginTime", 1, "trimtab: job 7 waits: BeginTime: Slurm lets a requeued job rest (cred_expire, 120 s by "),
    ],
)
def test_what_a_job_waits_for_is_told_once(clock, reason, restart_count, told):
    waiting = replace(WAITING_JOB, reason=reason, restart_count=restart_count)
    client = Client(clock, lambda now: waiting if now < 60 else replace(waiting, state="CANCELLED"))
    shown = []
    following.follow(client, 7, shown.append)
    assert len(shown) == 1
    assert shown[0].startswith(told)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"state": "CANCELLED", "start_seconds": None},
            "job 7 was cancelled before it began: there is nothing to report",
        ),
        (
            {"state": "DEADLINE", "start_seconds": None},
            "job 7 has ended (DEADLINE) before it began: there is nothing to report",
        ),
        ({"state": "CANCELLED", "start_seconds": None, "restart_count": 1}, ""),
        ({"state": "CANCELLED"}, ""),
    ],
)
def test_of_a_job_without_an_attempt_there_is_nothing_to_report(changes, told):
    assert following.never_began(replace(RUNNING_JOB, **changes)) == told


def _held(sandbox, directory):
    """`trimtab submit --follow` of a job that does not begin; the process, and the job's id."""
    (directory / "job.toml").touch()
    process = subprocess.Popen(
        [sys.executable, "-m", "trimtab", "submit", "job.toml", "--template", "cpu-demo", "--follow", "--", "--hold"],
        cwd=directory,
        env={**sandbox.environment, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    job_id = process.stdout.readline().split()[2].rstrip(";")
    assert process.stdout.readline() == f"trimtab: job {job_id} waits: JobHeldUser\n"
    return process, job_id


@pytest.mark.slurm
def test_a_job_that_is_cancelled_while_it_waits_is_not_waited_for(sandbox, tmp_path):
    process, job_id = _held(sandbox, tmp_path)
    sandbox.run("scancel", job_id)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert error == f"trimtab: job {job_id} was cancelled before it began: there is nothing to report\n"


@pytest.mark.slurm
def test_ctrl_c_leaves_the_job_alone_and_says_what_can_be_done_with_it(sandbox, tmp_path):
    process, job_id = _held(sandbox, tmp_path)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert error == (
        f"\ntrimtab: job {job_id} goes on without you: `tail -f {tmp_path}/trimtab-{job_id}.out` shows what it writes, "
        f"`trimtab report {job_id}` says how it went, `scancel {job_id}` ends it\n"
    )
    assert "JobState=PENDING" in sandbox.run("scontrol", "show", "job", job_id).stdout
    sandbox.run("scancel", job_id)
