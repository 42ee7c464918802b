import pytest

from trimtab.balance.deciding.ledger import Given, Ledger
from trimtab.balance.deciding.situation import Fault, Kind
from trimtab.protocol import Balance

SLOW = Fault("hardware", ((0, 1),))
HEAVY = Fault("intrinsic")


def given(time_seconds=0.0, kind=Kind.LAYERS, fault=HEAVY, step_seconds=2.0, gain_ratio=0.1):
    return Given(time_seconds, kind, fault, step_seconds, gain_ratio)


def test_the_loss_of_one_fault_adds_up_and_another_fault_begins_at_0():
    ledger = Ledger().endured(SLOW, 3.0).endured(SLOW, 4.0)
    assert ledger.loss_of(SLOW) == 7.0
    assert ledger.loss_of(HEAVY) == 0.0
    assert ledger.endured(HEAVY, 1.0).loss_of(HEAVY) == 1.0
    assert ledger.endured(HEAVY, 1.0).endured(SLOW, 2.0).loss_of(SLOW) == 2.0


def test_an_order_settles_the_loss():
    assert Ledger().endured(SLOW, 3.0).given(given(fault=SLOW)).loss_of(SLOW) == 0.0


def test_the_rest_after_an_order_runs_out():
    policy = Balance(cooldown_seconds=300)
    ledger = Ledger().given(given(time_seconds=1000))
    assert Ledger().cooling_seconds(0, policy) == 0
    assert [ledger.cooling_seconds(now, policy) for now in (1000, 1299, 1300, 5000)] == [300, 1, 0, 0]


def test_orders_count_for_an_hour():
    ledger = Ledger().given(given(time_seconds=0)).given(given(time_seconds=1800))
    assert [ledger.orders_within_hour(now) for now in (1800, 3599, 3600, 5400)] == [2, 2, 1, 0]


@pytest.mark.parametrize(("after_seconds", "failed"), [(1.8, False), (1.9, False), (1.901, True), (2.5, True)])
def test_an_order_has_failed_that_brought_less_than_half_of_its_promise(after_seconds, failed):
    """Promised: a tenth of 2 s."""
    ledger = Ledger().given(given()).measured(after_seconds)
    assert ledger.failed(HEAVY) == ({Kind.LAYERS} if failed else set())


def test_what_failed_is_tried_again_against_another_fault():
    ledger = Ledger().given(given(fault=SLOW)).measured(2.0)
    assert ledger.failed(SLOW) == {Kind.LAYERS}
    assert ledger.failed(Fault("hardware", ((0, 2),))) == set()


def test_an_order_whose_effect_is_not_yet_measured_has_not_failed():
    assert Ledger().given(given()).failed(HEAVY) == set()


def test_the_effect_of_no_order_cannot_be_measured():
    with pytest.raises(ValueError, match="no order was given"):
        Ledger().measured(1.0)


def test_what_was_refused_is_not_tried_again_wherever_the_fault_is():
    ledger = Ledger().given(given(fault=SLOW)).refused()
    assert ledger.failed(SLOW) == {Kind.LAYERS}
    assert ledger.failed(Fault("hardware", ((0, 0),))) == {Kind.LAYERS}
    assert ledger.failed(HEAVY) == set()
    assert Ledger().refused() == Ledger()
