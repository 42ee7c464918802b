"""One attempt's controller: what its steps and messages come to, when to decide, and what became of it.

It does no I/O and has no clock: `trimtab run` tells it what happens, asks it what to do, and does that. Deciding itself
is `advising.advise`, a pure function, for a thread:

    sight = trimmer.see(step)                                       # likewise hear(message)
    if sight.due:
        question = trimmer.question(training, surroundings)
        advice = advise(question)                                   # in a thread
        sight = trimmer.given(advice)                               # then order or restart
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from trimtab.account import OrderRecord
from trimtab.balance.deciding.ledger import Given, Ledger
from trimtab.balance.deciding.situation import Fault, Toll
from trimtab.balance.detect import WARM_UP_STEPS
from trimtab.balance.measuring.steps import Step
from trimtab.protocol import Hello, Job, Message, Probe, Reshaped, Setting, Shape, setting_of
from trimtab.trimming.surroundings import Advice, Question, Surroundings
from trimtab.watching import Lookout
from trimtab.wording import milliseconds
from trimtab_slurm.contents import TrainingProfile


@dataclass(frozen=True)
class Sight:
    """What something that happened has shown, and asks for."""

    events: tuple[tuple[str, str], ...] = ()
    """Kind and sentence of each."""
    records: tuple[OrderRecord, ...] = ()
    """Of orders, new or changed."""
    probe: str = ""
    """Why the ranks shall be probed now; empty: they need not be."""
    due: bool = False
    """Whether a decision shall be made now."""


@dataclass(frozen=True)
class _Effect:
    """An order that is carried out: what it brings is still measured."""

    record: OrderRecord
    setting: Setting | None
    """What it makes of that of the ranks; None: it was a restart, and they run what it led to."""
    relieved_seconds: float | None = None
    """Where it is given against slow hardware: since when that is slow."""
    skip: int = WARM_UP_STEPS
    """Steps under it that are still to be left out."""
    seconds: tuple[float, ...] = ()
    """Of the steps that count."""


class Trimmer:
    """The controller of an attempt. Times are UTC, seconds."""

    def __init__(self, job: Job, shape: Shape, title: str = "This attempt") -> None:
        self.setting = setting_of(job, shape)
        """What the ranks run."""
        self._policy, self._title, self._replicas = job.balance, title, shape.data
        self._lookout = Lookout(job.balance)
        self._ledger = Ledger()
        self._toll = Toll()
        self._first_step = 0  # under the setting in force
        self._ranks: set[int] = set()
        self._unprobed: set[int] = set()  # ranks whose probe is awaited
        self._owed = False  # a decision, as soon as all that it needs is there
        self._deciding = False
        self._settled_seconds = 0.0  # until when the ledger has counted what the fault costs
        self._relieved_seconds: float | None = None  # since when hardware is slow that the setting in force relieves
        self._windows = 0
        self._effect: _Effect | None = None
        self._told: set[tuple[str, Fault, str]] = set()
        self._numbers = 0

    @property
    def orders(self) -> tuple[Given, ...]:
        """All that were given, those of earlier attempts first."""
        return self._ledger.orders

    def restored(self, orders: Sequence[Given], *, restarted: bool) -> None:
        """Remember the orders of earlier attempts: they count for the rest after an order, and as tried.

        What a restart has brought shows in this attempt if it is what was `restarted` for. Otherwise Slurm or the user
        has begun another one, and nothing is known of what was asked for.
        """
        self._ledger = replace(self._ledger, orders=(*orders, *self._ledger.orders))
        last = orders[-1] if orders else None
        if last and last.fault.cause == "hardware" and not last.kind.restarts and not last.refused:
            self._relieved_seconds = last.time_seconds
        if restarted and last and last.kind.restarts and last.measured_gain_ratio is None and not last.refused:
            self._numbers += 1
            record = OrderRecord(
                number=self._numbers,
                step=0,
                time_seconds=last.time_seconds,
                kind=str(last.kind),
                before="",
                after=str(self.setting),
                reason="asked for in the attempt before",
                before_seconds=last.step_seconds,
                predicted_seconds=last.step_seconds * (1 - last.promised_gain_ratio),
                outcome="carried out",
            )
            self._effect = _Effect(record, setting=None)

    def see(self, step: Step) -> Sight:
        """The next whole step."""
        if step.step < self._first_step:
            return Sight()  # of the setting before, and late
        seen = self._lookout.see(step, self.setting)
        if seen.probe:
            self._unprobed = set(self._ranks)
        elif seen.window:
            self._unprobed.clear()  # what has not come within a window does not come
        if seen.window:
            self._windows += 1
            self._owed = self._lookout.detection.triggered or self._looks
        measured = self._measure(step)
        events = (("imbalance", seen.event),) if seen.event else ()
        return Sight(
            events=(*events, *measured.events),
            records=measured.records,
            probe=seen.probe or "",
            due=self._is_due(step.time_seconds),
        )

    def hear(self, message: Message) -> Sight:
        """A message of a rank; those of which it takes no notice show nothing."""
        match message:
            case Hello():
                self._ranks.add(message.rank)
            case Probe():
                self._unprobed.discard(message.rank)
            case Reshaped():
                return self._reshaped(message)
        return Sight()

    def question(self, training: TrainingProfile, surroundings: Surroundings) -> Question:
        """What is to be decided, now that a decision is due. `training` is all that was recorded until now."""
        self._owed, self._deciding = False, True
        return Question(
            title=self._title,
            training=training,
            setting=self.setting,
            detection=self._lookout.detection,
            settled_seconds=self._settled_seconds,
            relieved_seconds=self._relieved_seconds,
            ledger=self._ledger,
            toll=self._toll,
            surroundings=surroundings,
        )

    def given(self, advice: Advice) -> Sight:
        """Take in what was decided; what it asks for is then to be carried out.

        The same is told once for each cause and place; what is only told, is not counted as given.
        """
        self._deciding = False
        if not advice.asked:
            return Sight()
        self._ledger, self._settled_seconds = advice.ledger, advice.time_seconds
        decision, situation = advice.answer.decision, advice.answer.case.situation
        kind = str(decision.order.kind) if decision.order else ""
        if not advice.acts:
            key = kind, situation.fault, decision.order.change if decision.order else ""
            if key in self._told:
                return Sight()
            self._told.add(key)
        elif given := decision.given(situation):
            self._ledger = self._ledger.given(given)
        if advice.record is None:
            return Sight(events=(("decision", advice.sentence),))
        self._numbers += 1
        record = replace(advice.record, number=self._numbers)
        if advice.order and advice.order.setting:
            fault_seconds = (
                situation.now_seconds - situation.lasting_seconds if situation.fault.cause == "hardware" else None
            )
            self._effect = _Effect(record, advice.order.setting, fault_seconds)
        return Sight(events=(("order", advice.sentence),), records=(record,))

    def undecided(self, reason: str) -> Sight:
        """No decision could be made: why, in a sentence. The next window asks again."""
        self._deciding = False
        key = "undecided", Fault(), re.sub(r"[\d.,]+", "", reason)
        if key in self._told:
            return Sight()
        self._told.add(key)
        return Sight(events=(("decision", f"What to change cannot be worked out: {reason}"),))

    def refused(self, record: OrderRecord, reason: str) -> Sight:
        """An order could not be carried out: it is not tried again."""
        self._effect = None
        self._ledger = self._ledger.refused()
        return Sight(
            events=(("order", f"{record.kind} was refused: {reason}"),),
            records=(replace(record, outcome=f"refused: {reason}"),),
        )

    def _reshaped(self, message: Reshaped) -> Sight:
        effect = self._effect
        ordered = effect is not None and effect.setting is not None
        if message.refused:
            return self.refused(effect.record, message.refused) if effect and ordered else Sight()
        self.setting, self._first_step, self._owed = message.setting, message.step + 1, False
        moving_seconds = message.moved_bytes / self._toll.moved_bytes_per_second
        self._toll = replace(self._toll, reshape_seconds=max(0.0, message.seconds - moving_seconds))
        if effect is None:
            return Sight()
        record = replace(effect.record, step=self._first_step, after=str(message.setting))
        self._effect = replace(effect, record=record, skip=WARM_UP_STEPS, seconds=())
        if not ordered:
            return Sight()
        record = replace(
            record, cost_seconds=message.seconds, moved_bytes=float(message.moved_bytes), outcome="carried out"
        )
        self._effect, self._relieved_seconds = replace(self._effect, record=record), effect.relieved_seconds
        return Sight(records=(record,))

    def _measure(self, step: Step) -> Sight:
        """What the last order has brought, once a window of steps has shown it."""
        effect = self._effect
        if effect is None or effect.setting not in (None, self.setting):
            return Sight()
        if effect.skip:
            record = replace(effect.record, step=effect.record.step or step.step)
            self._effect = replace(effect, record=record, skip=effect.skip - 1)
            return Sight()
        seconds = (*effect.seconds, step.duration_seconds)
        if len(seconds) < self._policy.window_steps:
            self._effect = replace(effect, seconds=seconds)
            return Sight()
        self._effect = None
        record = replace(effect.record, measured_seconds=median(seconds))
        self._ledger = self._ledger.measured(median(seconds))
        return Sight(events=(("reshape", _effect_sentence(record)),), records=(record,))

    @property
    def _looks(self) -> bool:
        """Whether a level run is looked at, too, every few windows: uneven data may even out over the steps of one, and
        hardware that was relieved no longer sets stages apart."""
        possible = self._replicas > 1 or self._relieved_seconds is not None
        return possible and self._windows % self._policy.trigger_windows == 0

    def _is_due(self, now_seconds: float) -> bool:
        waits = self._deciding or self._effect or self._unprobed
        return self._owed and not waits and not self._ledger.cooling_seconds(now_seconds, self._policy)


def _effect_sentence(record: OrderRecord) -> str:
    before, promised, measured = (
        milliseconds(seconds) for seconds in (record.before_seconds, record.predicted_seconds, record.measured_seconds)
    )
    return f"{record.kind}: {before} -> {promised} ms a step were promised, {measured} ms are measured"
