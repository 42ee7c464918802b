import signal

import pytest

from trimtab.afterwards import AGAIN
from trimtab.hanging import Suspicion
from trimtab.outcome import ExitCode, Roll, Stop, Why
from trimtab.protocol import Done, Failed, Hello, StepReport


def roll_of(world_size, *, steps=10):
    roll = Roll(steps)
    for rank in range(world_size):
        roll.hear(rank, Hello("", rank, f"n{rank}", 0, 100 + rank, 0, rank, 0, (), 1, ""))
        roll.hear(rank, StepReport(rank, 4, 0.0, 1.0, 0.3, 0.6, 8, 100, 1000, 0))
    return roll


def finish(roll, step):
    for rank in roll.ranks:
        roll.hear(rank, Done(rank, step))
        roll.lose(rank)


def test_trained_to_the_end():
    roll = roll_of(2)
    finish(roll, 10)
    assert roll.outcome(0, None).exit_code == ExitCode.TRAINED
    assert roll.outcome(0, None).sentence == "trained to step 10"


def test_a_lost_connection_alone_is_no_failure():
    roll = roll_of(2)
    roll.lose(1)
    roll.hear(0, Done(0, 10))
    assert roll.outcome(0, None).exit_code == ExitCode.TRAINED


def test_stopped_and_saved_asks_to_be_requeued():
    roll = roll_of(2)
    finish(roll, 6)
    outcome = roll.outcome(0, Stop.by_signal(signal.SIGUSR1))
    assert outcome.why is Why.TIME_LIMIT
    assert (outcome.exit_code, outcome.sentence) == (75, "stopped by SIGUSR1 at step 6 of 10")


def test_the_killed_rank_is_named_though_its_peers_spoke_first():
    roll = roll_of(4)
    roll.hear(1, Failed(1, 4, "Connection closed by peer", peer_lost=True))
    roll.lose(2)
    roll.lose(0)
    outcome = roll.outcome(137, None)
    assert outcome.exit_code == 3
    assert outcome.sentence == (
        "rank 2 (node n2, stage 2, pid 102) vanished after step 4: it was killed, or its node failed"
    )


def test_the_first_error_of_its_own_is_the_cause():
    roll = roll_of(3)
    roll.hear(1, Failed(1, 5, "ValueError: bad sample", peer_lost=False))
    roll.lose(1)
    roll.hear(0, Failed(0, 5, "Connection closed by peer", peer_lost=True))
    roll.lose(2)  # srun ended it
    outcome = roll.outcome(1, None)
    assert outcome.sentence == "rank 1 (node n1, stage 1, pid 101) failed: ValueError: bad sample"
    assert outcome.node == "", "all may have raised it: no node is to blame"


def test_input_that_does_not_fit_is_no_failure_of_a_rank_whoever_else_ended_before():
    roll = roll_of(3)
    roll.lose(0)
    roll.hear(1, Failed(1, 0, "Connection closed by peer", peer_lost=True))
    roll.hear(2, Failed(2, 0, 'data.path = "x": cannot be read', peer_lost=False, bad_input=True))
    for stop, hung in ((None, None), (Stop.by_signal(signal.SIGUSR1), None), (None, Suspicion((1,), "rank 1"))):
        outcome = roll.outcome(1, stop, hung)
        assert (outcome.exit_code, outcome.why) == (ExitCode.BAD_INPUT, Why.BAD_INPUT)
        assert outcome.sentence == 'bad input, found by rank 2 on node n2: data.path = "x": cannot be read'
        assert outcome.node == ""
    assert Why.BAD_INPUT not in AGAIN


def test_a_rank_that_comes_back_is_not_lost():
    roll = roll_of(2)
    roll.lose(1)
    roll.hear(1, roll.ranks[1])
    roll.hear(0, Failed(0, 5, "OSError: disk full", peer_lost=False))
    assert roll.outcome(1, None).sentence.startswith("rank 0 ")


