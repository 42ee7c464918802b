"""The sampler: one process for each attempt and node, which has its devices read every period until told to stop.

From the prolog it inherits its journal, locked, as its one open descriptor, and SIGTERM blocked: a job may end before
Python has started. Drivers are asked by threads (`asking`); what has come in within a round's limit is written at
once, and what comes later with the time at which it was measured. When sampling is over, a fresh process turns the
journal into the node's part: a call that hangs in this one can hold up neither that nor its own end.
"""

import getopt
import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from trimtab_slurm import directories, faults, journal
from trimtab_slurm.asking import Answer, Askers, Outcome, Question, Sample, ask_drivers, ask_source
from trimtab_slurm.detach import KEPT_DESCRIPTOR
from trimtab_slurm.devices import Discovery, Identity, discover
from trimtab_slurm.injection import Injection
from trimtab_slurm.settings import load_or_default

LIMIT_SECONDS = 0.5
"""How long the first round and the last wait for what was asked: a last sample that came much later would be of the
node's next job. The rounds between wait no longer than half a period either, so that the rhythm is kept."""
SILENT_SECONDS = 5.0
"""After which it is said that a source does not answer: a call of a driver takes milliseconds, seldom a second."""
CHECK_SECONDS = 1.0
"""How often it is seen whether the attempt's state is still there, and whether a late answer has come."""
LARGEST_CORRECTION_SECONDS = 1.0
"""By how much the clock may drift while a job runs before it is said."""
MOST_EVENTS = 1000
"""How many events wait for a journal that cannot be written to; then the oldest go."""


