"""What a controller remembers between decisions: the loss endured, and the orders given with what they brought.

Immutable: each event makes a new ledger, so a decision can be worked out again from the one it was taken with.
"""

from dataclasses import dataclass, field, replace

from trimtab.balance.deciding.situation import Fault, Kind
from trimtab.protocol import Balance

KEPT_PROMISE_RATIO = 0.5
"""Measured over promised gain below which an order has failed."""


@dataclass(frozen=True)
class Given:
    """An order that was given."""

    time_seconds: float
    kind: Kind
    fault: Fault
    """What it was given against."""
    step_seconds: float
    """Before it."""
    promised_gain_ratio: float
    """Share of the step's time that it should save."""
    measured_gain_ratio: float | None = None
    """What it saved; None: not yet measured."""
    refused: bool = False
    """Whether it could not be carried out."""

    @property
    def failed(self) -> bool:
        """Whether it brought less than half of what it promised, or nothing at all."""
        if self.refused:
            return True
        measured = self.measured_gain_ratio
        return measured is not None and measured < KEPT_PROMISE_RATIO * self.promised_gain_ratio


@dataclass(frozen=True)
class Ledger:
    """The memory of one attempt."""

    fault: Fault = field(default_factory=Fault)
    """The one that the loss is of."""
    loss_seconds: float = 0.0
    """What this fault has cost since its trigger, and since the last order."""
    orders: tuple[Given, ...] = ()
    """Oldest first."""

    def endured(self, fault: Fault, seconds: float) -> "Ledger":
        """After a time in which a fault has cost `seconds`. Another fault begins at 0, and so does one that was over.

        Dry run or not, the loss is the same.
        """
        earlier = self.loss_seconds if fault == self.fault else 0.0
        return replace(self, fault=fault, loss_seconds=earlier + seconds)

    def given(self, order: Given) -> "Ledger":
        """After an order: what was lost before is paid for."""
        return replace(self, loss_seconds=0.0, orders=(*self.orders, order))

    def measured(self, step_seconds: float) -> "Ledger":
        """With the step's time after the last order. Raises ValueError where no order was given."""
        if not self.orders:
            raise ValueError("no order was given whose effect could be measured")
        last = self.orders[-1]
        gain = 1 - step_seconds / last.step_seconds
        return replace(self, orders=(*self.orders[:-1], replace(last, measured_gain_ratio=gain)))

    def refused(self) -> "Ledger":
        """After the last order, if there was one, could not be carried out."""
        return replace(self, orders=(*self.orders[:-1], *(replace(last, refused=True) for last in self.orders[-1:])))

    def loss_of(self, fault: Fault) -> float:
        """Seconds that this fault has cost."""
        return self.loss_seconds if fault == self.fault else 0.0

    def failed(self, fault: Fault) -> frozenset[Kind]:
        """What has failed against this very fault, or was refused, and is not tried against it again.

        Where a fault is does not matter to what was refused: it is the ranks, or Slurm, that cannot.
        """
        return frozenset(
            order.kind
            for order in self.orders
            if order.failed and (order.fault == fault or (order.refused and order.fault.cause == fault.cause))
        )

    def cooling_seconds(self, now_seconds: float, policy: Balance) -> float:
        """What remains of the rest after the last order; 0: none."""
        if not self.orders:
            return 0.0
        return max(0.0, self.orders[-1].time_seconds + policy.cooldown_seconds - now_seconds)

    def orders_within_hour(self, now_seconds: float) -> int:
        """Orders of the last hour."""
        return sum(order.time_seconds > now_seconds - 3600 for order in self.orders)
