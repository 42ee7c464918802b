"""Replicas that take unequal shares of a step: each token counts the same."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.protocol import Hello, Shape, StepReport
from trimtab_megatron.train import loss_weights

SAME = 1e-6

CASES = {
    "4|4": ({"pipeline": 2}, (4, 4)),
    "6|2": ({"pipeline": 2}, (6, 2)),
    "1|7, distributed optimizer": ({"pipeline": 2, "distributed_optimizer": True}, (1, 7)),
    "6|2, interleaved": ({"pipeline": 2, "virtual": 2}, (6, 2)),
    "5|1|1|1": ({}, (5, 1, 1, 1)),
}


@pytest.fixture(scope="module")
def runs(train_series, tiny_job):
    jobs = [
        tiny_job(parallel=parallel, batch={"global_batch_size": 16}, train={"steps": 3})
        for parallel, _ in CASES.values()
    ]
    counts = {place: counts for place, (_, counts) in enumerate(CASES.values())}
    return dict(zip(CASES, train_series(jobs, 4, microbatches=counts), strict=True))


@pytest.mark.mcore
@pytest.mark.parametrize("name", [name for name in CASES if name != "4|4"])
def test_a_step_comes_to_the_same_however_its_microbatches_are_shared_out(name, runs):
    assert runs[name].losses == pytest.approx(runs["4|4"].losses, rel=SAME)
    assert runs[name].gradient_norms == pytest.approx(runs["4|4"].gradient_norms, rel=SAME)
    assert list(runs[name].losses) == [1, 2, 3]


@pytest.mark.mcore
def test_each_rank_reports_what_its_replica_took(runs):
    for name, (_, counts) in CASES.items():
        replica = {hello.rank: hello.data_rank for hello in runs[name].all(Hello)}
        for report in runs[name].all(StepReport):
            assert report.microbatches == counts[replica[report.rank]]
            assert report.tokens == report.microbatches * 2 * 32
            assert report.squared_lengths == report.microbatches * 2 * 32**2


def weights(lengths, replicas, global_batch_size, sequence_length):
    run = SimpleNamespace(
        world=SimpleNamespace(shape=Shape(1, 1, replicas)),
        job=SimpleNamespace(
            batch=SimpleNamespace(global_batch_size=global_batch_size),
            model=SimpleNamespace(sequence_length=sequence_length),
        ),
        dataset=SimpleNamespace(variable_lengths=False),
    )
    return loss_weights(run, [SimpleNamespace(lengths=row) for row in lengths])


@settings(deadline=None)
@given(st.integers(1, 100), st.integers(1, 64), st.integers(1, 8), st.integers(1, 10_000))
def test_equal_shares_have_the_weight_of_exactly_one(count, replicas, size, length):
    taken = [(length,) * size] * count
    assert weights(taken, replicas, count * replicas * size, length) == [1.0] * count


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 8))
def test_over_all_replicas_each_microbatch_counts_its_share_of_the_tokens(counts, size):
    for count in counts:
        taken = [(7,) * size] * count
        for weight in weights(taken, len(counts), sum(counts) * size, 7):
            assert weight / count / len(counts) == pytest.approx(1 / sum(counts), rel=1e-12)
