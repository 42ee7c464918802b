import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.balance.layouts import partition as module
from trimtab.balance.layouts.partition import NoLayout, Partition, partition
from trimtab.balance.pipeline.memory import stage_memory_bytes
from trimtab.balance.pipeline.schedules import SPLITTING, stage_orders
from trimtab.balance.plan import Costs, Hardware, ParameterMemory, Part, Plan, Schedule
from trimtab.protocol import Layout

SAME = 1e-9
"""Sums of the same seconds in another order differ by rounding alone."""
MEMORY = ParameterMemory(weight_bytes=2, gradient_bytes=4, optimizer_bytes=12)


@dataclass(frozen=True)
class Instance:
    costs: Costs
    memory: ParameterMemory
    hardware: Hardware
    schedule: Schedule
    stages: int
    virtual: int
    microbatches: int
    recompute: str
    current: Layout | None
    slack_ratio: float

    def solve(self, **changes) -> Partition:
        given = {**self.__dict__, **changes}
        return partition(given.pop("costs"), given.pop("memory"), given.pop("hardware"), **given)


def layouts(layers: int, chunks: int) -> Iterator[tuple[int, ...]]:
    """Every number of layers of each chunk, those between the first and the last not empty."""

    def rest(left: int, chunk: int) -> Iterator[tuple[int, ...]]:
        if chunk == chunks - 1:
            yield (left,)
            return
        for count in range(0 if chunk == 0 else 1, left + 1):
            for others in rest(left - count, chunk + 1):
                yield (count, *others)

    return rest(layers, 0)


