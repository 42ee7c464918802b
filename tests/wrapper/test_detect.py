import pytest

from trimtab.balance.detect import imbalance, imbalance_ratio
from trimtab.balance.steps import StageStep


def stage(index, compute, *, step=1, replica=0):
    return StageStep(step, replica, index, compute / 3, compute * 2 / 3, 1, 10, 100, 10)


def test_imbalance_is_slowest_over_median():
    assert imbalance_ratio([1.0, 1.0, 1.0, 1.3]) == pytest.approx(0.3)
    assert imbalance_ratio([0.735, 1.0]) == pytest.approx(1.0 / 0.8675 - 1)


def test_one_outlier_step_does_not_move_the_window():
    window = [stage(0, 1.0, step=step) for step in range(9)] + [stage(1, 1.0, step=step) for step in range(8)]
    assert imbalance([*window, stage(1, 50.0, step=8)]).ratio == 0.0


def test_imbalance_names_the_slowest_stage_and_replica():
    found = imbalance([stage(0, 1.0), stage(1, 1.0), stage(0, 1.0, replica=1), stage(1, 1.2, replica=1)])
    assert (found.replica, found.stage) == (1, 1)
    assert found.ratio == pytest.approx(0.2)


def test_one_stage_cannot_be_apart():
    assert imbalance([stage(0, 1.0)]) is None


def test_no_measured_compute_is_no_balance():
    assert imbalance([stage(0, 0.0), stage(1, 0.0)]) is None
