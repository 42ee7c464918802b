"""Threads that ask the drivers, since any call of a driver may hang, for ever and beyond the reach of signals.

One thread asks all sources, one after another. As soon as one of them keeps it waiting, it is left to that one, and
another thread takes its place: there is one thread for each call that hangs, and one that works. A thread for each
source would cost three times the CPU: all of them want the interpreter's lock back after every call.

A call that hangs without letting go of that lock would stop every thread. The functions that ctypes calls let go of it.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from trimtab_slurm.devices import Device, DeviceError, Discovery, Identity, Source

PATIENCE_SECONDS = 0.02
"""How long a source may keep a thread from asking the others. A GPU's figures take milliseconds where its driver need
not wait for some of them: else GPUs are better read at the same time."""


@dataclass(frozen=True)
class Sample:
    """A device's reading, ready to be written."""

    identity: Identity
    monotonic: float
    """When the device had answered."""
    values: tuple[float, ...]
    """In the order of the identity's columns; NaN where there is none."""
    absent: dict[str, str]
    """Column -> why there is none."""
    processes: dict[int, float] | None
    """Process id -> bytes of the device's memory; None: not known which."""
    events: tuple[tuple[str, str], ...]
    """Kind and text."""


@dataclass(frozen=True)
class Outcome:
    """What came of asking a device, a source which devices it has, or the drivers which sources there are."""

    name: str
    fault: str = ""
    """Why nothing came of it."""
    identity: Identity | None = None
    """Of the device that it concerns."""
    sample: Sample | None = None
    discovery: Discovery | None = None


class Question:
    """What a driver is asked again and again."""

    def __init__(self, name: str, ask: Callable[[], Sequence[Outcome]]) -> None:
        """`ask` may hang, but never raises."""
        self.name = name
        self.ask = ask
        self.asked = -math.inf
        """When it was put the last time, by the monotonic clock."""
        self.silent = False
        """Whether its answer is waited for no more: set by who puts it, until it is answered."""
        self.put_again = False
        """Whether it has been put again before it was answered."""


@dataclass(frozen=True)
class Answer:
    """To a question, and how long it took to be noticed."""

    question: Question
    outcomes: Sequence[Outcome]
    seconds: float
    late: bool
    """Whether the question had been put again meanwhile."""


class Askers:
    """The threads, as seen by the one that puts questions and collects answers."""

    def __init__(self) -> None:
        self.open: list[Question] = []
        """Those put and not answered yet."""
        self._queues = _Queues()
        self._asker = _Asker(self._queues)

    def put(self, question: Question) -> None:
        """Have it asked, unless its last answer is still to come."""
        if question in self.open:
            question.put_again = True
        else:
            question.asked = time.monotonic()
            self.open.append(question)
            self._queues.questions.put(question)

    def answers(self, limit_seconds: float) -> list[Answer]:
        """What has been answered, when all is that is waited for, or the limit has passed."""
        found: list[Answer] = []
        deadline = time.monotonic() + limit_seconds
        while True:
            while self._queues.answers:
                question, outcomes = self._queues.answers.popleft()
                found.append(Answer(question, outcomes, time.monotonic() - question.asked, question.put_again))
                self.open.remove(question)
                question.silent = question.put_again = False
            left = deadline - time.monotonic()
            if left <= 0 or all(question.silent for question in self.open):
                return found
            if self._asker.stuck and not self._queues.questions.empty():
                self._asker.replaced = True
                self._asker = _Asker(self._queues)
            with suppress(Empty):
                self._queues.pauses.get(timeout=min(left, PATIENCE_SECONDS))


class _Queues:
    """What the threads share."""

    def __init__(self) -> None:
        self.questions: SimpleQueue[Question] = SimpleQueue()
        self.answers: deque[tuple[Question, Sequence[Outcome]]] = deque()
        self.pauses: SimpleQueue[None] = SimpleQueue()
        """An item for each time that a thread found no further question: one wake-up for all answers before it."""


class _Asker:
    """One thread, which asks until it has been replaced: a call that hangs then ends it, if it ever returns."""

    def __init__(self, queues: _Queues) -> None:
        self.replaced = False
        self._queues = queues
        self._begun = math.inf
        """Since when it has been asking; inf: it is not."""
        threading.Thread(target=self._run, name="asker", daemon=True).start()

    @property
    def stuck(self) -> bool:
        return time.monotonic() - self._begun > PATIENCE_SECONDS

    def _run(self) -> None:
        while not self.replaced:
            question = self._queues.questions.get()
            self._begun = time.monotonic()
            outcomes = question.ask()
            self._begun = math.inf
            self._queues.answers.append((question, outcomes))
            if self._queues.questions.empty():
                self._queues.pauses.put(None)


def ask_drivers(name: str, discover: Callable[[], Discovery]) -> list[Outcome]:
    """Ask which sources there are."""
    try:
        return [Outcome(name, discovery=discover())]
    except Exception as error:  # noqa: BLE001  the sampler goes on, and says so
        return [Outcome(name, fault=_described(name, error))]


def ask_source(source: Source) -> list[Outcome]:
    """Ask a source for its devices, and each of them for its figures. One that fails costs its own figures alone."""
    name = f"devices of {source.name}"  # which may be the name of a device too
    try:
        devices = source.devices()
    except Exception as error:  # noqa: BLE001  a library that fails must not end the samples of other devices
        return [Outcome(name, fault=_described(source.name, error))]
    return [Outcome(name), *map(_ask_device, devices)]


def _ask_device(device: Device) -> Outcome:
    identity = device.identity
    try:
        reading = device.sample()
        sample = Sample(
            identity=identity,
            monotonic=time.monotonic(),
            values=tuple(float(reading.values.get(column, math.nan)) for column in identity.columns),
            absent=dict(reading.absent),
            processes=None if reading.processes is None else dict(reading.processes),
            events=tuple(reading.events),
        )
        return Outcome(identity.uuid, identity=identity, sample=sample)
    except Exception as error:  # noqa: BLE001  as above
        return Outcome(identity.uuid, fault=_described(identity.uuid, error), identity=identity)


def _described(name: str, error: Exception) -> str:
    return str(error) if isinstance(error, DeviceError) else f"{name}: {type(error).__name__}: {error}"
