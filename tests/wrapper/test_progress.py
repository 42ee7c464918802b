import pytest

from trimtab.balance.measuring.steps import StageStep, Step
from trimtab.progress import Progress
from trimtab.protocol import Balance, Layout, Setting


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


def setting(*microbatches, layers=(2, 2)):
    return Setting(Layout(layers, 2), microbatches or (4,), (0, 0))


def test_a_line_tells_step_loss_rate_and_the_slowest_stage():
    line = Progress(40, Balance()).line(step(1.0, 1.5, loss=9.0625), setting())
    assert line == "step  1/40  loss  9.062       512 tokens/s  imbalance 20.0%  stage 1 is the slowest"


def test_of_several_replicas_the_slowest_is_named():
    line = Progress(40, Balance()).line(step(1.0, 1.0, 1.5, 1.0, replicas=2), setting(4, 4))
    assert line.endswith("imbalance 50.0%  stage 0 of replica 1 is the slowest")


def test_stages_that_are_level_name_none():
    assert Progress(40, Balance()).line(step(1.0, 1.1), setting()).endswith("imbalance  4.8%")


def test_the_imbalance_is_of_the_window():
    progress = Progress(40, Balance(window_steps=4))
    for number, compute in enumerate([9.0, 9.0, 1.0, 1.0, 9.0, 1.0], start=1):
        line = progress.line(step(1.0, compute, number=number), setting())
    assert line.endswith("imbalance  0.0%")  # one outlier is none


def test_the_window_begins_anew_with_a_setting():
    progress = Progress(40, Balance())
    for number in (1, 2, 3):
        progress.line(step(1.0, 2.0, number=number), setting(layers=(1, 3)))
    assert progress.line(step(1.5, 1.5, number=4), setting()).endswith("imbalance  0.0%")


def test_replicas_that_must_have_more_to_do_are_not_apart_by_it():
    line = Progress(40, Balance()).line(step(2.0, 2.0, 1.0, 1.0, replicas=2), setting(2, 1))
    assert line.endswith("imbalance  0.0%")


def test_one_stage_has_no_imbalance():
    assert "imbalance" not in Progress(40, Balance()).line(step(1.0), setting())


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), None])
def test_a_loss_that_is_no_number_does_not_break_the_line(loss):
    assert Progress(5, Balance()).line(step(1.0, loss=loss), setting()).startswith("step 1/5  loss")
