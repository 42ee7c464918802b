"""What the controller of an attempt makes of steps and messages; deciding itself is in test_advising.py."""

import dataclasses

import pytest

from trimtab.account import OrderRecord
from trimtab.balance.deciding.ledger import Given, Ledger
from trimtab.balance.deciding.situation import Fault, Kind
from trimtab.balance.detect import WARM_UP_STEPS
from trimtab.balance.measuring.steps import StageStep, Step
from trimtab.protocol import Balance, Batch, Hello, Job, Layout, Model, Order, Parallel, Probe, Reshaped, Setting, Shape
from trimtab.trimming.surroundings import Advice, Surroundings
from trimtab.trimming.trimmer import Sight, Trimmer

POLICY = Balance(window_steps=4, trigger_windows=2, cooldown_seconds=30)
BEFORE, AFTER = Setting(Layout((4, 4), 2), (8,), (0, 0)), Setting(Layout((5, 3), 2), (8, 8), (0, 0))
WARM = WARM_UP_STEPS
TRIGGERED = WARM + POLICY.window_steps * POLICY.trigger_windows
HEAVY = Fault("intrinsic", ((0, 1),))
EVEN, APART = (1.0, 1.0), (1.0, 1.6)
STEP_SECONDS = 2.0


def job(policy=POLICY, replicas=1):
    return Job(
        model=Model(layers=8),
        parallel=Parallel(pipeline=2),
        batch=Batch(microbatch_size=2, global_batch_size=16 * replicas),
        balance=policy,
    )


def step(number, compute=EVEN, seconds=STEP_SECONDS, replicas=1):
    stages = tuple(
        StageStep(number, replica, stage, own / 3, own * 2 / 3, 8, 1024, 65536, 0)
        for replica in range(replicas)
        for stage, own in enumerate(compute)
    )
    return Step(number, number * STEP_SECONDS, seconds, 1024, None, None, None, None, stages)


@dataclasses.dataclass
class Decided:
    """Stands in for an answer: of it, the decision and the fault are looked at."""

    order: object = None
    fault: Fault = HEAVY
    now_seconds: float = 100.0
    lasting_seconds: float = 40.0
    triggered: bool = True

    @property
    def decision(self):
        return self

    @property
    def case(self):
        return self

    @property
    def situation(self):
        return self

    def given(self, _):
        return Given(self.now_seconds, Kind.LAYERS, self.fault, 2.0, 0.1) if self.order else None


class Told(Advice):
    asked = True


@dataclasses.dataclass
class Chosen:
    kind: Kind = Kind.LAYERS
    change: str = "layers 4|4 -> 5|3"


RECORD = OrderRecord(0, 14, 100.0, "move layers", str(BEFORE), str(AFTER), "because", 2.0, 1.8)


def reshape(trimmer, now_seconds=100.0, **fields):
    """What is decided: to reshape."""
    order = Order("reshape", "because", AFTER, BEFORE.fingerprint)
    decided = Decided(Chosen(), now_seconds=now_seconds, **fields)
    return trimmer.given(Told(decided, "Move layers.", now_seconds, Ledger(), RECORD, order))


def nothing(trimmer, **fields):
    return trimmer.given(Told(Decided(**fields), "Change nothing: so.", 100.0, Ledger()))


def hello(rank):
    return Hello("", rank, "n1", rank, 9, 0, rank, 0, (), 1, "")


def trimmer(replicas=1, policy=POLICY):
    found = Trimmer(job(policy, replicas), Shape(1, 2, replicas))
    for rank in range(2 * replicas):
        assert found.hear(hello(rank)) == Sight()
    return found


def run(found, first, last, compute=EVEN, **fields):
    """The sights of some steps that show anything."""
    seen = {number: found.see(step(number, compute, **fields)) for number in range(first, last + 1)}
    return {number: sight for number, sight in seen.items() if sight != Sight()}


def test_it_begins_with_what_the_job_says():
    assert trimmer().setting == BEFORE


def test_a_level_run_of_one_replica_is_probed_once_and_never_decided_about():
    assert run(trimmer(), 1, 100) == {WARM: Sight(probe="the ranks are warm")}


