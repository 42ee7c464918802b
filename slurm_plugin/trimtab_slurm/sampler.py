"""One process per attempt and node: samples the attempt's devices into its journal, until it is told to stop.

`python -m trimtab_slurm.sampler STATE_FILE CONFIG`, started by the prolog. It knows no Slurm command, and ends on
SIGTERM, or when its state file is gone. What comes then, journal to profile, is `collect`'s, in this same process, so
that no hook has to wait for it.
"""

import math
import os
import signal
import sys
import syslog
import time
from pathlib import Path

from trimtab_slurm import attempt, collect, settings
from trimtab_slurm.attempt import Attempt
from trimtab_slurm.devices import Device, DeviceGone
from trimtab_slurm.devices.cpu import TaskFinder
from trimtab_slurm.journal import Journal

STOP = signal.SIGTERM
"""The prolog blocks it before it starts us, so that none is lost: we take it between samples."""


class Sampler:
    """The devices of one attempt, and the journal that takes their samples."""

    def __init__(self, sampled: Attempt, journal: Journal, period_seconds: float) -> None:
        self._journal = journal
        self._period_seconds = period_seconds
        self._finder = TaskFinder(sampled)
        self._devices: list[Device] = []
        self._gone: set[int] = set()
        clocks = {"realtime_seconds": time.time(), "monotonic_seconds": time.monotonic()}
        body = {"attempt": attempt.to_json(sampled), "sampler_period_seconds": period_seconds, **clocks}
        journal.write("A", body)
        if sampled.gpus:
            held = ", ".join(sampled.gpus)
            self.event("driver", f"no GPU driver is read yet: {len(sampled.gpus)} GPUs held ({held}), not measured")

    def event(self, kind: str, text: str) -> None:
        """Note something that is no figure."""
        self._journal.write("V", {"time_seconds": time.time(), "kind": kind, "text": text})

    def run(self, state_file: Path) -> None:
        """Sample at fixed moments until the stop; the first and the last sample are always taken."""
        due = time.monotonic()
        while True:
            self.sample()
            due = max(due + self._period_seconds, time.monotonic())
            if signal.sigtimedwait({STOP}, max(0.0, due - time.monotonic())) or not state_file.exists():
                break
        self.sample()
        self._journal.write("E", {"time_seconds": time.time()})

    def sample(self) -> None:
        """One sample of every device that is there."""
        for found in self._finder.new_devices():
            self._journal.write(
                "D",
                {
                    "uuid": found.uuid,
                    "kind": found.kind,
                    "model": found.model,
                    "index": found.index,
                    "driver": found.driver,
                    "columns": list(found.columns),
                },
            )
            self._devices.append(found)
        for number, device in enumerate(self._devices):
            try:
                values = device.sample()
            except DeviceGone as gone:
                if number not in self._gone:
                    self._gone.add(number)
                    self.event("device", f"{device.uuid}: {gone}")
                continue
            self._gone.discard(number)
            self._journal.sample(number, time.time(), [float(value) for value in values] or [math.nan])


def main(state_file: Path, config: Path) -> None:
    """Sample, then make the node's part of the profile."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {STOP})
    os.nice(5)
    node_settings = settings.load(config) if config.exists() else settings.NodeSettings()
    sampled = attempt.from_json(state_file.read_text(encoding="utf-8"))
    path = collect.journal_path(node_settings, sampled)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    journal = Journal(path)
    Sampler(sampled, journal, node_settings.sampler_period_seconds).run(state_file)
    journal.close()
    state_file.unlink(missing_ok=True)
    state_file.with_suffix(".pid").unlink(missing_ok=True)
    collect.collect_node(path, node_settings)


if __name__ == "__main__":
    syslog.openlog("trimtab-sampler", syslog.LOG_PID, syslog.LOG_DAEMON)
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    except Exception as error:  # noqa: BLE001 - outermost: its descriptors are closed, so syslog is all that is left
        syslog.syslog(syslog.LOG_ERR, f"{sys.argv[1:]}: {type(error).__name__}: {error}")
        sys.exit(1)
