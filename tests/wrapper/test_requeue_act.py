import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wrapper.slurm_states import RUNNING_JOB
from trimtab import sandbox as boxes
from trimtab.requeue.act import Requeued, give_back, requeue
from trimtab_slurm.cluster import CommandLineClient, JobState, Node, SlurmError, SlurmSilent

STAYS = "its number of nodes stays: {} fixes it, which sbatch need not be told"
NO_REQUEUE = "it was submitted with --no-requeue, or the site's JobRequeue=0 says so: sbatch --requeue allows it"
HETEROGENEOUS = "it is a component of a heterogeneous job, which is requeued as a whole or not at all"
CANCELLED = "Slurm is ending it, and not for its time limit, so it was cancelled or has failed (COMPLETING)"
NODES = tuple(Node(f"n{number}", "IDLE", ("main",), (), 4, 16384, 2) for number in range(1, 5))
JOB = RUNNING_JOB


@dataclass
class ScriptedSlurm:
    """A Slurm of one job, which may stay silent before or after it has done what it was asked."""

    state: JobState | None = JOB
    silences: list[str] = field(default_factory=list)
    """What becomes of each request, in order: "before", "after" or "" (an answer); then all are answered."""
    tasks_follow: bool = True
    """Whether the number of tasks follows that of nodes."""
    refusal: str = ""
    asked: list[object] = field(default_factory=list)

    def _answer(self, what, act, answer=lambda: None):
        silence = self.silences.pop(0) if self.silences else ""
        if silence == "before":
            raise SlurmSilent("Unable to contact slurm controller")
        self.asked.append(what)
        act()
        if silence == "after":
            raise SlurmSilent("scontrol was ended by SIGTERM before it answered")
        return answer()

    def job(self, job_id):
        return self._answer("job", lambda: None, lambda: self.state)

    def nodes(self, partition):
        return self._answer(f"nodes of {partition}", lambda: None, lambda: NODES)

    def requeue(self, job):
        def act():
            if self.state.state != "RUNNING":
                raise SlurmError("Job is pending execution")
            self.state = replace(self.state, state="COMPLETING", restart_count=self.state.restart_count + 1)

        return self._answer(f"requeue {job.name}", act)

    def update(self, job, *, excluded=None, nodes=None):
        def act():
            if self.refusal:
                raise SlurmError(self.refusal)
            if excluded is not None:
                self.state = replace(self.state, excluded_nodes=tuple(excluded))
            if nodes is not None:
                tasks = nodes if self.tasks_follow else self.state.tasks
                self.state = replace(self.state, least_nodes=nodes, most_nodes=nodes, tasks=tasks)

        return self._answer((excluded, nodes), act)

    def shrink(self, job, nodes):
        def act():
            self.state = replace(self.state, nodes=tuple(nodes))

        return self._answer(f"shrink {job.name}", act)


def _requeue(slurm, *, excluded=("n2",), nodes=1, job=JOB, **options):
    return requeue(slurm, job, excluded=excluded, nodes=nodes, sleep=lambda _seconds: None, **options)


def test_a_job_is_requeued_and_then_updated():
    slurm = ScriptedSlurm()
    assert _requeue(slurm) == Requeued(True, "on 1 node without n2")
    assert slurm.asked == ["job", "nodes of main", "requeue 7", "job", (("n2",), 1), "job"]


@pytest.mark.parametrize("silences", [[], ["before"], ["after"], ["", "before"], ["", "after", "before"]])
def test_nodes_are_given_back_once(silences, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)
    slurm = ScriptedSlurm(silences=silences)
    give_back(slurm, JOB, ("n1",))
    assert slurm.state.nodes == ("n1",)
    assert slurm.asked.count("shrink 7") == 1


@pytest.mark.parametrize(
    ("state", "told"), [(None, "job 7 is no longer known"), (replace(JOB, state="COMPLETING"), "job 7 is COMPLETING")]
)
def test_a_job_that_ends_gives_back_no_nodes(state, told):
    slurm = ScriptedSlurm(state)
    with pytest.raises(SlurmError, match=told):
        give_back(slurm, JOB, ("n1",))
    assert slurm.asked == ["job"]


def test_an_arrays_task_names_itself():
    slurm = ScriptedSlurm(replace(JOB, array_job_id=7, array_task_id=3))
    _requeue(slurm, job=slurm.state)
    assert "requeue 7_3" in slurm.asked


