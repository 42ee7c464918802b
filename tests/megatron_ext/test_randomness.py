"""Dropout does not depend on where a layer computes, in which order, or after what."""

import pytest

from trimtab.protocol import Order

pytestmark = pytest.mark.mcore

SAME = 1e-6
"""fp32 sums in another order, as without dropout."""
SAME_NORM = 2e-4

CASES = {
    "4 replicas": {},
    "PP2 x DP2": {"pipeline": 2},
    "PP2 x DP2, one replica takes 3 of 4 microbatches": {"pipeline": 2},
    "PP4, recomputed": {"pipeline": 4, "layout": "E|tt|tt|L", "recomputed_layers": [0, 2, 1, 0]},
    "PP2 x DP2, interleaved, recomputed": {"pipeline": 2, "virtual": 2, "recomputed_layers": [1, 2]},
    "stopped": {"pipeline": 2},
    "resumed": {"pipeline": 4},
}


@pytest.fixture(scope="module")
def runs(train_series, tiny_job, tmp_path_factory):
    """Of each case; and of TP2, where attention heads and, under sequence parallelism, all masks are the ranks' own."""
    tensor = {
        f"TP2 {other}{', sequence parallel' * split}": {"tensor": 2, "sequence_parallel": split, **more}
        for split in (False, True)
        for other, more in {"x DP2": {}, "x PP2, recomputed": {"pipeline": 2, "recomputed_layers": [2, 0]}}.items()
    }
    names = [*CASES, *tensor, "no dropout", "another seed"]
    jobs = [
        tiny_job(model={"dropout": 0.1}, parallel=parallel, train={"steps": 4})
        for parallel in (CASES | tensor).values()
    ]
    saved = str(tmp_path_factory.mktemp("checkpoints"))
    for name in ("stopped", "resumed"):
        jobs[names.index(name)]["train"] |= {"checkpoint_directory": saved}
    jobs += [tiny_job(train={"steps": 2}), tiny_job(model={"dropout": 0.1}, train={"steps": 2, "seed": 7})]
    ended = train_series(jobs, 4, orders={names.index("stopped"): {2: Order("stop", "test")}}, microbatches={2: (3, 1)})
    return dict(zip(names, ended, strict=True))


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("4 replicas", "stopped")])
def test_each_layer_drops_the_same_of_each_sample(name, runs):
    losses, norms = runs["4 replicas"].losses, runs["4 replicas"].gradient_norms
    first = min(runs[name].losses)
    assert first == (3 if name == "resumed" else 1)
    assert runs[name].losses == pytest.approx({step: losses[step] for step in range(first, 5)}, rel=SAME)
    assert runs[name].gradient_norms == pytest.approx({step: norms[step] for step in range(first, 5)}, rel=SAME_NORM)


@pytest.mark.parametrize("split", ["", ", sequence parallel"])
def test_tensor_parallel_ranks_drop_their_own_parts_alike_at_every_stage(split, runs):
    one, other = (runs[f"TP2 {shape}{split}"] for shape in ("x DP2", "x PP2, recomputed"))
    assert one.losses == pytest.approx(other.losses, rel=SAME)
    assert one.losses[1] != pytest.approx(runs["4 replicas"].losses[1], rel=SAME)


def test_something_is_dropped_and_it_follows_the_seed(runs):
    first = {name: ended.losses[1] for name, ended in runs.items() if 1 in ended.losses}
    assert first["no dropout"] != pytest.approx(first["4 replicas"], rel=1e-5)
    assert first["another seed"] != pytest.approx(first["4 replicas"], rel=1e-5)
