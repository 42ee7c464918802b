import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.balance.deciding.decide import REMEDIES, Verdict, asks, decide, weigh
from trimtab.balance.deciding.ledger import Given, Ledger
from trimtab.balance.deciding.outlook import Candidate, Room
from trimtab.balance.deciding.situation import Fault, Kind, Situation, Toll
from trimtab.balance.pipeline.estimate import estimate
from trimtab.balance.plan import Costs, Hardware, Link, ParameterMemory, Part, Plan, Schedule
from trimtab.protocol import Balance, Layout, Shape

POLICY = Balance()
LAYER = Part(0.1, 0.1, 0.1, 1e6, 0.0, 0.0)
NONE = Part(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
CAUSES = tuple(REMEDIES)


def situation(**fields):
    """8 layers in two stages, apart for a cause in the model, with an hour to go; a step of 2 s."""
    start = Situation(
        costs=Costs((LAYER,) * 8, NONE, NONE, 0.0),
        memory=ParameterMemory(4, 4, 12),
        hardware=Hardware(np.ones((1, 2)), (math.inf, math.inf), ()),
        plan=Plan(Layout((4, 4), 2), Schedule.ONE_F_ONE_B, (8,), (0, 0)),
        shape=Shape(1, 2, 1),
        step_seconds=2.0,
        triggered=True,
        fault=Fault("intrinsic"),
        seconds_left=3600.0,
    )
    return dataclasses.replace(start, **fields)


def candidate(kind, gain_ratio=0.1, cost_seconds=1.0, **fields):
    if kind is Kind.NOTHING:
        gain_ratio = cost_seconds = 0.0
    return Candidate(
        kind=kind,
        gain_ratio=gain_ratio,
        cost_seconds=cost_seconds,
        predicted_step_seconds=2 * (1 - gain_ratio),
        **fields,
    )


def every(*candidates):
    """The candidates, and of each other kind one that cannot be done."""
    given_ones = {found.kind: found for found in (candidate(Kind.NOTHING), *candidates)}
    return tuple(given_ones.get(kind, Candidate(kind=kind, obstacle="no")) for kind in Kind)


def verdict(decision, kind):
    return next(considered.verdict for considered in decision.considered if considered.kind is kind)


candidates_of_all_kinds = st.tuples(
    *(
        st.builds(
            candidate,
            st.just(kind),
            st.floats(-0.5, 0.9),
            st.floats(0, 2000),
            fits=st.booleans(),
            obstacle=st.sampled_from(["", "", "", "no"]),
            doubt=st.sampled_from(["", "", "", "perhaps"]),
        )
        for kind in Kind
    )
)
policies = st.builds(
    Balance,
    least_gain_ratio=st.floats(0, 0.2),
    gain_over_cost=st.floats(0.5, 5),
    cooldown_seconds=st.floats(0, 600),
    orders_per_hour=st.integers(1, 6),
    dry_run=st.booleans(),
)
faults = st.builds(Fault, st.sampled_from(CAUSES), st.sampled_from([(), ((0, 1),)]))
situations = st.builds(
    lambda **fields: situation(**fields),
    fault=faults,
    triggered=st.booleans(),
    asked=st.booleans(),
    utilization_ratio=st.none() | st.floats(0, 1),
    seconds_left=st.none() | st.floats(0, 1e5),
    lasting_seconds=st.floats(0, 5000),
    now_seconds=st.floats(0, 10000),
)
orders = st.builds(
    Given,
    st.floats(0, 10000),
    st.sampled_from(Kind),
    faults,
    st.just(2.0),
    st.floats(0.02, 0.5),
    st.none() | st.floats(-0.2, 0.5),
)
ledgers = st.builds(
    Ledger,
    faults,
    st.floats(0, 3000),
    st.lists(orders, max_size=6).map(lambda found: tuple(sorted(found, key=lambda order: order.time_seconds))),
)
property_test = settings(max_examples=100, deadline=None)


@property_test
@given(candidates_of_all_kinds, situations, policies, ledgers)
def test_an_order_saves_enough_of_a_step_and_more_than_its_cost(found, state, policy, ledger):
    order = weigh(found, state, policy, ledger).order
    if order is not None:
        assert order.gain_ratio >= policy.least_gain_ratio
        assert order.gain_ratio * order.horizon_seconds > policy.gain_over_cost * order.cost_seconds
        assert order.fits
        assert not order.obstacle
        assert not order.doubt


@property_test
@given(candidates_of_all_kinds, situations, policies, ledgers)
def test_an_order_is_a_remedy_of_its_cause_that_has_not_failed_against_it(found, state, policy, ledger):
    order = weigh(found, state, policy, ledger).order
    if order is not None:
        assert state.fault.cause != "unknown"
        assert order.kind in REMEDIES[state.fault.cause]
        assert order.kind not in ledger.failed(state.fault)
        assert asks(state, policy)


@property_test
@given(candidates_of_all_kinds, situations, policies, ledgers)
def test_no_order_within_the_rest_or_beyond_those_of_an_hour(found, state, policy, ledger):
    decision = weigh(found, state, policy, ledger)
    if decision.order is not None:
        assert ledger.cooling_seconds(state.now_seconds, policy) == 0
        assert ledger.orders_within_hour(state.now_seconds) < policy.orders_per_hour


@property_test
@given(candidates_of_all_kinds, situations, policies, ledgers)
def test_the_order_is_the_one_that_brings_most_of_those_that_are_worth_it(found, state, policy, ledger):
    decision = weigh(found, state, policy, ledger)
    rest = [considered for considered in decision.considered if considered.verdict is Verdict.WORTH]
    (chosen,) = (one for one in decision.considered if one.verdict is Verdict.CHOSEN)
    if decision.order is None:
        assert chosen.kind is Kind.NOTHING
    else:
        assert chosen == decision.order
        assert all(considered.net_seconds <= chosen.net_seconds for considered in rest)


@property_test
@given(candidates_of_all_kinds, situations, policies, ledgers)
def test_the_answer_names_each_kind_once_and_gives_every_reason(found, state, policy, ledger):
    decision = weigh(found, state, policy, ledger)
    assert [considered.kind for considered in decision.considered] == list(Kind)
    assert all(considered.reason for considered in decision.considered)
    assert decision.reason
    assert decision.dry_run == policy.dry_run


@property_test
@given(candidates_of_all_kinds, situations, policies, ledgers)
def test_a_dry_run_decides_as_any_other(found, state, policy, ledger):
    dry = weigh(found, state, dataclasses.replace(policy, dry_run=True), ledger)
    wet = weigh(found, state, dataclasses.replace(policy, dry_run=False), ledger)
    assert dry.order == wet.order
    assert dry.given(state) is None
    assert (wet.given(state) is None) == (wet.order is None)


@settings(max_examples=60, deadline=None)
@given(
    gain_ratio=st.floats(0.05, 0.9),
    cost_seconds=st.floats(1.0, 500.0),
    duration_seconds=st.floats(1.0, 20_000.0),
    step_seconds=st.floats(0.5, 20.0),
)
def test_ski_rental_costs_at_most_twice_the_best_in_hindsight(gain_ratio, cost_seconds, duration_seconds, step_seconds):
    """A fault of any duration; the run goes on long after it. Time moves in steps: one step's loss is allowed for."""
    slow = Fault("hardware", ((0, 1),))
    found = every(candidate(Kind.EXCLUDE, gain_ratio, cost_seconds))
    ledger, lasted, paid = Ledger(), 0.0, 0.0
    while lasted < duration_seconds:
        state = situation(fault=slow, lasting_seconds=lasted, seconds_left=1e6, step_seconds=step_seconds)
        decision = weigh(found, state, POLICY, ledger)
        if decision.order is not None:
            paid += cost_seconds
            break
        assert decision.loss_ratio == gain_ratio
        endured = min(step_seconds, duration_seconds - lasted) * gain_ratio
        ledger = ledger.endured(slow, endured)
        paid += endured
        lasted += step_seconds
    best = min(gain_ratio * duration_seconds, cost_seconds)
    assert paid <= 2 * best + gain_ratio * step_seconds + 1e-9 * paid


def test_a_restart_waits_until_the_loss_has_reached_its_cost():
    slow = Fault("hardware", ((0, 1),))
    found = every(candidate(Kind.EXCLUDE, 0.3, 60.0))
    early = weigh(found, situation(fault=slow), POLICY, Ledger().endured(slow, 59.0))
    assert early.order is None
    assert verdict(early, Kind.EXCLUDE) is Verdict.WAITS
    assert early.reason == "exclude a node waits: the loss so far is 59.0 s, its cost 60.0 s"
    late = weigh(found, situation(fault=slow), POLICY, Ledger().endured(slow, 60.0))
    assert late.order.kind is Kind.EXCLUDE
    assert late.order.horizon_seconds == 3600


def test_what_moves_in_place_is_ordered_at_once_while_a_restart_waits():
    slow = Fault("hardware", ((0, 1),))
    found = every(candidate(Kind.EXCLUDE, 0.5, 60.0), candidate(Kind.MICROBATCHES, 0.2, 0.0))
    decision = weigh(found, situation(fault=slow), POLICY, Ledger())
    assert decision.order.kind is Kind.MICROBATCHES
    assert verdict(decision, Kind.EXCLUDE) is Verdict.WAITS


@pytest.mark.parametrize(
    ("fields", "horizon_seconds"),
    [
        ({"fault": Fault("hardware")}, 600),
        ({"fault": Fault("hardware"), "lasting_seconds": 600.0}, 3600),
        ({"fault": Fault("hardware"), "seconds_left": 100.0}, 100),
        ({"fault": Fault("hardware"), "seconds_left": None}, 600),
        ({"fault": Fault("hardware"), "seconds_left": None, "lasting_seconds": 900.0}, 900),
        ({"fault": Fault("intrinsic")}, 3600),
        ({"fault": Fault("intrinsic"), "seconds_left": None}, 600),
    ],
)
def test_a_fault_of_the_hardware_counts_for_ten_minutes_unless_it_lasts(fields, horizon_seconds):
    decision = weigh(every(candidate(Kind.LAYERS)), situation(**fields), POLICY, Ledger())
    assert decision.order.horizon_seconds == horizon_seconds


def test_an_order_that_gains_too_little_or_costs_too_much_is_not_given():
    found = every(candidate(Kind.LAYERS, 0.0199, 0.0), candidate(Kind.SCHEDULE, 0.1, 180.0))
    decision = weigh(found, situation(), POLICY, Ledger())
    assert decision.order is None
    assert decision.reason == ("nothing is worth its cost; other schedule: saves 360 s, not 2 times the cost of 180 s")
    assert verdict(decision, Kind.LAYERS) is Verdict.TOO_LITTLE
    assert verdict(decision, Kind.SCHEDULE) is Verdict.TOO_DEAR  # 0.1 x 3600 s is twice its cost, not more


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "the stages are apart"),
        ({"triggered": False}, ""),
        ({"fault": Fault("none")}, ""),
        ({"triggered": False, "utilization_ratio": 0.8}, ""),
        ({"triggered": False, "utilization_ratio": 0.79}, "the devices are used 79%, below 80%"),
        ({"triggered": False, "asked": True}, "a user asks"),
        ({"triggered": False, "fault": Fault("hardware")}, ""),
        (
            {"triggered": False, "fault": Fault("hardware"), "relieved": True},
            "hardware is slow, though what could be was moved away from it",
        ),
        ({"triggered": False, "fault": Fault("data"), "confidence": 0.9}, "the sequences are uneven"),
        ({"triggered": False, "fault": Fault("data"), "confidence": 0.5}, ""),
        ({"triggered": False, "fault": Fault("data"), "confidence": 0.9, "live": False}, ""),
    ],
)
def test_what_asks_for_a_plan(fields, reason):
    assert asks(situation(**fields), POLICY) == reason


