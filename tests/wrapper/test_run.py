"""The wrapper's shell around an attempt: what it keeps, what it refuses, and what it does where that fails."""

import errno
import signal
from dataclasses import replace

import pytest

from tests.wrapper.slurm_states import RUNNING_JOB
from trimtab import run
from trimtab.afterwards import Next
from trimtab.balance.deciding.ledger import Given
from trimtab.balance.deciding.situation import Fault, Kind
from trimtab.launch import Allocation, LaunchError
from trimtab.outcome import ExitCode, Outcome, Why
from trimtab.prepared import prepare
from trimtab.protocol import Job, JobError, Model, Parallel, Train, job_to_json
from trimtab.ranks import End, Taken
from trimtab.requeue import act, store
from trimtab.requeue.chain import Attempt, Chain, Exclusion
from trimtab.requeue.shapes import beginning
from trimtab_slurm.cluster import Node, SlurmError, SlurmSilent

NODES = ("n1", "n2")
JOB = Job(model=Model(layers=8), parallel=Parallel(pipeline=2))
STATE = replace(RUNNING_JOB, start_seconds=1000.0)
SAVED = Outcome(ExitCode.STOPPED, "stopped by SIGUSR1 at step 20 of 100", Why.TIME_LIMIT)
ORDER = Given(900.0, Kind.LAYERS, Fault("intrinsic", ((0, 1),)), 1.0, 0.1, 0.1)
END = End(SAVED, Taken(1, 1010.0), Taken(20, 1200.0))


class Slurm:
    """Knows jobs by their states; the first answers may not come."""

    def __init__(self, *states, silences=0):
        self.states = {state.job_id: state for state in states}
        self.silences, self.killed = silences, []
        self.refusal, self.done = "", []

    def _answer(self, answer):
        self.silences -= 1
        if self.silences >= 0:
            raise SlurmSilent("scontrol: Unable to contact slurm controller")
        return answer

    def job(self, job_id):
        return self._answer(self.states.get(job_id))

    def node_address(self, _node):
        return self._answer("127.0.0.1")

    def nodes(self, _partition=""):
        return tuple(Node(name, "ALLOCATED", ("main",), (), 4, 8000, 0) for name in NODES)

    def requeue(self, job):
        self.done.append("requeue")
        self.states[job.job_id] = replace(job, state="COMPLETING", restart_count=job.restart_count + 1)

    def shrink(self, job, nodes):
        if self.refusal:
            raise SlurmError(self.refusal)
        self.done.append(nodes)
        self.states[job.job_id] = replace(job, nodes=nodes)

    def signal_steps(self, job, name, number):
        self.killed.append((job.job_id, name, number))


