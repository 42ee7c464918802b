"""Which order to give, or none, and why: every candidate weighed by what it brings, what it costs and how sure it is.

An order must save `least_gain_ratio` of a step, and over its horizon `gain_over_cost` times its cost. What moves in
place is ordered at once. What restarts the job is ordered when the loss since the trigger has reached its cost: whoever
rents until the rent paid equals the price, and buys then, never pays more than twice what the best choice in
hindsight would have cost (ski rental; Karlin, Manasse, Rudolph and Sleator, 1988, "Competitive snoopy caching").
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from trimtab.balance.deciding.candidates import candidates
from trimtab.balance.deciding.ledger import Given, Ledger
from trimtab.balance.deciding.outlook import Candidate
from trimtab.balance.deciding.situation import Kind, Situation, kept_nodes
from trimtab.protocol import Balance

_OF_THE_PLAN = frozenset({Kind.LAYERS, Kind.MICROBATCHES, Kind.RECOMPUTE, Kind.SCHEDULE, Kind.REQUEUE})
REMEDIES = {
    "intrinsic": _OF_THE_PLAN,
    "hardware": frozenset({Kind.LAYERS, Kind.MICROBATCHES, Kind.RECOMPUTE, Kind.EXCLUDE, Kind.FEWER}),
    "data": frozenset({Kind.REPACK}),
    "unknown": frozenset[Kind](),
    "none": _OF_THE_PLAN,
}
"""What helps against each cause. Against an unknown one nothing is tried."""

LEAST_CONFIDENCE = 0.6
"""In a cause, below which it counts as not sure."""
NO_ROOM = "a stage needs more memory than it has"
FITS_ALONE = "fits into memory, which the current plan does not"


class Verdict(StrEnum):
    """What became of a candidate. Where nothing is ordered, it is doing nothing that is chosen."""

    CHOSEN = "chosen"
    WORTH = "worth it"
    NOT_CHOSEN = "not chosen"
    WAITS = "waits"
    TOO_LITTLE = "too little"
    TOO_DEAR = "too dear"
    FAILED = "failed before"
    BESIDE = "beside the cause"
    NO_ROOM = "does not fit"
    UNSURE = "unsure"
    IMPOSSIBLE = "not possible"


@dataclass(frozen=True, kw_only=True)
class Considered(Candidate):
    """A candidate and its verdict."""

    horizon_seconds: float | None = None
    """How long its gain is counted."""
    net_seconds: float | None = None
    """Gain over the horizon, less the cost."""
    verdict: Verdict
    reason: str


@dataclass(frozen=True)
class Decision:
    """What to do, and everything that was considered."""

    order: Considered | None
    """None: nothing."""
    considered: tuple[Considered, ...]
    """One of each kind."""
    reason: str
    """Why this one, or why none."""
    dry_run: bool
    """Whether the order is only told."""
    loss_ratio: float = 0.0
    """Share of the time that goes by which the best restart would save: what a ledger endures until it is ordered."""

    def given(self, situation: Situation) -> Given | None:
        """The order as a ledger keeps it; None where there is none, or it is only told."""
        order = self.order
        if order is None or order.gain_ratio is None or self.dry_run:
            return None
        step_seconds = situation.step_seconds or self.considered[0].predicted_step_seconds or 0.0
        return Given(situation.now_seconds, order.kind, situation.fault, step_seconds, order.gain_ratio)


def decide(situation: Situation, policy: Balance, ledger: Ledger) -> Decision:
    """Weigh everything that could be done."""
    return weigh(candidates(situation), situation, policy, ledger)


def weigh(found: Sequence[Candidate], situation: Situation, policy: Balance, ledger: Ledger) -> Decision:
    """Choose among candidates, one of each kind.

    Nothing is ordered unless something asks for it (an imbalance, a user, idle devices, a slow link), within the rest
    after an order, or beyond the orders of an hour.
    """
    stuck = situation.step_seconds is None and any(one.kind is Kind.NOTHING and not one.fits for one in found)
    considered = tuple(_weighed(candidate, situation, policy, ledger, stuck=stuck) for candidate in found)
    worth = [one for one in considered if one.verdict is Verdict.WORTH]
    hindrance = _hindrance(situation, policy, ledger)
    best = None if hindrance else max(worth, key=_net_seconds, default=None)
    kind = best.kind if best else Kind.NOTHING
    if best or not stuck:
        considered = tuple(replace(one, verdict=Verdict.CHOSEN) if one.kind is kind else one for one in considered)
    order = next((one for one in considered if one.kind is kind and kind is not Kind.NOTHING), None)
    return Decision(
        order=order,
        considered=considered,
        reason=_reason(order, considered, hindrance, situation, stuck=stuck),
        dry_run=policy.dry_run,
        loss_ratio=_loss_ratio(considered),
    )


def asks(situation: Situation, policy: Balance) -> str:
    """Why a better plan is looked for; empty: nothing asks for one."""
    shifted = situation.plan.microbatches != situation.plan.even_microbatches  # then healthy replicas are apart
    if situation.triggered and (situation.fault.cause != "none" or shifted):
        return "the stages are apart"
    if situation.relieved and situation.fault.cause == "hardware":
        return "hardware is slow, though what could be was moved away from it"
    if situation.live and situation.fault.cause == "data" and not doubt_of_cause(situation):
        return "the sequences are uneven"
    slow = [
        stage for stage, link in enumerate(situation.hardware.links) if link.latency_seconds > policy.slow_link_seconds
    ]
    if slow:
        return f"the link after stage {slow[0]} is slow"
    utilization = situation.utilization_ratio
    if utilization is not None and utilization < policy.least_utilization_ratio:
        return f"the devices are used {utilization:.0%}, below {policy.least_utilization_ratio:.0%}"
    return "a user asks" if situation.asked else ""


def doubt_of_cause(situation: Situation) -> str:
    """That the cause is not sure, where a remedy against it would have to rely on it; empty: it is."""
    confidence = situation.confidence
    if confidence is None or confidence >= LEAST_CONFIDENCE or situation.fault.cause in ("none", "unknown"):
        return ""
    return f"the cause is not sure ({confidence:.0%})"


def _weighed(candidate: Candidate, situation: Situation, policy: Balance, ledger: Ledger, *, stuck: bool) -> Considered:
    """`stuck`: the current plan has not run, and cannot, so whatever can is better."""
    gain_ratio, cost_seconds = candidate.gain_ratio, candidate.cost_seconds
    if gain_ratio is None or cost_seconds is None:
        return Considered(**vars(candidate), verdict=Verdict.IMPOSSIBLE, reason=candidate.obstacle)
    loss_seconds = ledger.loss_of(situation.fault)
    paid = loss_seconds >= (cost_seconds if candidate.kind.restarts else situation.toll.restart_seconds)
    horizon_seconds = _horizon_seconds(situation, policy, paid)
    brought_seconds = gain_ratio * horizon_seconds
    brought, cost, loss = (_in_words(seconds) for seconds in (brought_seconds, cost_seconds, loss_seconds))
    price = f"and costs {cost}" if cost_seconds else "at no cost"
    verdict, reason = Verdict.WORTH, f"saves {brought} of the next {_in_words(horizon_seconds)}, {price}"
    if candidate.obstacle:
        verdict, reason = Verdict.IMPOSSIBLE, candidate.obstacle
    elif impossible := _no_restart(candidate, situation):
        verdict, reason = Verdict.IMPOSSIBLE, impossible
    elif candidate.kind is Kind.NOTHING:
        held_against = "what everything else is held against"
        verdict, reason = (
            Verdict.NOT_CHOSEN,
            held_against if candidate.fits else f"{held_against}, but {_full(candidate)}",
        )
        verdict = Verdict.NO_ROOM if stuck else verdict
    elif candidate.kind not in REMEDIES[situation.fault.cause]:
        verdict, reason = Verdict.BESIDE, f"does not help against a cause that is {situation.fault.cause}"
    elif candidate.doubt:
        verdict, reason = Verdict.UNSURE, candidate.doubt
    elif situation.live and doubt_of_cause(situation):
        verdict, reason = Verdict.UNSURE, doubt_of_cause(situation)
    elif not candidate.fits:
        verdict, reason = Verdict.NO_ROOM, _full(candidate)
    elif stuck:
        verdict, reason = Verdict.WORTH, FITS_ALONE
    elif candidate.kind in ledger.failed(situation.fault):
        verdict, reason = Verdict.FAILED, "brought less than half of what was promised, against the same cause"
    elif gain_ratio < policy.least_gain_ratio:
        verdict, reason = Verdict.TOO_LITTLE, f"saves less than {policy.least_gain_ratio:.0%} of a step"
    elif brought_seconds <= policy.gain_over_cost * cost_seconds:
        verdict = Verdict.TOO_DEAR
        reason = f"saves {brought}, not {policy.gain_over_cost:g} times the cost of {cost}"
    elif candidate.kind.restarts and loss_seconds < cost_seconds:
        verdict, reason = Verdict.WAITS, f"the loss so far is {loss}, its cost {cost}"
    return Considered(
        **vars(candidate),
        horizon_seconds=horizon_seconds,
        net_seconds=brought_seconds - cost_seconds,
        verdict=verdict,
        reason=reason,
    )


def _no_restart(candidate: Candidate, situation: Situation) -> str:
    """Why the job cannot begin again as a candidate needs it; empty: it can, or need not."""
    if not candidate.kind.restarts or situation.no_restart:
        return situation.no_restart if candidate.kind.restarts else ""
    nodes = candidate.nodes or len(situation.allocation)
    return "" if kept_nodes(situation.allocation, candidate.exclude, nodes) else situation.no_requeue


def _horizon_seconds(situation: Situation, policy: Balance, paid: bool) -> float:
    """How long a gain is counted: to the end of the run, and where that is not known, as long again as it has lasted.

    A fault of the hardware may pass: it counts for `hardware_horizon_seconds`, until it has lasted as long, or has cost
    as much as a restart (`paid`): then whatever helps is counted as long as a restart is.
    """
    new_seconds = policy.hardware_horizon_seconds
    left_seconds = situation.seconds_left
    if left_seconds is None:
        return max(new_seconds, situation.lasting_seconds)
    lasts = paid or situation.lasting_seconds >= new_seconds
    return left_seconds if lasts or situation.fault.cause != "hardware" else min(left_seconds, new_seconds)


def _hindrance(situation: Situation, policy: Balance, ledger: Ledger) -> str:
    """Why nothing is ordered, whatever it would bring; empty: something may be."""
    if not asks(situation, policy):
        return "nothing asks for a change"
    if situation.seconds_left is not None and situation.seconds_left <= 0:
        return "no step is left that could be faster"
    if resting := ledger.cooling_seconds(situation.now_seconds, policy):
        return f"the last order's effect is still measured, for {resting:.0f} s"
    if ledger.orders_within_hour(situation.now_seconds) >= policy.orders_per_hour:
        return f"{policy.orders_per_hour} orders were given within an hour"
    return ""


def _reason(
    order: Considered | None, considered: Sequence[Considered], hindrance: str, situation: Situation, *, stuck: bool
) -> str:
    if order is not None:
        doubt = doubt_of_cause(situation)
        return f"{doubt}: {order.kind}: {order.reason}" if doubt else f"{order.kind}: {order.reason}"
    if stuck:
        return _no_way(considered, situation)
    if hindrance:
        return hindrance
    if situation.fault.cause == "unknown":
        return "the cause is unknown: nothing is tried against it"
    waiting = [one for one in considered if one.verdict is Verdict.WAITS]
    if waiting:
        return f"{waiting[0].kind} waits: {waiting[0].reason}"
    return _nothing_worth(considered, situation)


def _no_way(considered: Sequence[Considered], situation: Situation) -> str:
    """Why nothing can run, and the way out."""
    now = next(one for one in considered if one.kind is Kind.NOTHING)
    requeue = next(one for one in considered if one.kind is Kind.REQUEUE)
    if situation.shapes is not None and situation.shapes.best is None:
        others = "no shape on these GPUs fits; take more GPUs, or GPUs with more memory"
    else:
        others = f"{requeue.kind}: {requeue.reason}; take more GPUs, or smaller microbatches"
    return f"does not fit: {_full(now)}; {others}"


def _nothing_worth(considered: Sequence[Considered], situation: Situation) -> str:
    """Why nothing is chosen, by what came nearest to it: of what helps against the cause, if anything does."""
    possible = [one for one in considered if one.kind is not Kind.NOTHING and one.verdict is not Verdict.IMPOSSIBLE]
    possible = [one for one in possible if one.verdict is not Verdict.BESIDE] or possible
    nearest = max(possible, key=lambda one: one.gain_ratio or 0.0, default=None)
    if situation.unsplit and (nearest is None or nearest.verdict is not Verdict.TOO_DEAR):
        return f"the layers cannot be moved: {situation.unsplit}"
    if nearest is None:
        return "there is nothing else that is possible"
    text = {
        Verdict.UNSURE: "nothing is sure to help",
        Verdict.TOO_LITTLE: "nothing helps enough",
        Verdict.TOO_DEAR: "nothing is worth its cost",
    }
    told = [nearest]
    if nearest.verdict is Verdict.UNSURE:  # what is sure, and how little that would be, is worth a word, too
        sure = [one for one in possible if one.verdict is Verdict.TOO_LITTLE]
        told = [*sorted(sure, key=lambda one: -(one.gain_ratio or 0.0))[:1], nearest]
    reasons = [f"{one.kind}: {one.reason}" for one in told]
    if math.isfinite(situation.hardware.stages_at_once):
        reasons.append("the ranks share cores, and keep them busy whichever stage they work for")
    return "; ".join([text.get(nearest.verdict, "nothing helps"), *reasons])


def _full(candidate: Candidate) -> str:
    return str(candidate.room) if candidate.room else NO_ROOM


def _in_words(seconds: float) -> str:
    """In the unit in which it is a number that one can read."""
    units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
    unit, size = next((each for each in units if abs(seconds) >= each[1]), units[-1 if seconds else 0])
    digits = 1 if abs(seconds) < 100 * size else 0
    return f"{seconds / size:,.{digits}f} {unit}"


def _loss_ratio(considered: Sequence[Considered]) -> float:
    awaited = (Verdict.WORTH, Verdict.CHOSEN, Verdict.WAITS, Verdict.TOO_DEAR)
    restarts = [one.gain_ratio or 0.0 for one in considered if one.kind.restarts and one.verdict in awaited]
    return max(restarts, default=0.0)


def _net_seconds(considered: Considered) -> float:
    return considered.net_seconds or 0.0