def test_a_slow_link_asks_for_a_plan():
    links = (Link(0.05, 1e9), Link(0.0501, 1e9))
    hardware = dataclasses.replace(situation().hardware, links=links)
    assert asks(situation(triggered=False, hardware=hardware), POLICY) == "the link after stage 1 is slow"


def test_nothing_is_ordered_that_nothing_asks_for():
    decision = weigh(every(candidate(Kind.LAYERS)), situation(triggered=False), POLICY, Ledger())
    assert decision.order is None
    assert decision.reason == "nothing asks for a change"
    assert verdict(decision, Kind.LAYERS) is Verdict.WORTH


def test_an_unknown_cause_is_only_reported():
    found = every(*(candidate(kind) for kind in Kind))
    decision = weigh(found, situation(fault=Fault("unknown"), utilization_ratio=0.1), POLICY, Ledger())
    assert decision.order is None
    assert decision.reason == "the cause is unknown: nothing is tried against it"
    assert {verdict(decision, kind) for kind in Kind if kind is not Kind.NOTHING} == {Verdict.BESIDE}


def test_uneven_data_is_repacked_and_no_layer_moves():
    found = every(candidate(Kind.LAYERS, 0.5, 0.0), candidate(Kind.REPACK, 0.1, 0.0))
    decision = weigh(found, situation(fault=Fault("data")), POLICY, Ledger())
    assert decision.order.kind is Kind.REPACK
    assert verdict(decision, Kind.LAYERS) is Verdict.BESIDE


