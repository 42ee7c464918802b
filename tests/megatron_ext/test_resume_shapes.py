"""A run goes on from its checkpoints at any shape: the same losses as if it had never stopped."""

from itertools import pairwise

import pytest
import torch

from trimtab.protocol import Order, StepReport

pytestmark = pytest.mark.mcore

SAME = 1e-6
"""fp32 sums in another order: 3e-7 was measured over six layouts."""
SAME_NORM = 2e-4
"""The gradient norm is summed per rank and then over ranks: its order follows the layout."""
SAME_LOW_PRECISION = 2e-3
"""Gradients are summed in another order, and then rounded to 8 (bf16) or 11 bits (fp16)."""
LEG = 3
"""Steps between two changes of shape: what a resume leaves wrong in the optimizer shows in the second one."""

ON_4_RANKS = {
    "TP2 PP2": {"tensor": 2, "pipeline": 2},
    "PP4": {"pipeline": 4},
    "PP2 DP2": {"pipeline": 2},
    "TP2 PP2, sequence parallel": {"tensor": 2, "pipeline": 2, "sequence_parallel": True},
    "DP4": {},
    "PP2 DP2, interleaved": {"pipeline": 2, "virtual": 2},
    "PP4, uneven": {"pipeline": 4, "layout": "E|t|ttt|L"},
    "TP2 DP2": {"tensor": 2},
}
ON_2_RANKS = {"TP2": {"tensor": 2}, "PP2, uneven": {"pipeline": 2, "layout": "Ettt|tL"}}
BACK_ON_4_RANKS = {"PP2 DP2 again": {"pipeline": 2}}
STEPS = LEG * (len(ON_4_RANKS) + len(ON_2_RANKS) + len(BACK_ON_4_RANKS))
OPTIMIZERS = {"plain": False, "distributed": True}
LOW_PRECISION = {"bf16": [{"pipeline": 2}, {"pipeline": 4}], "fp16": [{"pipeline": 2}, {"pipeline": 4}]}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Where each run has its checkpoints."""
    return {name: tmp_path_factory.mktemp("checkpoints") for name in (*OPTIMIZERS, *LOW_PRECISION)}


@pytest.fixture(scope="module")
def runs(train_series, tiny_job, directories):
    """All runs of this module in three starts of ranks: {name: [what each leg said]}; "twin" are uninterrupted ones."""
    train = {"steps": STEPS, "warmup_steps": 5}

    def legs(shapes, first, name, **more):
        return [
            (
                name,
                tiny_job(parallel=shape, train=train | {"checkpoint_directory": str(directories[name])} | more),
                {step: Order("stop", "test")} if (step := first + LEG * number) < STEPS else {},
            )
            for number, shape in enumerate(shapes, start=1)
        ]

    def of_both(shapes, first):
        return [
            leg
            for name, distributed in OPTIMIZERS.items()
            for leg in legs([shape | {"distributed_optimizer": distributed} for shape in shapes.values()], first, name)
        ]

    said = {}

    def start(jobs, ranks):
        ended = train_series([job for _, job, _ in jobs], ranks, {at: orders for at, (_, _, orders) in enumerate(jobs)})
        for (name, _, _), leg in zip(jobs, ended, strict=True):
            said.setdefault(name, []).append(leg)

    twins = [("twin", tiny_job(train=train), {})]
    low = []
    for name, shapes in LOW_PRECISION.items():
        low += legs(shapes, 0, name, precision=name)
        twins.append(
            (
                f"twin {name}",
                tiny_job(parallel=shapes[0], train=train | {"precision": name}),
                {2 * LEG: Order("stop", "test")},
            )
        )
    start([*twins, *of_both(ON_4_RANKS, 0), *low], 4)
    start(of_both(ON_2_RANKS, LEG * len(ON_4_RANKS)), 2)
    start(of_both(BACK_ON_4_RANKS, STEPS - LEG), 4)
    return said


def whole(legs, figure):
    return {step: value for leg in legs for step, value in getattr(leg, figure).items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_that_changes_its_shape_again_and_again_is_the_run_that_never_stopped(name, runs):
    (twin,) = runs["twin"]
    legs = runs[name]
    assert [list(leg.losses) for leg in legs] == [list(range(first, first + LEG)) for first in range(1, STEPS + 1, LEG)]
    assert whole(legs, "losses") == pytest.approx(twin.losses, rel=SAME)
    assert whole(legs, "gradient_norms") == pytest.approx(twin.gradient_norms, rel=SAME_NORM)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_learning_rate_and_samples_go_on_where_they_were(name, runs):
    def told(legs):
        reports = [report for leg in legs for report in leg.all(StepReport) if report.loss is not None]
        return [(report.step, report.learning_rate, report.consumed_samples) for report in reports]

    assert told(runs[name]) == told(runs["twin"])


def test_the_layout_of_a_checkpoint_is_told_and_not_used(runs):
    shapes = ["TP2 x PP2 x DP1, Ett|ttL", "TP1 x PP4 x DP1, Et|t|t|tL", "TP1 x PP2 x DP2, Ett|ttL"]
    for leg, (before, after) in zip(runs["plain"][1:], pairwise(shapes), strict=False):
        assert f"it was saved as {before}, and goes on as {after}" in leg.notices


@pytest.mark.parametrize("name", LOW_PRECISION)
def test_low_precision_and_its_loss_scale_go_on_at_another_shape(name, runs):
    (twin,) = runs[f"twin {name}"]
    assert list(whole(runs[name], "losses")) == list(range(1, 2 * LEG + 1))
    assert whole(runs[name], "losses") == pytest.approx(twin.losses, rel=SAME_LOW_PRECISION)


def test_the_loss_scale_goes_on_where_it_was(runs, directories):
    common = torch.load(directories["fp16"] / f"step-{2 * LEG:08d}" / "common.pt", weights_only=False)
    assert common["optimizer"]["grad_scaler"]["growth_tracker"] == 2 * LEG  # steps without an overflow, both legs
