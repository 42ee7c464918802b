"""Faults that are made up, so that a site can see what its jobs' profiles say of real ones.

`fault` in node.toml, several separated by commas, or the sampler's option --fault, once for each:

    lost:INDEX@SECONDS          the device is lost
    hang:INDEX@SECONDS          the driver does not come back from a call for the device
    slow:INDEX@SECONDS=DELAY    the driver takes DELAY seconds for the device
    unsupported:COLUMN          no device has this figure
    driver                      the drivers cannot be used
    driver-hang                 the drivers do not answer at all
    die@SECONDS                 the sampler is killed
    disk@SECONDS                the journal's disk is full

INDEX is a device's index in the profile: the driver's own, of a task its rank. SECONDS count from the sampler's start;
a fault lasts until its end. Each is announced when the sampler starts, by an event that begins with "injected"; what
follows from it reads as it would if it were real.
"""

import errno
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from trimtab_slurm import journal
from trimtab_slurm.devices import Device, DeviceError, Discovery, Identity, Reading, Source

FORMS = {
    "lost": "lost:INDEX@SECONDS",
    "hang": "hang:INDEX@SECONDS",
    "slow": "slow:INDEX@SECONDS=DELAY",
    "unsupported": "unsupported:COLUMN",
    "driver": "driver",
    "driver-hang": "driver-hang",
    "die": "die@SECONDS",
    "disk": "disk@SECONDS",
}
"""Kind -> how it is written."""

_NUMBER = r"\d{1,9}(?:\.\d{1,9})?"
_PLACES = {"INDEX": r"(?P<index>\d{1,9})", "COLUMN": r"(?P<column>\w{1,99})", "SECONDS": f"(?P<seconds>{_NUMBER})"}
_PLACES["DELAY"] = f"(?P<delay>{_NUMBER})"


class InjectionError(ValueError):
    """A fault that is none: says which there are."""


@dataclass(frozen=True)
class Fault:
    """What is to go wrong."""

    text: str
    """As it was asked for."""
    kind: str
    index: int = -1
    column: str = ""
    seconds: float = 0.0
    delay: float = 0.0

    @property
    def announcement(self) -> str:
        """As it was asked for, and on what it depends."""
        if self.column:
            return f"{self.text}, of devices that have it"
        return self.text if self.index < 0 else f"{self.text}, if there is a device {self.index}"


def parse(text: str) -> Fault:
    """A fault as it is written. Raises InjectionError."""
    for kind, form in FORMS.items():
        pattern = re.sub("|".join(_PLACES), lambda place: _PLACES[place[0]], form)
        if match := re.fullmatch(pattern, text, re.ASCII):
            types = {"index": int, "column": str, "seconds": float, "delay": float}
            fault = Fault(text, kind, **{name: types[name](value) for name, value in match.groupdict().items()})
            _check_column(fault)
            return fault
    raise InjectionError(f"fault {text!r} is not known; choose from {', '.join(FORMS.values())}")


def _check_column(fault: Fault) -> None:
    """Raises InjectionError where no device has the column of a fault that has one."""
    from trimtab_slurm.devices import cpu, figures  # hardly ever asked for

    columns = {*figures.COLUMNS, *cpu.COLUMNS}
    if fault.column and fault.column not in columns:
        import difflib

        close = difflib.get_close_matches(fault.column, columns, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose from {', '.join(sorted(columns))}"
        raise InjectionError(f"fault {fault.text!r}: no device has {fault.column}; {hint}")


class Injection:
    """The faults of one sampler. What it wraps is left as it is where there are none."""

    def __init__(self, texts: Sequence[str]) -> None:
        """A fault that is none is said in the announcements, and left out: the job needs its profile all the same."""
        self.announcements: list[str] = []
        """For the events and for syslog: nobody is to take a fault of these for a real one."""
        self._faults: list[Fault] = []
        self._begin = math.inf
        for text in filter(None, map(str.strip, texts)):
            try:
                self._faults.append(parse(text))
                self.announcements.append(f"injected: {self._faults[-1].announcement}")
            except InjectionError as error:
                self.announcements.append(f"not injected: {error}")

    def start(self) -> None:
        """Count the seconds from now on."""
        self._begin = time.monotonic()
        for fault in self._of("die"):
            timer = threading.Timer(fault.seconds, os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()

    def writer(self, descriptor: int) -> journal.Writer:
        """What writes the journal."""
        (fault,) = self._of("disk")[:1] or (None,)
        return journal.Writer(descriptor) if fault is None else _FullDisk(descriptor, partial(self._begun, fault))

    def discover(self, discover: Callable[[], Discovery]) -> Callable[[], Discovery]:
        """What asks the drivers for the sources."""
        if not self._faults:
            return discover

        def injected() -> Discovery:
            if self._of("driver"):
                raise DeviceError("injected: the drivers cannot be used")
            if self._of("driver-hang"):
                _hang()
            found = discover()
            return replace(found, sources=tuple(_Source(source, self._faults, self._begun) for source in found.sources))

        return injected

    def _of(self, kind: str) -> list[Fault]:
        return [fault for fault in self._faults if fault.kind == kind]

    def _begun(self, fault: Fault) -> bool:
        return time.monotonic() - self._begin >= fault.seconds


class _FullDisk(journal.Writer):
    """A writer that has no space any more once `full` says so."""

    def __init__(self, descriptor: int, full: Callable[[], bool]) -> None:
        super().__init__(descriptor)
        self._full = full

    def _write(self, content: bytes) -> None:
        if self._full():
            raise OSError(errno.ENOSPC, f"injected: {os.strerror(errno.ENOSPC)}")
        super()._write(content)


class _Source:
    """A source whose devices have faults."""

    def __init__(self, source: Source, faults: Sequence[Fault], begun: Callable[[Fault], bool]) -> None:
        self.name = source.name
        self._source, self._faults, self._begun = source, faults, begun

    def devices(self) -> Sequence[Device]:
        return [_Device(device, self._faults, self._begun) for device in self._source.devices()]


class _Device:
    """A device with those of the faults that are its own."""

    def __init__(self, device: Device, faults: Sequence[Fault], begun: Callable[[Fault], bool]) -> None:
        self.identity: Identity = device.identity
        self._device, self._begun = device, begun
        self._faults = [
            fault for fault in faults if fault.index == self.identity.index or fault.column in self.identity.columns
        ]

    def sample(self) -> Reading:
        present = list(filter(self._begun, self._faults))
        for fault in present:
            if fault.kind == "lost":
                raise DeviceError(f"injected: {self.identity.uuid} is lost")
            if fault.kind == "hang":
                _hang()
            if fault.kind == "slow":
                time.sleep(fault.delay)
        reading = self._device.sample()
        absent = {fault.column: "injected: not supported" for fault in present if fault.column}
        if not absent:
            return reading
        values = {column: value for column, value in reading.values.items() if column not in absent}
        return replace(reading, values=values, absent={**reading.absent, **absent})


def _hang() -> None:
    """Never come back, as a call that waits for a device that has gone."""
    threading.Event().wait()