def test_what_failed_is_not_tried_again():
    failed = Given(0.0, Kind.LAYERS, Fault("intrinsic"), 2.0, 0.1, measured_gain_ratio=0.01)
    found = every(candidate(Kind.LAYERS, 0.2, 0.0), candidate(Kind.SCHEDULE, 0.1, 0.0))
    decision = weigh(found, situation(now_seconds=1000.0), POLICY, Ledger(orders=(failed,)))
    assert decision.order.kind is Kind.SCHEDULE
    assert verdict(decision, Kind.LAYERS) is Verdict.FAILED


def test_a_head_as_heavy_as_two_layers_moves_one_of_them():
    """4|4 and a head of two layers: the end stage has 6 layers' work; 5|3 makes it 5 and 5."""
    head = dataclasses.replace(LAYER, forward_seconds=0.2, backward_input_seconds=0.2, backward_weight_seconds=0.2)
    costs = dataclasses.replace(situation().costs, head=head)
    decision = decide(situation(costs=costs, toll=Toll()), POLICY, Ledger())
    assert decision.order.kind is Kind.LAYERS
    assert decision.order.plan.layout == Layout((5, 3), 2)
    # 1F1B, t = 0.3 s a layer: (8 - 1) x 6 t + 4 t + 6 t before, 9 x 5 t after.
    assert decision.order.gain_ratio == pytest.approx(1 - 45 / 52, rel=1e-12)
    assert decision.order.predicted_step_seconds == pytest.approx(2 * 45 / 52, rel=1e-12)


