import pytest

from trimtab.progress import Progress
from trimtab.protocol import Balance, Hello, StepReport

RANKS = {rank: Hello("", rank, "n1", rank, 9, 0, rank, 0, (), 1, "") for rank in (0, 1)}


def report(rank, compute, *, step=1, loss=None):
    return StepReport(rank, step, 0.0, 2.0, compute / 2, compute / 2, 4, 1024, 65536, 0, loss=loss)


def test_a_step_is_told_when_its_last_rank_has_reported():
    progress = Progress(2, 40, Balance())
    assert progress.add(report(0, 1.0), RANKS) is None
    line = progress.add(report(1, 1.5, loss=9.0625), RANKS)
    assert line == "step  1/40  loss  9.062       512 tokens/s  imbalance 20.0%  stage 1 is the slowest"


def test_stages_that_are_level_name_none():
    progress = Progress(2, 40, Balance())
    progress.add(report(0, 1.0), RANKS)
    assert progress.add(report(1, 1.1, loss=1.0), RANKS).endswith("imbalance  4.8%")


def test_the_imbalance_is_of_the_window():
    progress = Progress(2, 40, Balance(window_steps=3))
    for step, compute in enumerate([1.0, 1.0, 9.0], start=1):
        progress.add(report(0, 1.0, step=step), RANKS)
        line = progress.add(report(1, compute, step=step, loss=1.0), RANKS)
    assert line.endswith("imbalance  0.0%")  # one outlier is none


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), None])
def test_a_loss_that_is_no_number_does_not_break_the_line(loss):
    progress = Progress(1, 5, Balance())
    assert progress.add(report(0, 1.0, loss=loss), {0: RANKS[0]}).startswith("step 1/5  loss")
