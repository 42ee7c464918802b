import dataclasses
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from trimtab.balance.deciding.search import Appraiser, Configuration, Space, Training, configurations_of, search
from trimtab.balance.layouts.equal_layers import spread
from trimtab.balance.layouts.partition import NoLayout, partition
from trimtab.balance.model.accelerators import ACCELERATORS
from trimtab.balance.model.placement import Cluster, Placement, place
from trimtab.balance.model.transformer import OptimizerState, Sizes
from trimtab.balance.pipeline.estimate import chunk_costs
from trimtab.balance.pipeline.memory import stage_memory_bytes
from trimtab.balance.plan import Costs, Hardware, ParameterMemory, Part, Plan, Schedule
from trimtab.protocol import Balance, Layout, Shape

H100 = ACCELERATORS["h100"]
SMALL = Sizes(8, 2048, 16, 8, 5632, 32000, 2048)
MEMORY = ParameterMemory(2, 4, 12)


def alike(layers, *, forward=1.0, head=1.5, activation=10.0, parameters=1.0):
    layer = Part(forward, forward, forward, parameters, activation, 1.0)
    ends = [Part(share, share, share, parameters, activation, activation) for share in (0.1 * forward, head * forward)]
    return Costs((layer,) * layers, *ends, boundary_bytes=1.0)


def hardware(stages, *, memory=float("inf"), speeds=None):
    return Hardware(np.array([speeds or [1.0] * stages]), (memory,) * stages, ())


@hypothesis_settings(deadline=None, max_examples=40)
@given(
    layers=st.integers(4, 14),
    stages=st.integers(1, 4),
    head=st.floats(0.1, 3),
    memory=st.floats(20, 400),
    slow=st.floats(0.5, 1.0),
)
def test_equal_layers_are_spread_as_partition_does(layers, stages, head, memory, slow):
    costs = alike(layers, head=head)
    machine = hardware(stages, memory=memory, speeds=[slow, *[1.0] * (stages - 1)])
    asked = {"schedule": Schedule.ONE_F_ONE_B, "stages": stages, "microbatches": 8}
    try:
        expected = partition(costs, MEMORY, machine, **asked, recompute="fit")
    except NoLayout:
        with pytest.raises(NoLayout):
            spread(costs, MEMORY, machine, **asked, virtual=1)
        return
    layout, recomputed = spread(costs, MEMORY, machine, **asked, virtual=1)
    plan = Plan(layout, Schedule.ONE_F_ONE_B, (8,), recomputed)
    assert slowest_seconds(costs, plan, machine) == pytest.approx(expected.slowest_seconds, rel=1e-9)


def slowest_seconds(costs, plan, machine):
    chunks = chunk_costs(costs, plan)
    seconds = chunks.forward_seconds + chunks.backward_input_seconds + chunks.backward_weight_seconds
    return (seconds.reshape(-1, plan.layout.stages).sum(axis=0) / machine.speeds[0]).max()


@hypothesis_settings(deadline=None, max_examples=30)
@given(
    layers=st.integers(8, 24),
    stages=st.integers(2, 4),
    virtual=st.integers(2, 4),
    memory=st.floats(300, 3000),
    head=st.floats(0.1, 3),
)
def test_interleaved_chunks_are_even_fit_and_hold_all_layers(layers, stages, virtual, memory, head):
    costs, machine = alike(layers, head=head), hardware(stages, memory=memory)
    asked = {"schedule": Schedule.INTERLEAVED, "stages": stages, "virtual": virtual, "microbatches": 2 * stages}
    try:
        layout, recomputed = spread(costs, MEMORY, machine, **asked)
    except NoLayout:
        return
    assert sum(layout.layers) == layers
    assert (layout.stages, layout.virtual) == (stages, virtual)
    for stage in range(stages):
        chunks = layout.layers[stage::stages]
        assert max(chunks) - min(chunks) <= 1
    plan = Plan(layout, Schedule.INTERLEAVED, (2 * stages,), recomputed)
    assert max(stage_memory_bytes(costs, MEMORY, plan)) <= memory + 1  # bytes are compared as whole ones


def test_chunks_of_a_heavy_head_hold_fewer_layers():
    layout, recomputed = spread(
        alike(20, head=2.0), MEMORY, hardware(2), schedule=Schedule.INTERLEAVED, stages=2, virtual=2, microbatches=4
    )
    assert layout == Layout((6, 5, 5, 4), 2)  # 11.1 and 9 + 2
    assert recomputed == (0, 0)


def test_layers_that_fit_nowhere_are_refused():
    with pytest.raises(NoLayout, match="8 layers over 2 stages"):
        spread(
            alike(8, parameters=100),
            MEMORY,
            hardware(2, memory=1000),
            schedule=Schedule.ONE_F_ONE_B,
            stages=2,
            virtual=1,
            microbatches=4,
        )


def test_stages_in_a_node_talk_over_its_links():
    placement = place(Cluster(H100, 8), Shape(2, 4, 1), False, 0.05)
    assert placement.links == (Cluster(H100, 8).link(0, 0),) * 4
    assert placement.order == (0,)


