"""Reshaping in place: nothing is changed by it but who holds what.

All cases run in the same four ranks, one after the other: starting ranks takes longer than training a tiny model.
"""

import json
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import cycle, islice, pairwise, product
from typing import Any

import pytest

from trimtab.protocol import (
    Done,
    Failed,
    Layout,
    Order,
    Reshaped,
    Setting,
    StepReport,
    encode,
    job_from_dict,
    job_to_json,
    setting_of,
)

pytestmark = pytest.mark.mcore

RANKS, STEPS = 4, 15
SAME = 1e-5
"""fp32 losses, whose sums are in another order after a move."""
SAME_NORM = 2e-4
"""The gradient norm is summed per rank and then over ranks: its order follows the layout."""


@dataclass(frozen=True)
class Shape:
    """Of the table: how the ranks are arranged, and the layers [chunk] of the settings that they pass through."""

    parallel: dict[str, Any]
    layers: tuple[int, ...]
    one_way: tuple[int, ...]
    several: tuple[int, ...]
    microbatches: tuple[int, ...] | None = None
    """[R] that they are shifted to; one replica has none to shift."""
    batch: dict[str, int] = field(default_factory=dict)


SHAPES = {
    "tp2pp2": Shape({"tensor": 2, "pipeline": 2, "sequence_parallel": True}, (3, 3), (2, 4), (5, 1)),
    "pp4": Shape({"pipeline": 4}, (2, 1, 1, 2), (1, 2, 1, 2), (0, 3, 3, 0)),
    "pp2dp2": Shape({"pipeline": 2}, (3, 3), (4, 2), (1, 5), (1, 3)),
    "pp2dp2-interleaved": Shape(
        {"pipeline": 2, "virtual": 2}, (1, 2, 2, 1), (2, 1, 2, 1), (0, 1, 4, 1), (2, 6), {"global_batch_size": 16}
    ),
}
OPTIMIZERS = {"plain": False, "distributed": True}
ORDERS = ("one way", "several", "microbatches", "recompute", "back")
CELLS = [
    (order, optimizer, shape)
    for order, optimizer, shape in product(ORDERS, OPTIMIZERS, SHAPES)
    if order != "microbatches" or SHAPES[shape].microbatches
]
TABLE = [pytest.param(*cell, id="-".join(cell).replace(" ", "-")) for cell in CELLS]

TIED = {"model": {"tied_embeddings": True}}
AT_ONCE = {
    "fp32-tied-plain-pp4": ({"pipeline": 4}, TIED),
    "fp32-tied-distributed-pp2dp2": ({"pipeline": 2, "distributed_optimizer": True}, TIED),
    "bf16-plain-tp2pp2": ({"tensor": 2, "pipeline": 2}, {"train": {"precision": "bf16"}}),
    "bf16-tied-distributed-pp2dp2": (
        {"pipeline": 2, "distributed_optimizer": True},
        TIED | {"train": {"precision": "bf16"}},
    ),
    "fp16-plain-pp2dp2-interleaved": ({"pipeline": 2, "virtual": 2}, {"train": {"precision": "fp16"}}),
    "fp16-distributed-pp2dp2": ({"pipeline": 2, "distributed_optimizer": True}, {"train": {"precision": "fp16"}}),
    "own-plain-pp2dp2": ({"pipeline": 2}, {"model": {"provider": "counting_model:build_model"}}),
    "own-distributed-pp4": (
        {"pipeline": 4, "distributed_optimizer": True},
        {"model": {"provider": "counting_model:build_model"}},
    ),
}
"""To another layout and back between two steps: what runs on is what was, bit for bit."""


def settings(shape: Shape, job: dict[str, Any]) -> dict[str, Setting]:
    """What each order of the table leads to, one after the other."""
    parsed = job_from_dict(job)
    begin = setting_of(parsed, parsed.shape(RANKS))
    one_way, several = (replace(begin, layout=Layout(to, begin.layout.stages)) for to in (shape.one_way, shape.several))
    shifted = replace(several, microbatches=shape.microbatches or several.microbatches)
    layers = [len(several.layout.stage_layers(stage)) for stage in range(begin.layout.stages)]
    recomputing = replace(shifted, recomputed_layers=tuple(min(1, count) for count in layers))
    back = replace(recomputing, layout=begin.layout)
    return {
        "begin": begin,
        "one way": one_way,
        "several": several,
        "microbatches": shifted,
        "recompute": recomputing,
        "back": back,
    }


def case(
    job: dict[str, Any], orders: dict[int, list[Order]], inject: str = "", looks: bool = False, spoils: bool = False
) -> dict[str, Any]:
    """What reshape_ranks.py runs. `looks`: around each order at what is held; `spoils`: a tensor on its way."""
    lines = {step: [encode(order).decode() for order in given] for step, given in orders.items()}
    return {
        "job": job_to_json(job_from_dict(job)),
        "orders": lines,
        "inject": inject,
        "looks": looks,
        "spoils": spoils,
    }


def chain(*passed: Setting) -> list[Order]:
    """Orders from each setting to the next."""
    return [Order("reshape", "test", will, was.fingerprint) for was, will in pairwise(passed)]