def test_when_all_only_lost_their_peers_the_first_is_named():
    roll = roll_of(2)
    for rank in (1, 0):
        roll.hear(rank, Failed(rank, 5, "Connection closed by peer", peer_lost=True))
    assert roll.outcome(1, None).sentence.startswith("rank 1 ")


def test_a_signal_that_left_no_time_to_save():
    roll = roll_of(2)
    outcome = roll.outcome(143, Stop.by_signal(signal.SIGTERM))
    assert (outcome.exit_code, outcome.why) == (128 + 15, Why.ENDED)


def test_a_rank_that_fails_while_stopping_is_still_a_failure():
    roll = roll_of(2)
    roll.hear(0, Failed(0, 5, "OSError: disk full", peer_lost=False))
    assert roll.outcome(1, Stop.by_signal(signal.SIGUSR1)).exit_code == 3


def test_srun_that_starts_nothing():
    outcome = Roll(10).outcome(1, None)
    assert outcome.exit_code == 4
    assert "before any rank reported" in outcome.sentence


def roll_of_nodes(ranks_per_node, nodes):
    roll = Roll(10)
    for rank in range(ranks_per_node * nodes):
        node = f"n{rank // ranks_per_node}"
        roll.hear(rank, Hello("", rank, node, rank % ranks_per_node, 100 + rank, 0, rank, 0, (), 1, ""))
    return roll


@pytest.mark.parametrize(
    ("gone", "lost"),
    [((2, 3, 0, 1), True), ((3, 2), True), ((2, 0, 3, 1), False), ((2,), False)],
    ids=["the node first", "in any order", "mixed with others", "one rank of it"],
)
def test_a_node_is_lost_when_all_of_its_ranks_vanish_first(gone, lost):
    roll = roll_of_nodes(2, 2)
    roll.hear(1, Failed(1, 5, "Connection closed by peer", peer_lost=True))
    for rank in gone:
        roll.lose(rank)
    outcome = roll.outcome(1, None)
    assert (outcome.node, outcome.lost_node) == ("n1", lost)


def test_a_single_rank_that_vanishes_does_not_tell_whether_its_node_did():
    roll = roll_of_nodes(1, 2)
    roll.lose(1)
    assert not roll.outcome(1, None).lost_node


def test_two_failures_of_one_cause_say_the_same():
    causes = set()
    for rank in (0, 1):
        roll = roll_of(2)
        roll.hear(rank, Failed(rank, 4 + rank, "ValueError: bad sample", peer_lost=False))
        causes.add(roll.outcome(1, None).cause)
    assert causes == {"ValueError: bad sample"}


def test_ranks_ended_for_a_hang():
    roll = roll_of(2)
    roll.lose(0)
    roll.lose(1)
    outcome = roll.outcome(137, None, Suspicion((1,), "rank 1 (node n1, stage 1) did not answer"))
    assert (outcome.exit_code, outcome.why, outcome.node) == (ExitCode.HUNG, Why.HUNG, "n1")
    assert outcome.sentence == "no step after step 4: rank 1 (node n1, stage 1) did not answer"


def test_ranks_stopped_for_another_shape():
    roll = roll_of(2)
    finish(roll, 6)
    outcome = roll.outcome(0, Stop(Why.RESHAPE, "to begin again without n2"))
    assert outcome.sentence == "stopped to begin again without n2 at step 6 of 10"
    assert outcome.why is Why.RESHAPE


def test_ranks_that_are_lost_while_they_stop_for_another_shape_have_failed():
    roll = roll_of(2)
    for rank in (0, 1):
        roll.hear(rank, Failed(rank, 4, "Connection closed by peer", peer_lost=True))
    outcome = roll.outcome(1, Stop(Why.RESHAPE, "to begin again without n2"))
    assert (outcome.exit_code, outcome.why) == (ExitCode.RANK_FAILED, Why.RESHAPE)
    assert outcome.sentence == "ended to begin again without n2 before all ranks had saved"