class Sampler:
    """Has the devices of one attempt read, and writes what they answer into its journal. Nothing of it raises."""

    def __init__(self, writer: journal.Writer, discover: Callable[[], Discovery]) -> None:
        """`discover` asks the drivers for the sources. It may hang."""
        self._writer = writer
        self._askers = Askers()
        self._drivers = Question("the drivers", partial(ask_drivers, "the drivers", discover))
        self._questions = [self._drivers]
        """What is asked in each round: which sources there are, then each of them."""
        self._records: dict[str, tuple[int, journal.DeviceRecord]] = {}
        self._unread: set[str] = set()
        """Devices that are there, and have given no figure yet."""
        self._processes: dict[int, dict[int, float]] = {}
        """Device number -> process id -> bytes, as last written."""
        self._faults: dict[str, str] = {}
        self._events: deque[tuple[str, str, float]] = deque(maxlen=MOST_EVENTS)
        """Kind, text and monotonic time of those that are not written yet."""
        self._slow: set[str] = set()
        """Sources of which it has been said that they are slower than the period."""
        self._losing = False
        """Whether the journal could not be written to the last time."""

    def note(self, kind: str, text: str) -> None:
        """Have an event of this moment written with what is written next. A fault is said in syslog at once."""
        if kind == "fault":
            faults.warn(text)
        self._events.append((kind, text, time.monotonic()))

    def round(self, limit_seconds: float) -> None:
        """Ask all that have answered the last time; write what is answered within the limit."""
        for question in self._questions:
            self._askers.put(question)
        self._write(self._answers(limit_seconds))

    def catch_up(self) -> None:
        """Between two rounds: write what has been noted and answered meanwhile."""
        self._write(self._answers(0.0))

    def end(self, reason: str) -> None:
        """Write why this is the end, and who has not answered."""
        for question in self._askers.open:
            seconds = time.monotonic() - question.asked
            self.note("fault", f"{question.name}: no answer in the last {seconds:.1f} s of sampling")
        self.note("sampler", f"stopped: {reason}")
        self._write([])
        try:
            self._writer.end()
        except OSError as error:
            faults.warn(str(error))

    def _answers(self, limit_seconds: float) -> list[Outcome]:
        """What is answered within the limit. Sources that are found meanwhile have as long again."""
        answers = self._askers.answers(limit_seconds)
        if answers and answers[0].question is self._drivers:  # nothing else has been asked yet
            self._adopt(answers[0].outcomes)
            answers += self._askers.answers(limit_seconds)
        self._watch(answers)
        return [outcome for answer in answers for outcome in answer.outcomes]

    def _adopt(self, outcomes: Sequence[Outcome]) -> None:
        """Have the sources asked, now and from now on. Where the drivers failed there are none."""
        self._questions = []
        for discovery in (outcome.discovery for outcome in outcomes if outcome.discovery):
            for note in discovery.notes:
                self.note("fault", note)
            self._questions += [Question(source.name, partial(ask_source, source)) for source in discovery.sources]
        for question in self._questions:
            self._askers.put(question)

    def _watch(self, answers: Sequence[Answer]) -> None:
        """Say who is silent, once when it has been for too long, and once when it has answered."""
        for answer in answers:
            name, seconds = answer.question.name, answer.seconds
            if seconds >= SILENT_SECONDS:
                self.note("fault", f"{name}: answered after {seconds:.1f} s")
            elif answer.late and name not in self._slow:
                self._slow.add(name)
                self.note("fault", f"{name}: takes {seconds:.1f} s, longer than the period: samples are missing")
        for question in self._askers.open:
            if not question.silent and time.monotonic() - question.asked >= SILENT_SECONDS:
                question.silent = True
                self.note(
                    "fault", f"{question.name}: no answer for {SILENT_SECONDS:g} s, and no figures until there is one"
                )

    def _write(self, outcomes: Sequence[Outcome]) -> None:
        """Write all samples at once. Where the journal cannot be written to, they are lost, and events are kept."""
        for outcome in outcomes:
            self._notice(outcome)
        samples = [outcome.sample for outcome in outcomes if outcome.sample is not None]
        try:
            while self._events:
                self._writer.event(*self._events[0])
                self._events.popleft()
            for outcome in outcomes:
                if outcome.identity and outcome.fault and outcome.identity.uuid not in self._records:
                    self._introduce(outcome.identity, dict.fromkeys(outcome.identity.columns, outcome.fault))
                    self._unread.add(outcome.identity.uuid)
            if samples:
                numbers = [self._introduce(sample.identity, sample.absent) for sample in samples]
                self._writer.samples(
                    [(number, sample.monotonic, sample.values) for number, sample in zip(numbers, samples, strict=True)]
                )
                self._write_processes(dict(zip(numbers, samples, strict=True)))
        except OSError as error:  # a full disk, say: it may be possible again later
            if not self._losing:
                self.note("fault", f"journal: {error}; samples are lost until it can be written to")
            self._losing = True
        else:
            if self._losing:
                self.note("fault", "journal: can be written to again")
            self._losing = False

    def _notice(self, outcome: Outcome) -> None:
        """Keep the events of an outcome; a fault is one when it begins."""
        if outcome.sample is not None:
            self._events += [(kind, text, outcome.sample.monotonic) for kind, text in outcome.sample.events]
        if not outcome.fault:
            self._faults.pop(outcome.name, None)
        elif self._faults.get(outcome.name) != outcome.fault:
            self._faults[outcome.name] = outcome.fault
            self.note("fault", outcome.fault)

    def _introduce(self, identity: Identity, absent: dict[str, str]) -> int:
        """Record a device when it is first seen, and whenever there are new reasons for what is absent; its number."""
        number, known = self._records.get(identity.uuid, (len(self._records), None))
        if known is None:
            record = journal.DeviceRecord(
                identity.uuid,
                identity.kind,
                identity.model,
                identity.index,
                identity.driver,
                identity.columns,
                absent,
                identity.pci,
                identity.parent_uuid,
            )
        elif identity.uuid in self._unread:
            record = replace(known, absent=absent)
            self._unread.remove(identity.uuid)
        elif absent.keys() <= known.absent.keys():
            return number
        else:
            record = replace(known, absent=known.absent | absent)
        self._writer.device(number, record)
        self._records[identity.uuid] = number, record
        return number

    def _write_processes(self, samples: Mapping[int, Sample]) -> None:
        """Write which processes are new, hold another amount of memory, or have gone."""
        changes = []
        held = {number: sample.processes for number, sample in samples.items() if sample.processes is not None}
        for number, after in held.items():
            before, monotonic = self._processes.get(number, {}), samples[number].monotonic
            changes += [
                (number, monotonic, pid, size)
                for pid, size in (dict.fromkeys(before, 0.0) | after).items()
                if pid not in before or not _same(before[pid], size)
            ]
        if changes:
            self._writer.processes(changes)
        self._processes |= held


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def next_deadline(deadline: float, period: float, now: float) -> float:
    """The first of the moments `deadline` + n periods that is not past: samples that were missed are not made up."""
    return deadline + period * max(1, math.ceil((now - deadline) / period))


