"""Threads that ask the drivers, since any call of a driver may hang, for ever and beyond the reach of signals.

A thread asks when it is told to, puts what it was answered into a queue that all threads share, and waits for the next
time. Nobody waits for a thread longer than they choose to. A call that holds Python's interpreter lock while it hangs
would hold up all threads: a driver's library is to be called, and loaded, by what lets go of it.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from trimtab_slurm.devices import Device, DeviceError, Discovery, Identity, Source


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
    sample: Sample | None = None
    discovery: Discovery | None = None


class Reader:
    """A thread that asks one source, or for the sources."""

    def __init__(self, name: str, action: Callable[[], Sequence[Outcome]], answers: "SimpleQueue[Answer]") -> None:
        """`action` asks, and never raises."""
        self.name = name
        self.asked: float | None = None
        """When it was asked what it has not answered yet, by the monotonic clock. The asker's, as the next."""
        self.silent = False
        """Whether it has been said that it does not answer."""
        self._action = action
        self._answers = answers
        self._asked: SimpleQueue[None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def ask(self) -> None:
        """Have it ask; not to be done again before it has answered."""
        self.asked = time.monotonic()
        self._asked.put(None)

    def _run(self) -> None:
        while True:
            self._asked.get()
            self._answers.put((self, self._action()))


Answer = tuple[Reader, Sequence[Outcome]]


def ask_drivers(name: str, discover: Callable[[], Discovery]) -> list[Outcome]:
    """Ask which sources there are."""
    try:
        return [Outcome(name, discovery=discover())]
    except Exception as error:  # noqa: BLE001  the sampler goes on, and says so
        return [Outcome(name, fault=_described(name, error))]


def ask_source(source: Source) -> list[Outcome]:
    """Ask a source for its devices, and each of them for its figures. One that fails costs its own figures alone."""
    try:
        devices = source.devices()
    except Exception as error:  # noqa: BLE001  a library that fails must not end the samples of other devices
        return [Outcome(source.name, fault=_described(source.name, error))]
    return [Outcome(source.name), *map(_ask_device, devices)]


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
        return Outcome(identity.uuid, sample=sample)
    except Exception as error:  # noqa: BLE001  as above
        return Outcome(identity.uuid, fault=_described(identity.uuid, error))


def _described(name: str, error: Exception) -> str:
    return str(error) if isinstance(error, DeviceError) else f"{name}: {type(error).__name__}: {error}"