def test_where_nothing_changes_nothing_is_updated():
    slurm = ScriptedSlurm()
    assert _requeue(slurm, excluded=(), nodes=None) == Requeued(True, "as it was")
    assert slurm.asked == ["job", "nodes of main", "requeue 7", "job"]


@given(st.lists(st.sampled_from(["", "before", "after"]), max_size=12))
@settings(deadline=None)
def test_whatever_goes_unanswered_is_done_once(silences):
    slurm = ScriptedSlurm(silences=list(silences))
    assert _requeue(slurm) == Requeued(True, "on 1 node without n2")
    assert (slurm.state.restart_count, slurm.state.excluded_nodes, slurm.state.least_nodes) == (1, ("n2",), 1)
    assert slurm.asked.count("requeue 7") == 1


def test_what_slurm_has_requeued_itself_is_only_updated():
    slurm = ScriptedSlurm(replace(JOB, state="COMPLETING", restart_count=1))  # after a preemption
    assert _requeue(slurm) == Requeued(True, "on 1 node without n2")
    assert "requeue 7" not in slurm.asked


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (None, "Slurm no longer knows job 7"),
        (replace(JOB, user="bob"), "Slurm no longer knows job 7"),
        (replace(JOB, state="COMPLETING"), CANCELLED),
        (replace(JOB, requeueable=False), NO_REQUEUE),
        (replace(JOB, heterogeneous=True), HETEROGENEOUS),
    ],
)
def test_a_job_that_must_not_begin_again_is_left_alone(state, told):
    slurm = ScriptedSlurm(state)
    assert _requeue(slurm) == Requeued(False, told)
    assert slurm.asked == ["job"]


def test_a_job_that_its_time_limit_is_ending_may_begin_again():
    slurm = ScriptedSlurm(replace(JOB, state="COMPLETING", reason="TimeLimit"))
    slurm.requeue = lambda job: setattr(slurm, "state", replace(slurm.state, restart_count=1))
    assert _requeue(slurm).done


def test_a_job_that_slurm_has_forgotten_to_run_waits_and_is_only_updated():
    slurm = ScriptedSlurm(replace(JOB, state="PENDING"))
    assert _requeue(slurm) == Requeued(True, "on 1 node without n2")
    assert "requeue 7" not in slurm.asked


def test_an_attempt_that_has_begun_is_left_alone():
    slurm = ScriptedSlurm(replace(JOB, restart_count=1))
    assert _requeue(slurm) == Requeued(True, "as it was; the next attempt has begun already")
    assert slurm.asked == ["job", "nodes of main"]


@pytest.mark.parametrize(
    ("job", "follow", "told"),
    [
        (replace(JOB, tasks_per_node=1), True, "--ntasks-per-node"),
        (replace(JOB, tasks=4), True, "--ntasks=4"),
        (JOB, False, "--ntasks=2"),  # as many as nodes, so only the answer shows that it was asked for
    ],
)
def test_where_tasks_were_asked_for_the_number_of_nodes_stays(job, follow, told):
    slurm = ScriptedSlurm(job, tasks_follow=follow)
    assert _requeue(slurm, job=job) == Requeued(True, f"without n2; {STAYS.format(told)}")
    assert (slurm.state.least_nodes, slurm.state.excluded_nodes) == (2, ("n2",))


def test_a_number_of_nodes_that_stays_is_no_complaint():
    job = replace(JOB, tasks_per_node=1)
    assert _requeue(ScriptedSlurm(job), job=job, nodes=2) == Requeued(True, "without n2")


def test_what_would_be_held_for_ever_is_not_asked_for():
    job = replace(JOB, excluded_nodes=("n4",))
    slurm = ScriptedSlurm(job)
    assert _requeue(slurm, job=job, excluded=("n4", "n1", "n2"), nodes=2) == Requeued(
        True, "as it was; without those that it would leave out, 1 node could run it, and it needs 2"
    )
    assert slurm.state.excluded_nodes == ("n4",)


def test_a_refused_update_leaves_a_requeued_job():
    assert _requeue(ScriptedSlurm(refusal="scontrol: Invalid node name specified")) == Requeued(
        True, "as it was; scontrol: Invalid node name specified"
    )