def sample_until_stopped(sampler: Sampler, period: float, state: Path) -> str:
    """Sample at once, every period, and once more when told to stop. Returns what told."""
    deadline, reason = time.monotonic(), ""
    sampler.round(LIMIT_SECONDS)
    while not reason:
        deadline = next_deadline(deadline, period, time.monotonic())
        reason = _wait(deadline, state, sampler)
        sampler.round(LIMIT_SECONDS if reason else min(LIMIT_SECONDS, period / 2))
    return reason


def _wait(deadline: float, state: Path, sampler: Sampler) -> str:
    """Sleep until the deadline, or less when told to stop; returns what told, or nothing."""
    while True:
        left = max(0.0, deadline - time.monotonic())
        if signal.sigtimedwait({signal.SIGTERM}, min(left, CHECK_SECONDS)):
            return "SIGTERM"
        if not state.is_dir():
            return f"{state} has vanished"
        for directory in (state.parent.parent, state.parent, state):
            if doubt := directories.doubt(directory):
                return doubt
        if left <= CHECK_SECONDS:
            return ""
        sampler.catch_up()


def clock_change(seconds: float) -> str:
    """What is to be said when the clock has been set by so much while the job ran; empty where it has been kept."""
    if abs(seconds) < LARGEST_CORRECTION_SECONDS:
        return ""
    return f"the clock was set by {seconds:+.0f} s since the job began; times here go on from how it was then"


def main() -> None:
    """The sampler's process, as the prolog starts it: [--fault FAULT]... JOURNAL STATE CONFIG. Does not return."""
    try:
        options, arguments = getopt.getopt(sys.argv[1:], "", ["fault="])
        _run([fault for _, fault in options], *map(Path, arguments))
    except Exception as error:  # noqa: BLE001  the boundary; what was written is collected by the epilog
        faults.warn(faults.describe(error))
    os._exit(0)  # a usual end would wait for what a driver's library does at its own


def _run(injected: Sequence[str], path: Path, state: Path, config: Path) -> None:
    os.umask(0o022)
    recorded = journal.read(KEPT_DESCRIPTOR)
    faults.introduce(f"sampler of job {recorded.attempt.job_id} on {recorded.attempt.node}")
    settings, _ = load_or_default(config)
    injection = Injection([*injected, *settings.fault.split(",")])
    sampler = Sampler(
        injection.writer(KEPT_DESCRIPTOR),
        injection.discover(partial(discover, recorded.attempt, settings.nvml_library)),
    )
    sampler.note("sampler", f"started, one sample in {recorded.period_seconds:g} s")
    for text in injection.announcements:
        sampler.note("fault", text)
    sampler.catch_up()
    injection.start()
    reason = sample_until_stopped(sampler, recorded.period_seconds, state)
    if change := clock_change(time.time() - time.monotonic() - recorded.offset_seconds):
        sampler.note("fault", change)
    sampler.end(reason)
    _hand_over(path, config)


def _hand_over(path: Path, config: Path) -> None:
    """Start the collector, which inherits the journal and its lock, and let go of them."""
    # Spawned, not forked: the kernel copies no memory, whose map a call that hangs may hold locked. Drivers' libraries
    # may have left descriptors open to be inherited: a device is busy as long as somebody has it open.
    others = [int(entry.name) for entry in Path("/proc/self/fd").iterdir() if int(entry.name) > KEPT_DESCRIPTOR]
    os.posix_spawn(
        sys.executable,
        [sys.executable, "-I", "-m", "trimtab_slurm.collect", "--held", str(config), str(path)],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_CLOSE, descriptor) for descriptor in others],
    )
    os.close(KEPT_DESCRIPTOR)  # a thread that hangs keeps this process, and what it has open, for as long


if __name__ == "__main__":
    main()
