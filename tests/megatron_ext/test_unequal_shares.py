"""A batch that replicas cannot share equally, from the first step of an attempt on: the run of one replica."""

from collections import defaultdict

import pytest

from trimtab.protocol import Hello, Order, StepReport

pytestmark = pytest.mark.mcore

SAME = 1e-5
"""fp32 sums in another order."""
SAME_NORM = 2e-4
"""The gradient norm is summed in an order that follows the ranks: 9e-5 were seen on Megatron-core 0.19."""
STEPS, LEG = 8, 4
SHARES = {3: [2, 3, 3], 4: [2, 2, 2, 2]}
OPTIMIZERS = {"plain": False, "distributed": True}


@pytest.fixture(scope="module")
def runs(train_series, tiny_job, tmp_path_factory):
    """{"twin", "begun on 3", and of each optimizer "... on 4" and then "... on 3": what its ranks said}"""

    def job(**train):
        batch = {"microbatch_size": 1, "global_batch_size": 8}
        return tiny_job(batch=batch, train={"steps": STEPS} | train)

    def resumed(name):
        directory = str(tmp_path_factory.mktemp(name))
        return job(checkpoint_directory=directory) | {"parallel": {"distributed_optimizer": OPTIMIZERS[name]}}

    legs = [resumed(name) for name in OPTIMIZERS]
    stop = {number: {LEG: Order("stop", "test")} for number in range(len(legs))}
    on_4 = train_series(legs, 4, stop)
    on_3 = train_series([*legs, job()], 3)
    (twin,) = train_series([job()], 1)
    said = {"twin": twin, "begun on 3": on_3[-1]}
    for name, before, after in zip(OPTIMIZERS, on_4, on_3[:-1], strict=True):
        said |= {f"{name} on 4": before, f"{name} on 3": after}
    return said


def test_three_replicas_share_eight_samples_from_the_first_step_on(runs):
    begun, twin = runs["begun on 3"], runs["twin"]
    assert list(begun.losses) == list(range(1, STEPS + 1))
    assert begun.losses == pytest.approx(twin.losses, rel=SAME)
    assert begun.gradient_norms == pytest.approx(twin.gradient_norms, rel=SAME_NORM)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_replicas_go_on_where_four_have_stopped(name, runs):
    before, after, twin = runs[f"{name} on 4"], runs[f"{name} on 3"], runs["twin"]
    assert (list(before.losses), list(after.losses)) == ([1, 2, 3, 4], [5, 6, 7, 8])
    assert before.losses | after.losses == pytest.approx(twin.losses, rel=SAME)
    assert before.gradient_norms | after.gradient_norms == pytest.approx(twin.gradient_norms, rel=SAME_NORM)


def test_each_step_takes_the_whole_batch_once(runs):
    for name, run in runs.items():
        counts, consumed = defaultdict(list), {}
        for report in run.all(StepReport):
            counts[report.step].append(report.microbatches)
            consumed |= {report.step: report.consumed_samples} if report.loss is not None else {}
        shares = SHARES.get(len(run.all(Hello)), [8])
        assert [sorted(taken) for taken in counts.values()] == [shares] * len(counts), name
        assert consumed == {step: 8 * step for step in counts}, name