def there_and_back(job: dict[str, Any]) -> tuple[Setting, Setting]:
    """The setting of a job of four layers, and one with a layer elsewhere."""
    parsed = job_from_dict(job)
    begin = setting_of(parsed, parsed.shape(RANKS))
    layers = (0, 2, *begin.layout.layers[2:]) if begin.layout.chunks == 4 else (1, 3)
    return begin, replace(begin, layout=Layout(layers, begin.layout.stages))


def table_cases(tiny_job: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The orders of the table one after the other, and the twins that get none."""
    for (name, shape), (optimizer, distributed) in product(SHAPES.items(), OPTIMIZERS.items()):
        job = tiny_job(
            model={"layers": 6, "dropout": 0.1},
            parallel=shape.parallel | {"layout": str(Layout(shape.layers, 1)), "distributed_optimizer": distributed},
            batch=shape.batch,
            train={"steps": STEPS},
        )
        passed = [to for order, to in settings(shape, job).items() if order != "microbatches" or shape.microbatches]
        yield f"{optimizer} {name} twin", case(job, {})
        orders = {step: [order] for step, order in enumerate(chain(*passed), 1)}
        yield f"{optimizer} {name}", case(job, orders, looks=True)


def other_cases(tiny_job: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, (parallel, sections) in AT_ONCE.items():
        job = tiny_job(
            parallel=parallel, train=sections.get("train", {}) | {"steps": 4}, model=sections.get("model", {})
        )
        begin, other = there_and_back(job)
        yield f"{name} twin", case(job, {})
        yield name, case(job, {2: chain(begin, other, begin)}, looks=True)

    job = tiny_job(parallel={"pipeline": 2, "distributed_optimizer": True}, train={"steps": 5})
    begin, other = there_and_back(job)
    too_many = replace(begin, layout=Layout((3, 2), 2))
    stale = [Order("reshape", "test", begin, other.fingerprint)]
    yield "refused twin", case(job, {})
    refused = {2: chain(begin, other), 3: [*chain(begin, too_many), *stale], 4: chain(begin, other)}
    yield "refused", case(job, refused, inject="fail:rank=1,during=reshape", looks=True)
    yield "spoilt", case(job, {2: chain(begin, other)}, spoils=True)

    job = tiny_job(model={"hidden_size": 128}, parallel={"pipeline": 2}, train={"steps": 21})
    orders = chain(*islice(cycle(there_and_back(job)), 21))
    yield "twenty", case(job, {step: [order] for step, order in enumerate(orders, 1)})


@pytest.fixture(scope="module")
def ended(start_ranks, tiny_job, tmp_path_factory):
    """{case: [what each rank wrote]} of all cases."""
    directory = tmp_path_factory.mktemp("cases")
    cases = dict(table_cases(tiny_job)) | dict(other_cases(tiny_job))
    (directory / "cases.json").write_text(json.dumps(cases))
    whole = start_ranks(
        tiny_job(), RANKS, script="reshape_ranks.py", environment={"CASES_DIRECTORY": str(directory)}
    ).end(1800)  # seconds: a machine may have much else to do
    assert whole.exit_codes == [0] * RANKS, "\n".join(whole.stderr)
    by_rank = [json.loads((directory / f"{rank}.json").read_text()) for rank in range(RANKS)]
    return {name: [told[name] for told in by_rank] for name in cases}


def of_all(ranks: list[dict[str, Any]], what: str) -> dict[int, float]:
    """The figures of steps, from the one rank that reports them."""
    (figures,) = [rank[what] for rank in ranks if rank[what]]
    return {int(step): figure for step, figure in figures.items()}


def reshaped(ranks: list[dict[str, Any]]) -> list[list[Any]]:
    """[refused, moved bytes, least bytes, fingerprint] of each order, from rank 0."""
    told: list[list[Any]] = ranks[0]["reshaped"]
    assert not any(rank["reshaped"] for rank in ranks[1:])
    return told


def check_what_is_held(ranks: list[dict[str, Any]], place: int) -> None:
    """Around one order: each part of each tensor is what it was, and each layer in one place."""
    parts: list[dict[str, str]] = [{}, {}]
    for rank in ranks:
        for part, held in zip(parts, rank["around"][place], strict=True):
            for name, digest in held["tensors"].items():
                assert part.setdefault(name, digest) == digest, name  # copies of a part are the same
        was, now = rank["around"][place]
        assert (was["steps"], was["scales"]) == (now["steps"], now["scales"])
    before, after = parts
    assert before == after
    assert sum("exp_avg_sq" in name for name in after) > 20  # that there is something to compare
    for tensor_rank, data_rank in {(rank["place"][0], rank["place"][2]) for rank in ranks}:
        layers = [
            layer
            for rank in ranks
            if (rank["place"][0], rank["place"][2]) == (tensor_rank, data_rank)
            for layer in rank["around"][place][1]["layers"]
        ]
        assert sorted(layers) == list(range(len(layers)))


@pytest.mark.parametrize(("order", "optimizer", "shape"), TABLE)
def test_an_order_changes_no_bit_and_no_result(order, optimizer, shape, ended):
    ranks, twin = ended[f"{optimizer} {shape}"], ended[f"{optimizer} {shape} twin"]
    place = [name for name in ORDERS if name != "microbatches" or SHAPES[shape].microbatches].index(order)

    refused, moved, least, _ = reshaped(ranks)[place]
    assert refused == ""
    if order in ("microbatches", "recompute"):
        assert moved == least == 0
    else:
        assert moved >= least > 0
        if optimizer == "plain":
            assert moved == least
    check_what_is_held(ranks, place)
    for rank in ranks:
        assert len(rank["around"][place][1]["layers"]) < 6
        assert rank["around"][place][1]["steps"] == [place + 1]

    assert STEPS - (place + 1) >= 10  # steps after it
    assert of_all(ranks, "losses") == pytest.approx(of_all(twin, "losses"), rel=SAME)
    assert of_all(ranks, "norms") == pytest.approx(of_all(twin, "norms"), rel=SAME_NORM)
    assert of_all(ranks, "rates") == of_all(twin, "rates")
    samples = sorted(index for rank in ranks for index in rank["samples"])
    assert samples == list(range(STEPS * SHAPES[shape].batch.get("global_batch_size", 8)))


@pytest.mark.parametrize("name", AT_ONCE)
def test_there_and_back_goes_on_bit_for_bit(name, ended):
    ranks, twin = ended[name], ended[f"{name} twin"]
    there, back = reshaped(ranks)
    assert there[0] == back[0] == ""
    assert there[1] >= there[2] > 0
    for place in (0, 1):
        check_what_is_held(ranks, place)
    for what in ("losses", "norms", "rates"):
        assert len(of_all(ranks, what)) == 4
        assert of_all(ranks, what) == of_all(twin, what)


def test_what_cannot_be_prepared_is_refused_and_all_train_on_as_they_were(ended):
    ranks, twin = ended["refused"], ended["refused twin"]
    (failed, too_many, stale, carried_out) = reshaped(ranks)
    assert failed[0] == "rank 1: MemoryError: out of memory (injected at reshape)"
    assert too_many[0] == "the layout has 5 layers, the model has 4"
    assert stale[0] == "it was worked out for another setting than what runs: layers 2|2, microbatches 2|2"
    assert carried_out[0] == ""
    assert [told[1:3] for told in (failed, too_many, stale)] == [[0, 0]] * 3
    assert [told[3] for told in (failed, too_many, stale)] == [failed[3]] * 3 != carried_out[3]
    assert ranks[0]["notices"] == [f"not reshaped: {told[0]}" for told in (failed, too_many, stale)]
    for place in range(4):
        check_what_is_held(ranks, place)
    for what in ("losses", "norms"):
        unchanged, other = ({step: of_all(told, what)[step] for step in (1, 2, 3, 4)} for told in (ranks, twin))
        assert unchanged == other  # of the steps before the last order, bit for bit
    assert of_all(ranks, "losses") == pytest.approx(of_all(twin, "losses"), rel=SAME)


def test_a_tensor_that_is_spoilt_on_its_way_ends_all_ranks(ended):
    for rank in ended["spoilt"]:
        assert re.match(r"after the reshape 1 tensors .* exp_avg_sq of .*: begin again", rank["error"])
        assert rank["losses"].keys() <= {"1", "2"}


def test_twenty_reshapes_leave_nothing_behind(ended):
    for rank in ended["twenty"]:
        assert rank["gone"] == [True] * 20
        # A rank holds 2 layers or so of 263,424 parameters, 16 bytes each: 16 that were left would be over 130 MB.
        assert rank["resident_bytes"][-1] - rank["resident_bytes"][3] < 16e6


@pytest.mark.parametrize("during", ["reshape", "move"])
def test_a_rank_that_is_killed_in_a_reshape_ends_all_and_none_trains_on(during, start_ranks, tiny_job):
    job = tiny_job(parallel={"pipeline": 2}, train={"steps": 100_000})
    parsed = job_from_dict(job)
    begin = setting_of(parsed, parsed.shape(2))
    other = replace(begin, layout=Layout((1, 3), 2))
    ranks = start_ranks(job, 2, environment={"TRIMTAB_INJECT": f"kill:rank=1,during={during},step=30"})
    there, back = chain(begin, other, begin)
    ranks.order("reshape", setting=there.setting, replaces=there.replaces)
    ranks.until(lambda messages: any(isinstance(m, Reshaped) for m in messages))
    ranks.until(lambda messages: any(isinstance(m, StepReport) and m.step >= 30 for m in messages))
    ranks.order("reshape", setting=back.setting, replaces=back.replaces)
    ended = ranks.end()
    assert ended.exit_codes == [1, -signal.SIGKILL]
    (reshaped_once,) = ended.all(Reshaped)
    assert (reshaped_once.refused, reshaped_once.setting) == ("", other)
    assert reshaped_once.moved_bytes == reshaped_once.least_bytes > 0
    (failed,) = ended.all(Failed)
    assert failed.peer_lost
    assert {report.step for report in ended.all(StepReport)} == set(range(1, failed.step + 1))
    assert not ended.all(Done)