def test_stages_between_nodes_talk_over_the_network():
    cluster = Cluster(H100, 16)
    inside, between = cluster.link(0, 0), cluster.link(0, 1)
    assert between.bytes_per_second < inside.bytes_per_second
    # TP4 x PP4: two stages a node; TP4 x PP2 x DP2: a stage is a node, its replicas share it.
    assert place(cluster, Shape(4, 4, 1), True, 0.05).links == (inside, between, inside, between)
    whole = place(cluster, Shape(4, 2, 2), True, 0.05)
    assert whole.links == (between, between)
    assert whole.replica_link == inside
    # TP8 x DP2: replicas are on different nodes.
    assert place(cluster, Shape(8, 1, 2), False, 0.05).replica_link == between


@pytest.mark.parametrize(
    ("gpus_per_node", "tensor", "slower"), [(8, 8, False), (1, 8, True), (4, 8, True), (6, 4, True)]
)
def test_tensor_parallel_ranks_in_several_nodes_talk_over_the_network(gpus_per_node, tensor, slower):
    sizes = dataclasses.replace(SMALL, attention_heads=24, hidden_size=1536, query_groups=24)
    configuration = Configuration(Shape(tensor, 1, 24 // tensor), Schedule.ONE_F_ONE_B, 1, 1, (24,) * (24 // tensor))
    training = Training(sizes, 24 * 24 // tensor)
    one, several = (Appraiser(training, Cluster(H100, 24, size)).costs(configuration) for size in (24, gpus_per_node))
    assert (several.layers[0].forward_seconds > one.layers[0].forward_seconds) is slower
    assert all(
        one.shape.tensor <= gpus_per_node
        for one in configurations_of(training, Cluster(H100, 24, gpus_per_node), Space())
    )


def test_a_slow_link_is_avoided_by_the_order_of_nodes():
    cluster = Cluster(H100, 32, 8, {(0, 1): 0.06, (1, 2): 0.06})
    order = place(cluster, Shape(8, 4, 1), False, 0.05).order
    pairs = {frozenset(pair) for pair in pairwise(order)}
    assert frozenset((0, 1)) not in pairs
    assert frozenset((1, 2)) not in pairs
    # Interleaved chunks close the ring: node 1 has one good link only, so one slow one stays.
    ring = place(cluster, Shape(8, 4, 1), True, 0.05)
    assert sum(latency > 0.05 for latency in ring.latencies()) == 1


@hypothesis_settings(deadline=None, max_examples=25)
@given(nodes=st.integers(8, 9), slow=st.sets(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=6))
def test_of_many_nodes_no_exchange_is_better(nodes, slow):
    latencies = {(a, b): 0.06 for a, b in slow if a < b < nodes}
    cluster = Cluster(H100, 8 * nodes, 8, latencies)
    found = place(cluster, Shape(8, nodes, 1), False, 0.05)
    assert sorted(found.order) == list(range(nodes))

    def toll(order):
        used = Placement(cluster, found.shape, False, tuple(order)).latencies()
        return sum(latency > 0.05 for latency in used)

    for one, other in product(range(nodes), repeat=2):
        order = list(found.order)
        order[one], order[other] = order[other], order[one]
        assert toll(order) >= toll(found.order)


def test_links_of_nodes_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match="nodes are 0 to 1"):
        Cluster(H100, 16, 8, {(1, 2): 0.06})


@pytest.mark.parametrize("gpus", [1, 6, 8, 16])
def test_configurations_use_every_gpu_and_all_sequences(gpus):
    training = Training(SMALL, 2 * gpus)
    found = list(configurations_of(training, Cluster(H100, gpus), Space()))
    assert len(found) == len(set(found)) > 0
    for one in found:
        assert one.shape.world_size == gpus
        assert sum(one.microbatches) * one.microbatch_size == 2 * gpus
        assert one.shape.tensor <= 8
        assert SMALL.query_groups % one.shape.tensor == 0
        assert (one.virtual > 1) == (one.schedule is Schedule.INTERLEAVED)


def test_replicas_that_cannot_share_equally_take_as_equal_shares_as_can_be():
    """Of 16 sequences three replicas take 6, 5 and 5, and in groups of two stages 6, 6 and 4."""
    space = Space(tensor=(1,), pipeline=(2,), virtual=(1, 2), microbatch_size=(1,))
    appraiser = Appraiser(Training(SMALL, 16), Cluster(H100, 6))
    one, interleaved = configurations_of(appraiser.training, appraiser.cluster, space)
    assert (one.microbatches, interleaved.microbatches) == ((6, 5, 5), (6, 6, 4))
    assert str(one) == "TP1 x PP2 x DP3, 1f1b, 5 to 6 microbatches of 1"
    # The step is that of the replica with the most.
    layout = Layout((4, 4), 2)
    equal = dataclasses.replace(one, microbatches=(6, 6, 6))
    unequal_seconds, equal_seconds = (
        appraiser.appraise(each, appraiser.plan(each, layout, (0, 0))).estimate.step_seconds for each in (one, equal)
    )
    assert unequal_seconds == equal_seconds


def test_three_chunks_are_tried_where_they_are_uneven():
    training = Training(dataclasses.replace(SMALL, layers=33), 64)
    found = configurations_of(training, Cluster(H100, 4), Space(pipeline=(4,), schedules=(Schedule.INTERLEAVED,)))
    assert {one.virtual for one in found} == {2, 3, 4, 8}


def test_a_space_narrows_the_search():
    space = Space(tensor=(2,), pipeline=(2,), virtual=(3,), microbatch_size=(2,))
    found = list(configurations_of(Training(SMALL, 16), Cluster(H100, 8), space))
    assert {(one.shape, one.virtual, one.microbatch_size) for one in found} == {(Shape(2, 2, 2), 3, 2)}


CASES = [
    pytest.param(8, 16, OptimizerState.DEVICE, {}, 80e9, id="roomy"),
    pytest.param(8, 16, OptimizerState.DEVICE, {}, 3.2e9, id="tight: layers are recomputed"),
    pytest.param(4, 8, OptimizerState.HOST, {}, 3e9, id="host"),
    pytest.param(16, 16, OptimizerState.DEVICE, {(0, 1): 0.06}, 80e9, id="slow network"),
    pytest.param(6, 16, OptimizerState.DEVICE, {}, 80e9, id="unequal shares"),
]


@pytest.mark.parametrize(("gpus", "batch", "optimizer", "latencies", "memory"), CASES)
def test_the_search_finds_what_trying_everything_finds(gpus, batch, optimizer, latencies, memory):
    accelerator = dataclasses.replace(H100, memory_bytes=memory)
    appraiser = Appraiser(Training(SMALL, batch, optimizer=optimizer), Cluster(accelerator, gpus, 8, latencies))
    everything = []
    for one in configurations_of(appraiser.training, appraiser.cluster, Space()):
        try:
            plan = appraiser.split(one)
        except NoLayout:
            continue
        outcome = appraiser.appraise(one, plan)
        assert outcome.fits
        # What the search relies on when it passes something over.
        step_seconds = outcome.estimate.step_seconds * (1 + 1e-9)
        assert appraiser.least_seconds(one) <= step_seconds
        assert appraiser.least_seconds(one) <= appraiser.least_plan_seconds(one, plan) * (1 + 1e-9)
        assert appraiser.least_plan_seconds(one, plan) <= step_seconds
        everything.append(outcome.estimate.step_seconds)
    found = search(appraiser)
    assert found.best.estimate.step_seconds == min(everything)
    assert found.best.fits
    # It says what became of each, and simulates few.
    assert len(found.considered) == len(list(configurations_of(appraiser.training, appraiser.cluster, Space())))
    assert all(one.verdict for one in found.considered)
    assert sum(one.step_seconds is not None for one in found.considered) < len(everything)


@pytest.mark.parametrize("schedule", Schedule)
def test_bounds_hold_for_every_schedule(schedule):
    appraiser = Appraiser(Training(SMALL, 16), Cluster(H100, 4))
    for one in configurations_of(appraiser.training, appraiser.cluster, Space(schedules=(schedule,))):
        plan = appraiser.split(one)
        step_seconds = appraiser.appraise(one, plan).estimate.step_seconds * (1 + 1e-9)
        assert appraiser.least_plan_seconds(one, plan) <= step_seconds


def test_where_nothing_fits_there_is_no_best():
    tiny = dataclasses.replace(H100, memory_bytes=1e8)
    found = search(Appraiser(Training(SMALL, 8), Cluster(tiny, 8)))
    assert found.best is None
    assert all("alone take" in one.verdict for one in found.considered)


def test_starting_points_are_tried_first_and_are_no_limits():
    appraiser = Appraiser(Training(SMALL, 16), Cluster(H100, 8), Balance(least_stages=4, most_stages=8))
    found = search(appraiser)

    def starts(one):
        return 4 <= one.configuration.shape.pipeline <= 8 and 8 <= max(one.configuration.microbatches) <= 16

    first = [starts(one) for one in found.considered]
    assert first == sorted(first, reverse=True)
    assert True in first
    assert False in first
    # The policy changes the order alone.
    other = search(Appraiser(Training(SMALL, 16), Cluster(H100, 8), Balance(least_stages=1, most_stages=2)))
    assert other.best.estimate.step_seconds == found.best.estimate.step_seconds
    assert not starts(next(one for one in found.considered if one.configuration == found.best.configuration))


def test_a_slow_stage_gets_fewer_layers():
    space = Space(pipeline=(4,), tensor=(1,), schedules=(Schedule.ONE_F_ONE_B,), microbatch_size=(1,))
    slowed = Appraiser(Training(SMALL, 16), Cluster(H100, 4), speeds={1: 0.5})
    layers = search(slowed, space).best.plan.layout.layers
    assert layers[1] < layers[0]
    assert layers[1] < layers[2]
