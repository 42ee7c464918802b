"""What comes after an attempt: whether the job begins again, where, and in which shape."""

import re
from dataclasses import replace

import pytest

from tests.wrapper.slurm_states import RUNNING_JOB
from trimtab.afterwards import MOST_ORDERS, what_next
from trimtab.balance.deciding.ledger import Given
from trimtab.balance.deciding.situation import Fault, Kind
from trimtab.outcome import ExitCode, Outcome, Why
from trimtab.protocol import Batch, Job, Layout, Model, Parallel, Requeue, Shape, Train, setting_of
from trimtab.ranks import End, Taken
from trimtab.requeue.chain import Attempt, Chain, fingerprint
from trimtab.requeue.exclusions import infeasible
from trimtab.requeue.shapes import beginning
from trimtab.trimming.surroundings import Restart
from trimtab_slurm.cluster import Node

NOW = 1e9
SHAPE = Shape(1, 2, 1)
JOB_FILE = Job(
    model=Model(layers=8),
    parallel=Parallel(pipeline=2),
    batch=Batch(2, 16),
    train=Train(checkpoint_directory="/checkpoints"),
)
STATE = replace(RUNNING_JOB, start_seconds=NOW - 3600)
PARTITION = tuple(Node(f"n{number}", "IDLE", ("main",), (), 4, 8000, 1) for number in range(1, 6))
FAILED = Outcome(ExitCode.RANK_FAILED, "rank 1 failed: ValueError: bad", Why.FAILED, "ValueError: bad")
VANISHED = Outcome(ExitCode.RANK_FAILED, "rank 1 vanished", Why.FAILED, "a rank vanished on node n2", "n2")
SAVED = Outcome(ExitCode.STOPPED, "stopped by SIGUSR1 at step 20 of 100", Why.TIME_LIMIT)


def attempt(**fields):
    begun = Attempt(7, 0, NOW - 3600, ("n1", "n2"), SHAPE, setting_of(JOB_FILE, SHAPE))
    return replace(begun, **fields)


def end_of(outcome, last=20, **fields):
    steps = {"first": Taken(1, NOW - 60), "last": Taken(last, NOW - 1)} if last else {}
    return End(outcome, setting=setting_of(JOB_FILE, SHAPE), **steps, **fields)


def after(end, *, chain=None, job_file=JOB_FILE, state=STATE, partition=PARTITION):
    return what_next(chain or Chain((attempt(),)), end, job_file, job_file, state, partition, NOW)


def test_a_job_that_has_trained_is_not_requeued_and_has_nothing_to_say():
    came = after(end_of(Outcome(ExitCode.TRAINED, "trained to step 100", Why.TRAINED), last=100))
    assert (came.again, came.told) == (False, "")
    (told,) = came.chain.attempts
    assert (told.first_step, told.last_step, told.exit_code, told.why) == (1, 100, 0, "trained to step 100")
    assert not told.requeued


def test_what_slurm_or_a_user_ends_is_theirs():
    assert not after(end_of(Outcome(ExitCode.STOPPED, "stopped by SIGTERM at step 5", Why.ENDED))).again


def test_before_the_time_limit_the_job_requeues_itself_as_it_is():
    came = after(end_of(SAVED))
    assert (came.again, came.nodes, came.excluded) == (True, None, ())
    assert came.told == "the job begins again: stopped by SIGUSR1 at step 20 of 100"
    assert came.chain.attempts[-1].requeued
    assert came.chain.wanted is None


def test_after_a_failure_the_job_begins_again_and_after_a_second_one_of_the_same_node_without_it():
    first = after(end_of(VANISHED))
    assert (first.again, first.excluded) == (True, ())
    chain = first.chain.begun(attempt(restart_count=1))
    second = after(end_of(VANISHED, last=40), chain=chain)
    assert (second.again, second.excluded) == (True, ("n2",))
    assert "without n2 (two attempts on end failed there)" in second.told


def test_a_lost_node_is_left_out_at_once():
    lost = replace(VANISHED, lost_node=True)
    assert after(end_of(lost)).excluded == ("n2",)
    assert after(end_of(lost), partition=PARTITION[:2]).excluded == (), "the job could not run without it"


