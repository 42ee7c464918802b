"""What trimtab changed, and what that brought, in words; the same in terminal and page. Pure."""

from collections.abc import Sequence

from trimtab.balance.deciding.situation import Kind
from trimtab.report.summary import Order, Setting, Stack, Summary, Training
from trimtab.wording import ABSENT, data_size, duration, listed, milliseconds, percent, plural

_RESTARTS = frozenset(kind for kind in Kind if kind.restarts)


def step_range(setting: Setting) -> str:
    """The steps of a setting: "steps 31-60"; of one without any, where they were to begin."""
    if setting.last_step is None:
        return f"no step, from {setting.first_step} on"
    return f"steps {setting.first_step}-{setting.last_step}"


def counts(numbers: Sequence[int]) -> str:
    """(9, 7) -> "9|7"; "-" where nothing is recorded."""
    return "|".join(map(str, numbers)) or ABSENT


def changes(order: Order) -> str:
    """What an order changes: "layers 2|2 -> layers 3|1"; empty where it says nothing of it.

    Of two settings, what both have in common is left out.
    """
    before, after = order.before, order.after
    if before.startswith("layers ") and after.startswith("layers ") and before != after:
        one, other = before.split(", "), after.split(", ")
        before = ", ".join(part for part in one if part not in other)
        after = ", ".join(part for part in other if part not in one)
    return " -> ".join(filter(None, (before, after)))


def why(order: Order) -> str:
    """The reason for an order, which stands beside its kind."""
    return order.reason.removeprefix(f"{order.kind}: ")


def became(order: Order, summary: Summary) -> str:
    """What has become of an order; what a restart brought is the next attempt's to say, where there is one."""
    if order.outcome == "given" and order.kind in _RESTARTS and summary.attempt_number < len(summary.attempts):
        return f"given: see attempt {summary.attempt_number + 1}"
    return order.outcome


def earlier_orders(summary: Summary) -> str:
    """Which attempts before this one carried out orders, and where to see them; empty: none did."""
    earlier = [attempt for attempt in summary.attempts[: summary.attempt_number - 1] if attempt.orders]
    if not earlier:
        return ""
    numbers = [str(attempt.number) for attempt in earlier]
    orders = plural(sum(attempt.orders for attempt in earlier), "order")
    names = f"attempt{'s' if len(earlier) > 1 else ''} {listed(numbers)}"
    return f"Before this, {names} carried out {orders}: trimtab report ... --attempt {numbers[-1]} shows what and why."


def stood_still(order: Order) -> str:
    """How long training stood still for an order: mostly far less than a second."""
    seconds = order.cost_seconds
    return f"{seconds:.2f} s" if seconds is not None and seconds < 1 else duration(seconds)


def worth(order: Order) -> str:
    """What an order promised, brought and cost, in a sentence; empty where there is no figure."""
    steps = [
        f"{milliseconds(seconds)} ms {what}"
        for seconds, what in (
            (order.before_seconds, "before"),
            (order.predicted_seconds, "expected"),
            (order.measured_seconds, "measured after"),
        )
        if seconds is not None
    ]
    parts = [f"A step took {', '.join(steps)}"] if steps else []
    if order.cost_seconds is not None:
        moved = f", {data_size(order.moved_bytes)} moved" if order.moved_bytes else ""
        parts.append(f"training stood still for {stood_still(order)}{moved}")
    sentence = "; ".join(parts)
    return f"{sentence[:1].upper()}{sentence[1:]}." if sentence else ""


def settings_compared(training: Training) -> str:
    """What the changes of setting brought, from the first that was measured to the latest; empty without a change."""
    measured = [(setting, setting.step_seconds) for setting in training.settings if setting.step_seconds]
    if len(measured) < 2:
        return ""
    (first, before), (last, after) = measured[0], measured[-1]
    text = (
        f"A step takes {abs(after / before - 1):.1%} {'less' if after < before else 'more'} time than at first: "
        f"{milliseconds(after)} ms instead of {milliseconds(before)} ms"
    )
    if first.imbalance_ratio is not None and last.imbalance_ratio is not None:
        text += f"; the imbalance is {percent(last.imbalance_ratio)} instead of {percent(first.imbalance_ratio)}"
    return f"{text}."


def innermost(stack: Stack) -> str:
    """The last lines of a stack: where it is, and what stands there."""
    lines = [line.strip() for line in stack.text.splitlines() if line.strip()]
    return " ".join(lines[-2:])