def test_what_was_given_is_kept_with_its_promise():
    state = situation(now_seconds=50.0)
    order = weigh(every(candidate(Kind.LAYERS)), state, POLICY, Ledger()).given(state)
    assert order == Given(50.0, Kind.LAYERS, Fault("intrinsic"), 2.0, 0.1)


NOT_SURE = {"fault": Fault("hardware"), "confidence": 0.59}


def test_an_order_is_not_given_against_a_cause_that_is_not_sure():
    found = every(candidate(Kind.LAYERS))
    decision = weigh(found, situation(**NOT_SURE), POLICY, Ledger())
    assert decision.order is None
    assert verdict(decision, Kind.LAYERS) is Verdict.UNSURE
    assert decision.reason == "nothing is sure to help; move layers: the cause is not sure (59%)"
    assert weigh(found, situation(**NOT_SURE | {"confidence": 0.6}), POLICY, Ledger()).order is not None


def test_a_suggestion_for_the_next_run_says_that_the_cause_is_not_sure():
    decision = weigh(every(candidate(Kind.LAYERS)), situation(**NOT_SURE, live=False), POLICY, Ledger())
    assert decision.order.kind is Kind.LAYERS
    assert decision.reason.startswith("the cause is not sure (59%): move layers: saves ")


@pytest.mark.parametrize(
    ("found", "fields", "reason"),
    [
        ([candidate(Kind.LAYERS, 0.01, 0.0)], {}, "nothing helps enough; move layers: saves less than 2% of a step"),
        ([], {}, "there is nothing else that is possible"),
        ([], {"unsplit": "so it is"}, "the layers cannot be moved: so it is"),
        ([candidate(Kind.LAYERS)], {"seconds_left": 0.0}, "no step is left that could be faster"),
        ([candidate(Kind.LAYERS, doubt="who knows")], {}, "nothing is sure to help; move layers: who knows"),
        (
            [candidate(Kind.LAYERS, 0.01, 0.0), candidate(Kind.REQUEUE, 0.3, doubt="who knows")],
            {"hardware": Hardware(np.ones((1, 2)), (math.inf, math.inf), (), stages_at_once=1.0)},
            "nothing is sure to help; move layers: saves less than 2% of a step; requeue in another shape: who knows; "
            "the ranks share cores, and keep them busy whichever stage they work for",
        ),
    ],
)
def test_why_nothing_is_changed(found, fields, reason):
    decision = weigh(every(*found), situation(**fields), POLICY, Ledger())
    assert decision.order is None
    assert decision.reason == reason