def test_a_cause_that_repeats_without_a_step_of_progress_stops_the_chain():
    chain = after(end_of(FAILED)).chain.begun(attempt(restart_count=1))
    came = after(end_of(FAILED), chain=chain)
    assert not came.again
    assert re.match(r"not requeued: the last two attempts ended for the same reason \(ValueError: bad\)", came.told)


@pytest.mark.parametrize(
    ("job_file", "end", "words"),
    [
        (replace(JOB_FILE, requeue=Requeue(enabled=False)), end_of(SAVED), "requeue.enabled is false"),
        (replace(JOB_FILE, train=Train(checkpoint_directory="")), end_of(FAILED), "checkpoint_directory is empty"),
        (JOB_FILE, end_of(FAILED, last=None), "no step was ever taken"),
        (
            replace(JOB_FILE, requeue=Requeue(on_hang="end")),
            end_of(Outcome(ExitCode.HUNG, "no step after step 3", Why.HUNG)),
            'requeue.on_hang is "end"',
        ),
    ],
)
def test_why_a_job_does_not_begin_again(job_file, end, words):
    came = after(end, job_file=job_file)
    assert not came.again
    assert words in came.told


def test_nothing_is_asked_of_a_slurm_that_did_not_say_what_the_job_is():
    came = after(end_of(FAILED), state=None)
    assert not came.again
    assert "Slurm did not say" in came.told


def test_a_wish_for_another_shape_goes_to_the_next_attempt():
    parallel, batch = Parallel(pipeline=1), Batch(2, 16)
    wish = Restart(parallel, batch, nodes=4, exclude=("n2",), reason="n2 is slow")
    came = after(end_of(replace(SAVED, why=Why.RESHAPE), restart=wish))
    assert (came.again, came.nodes, came.excluded) == (True, 4, ("n2",))
    assert came.told == "the job begins again: n2 is slow; without n2 (slow)"
    wanted = came.chain.wanted
    assert (wanted.job, wanted.nodes, wanted.parallel, wanted.batch) == (fingerprint(JOB_FILE), 4, parallel, batch)
    assert wanted.setting.microbatches == (2, 2, 2, 2)


@pytest.mark.parametrize(
    ("nodes", "exclude", "kept"),
    [
        (2, (), ("n1", "n2")),  # another shape on the same nodes
        (1, ("n2",), ("n1",)),
        (1, (), ("n1",)),
        (1, ("n1",), ()),  # whose batch script this is
        (2, ("n2",), ()),  # another node is needed
        (3, (), ()),
    ],
)
def test_what_the_allocation_has_needs_no_requeue(nodes, exclude, kept):
    wish = Restart(Parallel(), Batch(2, 24), nodes, exclude, "it is better")
    assert after(end_of(replace(SAVED, why=Why.RESHAPE), restart=wish)).kept == kept


LARGE = replace(JOB_FILE, batch=Batch(2, 24))
ON_FOUR = attempt(nodes=("n1", "n2", "n3", "n4"), shape=Shape(1, 2, 4), setting=setting_of(LARGE, Shape(1, 2, 4)))
STATE_ON_FOUR = replace(STATE, nodes=ON_FOUR.nodes, least_nodes=4, most_nodes=4, tasks=4)
ALL_TAKEN = tuple(replace(node, state="ALLOCATED") for node in PARTITION[:4])
"""The job's nodes are all that the partition has."""


def without_n2():
    wish = Restart(LARGE.parallel, LARGE.batch, nodes=3, exclude=("n2",), reason="n2 is slow")
    return after(
        end_of(replace(SAVED, why=Why.RESHAPE), restart=wish),
        chain=Chain((ON_FOUR,)),
        job_file=LARGE,
        state=STATE_ON_FOUR,
        partition=ALL_TAKEN,
    )