def test_patience_ends():
    assert _requeue(ScriptedSlurm(silences=["before"] * 99), patience_seconds=0.0) == Requeued(
        False, "Slurm does not answer: Unable to contact slurm controller"
    )
    late = ScriptedSlurm(silences=["", "", "", *["before"] * 99])  # it is asked no more once it is requeued
    assert _requeue(late, patience_seconds=0.0) == Requeued(
        True, "as it was; Slurm does not answer: Unable to contact slurm controller"
    )


SCRIPT = f"""#!{sys.executable}
import json, os, signal, sys, time
from trimtab.requeue.act import give_back, requeue
from trimtab_slurm.cluster import CommandLineClient

slurm, request = CommandLineClient(), json.loads(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: None)
job = slurm.job(int(os.environ["SLURM_JOB_ID"]))
print("begun", job.restart_count, ",".join(job.nodes), ",".join(job.excluded_nodes) or "none", flush=True)
if job.restart_count or request.get("task") not in (None, os.environ.get("SLURM_ARRAY_TASK_ID")):
    sys.exit()
if request["when"] == "told":
    signal.pause()
if request["when"] == "killed":
    slurm.requeue(job)
    os.kill(os.getpid(), signal.SIGKILL)
wait = request.get("wait")
while wait and not os.path.exists(wait):
    time.sleep(0.05)
if keeps := request.get("keeps"):
    give_back(slurm, job, job.nodes[:keeps])
    job = slurm.job(job.job_id)
done = requeue(slurm, job, excluded=[*job.excluded_nodes, *request.get("excluded", ())], nodes=request.get("nodes"))
print("requeued:" if done.done else "not requeued:", done.told, flush=True)
"""


class Batch:
    """Submits batch scripts that requeue themselves, and reads what they wrote."""

    def __init__(self, environment, directory):
        self.environment, self.directory = environment, directory
        self.slurm = CommandLineClient(environment)
        (directory / "script.py").write_text(SCRIPT)

    def submit(self, name, *arguments, **request):
        """The job's id."""
        options = ["--open-mode=append", f"--output={self.directory}/{name}.txt", f"--job-name={name}", *arguments]
        script = f"#!/bin/sh\nexec {sys.executable} {self.directory}/script.py '{json.dumps(request)}'\n"
        return self.slurm.submit(script, options)

    def lines(self, name):
        try:
            written = (self.directory / f"{name}.txt").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [line for line in written if line.startswith(("begun", "requeued", "not requeued"))]

    def wait(self, condition):
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, {path.name: path.read_text() for path in self.directory.glob("*.txt")}
            time.sleep(0.1)

    def wait_ended(self, *job_ids):
        self.wait(lambda: all((job := self.slurm.job(job_id)) is None or job.ended for job_id in job_ids))


@pytest.fixture(scope="module")
def ended(sandbox, tmp_path_factory):
    """What jobs wrote that requeued themselves, all at the same time, since most of it is waiting."""
    batch = Batch(sandbox.environment, tmp_path_factory.mktemp("jobs"))
    jobs = [
        batch.submit("cancelled", when="told"),
        batch.submit("others", "--nodes=2", when="told", excluded=["n1"], nodes=1),
        batch.submit("fewer", "--nodes=2", "--exclude=n4", when="now", excluded=["n1"], nodes=1),
        batch.submit("more", when="now", excluded=["n1"], nodes=3),
        batch.submit("tasks", "--nodes=2", "--ntasks=2", when="now", excluded=["n1"], nodes=1),
        batch.submit("per_node", "--nodes=2", "--ntasks-per-node=1", when="now", excluded=["n1"], nodes=1),
        batch.submit("all_out", "--nodes=2", when="now", excluded=["n1", "n2", "n3"]),
        batch.submit("unknown", when="now", excluded=["nowhere"]),
        batch.submit("killed", when="killed"),
        batch.submit("gave_back", "--nodes=3", when="now", keeps=2, nodes=2),
        batch.submit("gives_back", "--nodes=3", when="now", keeps=2),
        batch.submit("refused", "--no-requeue", when="now"),
        batch.submit("heterogeneous", "--nodes=1", ":", "--nodes=1", when="now"),
    ]
    array = batch.submit("task-%a", "--array=1-3", when="now", task="3", excluded=["n1"])
    batch.wait(lambda: batch.lines("cancelled") and batch.lines("others"))
    batch.slurm.cancel(jobs[0])
    batch.slurm.requeue(batch.slurm.job(jobs[1]))
    batch.wait_ended(*jobs, array, array + 1, array + 2)
    return batch