@pytest.fixture
def within(monkeypatch, tmp_path):
    """Within a job's allocation, and a Slurm of the test's own; the directory that checkpoints go to."""
    slurm = Slurm(STATE)

    def begin(job_id=7, restart_count=0, known=slurm):
        allocated = Allocation("test", job_id, restart_count, NODES, 1, 4, str(tmp_path), "ada")
        monkeypatch.setattr("trimtab.launch.allocation", lambda *_: allocated)
        monkeypatch.setattr("trimtab.prepared.client", lambda: known)
        return prepare(replace(JOB, train=Train(checkpoint_directory=str(tmp_path / "saves"))), 1)

    monkeypatch.setattr(act.time, "sleep", lambda _seconds: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    begin.directory = tmp_path / "saves"
    return begin


def attempt(**fields):
    shape = JOB.shape(2)
    return replace(Attempt(7, 0, 1000.0, NODES, shape, beginning(Chain(), JOB, 2).setting), **fields)


def test_a_job_of_another_size_is_refused_and_a_requeued_one_takes_the_nearest_shape(within, monkeypatch):
    three = JOB.parallel.pipeline + 1
    monkeypatch.setattr(Allocation, "world_size", three, raising=False)
    with pytest.raises(JobError, match="needs a multiple of 2 ranks, but the allocation gives 3"):
        within()
    assert within(restart_count=1).begin.job.shape(three).world_size == three


def test_an_attempt_is_kept_and_goes_on(within):
    prepared = within()
    after = run.conclude(prepared, prepared.chain.begun(attempt()), END)
    assert after.again
    assert store.load(within.directory) == (after.chain, "")


def test_where_the_chain_cannot_be_kept_the_job_does_not_begin_again(within, monkeypatch):
    def full(_directory, _chain):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    prepared = within()
    monkeypatch.setattr(store, "save", full)
    after = run.conclude(prepared, prepared.chain.begun(attempt()), END)
    assert not after.again
    assert after.told == (
        "not requeued: what the next attempt should know cannot be kept: [Errno 122] Disk quota exceeded"
    )


@pytest.mark.parametrize(("hours", "left"), [(23, 0), (25, 1)])
def test_an_exclusion_that_has_expired_takes_no_place(within, monkeypatch, hours, left):
    monkeypatch.setattr(run.time, "time", lambda: 1e9)
    chain = Chain((attempt(),), exclusions=(Exclusion("n9", "slow", 1e9 - hours * 3600),))
    assert run._surroundings(within(), chain, None).exclusions_left == left


def test_what_a_restart_takes_is_known_from_the_first_step_after_it(within):
    prepared = within()
    chain = Chain((attempt(last_step_seconds=1200.0), attempt(restart_count=1)))
    assert run._surroundings(prepared, chain, None).restart_seconds is None
    assert run._surroundings(prepared, chain, Taken(21, 1230.0)).restart_seconds == 30.0


def test_a_job_that_has_given_nodes_back_goes_on_with_those_that_slurm_says_it_has(within):
    """Its environment still has all, and its restart count is that of what was submitted."""
    chain = Chain((attempt(),))
    store.save(within.directory, chain)
    prepared = within(known=Slurm(replace(STATE, nodes=("n1",))))
    assert prepared.start.allocated.nodes == ("n1",)
    assert prepared.start.shape.world_size == 1


def test_nodes_that_are_not_needed_are_given_back_and_the_job_goes_on_at_once(within):
    prepared = within()
    assert run.begin_again(prepared, Next(Chain(), again=True, told="", kept=("n1",)))
    assert prepared.slurm.done == [("n1",)]


def test_where_nodes_cannot_be_given_back_the_job_is_requeued(within, capsys):
    prepared = within()
    prepared.slurm.refusal = "Requested operation is presently disabled"
    assert not run.begin_again(prepared, Next(Chain(), again=True, told="", kept=("n1",)))
    assert prepared.slurm.done == ["requeue"]
    assert "nodes cannot be given back: Requested operation is presently disabled" in capsys.readouterr().out


def test_a_job_that_slurm_is_ending_is_not_said_to_begin_again(within):
    prepared = within()
    prepared.slurm.states[7] = replace(STATE, state="COMPLETING")
    after = run.conclude(prepared, prepared.chain.begun(attempt()), END)
    assert (after.again, after.told) == (
        False,
        "not requeued: Slurm is ending it, and not for its time limit, so it was cancelled or has failed (COMPLETING)",
    )


def test_orders_are_kept_as_they_are_given(within, capsys):
    prepared = within()
    chain = prepared.chain.begun(attempt())
    run._remember(chain, (ORDER,), prepared.start.job)
    assert store.load(within.directory)[0] == replace(chain, orders=(ORDER,))
    store.save(within.directory, Chain((*chain.attempts, attempt(restart_count=1, started_seconds=1001.0))))
    run._remember(chain, (ORDER, ORDER), prepared.start.job)
    assert "which began after this attempt: nothing is written" in capsys.readouterr().out


def test_an_attempt_that_was_overtaken_does_not_begin_again(within):
    prepared = within()
    store.save(within.directory, Chain((attempt(job_id=8, started_seconds=1001.0),)))
    after = run.conclude(prepared, prepared.chain.begun(attempt()), END)
    assert not after.again
    assert "was written by job 8, restart 0, which began after this attempt" in after.told


@pytest.mark.parametrize(
    ("state", "ended", "refused"),
    [("RUNNING", None, True), ("SUSPENDED", None, True), ("RUNNING", 1100.0, False), ("PENDING", None, False)],
)
def test_a_directory_in_which_another_job_trains_is_refused(within, state, ended, refused):
    store.save(within.directory, Chain((attempt(job_id=6, ended_seconds=ended),)))
    slurm = Slurm(STATE, replace(STATE, job_id=6, state=state))
    if not refused:
        assert within(known=slurm).chain.attempts[0].job_id == 6
        return
    with pytest.raises(LaunchError) as raised:
        within(known=slurm)
    assert str(raised.value) == (
        f"train.checkpoint_directory {within.directory}: job 6 trains there ({state}): wait for its end, or name "
        "another directory ({job_id} in it gives each job its own)"
    )


@pytest.mark.parametrize(("state", "refused"), [("PENDING", True), ("RUNNING", True), ("CANCELLED", False)])
def test_a_directory_in_which_another_job_waits_to_go_on_is_refused(within, state, refused):
    store.save(within.directory, Chain((attempt(job_id=6, ended_seconds=1100.0, requeued=True),)))
    slurm = Slurm(STATE, replace(STATE, job_id=6, state=state))
    if not refused:
        assert within(known=slurm)
        return
    with pytest.raises(LaunchError, match=rf"job 6 waits to go on there \({state}\): wait for its end"):
        within(known=slurm)


def test_a_job_that_slurm_no_longer_knows_is_in_nobodys_way(within):
    store.save(within.directory, Chain((attempt(job_id=6),)))
    assert len(within().chain.attempts) == 1


def test_attempts_that_cannot_be_read_are_refused_in_words(within):
    (within.directory / store.FILE).mkdir(parents=True)
    with pytest.raises(LaunchError, match=r"train\.checkpoint_directory: .*: name one that this node can read"):
        within()


def test_a_checkpoint_directory_that_cannot_be_written_is_refused_before_anything_starts(within):
    within.directory.parent.joinpath("saves").write_text("no directory")
    with pytest.raises(LaunchError, match=r"train\.checkpoint_directory: .*File exists.*read and write, or none"):
        within()


@pytest.mark.parametrize(("limit_seconds", "refused"), [(120.0, True), (121.0, False), (None, False)])
def test_a_time_limit_that_leaves_no_time_to_train_is_refused(within, limit_seconds, refused):
    end_seconds = None if limit_seconds is None else STATE.start_seconds + limit_seconds
    slurm = Slurm(replace(STATE, end_seconds=end_seconds))
    if not refused:
        assert within(known=slurm)
        return
    with pytest.raises(JobError, match=r"requeue\.grace_seconds = 120: is what is kept .* time limit, which is 120 s"):
        within(known=slurm)


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (STATE, ()),
        (
            replace(STATE, requeueable=False),
            (
                "this job will not be requeued, whatever ends it: it was submitted with --no-requeue, or the site's "
                "JobRequeue=0 says so: sbatch --requeue allows it",
            ),
        ),
    ],
)
def test_a_job_that_will_not_be_requeued_is_told_so_when_it_begins(within, state, told):
    assert within(known=Slurm(state)).told == told