def test_a_decision_is_due_when_stages_are_apart_and_all_ranks_have_been_probed():
    found = trimmer()
    seen = run(found, 1, TRIGGERED, APART)[TRIGGERED]
    assert (seen.probe, seen.due) == ("the stages have come apart", False)
    assert [kind for kind, _ in seen.events] == ["imbalance"]
    found.hear(Probe(0, TRIGGERED, 0.01))
    assert run(found, TRIGGERED + 1, TRIGGERED + 1, APART) == {}
    found.hear(Probe(1, TRIGGERED, 0.01))
    assert run(found, TRIGGERED + 2, TRIGGERED + 2, APART) == {TRIGGERED + 2: Sight(due=True)}


def test_a_probe_that_does_not_come_holds_up_no_decision_for_longer_than_a_window():
    found = trimmer()
    run(found, 1, TRIGGERED, APART)
    assert run(found, TRIGGERED + 1, TRIGGERED + 4, APART) == {TRIGGERED + 4: Sight(due=True)}


def due(replicas=2):
    """A trimmer of which a decision is due; with two replicas no probe is waited for."""
    found = trimmer(replicas)
    assert run(found, 1, TRIGGERED, APART, replicas=replicas)[TRIGGERED].due
    return found


def test_a_question_is_put_once_and_holds_all_that_is_known():
    found = due()
    surroundings = Surroundings(now_seconds=50.0)
    question = found.question("tables", surroundings)
    assert (question.training, question.surroundings, question.setting) == ("tables", surroundings, found.setting)
    assert question.detection.since_step == WARM + 1
    assert question.relieved_seconds is None
    # No second one while the first is decided, however many windows end.
    assert run(found, TRIGGERED + 1, TRIGGERED + 20, APART, replicas=2) == {}


def test_what_does_not_help_is_told_once_for_each_cause_and_place():
    found = due()
    assert nothing(found) == Sight(events=(("decision", "Change nothing: so."),))
    assert nothing(found) == Sight()
    assert nothing(found, fault=Fault("hardware", ((0, 1),))) != Sight()
    assert found.orders == ()


def test_where_nothing_asked_for_a_change_nothing_is_told():
    class Unasked(Advice):
        asked = False

    assert due().given(Unasked(Decided(), "Change nothing: nothing asks.", 100.0, Ledger())) == Sight()


def test_an_order_is_recorded_carried_out_and_measured():
    found = due()
    told = reshape(found)
    record = dataclasses.replace(RECORD, number=1)
    assert told == Sight(events=(("order", "Move layers."),), records=(record,))
    assert [order.kind for order in found.orders] == [Kind.LAYERS]
    carried_out = found.hear(Reshaped(0, TRIGGERED, AFTER, "", 0.5, 1000, 1000))
    record = dataclasses.replace(
        record, step=TRIGGERED + 1, cost_seconds=0.5, moved_bytes=1000.0, outcome="carried out"
    )
    assert carried_out == Sight(records=(record,))
    assert found.setting == AFTER
    # The warm-up of the new setting does not count, nor does an outlier of the window.
    run(found, TRIGGERED + 1, TRIGGERED + WARM, seconds=9.0, replicas=2)
    assert run(found, TRIGGERED + WARM + 1, TRIGGERED + WARM + 1, seconds=9.0, replicas=2) == {}
    (measured,) = run(found, TRIGGERED + WARM + 2, TRIGGERED + WARM + 4, seconds=1.81, replicas=2).values()
    assert measured == Sight(
        events=(("reshape", "move layers: 2,000 -> 1,800 ms a step were promised, 1,810 ms are measured"),),
        records=(dataclasses.replace(record, measured_seconds=1.81),),
    )
    assert found.orders[0].measured_gain_ratio == pytest.approx(0.095)
    assert not found.orders[0].failed


def test_nothing_is_due_before_the_rest_after_an_order_is_over():
    found = due()
    reshape(found, now_seconds=TRIGGERED * STEP_SECONDS)
    found.hear(Reshaped(0, TRIGGERED, AFTER, "", 0.5, 0, 0))
    # Still apart: a window of the new setting's first ones triggers again, 13 steps later, within the 30 s of rest.
    seen = run(found, TRIGGERED + 1, TRIGGERED + 30, APART, replicas=2)
    assert next(number for number, sight in seen.items() if sight.due) == TRIGGERED + 15


def test_steps_of_the_setting_before_that_come_late_do_not_count():
    found = due()
    reshape(found)
    found.hear(Reshaped(0, TRIGGERED + 2, AFTER, "", 0.5, 0, 0))
    assert run(found, TRIGGERED + 1, TRIGGERED + 2, APART, replicas=2) == {}
    run(found, TRIGGERED + 3, TRIGGERED + 2 + WARM + 4, seconds=1.8, replicas=2)
    assert found.orders[0].measured_gain_ratio == pytest.approx(0.1)