def _begun(line):
    """Restarts, nodes, and excluded nodes of an attempt."""
    word, restarts, nodes, excluded = line.split()
    assert word == "begun"
    return int(restarts), nodes.split(","), excluded


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("name", "told", "nodes", "excluded"),
    [
        ("fewer", "on 1 node without n4, n1", 1, "n4,n1"),
        ("more", "on 3 nodes without n1", 3, "n1"),
        ("tasks", f"without n1; {STAYS.format('--ntasks=2')}", 2, "n1"),
        ("per_node", f"without n1; {STAYS.format('--ntasks-per-node')}", 2, "n1"),
        ("all_out", "as it was; without those that it would leave out, 1 node could run it, and it needs 2", 2, "none"),
        ("others", "on 1 node without n1", 1, "n1"),  # requeued from outside, as after a preemption
        ("gives_back", "as it was", 3, "none"),  # Slurm asks for the first number again
        ("task-3", "without n1", 1, "n1"),  # its job id is the array's
    ],
)
def test_a_job_begins_again_as_it_has_asked(ended, name, told, nodes, excluded):
    _, said, second = ended.lines(name)
    assert said == f"requeued: {told}"
    restarts, has, without = _begun(second)
    assert (restarts, len(has), without) == (1, nodes, excluded)
    assert not set(has) & set(excluded.split(","))


@pytest.mark.slurm
def test_a_job_that_gave_nodes_back_begins_again_with_what_is_left_where_slurm_takes_that(ended):
    """Without slurmdbd, it takes no update of such a job until the batch script has ended."""
    _, told, second = ended.lines("gave_back")
    refused = told.startswith("requeued: as it was; scontrol: Job update not available right now, the DB index")
    assert refused or told == "requeued: on 2 nodes"
    restarts, has, _ = _begun(second)
    assert (restarts, len(has)) == (1, 3 if refused else 2)


@pytest.mark.slurm
def test_the_other_tasks_of_an_array_run_once(ended):
    assert [[_begun(line)[0] for line in ended.lines(f"task-{task}")] for task in (1, 2)] == [[0], [0]]


@pytest.mark.slurm
def test_a_job_whose_update_slurm_refuses_begins_again_as_it_was(ended):
    _, told, second = ended.lines("unknown")
    assert told.startswith("requeued: as it was; scontrol: Invalid node name specified")
    assert _begun(second)[0::2] == (1, "none")


@pytest.mark.slurm
def test_a_job_that_is_killed_between_requeue_and_update_begins_again_as_it_was(ended):
    assert [_begun(line)[0::2] for line in ended.lines("killed")] == [(0, "none"), (1, "none")]


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("name", "told"), [("refused", NO_REQUEUE), ("heterogeneous", HETEROGENEOUS), ("cancelled", CANCELLED)]
)
def test_a_job_that_must_not_begin_again_does_not(ended, name, told):
    first, said = ended.lines(name)
    assert _begun(first)[0] == 0
    assert said == f"not requeued: {told}"


@pytest.mark.slurm
def test_a_controller_that_is_restarted_meanwhile_is_waited_for(slurm_installed, box_directory, tmp_path):
    box, _ = boxes.up(box_directory, boxes.Spec(nodes=2))
    batch = Batch(box.environment, tmp_path)
    job_id = batch.submit("waits", when="now", excluded=["n1"], wait=str(tmp_path / "go"))
    batch.wait(lambda: batch.lines("waits"))
    (controller,) = [daemon for daemon in box.daemons if daemon.name == "slurmctld"]
    os.kill(controller.pid, signal.SIGTERM)  # SIGKILL loses the last seconds, in which the job has begun
    (tmp_path / "go").touch()
    time.sleep(1)
    with (tmp_path / "slurmctld.log").open("w") as log:
        again = subprocess.Popen(["slurmctld", "-D"], env=box.environment, stdout=log, stderr=log)
    try:
        batch.wait_ended(job_id)
        assert [line.split()[:2] for line in batch.lines("waits")] == [
            ["begun", "0"],
            ["requeued:", "without"],
            ["begun", "1"],
        ]
        assert batch.lines("waits")[2].split()[2:] == ["n2", "n1"]
    finally:
        again.terminate()
        again.wait()
