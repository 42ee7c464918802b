import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trimtab.balance.deciding.candidates import candidates
from trimtab.balance.deciding.in_place import balanced_microbatches
from trimtab.balance.deciding.search import Configuration, Outcome
from trimtab.balance.deciding.situation import Fault, Kind, Shapes, Situation, Toll
from trimtab.balance.deciding.words import counts_text, split_text
from trimtab.balance.pipeline.estimate import estimate
from trimtab.balance.plan import Costs, Hardware, Link, ParameterMemory, Part, Plan, Schedule
from trimtab.protocol import Layout, Shape

LAYER = Part(0.1, 0.1, 0.1, 1e6, 100.0, 10.0)
NONE = Part(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
MEMORY = ParameterMemory(2, 4, 12)
LINKS = (Link(0.0, 1e12),) * 2


def situation(*, layers=8, shares=(4, 4), speeds=((1.0, 1.0),), microbatches=8, head=NONE, memory=math.inf, **fields):
    """Equal layers in stages of equal devices."""
    replicas, stages = np.shape(speeds)
    start = Situation(
        costs=Costs((LAYER,) * layers, NONE, head, 0.0),
        memory=MEMORY,
        hardware=Hardware(np.array(speeds), (memory,) * stages, LINKS[:1] * stages),
        plan=Plan(Layout(shares, stages), Schedule.ONE_F_ONE_B, (microbatches,) * replicas, (0,) * stages),
        shape=Shape(1, stages, replicas),
        fault=Fault("intrinsic"),
    )
    return dataclasses.replace(start, **fields)


def found(kind, state):
    return next(one for one in candidates(state) if one.kind is kind)


def test_there_is_one_candidate_of_each_kind():
    assert [one.kind for one in candidates(situation())] == list(Kind)


def test_nothing_is_predicted_as_it_was_measured():
    nothing = found(Kind.NOTHING, situation(step_seconds=7.0))
    assert nothing.predicted_step_seconds == 7.0
    assert (nothing.gain_ratio, nothing.cost_seconds) == (0.0, 0.0)


def test_predictions_are_ratios_of_what_was_measured():
    """Head of two layers: 52 layer times before, 45 after (see test_decide)."""
    head = dataclasses.replace(LAYER, forward_seconds=0.2, backward_input_seconds=0.2, backward_weight_seconds=0.2)
    layers = found(Kind.LAYERS, situation(head=head, step_seconds=104.0))
    assert layers.change == "layers 4|4 -> 5|3"
    assert layers.gain_ratio == pytest.approx(7 / 52, rel=1e-12)
    assert layers.predicted_step_seconds == pytest.approx(90.0, rel=1e-12)


def test_moving_costs_a_fixed_time_and_that_of_the_bytes():
    head = dataclasses.replace(LAYER, forward_seconds=0.2, backward_input_seconds=0.2, backward_weight_seconds=0.2)
    toll = Toll(reshape_seconds=0.5, moved_bytes_per_second=1e6)
    assert found(Kind.LAYERS, situation(head=head, toll=toll)).cost_seconds == 0.5 + 1e6 * (2 + 12) / 1e6


def test_the_best_split_is_not_moved():
    assert found(Kind.LAYERS, situation()).obstacle == "4|4 is the best split of whole layers"


@pytest.mark.parametrize(("slowness", "moves"), [(1.24, False), (1.28, True)])
def test_a_whole_layer_moves_only_off_a_rank_that_is_slower_than_1_plus_1_over_n(slowness, moves):
    """Four layers a stage, so 1.25: below it the other stage, with five, would be slower than this one with four."""
    slow = situation(speeds=((1.0, 1 / slowness),), fault=Fault("hardware", ((0, 1),)))
    layers = found(Kind.LAYERS, slow)
    if moves:
        assert layers.plan.layout == Layout((5, 3), 2)
        assert layers.gain_ratio > 0
    else:
        assert layers.obstacle == (
            "4|4 is the best split of whole layers: with 4 on a slow stage, moving one helps only if it is slower than "
            "1.25 times"
        )


def test_microbatches_move_away_from_a_slow_replica():
    fault = Fault("hardware", ((1, 0), (1, 1)))
    slow = situation(speeds=((1.0, 1.0), (0.5, 0.5)), microbatches=12, fault=fault, toll=Toll(reshape_seconds=0.5))
    moved = found(Kind.MICROBATCHES, slow)
    assert moved.change == "microbatches 12, 12 -> 16, 8"
    # 4 layers a stage, 1.2 s: (16 + 1) x 1.2 s and (8 + 1) x 2.4 s, after (12 + 1) x 2.4 s.
    assert moved.gain_ratio == pytest.approx(1 - 21.6 / 31.2, rel=1e-12)
    assert moved.cost_seconds == 0.5  # no bytes move


@settings(max_examples=40, deadline=None)
@given(
    speeds=st.lists(st.tuples(st.floats(0.4, 1.0), st.floats(0.4, 1.0)), min_size=2, max_size=3),
    microbatches=st.integers(2, 5),
    shares=st.sampled_from([(4, 4), (3, 5), (1, 7)]),
)
def test_shares_of_microbatches_keep_their_sum_and_are_the_best_there_are(speeds, microbatches, shares):
    state = situation(speeds=speeds, microbatches=microbatches, shares=shares)
    total = microbatches * len(speeds)

    def seconds(counts):
        plan = dataclasses.replace(state.plan, microbatches=tuple(counts))
        return estimate(state.costs, state.memory, plan, state.hardware).step_seconds

    chosen = balanced_microbatches(state)
    assert sum(chosen) == total
    others = itertools.product(range(1, total), repeat=len(speeds))
    best = min(seconds(counts) for counts in others if sum(counts) == total)
    assert seconds(chosen) == pytest.approx(best, rel=1e-9)


def test_interleaved_replicas_take_microbatches_in_groups_of_as_many_as_stages():
    state = situation(speeds=((1.0, 1.0), (0.5, 0.5)), microbatches=12)
    plan = dataclasses.replace(state.plan, layout=Layout((2, 2, 2, 2), 2), schedule=Schedule.INTERLEAVED)
    shares = balanced_microbatches(dataclasses.replace(state, plan=plan))
    assert sum(shares) == 24
    assert all(share % 2 == 0 for share in shares)
    assert shares[0] > shares[1]


def test_recomputation_is_dropped_where_the_memory_allows_it():
    """A stage: 4e6 parameters of 18 bytes, and of two microbatches 4 x 100 bytes."""
    plan = dataclasses.replace(situation().plan, recomputed_layers=(4, 4))
    dropped = found(Kind.RECOMPUTE, situation(memory=4e6 * 18 + 10_000, plan=plan))
    assert dropped.plan.recomputed_layers == (0, 0)
    assert dropped.gain_ratio == pytest.approx(0.25, rel=1e-12)
    assert dropped.change == "recomputed layers 4, 4 -> 0, 0"


def test_as_much_is_recomputed_as_the_memory_needs():
    """Stage 0 holds two microbatches, 800 bytes; a recomputed layer saves 180, and takes 90 while it is recomputed."""
    plan = dataclasses.replace(situation().plan, recomputed_layers=(4, 4))
    dropped = found(Kind.RECOMPUTE, situation(memory=4e6 * 18 + 715, plan=plan))
    assert dropped.plan.recomputed_layers == (1, 0)


def test_recomputation_is_not_dropped_into_memory_that_is_not_known():
    plan = dataclasses.replace(situation().plan, recomputed_layers=(4, 4))
    obstacle = found(Kind.RECOMPUTE, situation(plan=plan)).obstacle
    assert obstacle == "the devices' memory is not known: less of it may not fit"


def test_nothing_recomputed_is_nothing_to_drop():
    obstacle = found(Kind.RECOMPUTE, situation()).obstacle
    assert obstacle == "nothing is recomputed, and no better layout needs it"


def test_more_chunks_a_stage_shrink_the_bubble():
    """M = 8: (8 + 1) x 1.2 s with one chunk a stage, (8 + 1/4) x 1.2 s with four."""
    other = found(Kind.SCHEDULE, situation())
    assert other.change == "1f1b -> interleaved with 4 chunks a stage, layers 1|1|1|1|1|1|1|1"
    assert other.gain_ratio == pytest.approx(1 - 8.25 / 9, rel=1e-12)
    assert not other.obstacle


def test_more_messages_are_not_trusted_where_no_link_was_measured():
    state = situation()
    blind = dataclasses.replace(state, hardware=dataclasses.replace(state.hardware, links=()))
    other = found(Kind.SCHEDULE, blind)
    assert other.gain_ratio > 0
    assert other.doubt == (
        "4 times the messages between stages, whose time is not measured: the step is at least as long"
    )


def test_interleaving_needs_whole_groups_of_microbatches():
    obstacle = found(Kind.SCHEDULE, situation(microbatches=7)).obstacle
    assert obstacle == "the ranks have no other that fits these layers and microbatches"


def test_where_the_memory_is_short_another_schedule_recomputes():
    """1F1B holds 800 bytes on stage 0; interleaved chunks hold more."""
    short = situation(memory=4e6 * 18 + 800)
    other = found(Kind.SCHEDULE, short)
    assert other.fits
    assert any(other.plan.recomputed_layers)


def test_repacking_brings_what_even_microbatches_would():
    repack = found(Kind.REPACK, situation(uneven_data_ratio=0.2, step_seconds=10.0))
    assert (repack.gain_ratio, repack.predicted_step_seconds, repack.cost_seconds) == (0.2, 8.0, 0.0)
    assert found(Kind.REPACK, situation()).obstacle == "how uneven the samples are is not measured"


NODES = {(0, 0): ("n1",), (0, 1): ("n2",), (1, 0): ("n3",), (1, 1): ("n4",)}


def slow_node(**fields):
    speeds = ((1.0, 1.0), (1.0, 0.5))
    return situation(speeds=speeds, fault=Fault("hardware", ((1, 1),)), nodes=NODES, **fields)


def test_without_the_slow_node_its_places_are_as_fast_as_the_others():
    exclude = found(Kind.EXCLUDE, slow_node(toll=Toll(restart_seconds=90.0)))
    assert exclude.exclude == ("n4",)
    assert exclude.change == "without n4, another node in its place"
    assert exclude.cost_seconds == 90.0
    healthy = found(Kind.NOTHING, situation(speeds=((1.0, 1.0), (1.0, 1.0)))).predicted_step_seconds
    assert exclude.predicted_step_seconds == pytest.approx(healthy, rel=1e-12)


@pytest.mark.parametrize(
    ("fields", "obstacle"),
    [
        ({"spare_nodes": 0}, "0 idle nodes could replace 1"),
        ({"fault": Fault("intrinsic", ((1, 1),))}, "no node is slow"),
        ({"nodes": {}}, "the nodes of the slow places are not known"),
        ({"nodes": dict.fromkeys(NODES, ("n1",))}, "every place has ranks on a slow node"),
    ],
)
def test_a_node_that_cannot_be_replaced_stays(fields, obstacle):
    assert found(Kind.EXCLUDE, dataclasses.replace(slow_node(), **fields)).obstacle == obstacle


@pytest.mark.parametrize("spare_nodes", [None, 1])
def test_a_node_is_excluded_where_a_spare_is_there_or_may_be(spare_nodes):
    assert not found(Kind.EXCLUDE, slow_node(spare_nodes=spare_nodes)).obstacle


def four_nodes(slowness=2.5, *, replicas=4, stages=2, ranks_per_node=2, slow="n2", **fields):
    """Ranks in Megatron-core's order, replicas before stages: n2 has the first stage of two of four replicas."""
    places = [(replica, stage) for stage in range(stages) for replica in range(replicas)]
    nodes = {place: (f"n{rank // ranks_per_node + 1}",) for rank, place in enumerate(places)}
    speeds = np.ones((replicas, stages))
    faulty = tuple(place for place in sorted(places) if nodes[place] == (slow,))
    for place in faulty:
        speeds[place] /= slowness
    fault = Fault("hardware", faulty)
    defaults = {"microbatches": 3, "spare_nodes": 0, "shares": (8 // stages,) * stages, "nodes": nodes}
    return situation(speeds=speeds, fault=fault, **defaults | fields)


def test_where_no_node_is_to_spare_the_job_goes_on_with_fewer():
    state = four_nodes(toll=Toll(restart_seconds=90.0))
    fewer = found(Kind.FEWER, state)
    assert fewer.change == "without n2, on 3 nodes: TP1 x PP2 x DP3"
    assert (fewer.exclude, fewer.nodes, fewer.cost_seconds) == (("n2",), 3, 90.0)
    assert fewer.plan.microbatches == (4, 4, 4)
    # Four layers of 0.3 s a stage: (4 + 1) x 1.2 s, after 3 x 3.0 s on the slow node, which waits 0.2 s for a backward.
    assert fewer.gain_ratio == pytest.approx(1 - 6.0 / 9.2, rel=1e-12)
    assert (fewer.obstacle, fewer.doubt) == ("", "")
    assert found(Kind.EXCLUDE, state).obstacle == "0 idle nodes could replace 1"


def test_fewer_nodes_have_the_layout_that_suits_them():
    """What was moved away from the slow stages goes back."""
    state = four_nodes()
    moved = dataclasses.replace(state, plan=dataclasses.replace(state.plan, layout=Layout((3, 5), 2)))
    fewer = found(Kind.FEWER, moved)
    assert fewer.plan.layout == Layout((4, 4), 2)
    assert fewer.change == "without n2, on 3 nodes: TP1 x PP2 x DP3, layers 3|5 -> 4|4"


def test_spare_nodes_take_the_places_of_as_many_slow_ones():
    """Two of six nodes are slow, and one is idle."""
    state = four_nodes(replicas=6, microbatches=5)
    nodes = state.nodes
    faulty = tuple(place for place in sorted(nodes) if nodes[place][0] in ("n2", "n3"))
    state = dataclasses.replace(state, fault=Fault("hardware", faulty), spare_nodes=1)
    fewer = found(Kind.FEWER, state)
    assert fewer.change == "without n2, n3, on 5 nodes: TP1 x PP2 x DP5"
    assert fewer.plan.microbatches == (6,) * 5


NAMES = ("n1", "n2", "n3", "n4")


@pytest.mark.parametrize(("slow", "obstacle"), [("n2", ""), ("n1", "--ntasks=4 fixes it")])
def test_a_number_of_nodes_that_is_fixed_for_a_requeue_does_not_keep_a_job_from_giving_nodes_back(slow, obstacle):
    """But that of the batch script."""
    state = four_nodes(slow=slow, allocation=NAMES, fixed_nodes="--ntasks=4 fixes it")
    assert found(Kind.FEWER, state).obstacle == obstacle


@pytest.mark.parametrize(
    ("state", "obstacle"),
    [
        (four_nodes(replicas=2, ranks_per_node=1), "3 nodes, 3 ranks: no whole number of replicas of TP1 x PP2"),
        (four_nodes(replicas=1, ranks_per_node=1), "1 node, 1 rank: no whole number of replicas of TP1 x PP2"),
        (four_nodes(ranks_per_node=3), "its nodes have unequal numbers of ranks"),
        (four_nodes(spare_nodes=1), "idle nodes could replace all that are slow"),
        (four_nodes(exclusions_left=0), "0 more nodes may be left out, and 1 are slow"),
        (four_nodes(fixed_nodes="--ntasks=4 fixes it"), "--ntasks=4 fixes it"),
        (four_nodes(nodes={}), "the nodes of the slow places are not known"),
        (situation(), "no node is slow"),
    ],
)
def test_why_a_job_does_not_go_on_with_fewer_nodes(state, obstacle):
    assert found(Kind.FEWER, state).obstacle == obstacle


def test_a_batch_that_fewer_replicas_cannot_share_equally_takes_as_long_as_the_largest_share():
    fewer = found(Kind.FEWER, four_nodes(microbatches=4))
    assert fewer.change == "without n2, on 3 nodes: TP1 x PP2 x DP3, microbatches 6, 5, 5"
    assert fewer.plan.microbatches == (6, 5, 5)
    # (6 + 1) x 1.2 s, after 4 x 3.0 s on the slow node, which waits 0.2 s for a backward.
    assert fewer.gain_ratio == pytest.approx(1 - 8.4 / 12.2, rel=1e-12)
    assert (fewer.obstacle, fewer.doubt) == ("", "")


@pytest.mark.parametrize(("before", "after"), [(4, (6, 6)), (2, (4, 2))])
def test_interleaved_chunks_go_on_in_whole_groups_on_fewer_nodes_too(before, after):
    """Of two stages: 6 microbatches are three groups of 2."""
    state = four_nodes(replicas=3)
    plan = dataclasses.replace(
        state.plan, layout=Layout((2,) * 4, 2), schedule=Schedule.INTERLEAVED, microbatches=(before,) * 3
    )
    assert found(Kind.FEWER, dataclasses.replace(state, plan=plan)).plan.microbatches == after


def test_another_schedule_is_weighed_with_the_shares_that_it_would_begin_with():
    """12 microbatches are three groups of 4, which two replicas cannot share equally; 4 are one, which is too few."""
    state = situation(layers=16, shares=(4,) * 4, speeds=np.ones((2, 4)), microbatches=6)
    assert found(Kind.SCHEDULE, state).plan.microbatches == (8, 4)
    few = dataclasses.replace(state, plan=dataclasses.replace(state.plan, microbatches=(2, 2)))
    assert found(Kind.SCHEDULE, few).obstacle == "the ranks have no other that fits these layers and microbatches"


SHARDED = dataclasses.replace(MEMORY, shards=4)
BYTES = (4e6 * (2 + 4 + 12 / 4) + 800, 4e6 * (2 + 4 + 12 / 3) + 800)
"""Of a first stage with optimizer state on four replicas, and on three."""


@pytest.mark.parametrize(("memory", "fits"), [(BYTES[1], True), (BYTES[1] - 1, False)])
def test_fewer_replicas_hold_more_of_the_optimizer(memory, fits):
    # The parameters are too many for a layer to move elsewhere.
    fewer = found(Kind.FEWER, dataclasses.replace(four_nodes(memory=memory), memory=SHARDED))
    assert (fewer.fits, fewer.room.needed_bytes, fewer.room.held_bytes) == (fits, BYTES[1], memory)
    assert not fewer.doubt


def test_fewer_nodes_are_in_doubt_where_ranks_would_hold_more_of_memory_that_is_not_known():
    assert not found(Kind.FEWER, four_nodes()).doubt
    layers = Costs((dataclasses.replace(LAYER, parameters=2**28),) * 8, NONE, NONE, 0.0)
    doubted = found(Kind.FEWER, dataclasses.replace(four_nodes(), memory=SHARDED, costs=layers))
    assert doubted.doubt == (
        "what the fullest rank holds would grow from 9.0 to 10.0 GiB, and how much the devices hold is not known"
    )


@settings(max_examples=40, deadline=None)
@given(
    replicas=st.integers(1, 8),
    stages=st.sampled_from([1, 2, 4]),
    ranks_per_node=st.sampled_from([1, 2, 4, 8]),
    microbatches=st.sampled_from([1, 3, 4, 6, 7]),
    slowness=st.floats(1.1, 5.0),
)
def test_fewer_nodes_run_the_whole_batch_on_all_of_their_ranks(
    replicas, stages, ranks_per_node, microbatches, slowness
):
    assume(replicas * stages % ranks_per_node == 0)
    state = four_nodes(
        slowness, replicas=replicas, stages=stages, ranks_per_node=ranks_per_node, slow="n1", microbatches=microbatches
    )
    fewer = found(Kind.FEWER, state)
    if not fewer.obstacle:
        shares = fewer.plan.microbatches
        assert sum(shares) == replicas * microbatches
        assert max(shares) - min(shares) <= 1
        assert len(shares) * stages == fewer.nodes * ranks_per_node < replicas * stages
        assert fewer.plan.layout.stages == stages


def test_one_stage_has_nothing_to_move():
    alone = situation(shares=(8,), speeds=((1.0,),))
    assert found(Kind.LAYERS, alone).obstacle == "there is one stage"
    assert found(Kind.SCHEDULE, alone).obstacle == "there is one stage"
    assert found(Kind.MICROBATCHES, alone).obstacle == "there is one replica"


def outcome(pipeline, layout, step_seconds):
    """What a search gives; of the estimate, the step's time alone is looked at."""
    shape = Shape(1, pipeline, 1)
    state = situation()
    estimated = estimate(state.costs, state.memory, state.plan, state.hardware)
    return Outcome(
        configuration=Configuration(shape, Schedule.ONE_F_ONE_B, 1, 1, (8,)),
        plan=Plan(layout, Schedule.ONE_F_ONE_B, (8,), (0,) * pipeline),
        estimate=dataclasses.replace(estimated, step_seconds=step_seconds),
        memory_bytes=(0.0,) * pipeline,
        fits=True,
        overhead_seconds=0.0,
        node_order=(0,),
    )


NOW = outcome(2, Layout((4, 4), 2), 4.0)
DEEPER = outcome(4, Layout((2, 2, 2, 2), 4), 3.0)


def test_another_shape_brings_the_ratio_of_what_both_are_worked_out_to_take():
    requeue = found(
        Kind.REQUEUE, situation(shapes=Shapes(NOW, DEEPER), step_seconds=8.0, toll=Toll(restart_seconds=60.0))
    )
    assert requeue.configuration.shape == Shape(1, 4, 1)
    assert (requeue.gain_ratio, requeue.predicted_step_seconds, requeue.cost_seconds) == (0.25, 6.0, 60.0)
    assert requeue.change == "TP1 x PP4 x DP1, 1f1b, 8 microbatches of 1, layers 2|2|2|2"
    assert not requeue.obstacle


def test_another_schedule_is_a_key_of_the_job_and_takes_a_restart():
    assert found(Kind.SCHEDULE, situation(toll=Toll(restart_seconds=60.0))).cost_seconds == 60.0
    assert Kind.SCHEDULE.restarts


def test_a_node_is_left_out_with_even_shares_and_the_layout_that_suits_its_peers():
    """What was moved away from a slow place goes back when another device is in its place."""
    relieved = dataclasses.replace(
        slow_node(), plan=dataclasses.replace(slow_node().plan, layout=Layout((5, 3), 2), microbatches=(10, 6))
    )
    exclude = found(Kind.EXCLUDE, relieved)
    assert exclude.plan.microbatches == (8, 8)
    assert exclude.plan.layout == Layout((4, 4), 2)
    assert exclude.change == "without n4, another node in its place, layers 5|3 -> 4|4"


@pytest.mark.parametrize(
    ("left", "obstacle"), [(0, "0 more nodes may be left out, and 1 are slow"), (1, ""), (None, "")]
)
def test_no_more_nodes_are_left_out_than_may_be(left, obstacle):
    assert found(Kind.EXCLUDE, slow_node(exclusions_left=left)).obstacle == obstacle


@pytest.mark.parametrize(
    ("fields", "obstacle"),
    [
        ({"shapes": None}, "what another shape would cost is not known"),
        ({"shapes": Shapes(NOW, None)}, "no shape on these GPUs fits into their memory"),
        ({"shapes": Shapes(NOW, NOW)}, "of all shapes, TP1 x PP2 x DP1 is the fastest"),
    ],
)
def test_a_shape_that_is_no_better_or_not_to_be_had(fields, obstacle):
    assert found(Kind.REQUEUE, situation(**{"shapes": Shapes(NOW, DEEPER), **fields})).obstacle == obstacle


def test_another_shape_is_not_relied_on_where_no_link_was_measured():
    blind = Hardware(np.ones((1, 2)), (math.inf,) * 2, ())
    requeue = found(Kind.REQUEUE, situation(shapes=Shapes(NOW, DEEPER), hardware=blind))
    assert (requeue.gain_ratio, requeue.doubt) == (0.25, "how fast the devices exchange is not measured")


def test_a_provider_s_own_model_keeps_its_layers_where_they_are():
    own = situation(unsplit="not known")
    assert (found(Kind.LAYERS, own).obstacle, found(Kind.SCHEDULE, own).obstacle) == ("not known", "not known")


def test_long_layouts_are_told_in_short():
    assert split_text(Layout((5, 3), 2)) == "5|3"
    assert split_text(Layout((2, *[1] * 14, 0), 4)) == "2|1 x 14|0"


def test_few_counts_are_told_one_by_one_and_many_by_how_many_are_alike():
    assert counts_text((3, 3, 2)) == "3, 3, 2"
    assert counts_text((3,) * 12 + (2,) * 4) == "12 of 3, 4 of 2"
