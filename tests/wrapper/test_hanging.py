"""Whether ranks hang, and who keeps the others waiting."""

import pytest

from trimtab.hanging import LEAST_SECONDS, SAVE_SECONDS, TIMES_LONGEST, Hanging, suspicion
from trimtab.protocol import Hello, Requeue, Stack

STEP = 'File "/x/train.py", line 1, in take_step\n  losses = forward_and_backward(run)\n'
WAITS = STEP + 'File "/x/torch/distributed/distributed_c10d.py", line 1, in all_reduce\n  work.wait()'
WORKS = STEP + 'File "/x/my_data.py", line 1, in read\n  return file.read()'
WRITES = STEP + 'File "/x/torch/distributed/checkpoint/filesystem.py", line 1, in _write\n  os.fsync(stream.fileno())'
SYNCHRONIZES = STEP + 'File "/x/train.py", line 1, in apply_gradients\n  return float(norm)'


def hello(rank):
    return Hello("", rank, f"n{rank + 1}", 0, 100 + rank, 0, rank, 0, (), 0, "")


def ranks(count):
    return {rank: hello(rank) for rank in range(count)}


def stacks(*texts):
    return {rank: Stack(rank, 5, text) for rank, text in enumerate(texts) if text}


def test_before_the_first_step_nothing_counts_as_hung():
    assert not Hanging(Requeue(hang_seconds=1.0)).hung(1e6)


def test_the_limit_follows_the_longest_time_between_steps():
    hanging = Hanging(Requeue())
    for step, now in enumerate((0.0, 100.0, 150.0), 1):
        hanging.stepped(now, step)
    assert hanging.limit_seconds == TIMES_LONGEST * 100.0
    assert not hanging.hung(150.0 + 1000.0)
    assert hanging.hung(150.0 + 1000.1)


def test_short_steps_do_not_make_a_short_pause_a_hang():
    hanging = Hanging(Requeue())
    hanging.stepped(0.0, 1)
    hanging.stepped(0.1, 2)
    assert not hanging.hung(0.1 + LEAST_SECONDS)
    assert hanging.hung(0.2 + LEAST_SECONDS)


def test_the_job_file_can_set_the_limit():
    hanging = Hanging(Requeue(hang_seconds=20.0))
    hanging.stepped(0.0, 1)
    assert hanging.hung(20.1)


def test_a_save_may_take_longer_and_comes_after_the_step_that_the_ranks_are_in():
    hanging = Hanging(Requeue(hang_seconds=20.0))
    hanging.stepped(0.0, 1)
    hanging.ordered()
    for _ in range(4):  # step 2 was under way when they were told; then four ranks begin to save
        hanging.stepped(10.0, 2)
    assert not hanging.hung(10.0 + 20.0 + SAVE_SECONDS)
    hanging.stepped(1000.0, 3)
    assert hanging.limit_seconds == 20.0
    assert hanging.hung(1020.1)


@pytest.mark.parametrize(
    ("texts", "last_step", "suspects", "words"),
    [
        ((WAITS, "", WAITS), {0: 5, 1: 5, 2: 5}, (1,), "did not answer"),
        ((WAITS, WORKS, WAITS), {0: 5, 1: 5, 2: 5}, (1,), "did not wait"),
        ((WAITS, WRITES, WAITS), {0: 5, 1: 5, 2: 5}, (1,), "did not wait"),
        ((SYNCHRONIZES, WORKS, WAITS), {0: 5, 1: 5, 2: 5}, (1,), "did not wait"),
        ((WAITS, WAITS, WAITS), {0: 5, 1: 4, 2: 5}, (1,), "fewer steps"),
        ((WAITS, WAITS, WAITS), {0: 5, 1: 5, 2: 5}, (), "no rank stands out"),
        ((WORKS, WORKS, WORKS), {0: 5, 1: 5, 2: 5}, (), "no rank stands out"),
    ],
)
def test_who_keeps_the_others_waiting(texts, last_step, suspects, words):
    found = suspicion(ranks(3), last_step, stacks(*texts))
    assert found.ranks == suspects
    assert words in found.sentence
    if suspects:
        assert "rank 1 (node n2, stage 1)" in found.sentence


def test_of_many_ranks_the_first_are_named():
    found = suspicion(ranks(40), {}, {})
    assert len(found.ranks) == 40
    assert "and 32 more" in found.sentence