TOO_LARGE = candidate(Kind.NOTHING, fits=False, room=Room(1, 90 * 2**30, 80 * 2**30))


def test_of_a_plan_that_has_not_run_and_does_not_fit_whatever_fits_is_better():
    found = every(TOO_LARGE, candidate(Kind.LAYERS, -0.1, 0.0))
    decision = weigh(found, situation(step_seconds=None), POLICY, Ledger())
    assert decision.order.kind is Kind.LAYERS
    assert decision.order.reason == "fits into memory, which the current plan does not"
    assert verdict(decision, Kind.NOTHING) is Verdict.NO_ROOM


def test_a_plan_that_cannot_run_is_not_chosen():
    decision = weigh(every(TOO_LARGE), situation(step_seconds=None), POLICY, Ledger())
    assert verdict(decision, Kind.NOTHING) is Verdict.NO_ROOM
    assert decision.reason.startswith("does not fit: stage 1 needs 90.0 of 80.0 GiB; ")
    # One that was measured did run, whatever is predicted.
    assert verdict(weigh(every(TOO_LARGE), situation(), POLICY, Ledger()), Kind.NOTHING) is Verdict.CHOSEN


@pytest.mark.parametrize(
    ("seconds_left", "words"),
    [
        (3600.0, "saves 360 s of the next 3,600 s"),
        (0.5, "saves 50.0 ms of the next 500 ms"),
        (5e-5, "saves 5.0 µs of the next 50.0 µs"),
    ],
)
def test_what_is_saved_is_told_in_a_unit_that_can_be_read(seconds_left, words):
    decision = weigh(every(candidate(Kind.LAYERS, 0.1, 0.0)), situation(seconds_left=seconds_left), POLICY, Ledger())
    assert decision.order.reason == f"{words}, at no cost"


def test_shares_that_no_slow_device_asks_for_any_more_are_evened_out():
    """Both replicas are healthy, and one has the other's microbatches: the stages are apart for no cause."""
    shifted = situation(
        hardware=Hardware(np.ones((2, 2)), (math.inf, math.inf), ()),
        plan=Plan(Layout((4, 4), 2), Schedule.ONE_F_ONE_B, (10, 6), (0, 0)),
        shape=Shape(1, 2, 2),
        fault=Fault("none"),
    )
    order = decide(shifted, POLICY, Ledger()).order
    assert order.kind is Kind.MICROBATCHES
    assert order.plan.microbatches == (8, 8)


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind.restarts])
def test_a_job_that_cannot_be_begun_again_is_not_restarted(kind):
    fault = Fault("hardware") if kind in REMEDIES["hardware"] else Fault("intrinsic")
    found = every(candidate(kind, 0.5))
    can, cannot = (
        weigh(found, situation(fault=fault, no_restart=reason), POLICY, Ledger().endured(fault, 100.0))
        for reason in ("", "requeue.enabled is false")
    )
    assert can.order.kind is kind
    assert cannot.order is None
    assert verdict(cannot, kind) is Verdict.IMPOSSIBLE


