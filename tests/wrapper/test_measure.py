import pytest

from trimtab.balance.measure import StageStep, assemble, imbalance, imbalance_ratio
from trimtab.protocol import Hello, StepReport


def hello(rank, *, tensor=0, pipeline=0, data=0):
    return Hello("", rank, f"n{rank}", 0, 100 + rank, tensor, pipeline, data, (0,), 1, "")


def report(rank, forward, backward, **more):
    fields = {"step": 3, "time_seconds": 50.0 + rank, "duration_seconds": 2.0 + rank, "microbatches": 4, "tokens": 1024}
    return StepReport(
        rank=rank, forward_seconds=forward, backward_seconds=backward, peak_memory_bytes=rank, **fields | more
    )


def stage(index, compute, *, step=1, replica=0):
    return StageStep(step, replica, index, compute / 3, compute * 2 / 3, 10, 10)


def test_a_step_is_put_together_from_its_ranks():
    ranks = {
        0: hello(0, tensor=0, pipeline=0),
        1: hello(1, tensor=1, pipeline=0),
        2: hello(2, tensor=0, pipeline=1),
        3: hello(3, tensor=1, pipeline=1),
    }
    step = assemble(
        [
            report(0, 1.0, 2.0),
            report(1, 1.5, 2.5),
            report(2, 2.0, 3.0, loss=4.5, consumed_samples=48),
            report(3, 1.0, 1.0),
        ],
        ranks,
    )
    # each stage is its slowest tensor-parallel rank, with the largest memory of them
    assert step.stages == (StageStep(3, 0, 0, 1.5, 2.5, 1024, 1), StageStep(3, 0, 1, 2.0, 3.0, 1024, 3))
    assert (step.loss, step.consumed_samples, step.duration_seconds, step.time_seconds) == (4.5, 48, 5.0, 53.0)
    assert step.tokens == 1024  # the same tokens pass both stages


def test_tokens_add_up_over_replicas():
    ranks = {0: hello(0, data=0), 1: hello(1, data=1)}
    assert assemble([report(0, 1.0, 1.0), report(1, 1.0, 1.0)], ranks).tokens == 2048


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