def test_an_order_that_ranks_refuse_is_told_and_not_tried_again():
    found = due()
    reshape(found)
    told = found.hear(Reshaped(0, TRIGGERED, BEFORE, "rank 1: out of memory", 0.1, 0, 0))
    assert told == Sight(
        events=(("order", "move layers was refused: rank 1: out of memory"),),
        records=(dataclasses.replace(RECORD, number=1, outcome="refused: rank 1: out of memory"),),
    )
    assert found.setting.layout == BEFORE.layout
    ledger = found.question(None, Surroundings(0.0)).ledger
    assert ledger.failed(Fault("intrinsic", ((0, 0),))) == {Kind.LAYERS}


def test_what_a_reshape_took_is_what_the_next_one_costs():
    found = due()
    found.hear(Reshaped(0, TRIGGERED, AFTER, "", 3.0, 2_000_000_000, 0))
    toll = found.question(None, Surroundings(0.0)).toll
    assert toll.reshape_seconds + 2e9 / toll.moved_bytes_per_second == 3.0


def test_hardware_that_was_relieved_is_looked_at_though_the_stages_are_level():
    found = due()
    reshape(found, fault=Fault("hardware", ((1, 1),)))
    found.hear(Reshaped(0, TRIGGERED, AFTER, "", 0.5, 0, 0))
    seen = run(found, TRIGGERED + 1, TRIGGERED + 60, replicas=2)
    assert any(sight.due for sight in seen.values())
    assert found.question(None, Surroundings(0.0)).relieved_seconds == 60.0  # slow for 40 s, at 100 s


def test_level_replicas_are_looked_at_every_few_windows_for_uneven_data():
    seen = run(trimmer(replicas=2), 1, WARM + 24, replicas=2)
    assert seen == {number: Sight(due=True) for number in seen}
    assert min(seen) == TRIGGERED


def test_what_is_only_told_is_recorded_once_and_not_counted_as_given():
    found = trimmer(2)
    advice = Told(Decided(Chosen(Kind.REPACK)), "Repack.", 100.0, Ledger(), RECORD)
    assert found.given(advice).records == (dataclasses.replace(RECORD, number=1),)
    assert found.given(advice) == Sight()
    assert found.orders == ()


def test_orders_of_earlier_attempts_count():
    earlier = Given(0.0, Kind.LAYERS, Fault("intrinsic"), 2.0, 0.1, 0.1)
    found = trimmer(2)
    found.restored([dataclasses.replace(earlier, time_seconds=TRIGGERED * STEP_SECONDS)], restarted=False)
    assert not any(sight.due for sight in run(found, 1, TRIGGERED + 14, APART, replicas=2).values())
    assert run(found, TRIGGERED + 15, TRIGGERED + 15, APART, replicas=2)[TRIGGERED + 15].due


EXCLUDED = Given(0.0, Kind.EXCLUDE, Fault("hardware", ((1, 1),)), 2.5, 0.2)


def test_a_restart_that_was_not_what_was_asked_for_is_not_measured_and_may_be_tried_again():
    found = trimmer(2)
    found.restored([EXCLUDED], restarted=False)
    assert not any(sight.records for sight in run(found, 101, 101 + WARM + 4, replicas=2).values())
    assert found.orders == (EXCLUDED,)
    assert not found.orders[-1].failed


def test_what_a_restart_has_brought_shows_in_the_attempt_after_it():
    found = trimmer(2)
    found.restored([EXCLUDED], restarted=True)
    seen = run(found, 101, 101 + WARM + 4, replicas=2)
    (events,) = (sight.events for sight in seen.values() if sight.events)
    assert events == (("reshape", "exclude a node: 2,500 -> 2,000 ms a step were promised, 2,000 ms are measured"),)
    (record,) = (sight.records[0] for sight in seen.values() if sight.records)
    assert (record.number, record.step, record.kind, record.measured_seconds) == (1, 101, "exclude a node", 2.0)
    assert found.orders[-1].measured_gain_ratio == pytest.approx(0.2)


def test_why_nothing_can_be_decided_is_told_once():
    found = due()
    told = found.undecided("Job 1: 3 whole steps are recorded")
    assert told == Sight(
        events=(("decision", "What to change cannot be worked out: Job 1: 3 whole steps are recorded"),)
    )
    assert found.undecided("Job 1: 4 whole steps are recorded") == Sight()