@pytest.mark.parametrize(
    ("kind", "exclude", "nodes", "possible"),
    [
        (Kind.REQUEUE, (), None, True),  # another shape of the same ranks
        (Kind.FEWER, ("n2",), 1, True),
        (Kind.FEWER, ("n1",), 1, False),  # which runs the batch script
        (Kind.EXCLUDE, ("n2",), None, False),
    ],
)
def test_a_job_that_slurm_does_not_requeue_begins_again_on_nodes_that_it_has(kind, exclude, nodes, possible):
    fault = Fault("hardware") if kind in REMEDIES["hardware"] else Fault("intrinsic")
    one = dataclasses.replace(candidate(kind, 0.5), exclude=exclude, nodes=nodes)
    state = situation(fault=fault, allocation=("n1", "n2"), no_requeue="--no-requeue")
    decision = weigh(every(one), state, POLICY, Ledger().endured(fault, 100.0))
    assert (decision.order is not None) == possible
    if not possible:
        assert next(one.reason for one in decision.considered if one.kind is kind) == "--no-requeue"


def one_stage_a_node(slowness, *, microbatches=6, shares=(2, 2, 2, 2)):
    """Four replicas of four stages, each stage on a node of its own with no other to spare: the second is slow."""
    speeds = np.ones((4, 4))
    speeds[:, 1] /= slowness
    return situation(
        hardware=Hardware(speeds, (math.inf,) * 4, (), overhead_seconds=0.1),
        plan=Plan(Layout(shares, 4), Schedule.ONE_F_ONE_B, (microbatches,) * 4, (0, 0, 0, 0)),
        shape=Shape(1, 4, 4),
        fault=Fault("hardware", tuple((replica, 1) for replica in range(4))),
        nodes={(replica, stage): (f"n{stage + 1}",) for replica in range(4) for stage in range(4)},
        spare_nodes=0,
    )


def test_a_slow_node_is_done_without_once_that_is_paid_for_though_none_takes_its_place():
    """Two layers of 0.3 s a stage: four such stages with 8 microbatches take (8 + 3) x 0.6 s."""
    state = one_stage_a_node(2.0)
    now_seconds = estimate(state.costs, state.memory, state.plan, state.hardware).step_seconds
    early, late = (decide(state, POLICY, Ledger().endured(state.fault, seconds)) for seconds in (119.0, 120.0))
    assert early.order.kind is Kind.LAYERS  # in place, and not as good: two layers cannot be halved without a rest
    assert late.order.kind is Kind.FEWER
    assert (late.order.nodes, late.order.exclude) == (3, ("n2",))
    assert late.order.plan.microbatches == (8, 8, 8)
    assert late.order.gain_ratio == pytest.approx(1 - (11 * 0.6 + 0.1) / now_seconds, rel=1e-12)


def test_for_a_small_slowness_no_node_is_given_up():
    state = one_stage_a_node(1.1)
    decision = decide(state, POLICY, Ledger().endured(state.fault, 1e6))
    assert decision.order is None
    fewer = next(one for one in decision.considered if one.kind is Kind.FEWER)
    assert fewer.gain_ratio < 0


def test_microbatches_are_moved_rather_than_a_node_given_up_where_both_bring_the_same():
    """A replica on each of four nodes, one half as fast: (4, 4, 3, 1) is over when three replicas have done 4 each."""
    state = situation(
        hardware=Hardware(np.array([[1.0], [1.0], [1.0], [0.5]]), (math.inf,), ()),
        plan=Plan(Layout((8,), 1), Schedule.ONE_F_ONE_B, (3, 3, 3, 3), (0,)),
        shape=Shape(1, 1, 4),
        fault=Fault("hardware", ((3, 0),)),
        nodes={(replica, 0): (f"n{replica + 1}",) for replica in range(4)},
        spare_nodes=0,
    )
    decision = decide(state, POLICY, Ledger().endured(state.fault, 1e6))
    fewer, moved = (
        next(one for one in decision.considered if one.kind is kind) for kind in (Kind.FEWER, Kind.MICROBATCHES)
    )
    assert fewer.verdict is Verdict.WORTH
    assert fewer.gain_ratio == pytest.approx(moved.gain_ratio, rel=1e-12)
    assert decision.order == moved