def test_what_the_job_file_says_otherwise_than_for_the_attempt_before_is_told(within):
    before = replace(within().job_file, train=Train(steps=70, checkpoint_directory=str(within.directory)))
    store.save(within.directory, Chain((attempt(),), job=job_to_json(before)))
    (told,) = within(restart_count=1).told
    assert told == f"the job file has changed since the attempt before: train.steps 70 -> {JOB.train.steps}"


def test_a_slurm_that_is_away_at_the_start_is_waited_for(within):
    slurm = Slurm(STATE, silences=3)
    assert within(known=slurm).state == STATE


@pytest.mark.parametrize(("last", "again"), [(attempt(), True), (attempt(job_id=6), False)])
def test_what_outlives_the_wrapper_goes_on_after_an_attempt_of_its_own_and_forgets_no_order(
    within, monkeypatch, last, again
):
    chain = Chain((replace(last, ended_seconds=None),), orders=(ORDER,))
    store.save(within.directory, chain)
    prepared, begun = within(), []
    monkeypatch.setattr(run, "prepare", lambda *_: prepared)
    monkeypatch.setattr(run, "begin_again", lambda _, after: begun.append(after))
    monkeypatch.setattr(run.signal, "pthread_sigmask", lambda *_: None)
    monkeypatch.setattr(run, "_taken", lambda *_: (END.first, END.last))
    assert run.outlived(prepared.job_file, 1, signal.SIGKILL).exit_code == 128 + 9
    assert [after.again for after in begun] == [True] * again
    assert prepared.slurm.killed == [(7, "ranks", signal.SIGKILL)] * again
    assert store.load(within.directory)[0].orders == (ORDER,)
