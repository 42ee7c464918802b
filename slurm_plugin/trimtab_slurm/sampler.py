"""The sampler: one process for each attempt and node, which reads its devices every period until the epilog says stop.

From the prolog it inherits its journal, locked, as its one open descriptor, and SIGTERM blocked: a job may end before
Python has started. When sampling is over, the same process turns the journal into the node's part.
"""

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from trimtab_slurm import faults, journal
from trimtab_slurm.detach import KEPT_DESCRIPTOR
from trimtab_slurm.devices import Device, DeviceError, Discovery, discover
from trimtab_slurm.settings import load_or_default

NICENESS = 10
STATE_CHECK_SECONDS = 1.0
"""How often it is seen whether the attempt's state is still there."""

T = TypeVar("T")
Samples = list[tuple[int, float, Sequence[float]]]


class Sampler:
    """Samples the devices of one attempt into its journal."""

    def __init__(self, writer: journal.Writer, discovery: Discovery) -> None:
        self._writer = writer
        self._sources = discovery.sources
        self._records: dict[str, tuple[int, journal.DeviceRecord]] = {}
        self._faults: dict[str, str] = {}
        for note in discovery.notes:
            writer.event("fault", note)

    def round(self) -> None:
        """One sample of each device that there is. What fails becomes an event, once, and costs only its own sample.

        Raises OSError when the journal cannot be written to; the samples of this round are then lost.
        """
        samples: Samples = []
        for source in self._sources:
            for device in self._guarded(source.name, source.devices) or ():
                reading = self._guarded(device.identity.uuid, device.sample)
                if reading is not None:
                    number, columns = self._introduce(device, dict(reading.absent))
                    values = [reading.values.get(column, math.nan) for column in columns]
                    samples.append((number, time.monotonic(), values))
        if samples:
            self._writer.samples(samples)

    def _introduce(self, device: Device, absent: dict[str, str]) -> tuple[int, Sequence[str]]:
        """Record a device at its first reading, and whenever it gives new reasons for what is absent."""
        identity = device.identity
        number, record = self._records.get(identity.uuid, (len(self._records), None))
        if record is None:
            record = journal.DeviceRecord(
                identity.uuid, identity.kind, identity.model, identity.index, identity.driver, identity.columns, absent
            )
            self._writer.device(number, record)
            self._records[identity.uuid] = number, record
        elif not absent.keys() <= record.absent.keys():
            record.absent |= absent
            self._writer.device(number, record)
        return number, record.columns

    def _guarded(self, source: str, action: Callable[[], T]) -> T | None:
        """What a driver's action gives; None when it fails, which is recorded when it begins."""
        try:
            result = action()
        except Exception as error:  # noqa: BLE001  a library that fails must not end the samples of other devices
            text = str(error) if isinstance(error, DeviceError) else f"{source}: {type(error).__name__}: {error}"
            if self._faults.get(source) != text:
                self._faults[source] = text
                self._writer.event("fault", text)
            return None
        self._faults.pop(source, None)
        return result


def next_deadline(deadline: float, period: float, now: float) -> float:
    """The first of the moments `deadline` + n periods that is not past: samples that were missed are not made up."""
    return deadline + period * max(1, math.ceil((now - deadline) / period))


def sample_until_stopped(sampler: Sampler, period: float, state: Path) -> str:
    """Sample at once, every period, and once more when told to stop. Returns what told."""
    deadline, reason, trouble = time.monotonic(), "", ""
    while True:
        try:
            sampler.round()
            trouble = ""
        except OSError as error:  # a full disk, say: it may be possible again later
            if str(error) != trouble:
                trouble = str(error)
                faults.warn(f"sampler: {trouble}")
        if reason:
            return reason
        deadline = next_deadline(deadline, period, time.monotonic())
        reason = _wait(deadline, state)


def _wait(deadline: float, state: Path) -> str:
    """Sleep until the deadline, or less when told to stop; returns what told, or nothing."""
    while (left := deadline - time.monotonic()) > 0:
        if signal.sigtimedwait({signal.SIGTERM}, min(left, STATE_CHECK_SECONDS)):
            return "SIGTERM"
        if not state.is_dir():
            return f"{state} has vanished"
    return ""


def main() -> None:
    """The sampler's process, as the prolog starts it: JOURNAL STATE CONFIG."""
    faults.report_uncaught("sampler")
    path, state, config = map(Path, sys.argv[1:])
    os.umask(0o022)
    os.nice(NICENESS)
    recorded = journal.read(KEPT_DESCRIPTOR)
    writer = journal.Writer(KEPT_DESCRIPTOR)
    writer.event("sampler", f"started, one sample in {recorded.period_seconds:g} s")
    reason = sample_until_stopped(Sampler(writer, discover(recorded.attempt)), recorded.period_seconds, state)
    writer.event("sampler", f"stopped: {reason}")
    writer.end()

    from trimtab_slurm import collect  # late: numpy and h5py are not to lie in memory while the job runs

    settings, _ = load_or_default(config)
    collect.collect_locked(KEPT_DESCRIPTOR, path, Path(settings.profile_root))


if __name__ == "__main__":
    main()
