"""The same job at every shape: the same numbers."""

import pytest

from trimtab.protocol import Hello, StepReport, job_from_dict
from trimtab_megatron.identity import Identity, introduction

pytestmark = pytest.mark.mcore

SAME = 1e-6
"""fp32 sums in another order: 3e-7 was measured over six layouts."""
SAME_NORM = 2e-4
"""The gradient norm is summed per rank and then over ranks: its order follows the layout."""

SHAPES = {
    "TP2 x PP2, 1|3, sequence parallel": {
        "tensor": 2,
        "pipeline": 2,
        "layout": "Et|tttL",
        "sequence_parallel": True,
    },
    "PP4, E and L alone": {"pipeline": 4, "layout": "E|tt|tt|L"},
    "PP2 x DP2": {"pipeline": 2},
    "PP2 x DP2, distributed optimizer": {"pipeline": 2, "distributed_optimizer": True},
    "TP2 x PP2, interleaved": {"tensor": 2, "pipeline": 2, "virtual": 2},
    "TP4": {"tensor": 4},
}


@pytest.fixture(scope="module")
def tied(tiny_job):
    return tiny_job(model={"tied_embeddings": True, "query_groups": 2}, train={"steps": 2})


@pytest.fixture(scope="module")
def on_one_rank(train_series, tiny_job, tied):
    """The job on one rank, which all shapes are held against, and the one with tied embeddings."""
    return train_series([tiny_job(), tied], 1)


@pytest.fixture(scope="module")
def one_rank(on_one_rank):
    return on_one_rank[0]


@pytest.fixture(scope="module")
def shapes(train_series, tiny_job):
    ended = train_series([tiny_job(parallel=parallel) for parallel in SHAPES.values()], 4)
    return dict(zip(SHAPES, ended, strict=True))


def test_the_loss_falls_and_every_figure_of_a_step_is_reported(one_rank):
    losses = one_rank.losses
    assert list(losses) == [1, 2, 3, 4, 5, 6]
    assert losses[1] == pytest.approx(5.95, abs=0.1)  # ln 384, the padded vocabulary of bytes
    assert losses[6] < losses[1] - 0.5
    reports = one_rank.all(StepReport)
    assert [report.consumed_samples for report in reports] == [8, 16, 24, 32, 40, 48]
    rates = [report.learning_rate for report in reports]
    assert rates[0] == 3e-3  # the one step of warm-up
    assert rates[-1] == pytest.approx(3e-5)
    assert rates == sorted(rates, reverse=True)
    for report in reports:
        assert (report.microbatches, report.tokens) == (4, 4 * 2 * 32)
        assert 0 < report.forward_seconds < report.duration_seconds * 1.5
        assert 0 < report.backward_seconds < report.duration_seconds * 1.5
        assert report.peak_memory_bytes > 100e6
        assert report.gradient_norm > 0


@pytest.mark.parametrize("name", SHAPES)
def test_losses_do_not_depend_on_the_shape(name, shapes, one_rank):
    ended = shapes[name]
    assert ended.losses == pytest.approx(one_rank.losses, rel=SAME)
    assert ended.gradient_norms == pytest.approx(one_rank.gradient_norms, rel=SAME_NORM)
    assert len(ended.all(StepReport)) == 6 * 4
    assert {report.rank for report in ended.all(StepReport) if report.loss is not None} == {
        min(hello.rank for hello in ended.all(Hello) if hello.pipeline_rank == SHAPES[name].get("pipeline", 1) - 1)
    }


@pytest.mark.parametrize("name", SHAPES)
def test_a_rank_knows_its_place_before_megatron_core_gives_it_one(name, shapes, tiny_job):
    job = job_from_dict(tiny_job(parallel=SHAPES[name]))
    for hello in shapes[name].all(Hello):
        early = introduction(Identity(hello.rank, 4, hello.local_rank, hello.node), job)
        for kind in ("tensor_rank", "pipeline_rank", "data_rank"):
            assert getattr(early, kind) == getattr(hello, kind), (hello.rank, kind)


def test_each_rank_says_what_it_holds(train_ranks, on_one_rank, tied):
    one = on_one_rank[1]
    two = train_ranks(tied | {"parallel": {"pipeline": 2, "layout": "Et|tttL"}}, 2)
    assert two.losses == pytest.approx(one.losses, rel=SAME)
    hellos = {hello.rank: hello for hello in two.all(Hello)}
    assert [hellos[rank].layers for rank in (0, 1)] == [(0,), (1, 2, 3)]
    assert [(hellos[rank].tensor_rank, hellos[rank].pipeline_rank, hellos[rank].data_rank) for rank in (0, 1)] == [
        (0, 0, 0),
        (0, 1, 0),
    ]
    embedding, layer, norm = 384 * 64, 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 256 + 2 * 64, 64
    assert hellos[0].parameters == embedding + layer
    assert hellos[1].parameters == 3 * layer + norm + embedding
    assert one.all(Hello)[0].parameters == embedding + 4 * layer + norm
