import pytest

from trimtab.balance.measuring.steps import StageStep, Step
from trimtab.progress import Progress
from trimtab.protocol import Balance


def step(*compute, number=1, loss=1.0, replicas=1):
    stages = len(compute) // replicas
    return Step(
        step=number,
        time_seconds=0.0,
        duration_seconds=2.0,
        tokens=1024,
        loss=loss,
        gradient_norm=None,
        learning_rate=None,
        consumed_samples=None,
        stages=tuple(
            StageStep(number, *divmod(index, stages), seconds / 2, seconds / 2, 4, 1024, 65536, 0)
            for index, seconds in enumerate(compute)
        ),
    )


def test_a_line_tells_step_loss_rate_and_the_slowest_stage():
    line = Progress(40, Balance()).line(step(1.0, 1.5, loss=9.0625))
    assert line == "step  1/40  loss  9.062       512 tokens/s  imbalance 20.0%  stage 1 is the slowest"


def test_of_several_replicas_the_slowest_is_named():
    line = Progress(40, Balance()).line(step(1.0, 1.0, 1.5, 1.0, replicas=2))
    assert line.endswith("imbalance 50.0%  stage 0 of replica 1 is the slowest")


def test_stages_that_are_level_name_none():
    assert Progress(40, Balance()).line(step(1.0, 1.1)).endswith("imbalance  4.8%")


def test_the_imbalance_is_of_the_window():
    progress = Progress(40, Balance(window_steps=4))
    for number, compute in enumerate([9.0, 9.0, 1.0, 1.0, 9.0, 1.0], start=1):
        line = progress.line(step(1.0, compute, number=number))
    assert line.endswith("imbalance  0.0%")  # one outlier is none


def test_one_stage_has_no_imbalance():
    assert "imbalance" not in Progress(40, Balance()).line(step(1.0))


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), None])
def test_a_loss_that_is_no_number_does_not_break_the_line(loss):
    assert Progress(5, Balance()).line(step(1.0, loss=loss)).startswith("step 1/5  loss")