def held_at_once(one: Instance, stage: int) -> set[tuple[int, ...]]:
    """How many microbatches of each of its chunks a stage holds, after each of its operations."""
    freeing = "W" if one.schedule in SPLITTING else "B"
    held, seen = [0] * one.virtual, set()
    for kind, chunk, _ in stage_orders(one.schedule, one.stages, one.virtual, one.microbatches)[stage]:
        held[chunk // one.stages] += {"F": 1, freeing: -1}.get(kind, 0)
        seen.add(tuple(held))
    return {mix for mix in seen if not any(other != mix and all(np.greater_equal(other, mix)) for other in seen)}


def brute_force(one: Instance) -> tuple[float, float, float] | None:
    """The optimum, the fewest moved bytes within the slack, and the fastest of those; None where nothing fits."""
    speeds = one.hardware.speeds.min(axis=0)
    mixes = [held_at_once(one, stage) for stage in range(one.stages)]
    ends = {0: one.costs.embedding}, {one.stages - 1: one.costs.head}
    layers = one.costs.layers

    @cache
    def seconds(stage: int, chunks: tuple[range, ...]) -> float:
        """Of the fewest recomputed layers that let a stage fit; infinite where none do."""
        own = [layer for chunk in chunks for layer in chunk]
        extra = [end[stage] for end in ends if stage in end]
        parameters = sum(layers[layer].parameters for layer in own) + sum(part.parameters for part in extra)
        counts = {"none": [0], "full": [len(own)], "fit": range(len(own) + 1)}[one.recompute]
        for count in counts:
            again = own[:count]
            kept = [
                sum(layers[i].recomputed_bytes if i in again else layers[i].activation_bytes for i in chunk)
                for chunk in chunks
            ]
            if stage == 0:
                kept[0] += one.costs.embedding.activation_bytes
            if stage == one.stages - 1:
                kept[-1] += one.costs.head.activation_bytes
            most = max(sum(map(float.__mul__, kept, map(float, mix))) for mix in mixes[stage])
            transient = max((layers[i].activation_bytes - layers[i].recomputed_bytes for i in again), default=0.0)
            if parameters * one.memory.total_bytes + most + transient <= one.hardware.memory_bytes[stage]:
                work = [*(layers[layer].compute_seconds for layer in own), *(part.compute_seconds for part in extra)]
                return (sum(work) + sum(layers[layer].forward_seconds for layer in again)) / speeds[stage]
        return math.inf

    plans = []
    for sizes in layouts(len(layers), one.stages * one.virtual):
        ahead = np.cumsum((0, *sizes)).tolist()
        chunks = [range(*pair) for pair in pairwise(ahead)]
        slowest = max(seconds(stage, tuple(chunks[stage :: one.stages])) for stage in range(one.stages))
        if math.isfinite(slowest):
            plans.append((slowest, sizes))
    if not plans:
        return None
    optimum = min(plans)[0]
    if one.current is None:
        return optimum, 0.0, optimum
    owners = one.current.owners
    moved = []
    for slowest, sizes in plans:
        if slowest <= optimum * (1 + one.slack_ratio):
            new = [chunk % one.stages for chunk, size in enumerate(sizes) for _ in range(size)]
            leaving = (layer for layer, pair in enumerate(zip(new, owners, strict=True)) if pair[0] != pair[1])
            moved.append((sum(round(layers[i].parameters * one.memory.moved_bytes) for i in leaving), slowest))
    return optimum, *min(moved)


def random_instance(seed: int) -> Instance:
    random = np.random.default_rng(seed)
    virtual = int(random.integers(1, 4))
    stages = int(random.integers(1, 4 if virtual == 3 else 5))
    layers = int(random.integers(max(1, stages * virtual - 2), 13))
    single = [schedule for schedule in Schedule if schedule is not Schedule.INTERLEAVED]
    schedule = single[random.integers(len(single))] if virtual == 1 else Schedule.INTERLEAVED
    microbatches = stages * int(random.integers(1, 4)) if virtual > 1 else int(random.integers(1, 13))
    alike = random.random() < 0.4

    def part(scale: float) -> Part:
        seconds, kept = (0.0, 0.0) if alike and scale == 1 else random.uniform(-0.5, 1, 2)
        activation = round(2e8 * (1 + kept) * scale)
        seconds = 3.0 * (1 + seconds) * scale
        shares = random.uniform(0.05, 0.4)
        parameters = float(random.integers(1, 4) * 10**7)
        return Part(
            seconds / 3, seconds / 2, seconds / 6, parameters, float(activation), float(round(activation * shares))
        )

    costs = Costs(
        tuple(part(1) for _ in range(layers)), part(random.uniform(0.1, 1)), part(random.uniform(0.1, 3)), 0.0
    )
    memory = replace(MEMORY, shards=int(random.integers(1, 4)))
    capacity = np.full(stages, np.inf)
    if random.random() < 0.7 and layers >= stages * virtual:
        plan = Plan(Layout.uniform(layers, stages, virtual), schedule, (microbatches,), (0,) * stages)
        # In between whole bytes: no sum comes out at the limit itself.
        capacity = np.floor(max(stage_memory_bytes(costs, memory, plan)) * random.uniform(0.6, 1.3, stages)) + 0.5
    replicas = int(random.integers(1, 3))
    speeds = random.choice([1.0, 0.9, 0.8, 0.5], (replicas, stages))
    current = None
    if random.random() < 0.6:
        choices = list(layouts(layers, stages * virtual))
        current = Layout(choices[random.integers(len(choices))], stages)
    return Instance(
        costs,
        memory,
        Hardware(speeds, tuple(capacity.tolist()), ()),
        schedule,
        stages,
        virtual,
        microbatches,
        ("none", "full", "fit")[random.integers(3)],
        current,
        (0.01, 0.1)[random.integers(2)],
    )


def check_against_brute_force(one: Instance) -> bool:
    """Whether there is a layout at all."""
    expected = brute_force(one)
    if expected is None:
        with pytest.raises(NoLayout):
            one.solve()
        return False
    found = one.solve()
    optimum, moved_bytes, slowest = expected
    assert found.exact
    assert found.bound_seconds == pytest.approx(optimum, rel=SAME)
    assert found.moved_bytes == moved_bytes
    if one.virtual == 1 or one.current is None:
        assert found.slowest_seconds == pytest.approx(slowest, rel=SAME)
    plan = Plan(found.layout, one.schedule, (one.microbatches,), found.recomputed_layers)
    held = stage_memory_bytes(one.costs, one.memory, plan)
    assert all(need <= has for need, has in zip(held, one.hardware.memory_bytes, strict=True))
    return True


@pytest.mark.parametrize("first", range(0, 2000, 250))
def test_the_optimum_equals_brute_force(first):
    solved = sum(check_against_brute_force(random_instance(seed)) for seed in range(first, first + 250))
    assert solved > 150  # that most instances have a layout is part of the test


def test_a_search_near_a_good_layout_first_changes_no_optimum(monkeypatch):
    monkeypatch.setattr(module, "FEW_LAYOUTS", 0)
    instances = [one for one in map(random_instance, range(2000, 2150)) if one.virtual > 1]
    assert sum(map(check_against_brute_force, instances)) > 60


def test_where_the_search_is_too_large_the_bound_holds(monkeypatch):
    monkeypatch.setattr(module, "FEW_LAYOUTS", 0)
    monkeypatch.setattr(module, "MOST_CHOICES", 300)
    unproved = 0
    for one in map(random_instance, range(3000, 3150)):
        expected = brute_force(one)
        if one.virtual == 1 or expected is None:
            continue
        try:
            found = one.solve()
        except NoLayout:  # none was found
            continue
        unproved += not found.exact
        assert found.bound_seconds <= expected[0] * (1 + SAME)
        assert found.slowest_seconds >= expected[0] * (1 - SAME)
        plan = Plan(found.layout, one.schedule, (one.microbatches,), found.recomputed_layers)
        held = stage_memory_bytes(one.costs, one.memory, plan)
        assert all(need <= has for need, has in zip(held, one.hardware.memory_bytes, strict=True))
    assert unproved > 5


def model(seconds, embedding=0.0, head=0.0, parameters=1e6, kept=1e6):
    def part(amount: float) -> Part:
        return Part(amount / 4, amount / 4, amount / 2, parameters, kept, kept / 4)

    return Costs(tuple(map(part, seconds)), part(embedding), part(head), 0.0)


def hardware(stages, speeds=None, memory_bytes=math.inf):
    return Hardware(np.array([speeds or [1.0] * stages]), (memory_bytes,) * stages, ())


def solve(costs, on, virtual=1, **options) -> Partition:
    schedule = Schedule.ONE_F_ONE_B if virtual == 1 else Schedule.INTERLEAVED
    stages = len(on.memory_bytes)
    return partition(
        costs,
        options.pop("memory", MEMORY),
        on,
        schedule=schedule,
        stages=stages,
        virtual=virtual,
        microbatches=4 * stages,
        **options,
    )


@st.composite
def models(draw: st.DrawFn) -> tuple[Costs, Hardware, int]:
    """(costs, hardware, virtual)"""
    virtual = draw(st.integers(1, 2))
    stages = draw(st.integers(1, 4 if virtual == 1 else 3))
    seconds = draw(st.lists(st.sampled_from([1.0, 1.25, 2.0, 3.0]), min_size=stages * virtual, max_size=14))
    speeds = draw(st.lists(st.sampled_from([0.5, 0.8, 1.0]), min_size=stages, max_size=stages))
    return model(seconds, draw(st.floats(0, 2)), draw(st.floats(0, 5))), hardware(stages, speeds), virtual


@settings(deadline=None, max_examples=50)
@given(models())
def test_every_layer_is_on_one_stage_and_the_slowest_is_as_slow_as_said(given):
    costs, on, virtual = given
    found = solve(costs, on, virtual)
    stages = found.layout.stages
    assert sorted(layer for stage in range(stages) for layer in found.layout.stage_layers(stage)) == list(
        range(len(costs.layers))
    )
    seconds = np.zeros(stages)
    for chunk in range(found.layout.chunks):
        seconds[chunk % stages] += sum(part.compute_seconds for part in costs.chunk(found.layout, chunk))
    assert found.slowest_seconds == pytest.approx((seconds / on.speeds[0]).max(), rel=SAME)
    assert found.bound_seconds == pytest.approx(found.slowest_seconds, rel=SAME)


@settings(deadline=None, max_examples=30)
@given(models(), st.floats(1e-6, 1e6))
def test_the_optimum_scales_with_the_costs(given, scale):
    costs, on, virtual = given

    def scaled(part: Part) -> Part:
        return replace(
            part,
            forward_seconds=part.forward_seconds * scale,
            backward_input_seconds=part.backward_input_seconds * scale,
            backward_weight_seconds=part.backward_weight_seconds * scale,
        )

    larger = Costs(tuple(map(scaled, costs.layers)), scaled(costs.embedding), scaled(costs.head), 0.0)
    found = solve(costs, on, virtual).slowest_seconds
    assert solve(larger, on, virtual).slowest_seconds == pytest.approx(found * scale, rel=SAME)


@settings(deadline=None, max_examples=30)
@given(models(), st.randoms(use_true_random=False))
def test_the_order_of_equal_layers_changes_nothing(given, random):
    costs, on, virtual = given
    # Layers of one kind, each an object of its own.
    alike = tuple(replace(costs.layers[0]) for _ in costs.layers)
    shuffled = list(alike)
    random.shuffle(shuffled)
    assert solve(replace(costs, layers=alike), on, virtual) == solve(
        replace(costs, layers=tuple(shuffled)), on, virtual
    )


@settings(deadline=None, max_examples=40)
@given(models(), st.floats(0.3, 1.2), st.floats(1.0, 2.0), st.sampled_from(["none", "full", "fit"]))
def test_more_memory_is_never_worse(given, share, more, recompute):
    costs, on, virtual = given
    plan = Plan(
        Layout.uniform(len(costs.layers), len(on.memory_bytes), virtual),
        Schedule.ONE_F_ONE_B if virtual == 1 else Schedule.INTERLEAVED,
        (4 * len(on.memory_bytes),),
        (0,) * len(on.memory_bytes),
    )
    memory = max(stage_memory_bytes(costs, MEMORY, plan)) * share

    def seconds(memory_bytes: float) -> float:
        try:
            return solve(
                costs, replace(on, memory_bytes=(memory_bytes,) * plan.layout.stages), virtual, recompute=recompute
            ).slowest_seconds
        except NoLayout:
            return math.inf

    assert seconds(memory * more) <= seconds(memory) * (1 + SAME)


@settings(deadline=None, max_examples=40)
@given(models(), st.lists(st.floats(0, 0.5), min_size=2, max_size=2), st.randoms(use_true_random=False))
def test_more_slack_never_moves_more_bytes(given, slacks, random):
    costs, on, virtual = given
    choices = list(layouts(len(costs.layers), len(on.memory_bytes) * virtual))
    current = Layout(random.choice(choices), len(on.memory_bytes))
    less, more = (solve(costs, on, virtual, current=current, slack_ratio=slack).moved_bytes for slack in sorted(slacks))
    assert more <= less


@settings(deadline=None, max_examples=30)
@given(models(), st.floats(0, 0.1))
def test_a_layout_within_the_slack_stays(given, slack):
    costs, on, virtual = given
    best = solve(costs, on, virtual)
    found = solve(costs, on, virtual, current=best.layout, slack_ratio=slack)
    assert (found.layout, found.moved_bytes, found.exact) == (best.layout, 0.0, True)


def test_a_slow_stage_and_a_heavy_head_get_fewer_layers():
    found = solve(model([1] * 14, head=3), hardware(4, [1, 0.5, 1, 1]))
    assert found.layout == Layout((5, 2, 5, 2), 4)
    assert found.slowest_seconds == 5


def test_the_slowest_replica_counts():
    on = Hardware(np.array([[1.0, 1.0], [1.0, 0.5]]), (math.inf,) * 2, ())
    assert solve(model([1] * 6), on).layout == Layout((4, 2), 2)


def test_embedding_and_head_may_be_alone():
    found = solve(model([1] * 4, embedding=2, head=2), hardware(4))
    assert found.layout == Layout((0, 2, 2, 0), 4)


def test_equally_fast_layouts_are_told_apart_by_the_most_even_chunks():
    # The head of 3 decides the slowest stage; 2|2|2|2|0 is as fast as 3|1|2|2|0.
    found = solve(model([1] * 8, head=3), hardware(5))
    assert found.layout == Layout((2, 2, 2, 2, 0), 5)


def test_moving_the_fewest_bytes_leaves_the_optimum_by_no_more_than_the_slack():
    costs, on, current = model([1.0, 1.0, 1.0, 1.0, 1.0, 1.05]), hardware(2), Layout((4, 2), 2)
    assert solve(costs, on).layout == Layout((3, 3), 2)
    one_layer = 1e6 * (2 + 12)
    assert solve(costs, on, current=current).moved_bytes == one_layer
    assert solve(costs, on, current=current, slack_ratio=0.4).layout == current


def test_as_few_layers_as_needed_are_recomputed():
    # Stage 0 holds 2 microbatches of 3 layers (1 MB each, 0.25 MB recomputed) and the embedding, stage 1 one of each.
    costs = model([1] * 6)
    parameters = 4 * 1e6 * 18
    on = Hardware(np.ones((1, 2)), (parameters + 2 * 4e6 - 0.7e6, math.inf), ())
    found = solve(costs, on, recompute="fit")
    # Recomputing one saves 2 x 0.75 MB, and has 0.75 MB back while it runs.
    assert (found.layout, found.recomputed_layers) == (Layout((3, 3), 2), (1, 0))
    assert found.slowest_seconds == 3.25
    assert solve(costs, on, recompute="full").recomputed_layers == tuple(
        solve(costs, on, recompute="full").layout.layers
    )


def test_equal_layers_over_many_chunks():
    # 128 layers and a head of 2 over 8 stages: 16 stages' worth and 2 more, so one stage at least takes 17.
    found = solve(model([1] * 128, embedding=0.1, head=2), hardware(8), virtual=2)
    assert (found.slowest_seconds, found.exact) == (17, True)
    assert max(found.layout.layers) - min(found.layout.layers) <= 2


def test_uneven_layers_over_many_chunks_are_near_the_bound():
    random = np.random.default_rng(5)
    costs = model(random.uniform(0.7, 1.3, 96), embedding=0.1, head=2)
    current = Layout.uniform(96, 8, 4)
    found = solve(costs, hardware(8), virtual=4, current=current)
    assert found.bound_seconds <= found.slowest_seconds <= 1.03 * found.bound_seconds
    assert found == solve(costs, hardware(8), virtual=4, current=current)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_where_nothing_fits_the_least_lack_is_named(recompute):
    costs, memory_bytes = model([1] * 7, parameters=3e6, kept=5e6), 100e6
    with pytest.raises(NoLayout) as caught:
        solve(costs, hardware(3, memory_bytes=memory_bytes), recompute=recompute)
    lacking = caught.value.lacking_bytes
    assert f"stage {caught.value.stage}" in str(caught.value)
    assert f"lacks {lacking / 2**20:,.1f} MiB of 95.4 MiB" in str(caught.value)
    assert ("recompute layers" in str(caught.value)) == (recompute == "none")
    assert "distributed optimizer" in str(caught.value)
    assert "smaller microbatches or more stages" in str(caught.value)
    solve(costs, hardware(3, memory_bytes=memory_bytes + lacking), recompute=recompute)
    with pytest.raises(NoLayout):
        solve(costs, hardware(3, memory_bytes=memory_bytes + lacking - 2), recompute=recompute)


def test_a_shared_optimizer_is_not_told_to_be_shared():
    with pytest.raises(NoLayout, match="no layout fits; at best stage") as caught:
        solve(model([1] * 4), hardware(2, memory_bytes=1e6), memory=replace(MEMORY, shards=2))
    assert "distributed optimizer" not in str(caught.value)


@pytest.mark.parametrize(("layers", "stages", "virtual"), [(1, 4, 1), (3, 3, 2), (0, 1, 1)])
def test_too_few_layers(layers, stages, virtual):
    with pytest.raises(NoLayout, match="take fewer stages"):
        solve(model([1] * layers), hardware(stages), virtual)


def test_what_does_not_fit_together_is_refused():
    costs, on = model([1] * 4), hardware(2)
    with pytest.raises(ValueError, match="one chunk a stage"):
        partition(costs, MEMORY, on, schedule=Schedule.GPIPE, stages=2, virtual=2, microbatches=4)
    with pytest.raises(ValueError, match="for 4 stages"):
        partition(costs, MEMORY, on, schedule=Schedule.GPIPE, stages=4, microbatches=4)
    with pytest.raises(ValueError, match="the current layout has 5 layers, the model 4"):
        solve(costs, on, current=Layout((3, 2), 2))