def test_a_job_goes_on_at_once_without_a_slow_node_though_none_is_to_spare():
    came = without_n2()
    assert (came.again, came.nodes, came.excluded, came.kept) == (True, 3, ("n2",), ("n1", "n3", "n4"))
    assert came.told == "the job begins again: n2 is slow; without n2 (slow); at once, on n1, n3, n4, which it has"
    assert infeasible(STATE_ON_FOUR, ALL_TAKEN, came.excluded, came.nodes) == ""
    assert beginning(came.chain, LARGE, world_size=6).setting == replace(ON_FOUR.setting, microbatches=(4, 4, 4))


def test_a_job_that_gave_nodes_back_asks_for_no_more_with_its_next_requeue_unless_they_are_there():
    """Slurm would ask for as many as it gave at first, and could wait for them for ever."""
    on_three = attempt(nodes=("n1", "n3", "n4"), shape=Shape(1, 2, 3))
    chain, state = without_n2().chain.begun(on_three), replace(STATE_ON_FOUR, nodes=on_three.nodes, least_nodes=3)
    came = after(end_of(SAVED, last=40), chain=chain, job_file=LARGE, state=state, partition=ALL_TAKEN)
    assert (came.nodes, came.excluded, came.kept) == (3, ("n2",), ())
    came = after(end_of(SAVED, last=40), chain=chain, job_file=LARGE, state=state, partition=(*ALL_TAKEN, PARTITION[4]))
    assert (came.nodes, came.excluded) == (None, ("n2",)), "n5 takes its place"


@pytest.mark.parametrize(
    ("job_file", "idle", "nodes"),
    [
        (LARGE, 0, 3),
        (LARGE, 1, None),  # which takes the lost one's place
        (replace(LARGE, batch=Batch(2, 16)), 0, 3),  # of shares that are not equal
        (replace(LARGE, batch=Batch(4, 8)), 0, None),  # two microbatches are none for the third: wait for the node
        # three might not have room
        (replace(LARGE, parallel=Parallel(pipeline=2, distributed_optimizer=True)), 0, None),
    ],
)
def test_a_job_goes_on_without_a_lost_node_where_fewer_can_run_it(job_file, idle, nodes):
    states = {"n2": "DOWN*", "n5": "IDLE" if idle else "DOWN"}
    partition = [replace(node, state=states.get(node.name, "ALLOCATED")) for node in PARTITION]
    lost, chain = replace(VANISHED, lost_node=True), Chain((ON_FOUR,))
    came = after(end_of(lost), chain=chain, job_file=job_file, state=STATE_ON_FOUR, partition=partition)
    assert (came.again, came.nodes, came.excluded) == (True, nodes, ("n2",))


def test_where_the_partition_is_not_known_nothing_is_changed():
    lost = end_of(replace(VANISHED, lost_node=True))
    came = after(lost, chain=Chain((ON_FOUR,)), job_file=LARGE, state=STATE_ON_FOUR, partition=())
    assert (came.again, came.nodes, came.excluded) == (True, None, ())


@pytest.mark.parametrize(
    ("hours", "new_node", "nodes", "excluded", "told"),
    [
        (1, "DOWN", None, ("n2",), "without n2 (slow)"),
        (1, "IDLE", 4, ("n2",), "without n2 (slow); on 4 nodes again"),  # in the place of n2
        (25, "DOWN", 4, (), "no longer left out: n2; on 4 nodes again"),
    ],
)
def test_a_job_has_all_of_its_nodes_again_with_a_later_requeue_when_as_many_are_idle(
    hours, new_node, nodes, excluded, told
):
    on_three = attempt(restart_count=1, nodes=("n1", "n3", "n4"), shape=Shape(1, 2, 3))
    state = replace(STATE_ON_FOUR, nodes=on_three.nodes, excluded_nodes=("n2",), least_nodes=3, most_nodes=3, tasks=3)
    states = {"n2": "IDLE", "n5": new_node}
    partition = [replace(node, state=states.get(node.name, "ALLOCATED")) for node in PARTITION]
    chain = without_n2().chain.begun(on_three)
    came = what_next(chain, end_of(SAVED, last=40), LARGE, LARGE, state, partition, NOW + 3600 * hours)
    assert (came.nodes, came.excluded) == (nodes, excluded)
    assert came.told.endswith(told)
    count = nodes or 3
    assert beginning(came.chain, LARGE, world_size=2 * count).setting.microbatches == (12 // count,) * count


def test_an_idle_node_takes_one_place_only():
    """n2 is left out, n3 is lost, and n5 is idle: for three nodes, not for four."""
    on_three = attempt(restart_count=1, nodes=("n1", "n3", "n4"), shape=Shape(1, 2, 3))
    state = replace(STATE_ON_FOUR, nodes=on_three.nodes, excluded_nodes=("n2",), least_nodes=3, most_nodes=3, tasks=3)
    states = {"n2": "IDLE", "n3": "DOWN*", "n5": "IDLE"}
    partition = [replace(node, state=states.get(node.name, "ALLOCATED")) for node in PARTITION]
    lost = end_of(replace(VANISHED, lost_node=True, node="n3"), last=40)
    many = replace(LARGE, requeue=Requeue(most_excluded_ratio=0.5))
    came = what_next(without_n2().chain.begun(on_three), lost, many, many, state, partition, NOW + 60)
    assert (came.nodes, came.excluded) == (None, ("n2", "n3"))


def given(cause):
    return Given(NOW - 600, Kind.LAYERS, Fault(cause, ((0, 1),)), 1.0, 0.1, 0.1)


def test_layers_that_were_moved_stay_moved_unless_it_was_for_a_slow_node():
    moved = replace(setting_of(JOB_FILE, SHAPE), layout=Layout((5, 3), 2))
    came = after(replace(end_of(SAVED, orders=(given("intrinsic"),)), setting=moved))
    assert came.chain.wanted.parallel.layout == "Ettttt|tttL"
    assert came.chain.wanted.setting == moved
    preempted = Outcome(ExitCode.STOPPED, "stopped by SIGTERM at step 5", Why.ENDED)  # Slurm requeues it by itself
    assert after(replace(end_of(preempted, orders=(given("intrinsic"),)), setting=moved)).chain.wanted.setting == moved
    assert after(replace(end_of(SAVED, orders=(given("hardware"),)), setting=moved)).chain.wanted is None


NAMES = ("n1", "n2", "n3", "n4")
ON_PP4 = replace(JOB_FILE, parallel=Parallel(pipeline=4))


def attempted(chain, job_file, nodes, setting=None, orders=()):
    """What came after an attempt, one rank a node, that began from a chain and ended in another setting."""
    begin = beginning(chain, job_file, nodes)
    chain = chain.begun(attempt(nodes=NAMES[:nodes], shape=begin.job.shape(nodes), setting=begin.setting))
    end = replace(end_of(SAVED, orders=orders or chain.orders), setting=setting or begin.setting)
    state = replace(STATE, nodes=NAMES[:nodes], least_nodes=nodes, most_nodes=nodes, tasks=nodes)
    return what_next(chain, end, job_file, begin.job, state, PARTITION, NOW).chain


@pytest.mark.parametrize(
    ("edited", "nodes"),
    [
        (replace(ON_PP4, batch=Batch(4, 32)), 4),
        (replace(ON_PP4, parallel=Parallel(pipeline=2)), 4),
        (replace(ON_PP4, model=Model(layers=12)), 4),
        (ON_PP4, 2),
    ],
)
def test_an_edit_or_another_number_of_nodes_is_what_the_attempts_after_it_run(edited, nodes):
    moved = replace(setting_of(ON_PP4, Shape(1, 4, 1)), layout=Layout((3, 2, 2, 1), 4))
    chain = attempted(Chain(), ON_PP4, 4, moved, (given("intrinsic"),))
    first = beginning(chain, edited, nodes)
    second = beginning(attempted(chain, edited, nodes), edited, nodes)
    assert second.setting == first.setting
    assert (second.job.batch, second.job.shape(nodes)) == (first.job.batch, first.job.shape(nodes))
    if edited != ON_PP4:
        assert (first.job.batch, first.job.shape(nodes)) == (edited.batch, edited.shape(nodes))


def test_orders_are_remembered_the_last_ones_alone():
    orders = tuple(replace(given("intrinsic"), time_seconds=NOW - 1000 + number) for number in range(MOST_ORDERS + 1))
    assert after(end_of(SAVED, orders=orders)).chain.orders == orders[1:]
