import math
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from trimtab_slurm import journal
from trimtab_slurm.devices import DeviceError, Discovery, Identity, Reading
from trimtab_slurm.sampler import LIMIT_SECONDS, Sampler, next_deadline, sample_until_stopped


class FakeDevice:
    """A GPU whose readings are scripted: figures, or what is raised."""

    def __init__(self, uuid, *readings):
        self.identity = Identity(uuid, "gpu", "H100", 0, "fake", ("power_watts", "fan_ratio"))
        self._readings = list(readings)

    def sample(self):
        reading = self._readings.pop(0) if len(self._readings) > 1 else self._readings[0]
        if isinstance(reading, Exception):
            raise reading
        return reading


class FakeSource:
    """Devices that may be changed; `open`: cleared, asking for them hangs until it is set."""

    def __init__(self, *devices, name="FakeSource"):
        self.name = name
        self.present = list(devices)
        self.open = threading.Event()
        self.open.set()
        self.asked = 0

    def devices(self):
        self.asked += 1
        self.open.wait()
        if isinstance(self.present, Exception):
            raise self.present
        return self.present


@pytest.fixture
def hanging():
    """A source of one device that hangs until the test, or its end, lets it go."""
    source = FakeSource(FakeDevice("hung", Reading({"power_watts": 7.0})), name="stuck driver")
    source.open.clear()
    yield source
    source.open.set()


@pytest.fixture
def writer(tmp_path, attempt):
    _, opened = journal.create(tmp_path / "journals", attempt, 1.0)
    yield opened
    os.close(opened.descriptor)


def rows(writer):
    return {device.uuid: device.rows for device in journal.read(writer.descriptor).devices}


def faults(writer):
    return [text for _, kind, text in journal.read(writer.descriptor).events if kind == "fault"]


def test_a_round_samples_every_device_of_every_driver(writer):
    first, second = FakeDevice("a", Reading({"power_watts": 1.0})), FakeDevice("b", Reading({"fan_ratio": 0.5}))
    sampler = Sampler(writer, lambda: Discovery((FakeSource(first), FakeSource(second)), ("2 GPUs held",)))
    sampler.round(LIMIT_SECONDS)
    assert str(rows(writer)) == str({"a": [(1.0, math.nan)], "b": [(math.nan, 0.5)]})
    assert faults(writer) == ["2 GPUs held"]


def test_devices_may_come_and_go(writer):
    first, second = FakeDevice("a", Reading({})), FakeDevice("b", Reading({}))
    driver = FakeSource(first)
    sampler = Sampler(writer, lambda: Discovery((driver,), ()))
    for present in ([first], [first, second], [second], [first]):
        driver.present = present
        sampler.round(LIMIT_SECONDS)
    assert {uuid: len(found) for uuid, found in rows(writer).items()} == {"a": 3, "b": 2}


def test_a_fault_is_said_when_it_begins_and_costs_its_own_sample_alone(writer):
    lost = FakeDevice(
        "a", Reading({}), DeviceError("a: GPU is lost"), DeviceError("a: GPU is lost"), Reading({}), KeyError("x")
    )
    driver = FakeSource(lost, FakeDevice("b", Reading({})))
    sampler = Sampler(writer, lambda: Discovery((driver,), ()))
    for _ in range(5):
        sampler.round(LIMIT_SECONDS)
    assert {uuid: len(found) for uuid, found in rows(writer).items()} == {"a": 2, "b": 5}
    driver.present = RuntimeError("library went away")
    sampler.round(LIMIT_SECONDS)
    assert faults(writer) == ["a: GPU is lost", "a: KeyError: 'x'", "FakeSource: RuntimeError: library went away"]


def test_a_source_that_is_slower_than_the_period_is_said_once(writer):
    device = FakeDevice("a", Reading({}))
    quick, device.sample = device.sample, lambda: time.sleep(0.3) or quick()
    sampler = Sampler(writer, lambda: Discovery((FakeSource(device),), ()))
    for _ in range(12):
        sampler.round(0.1)
    assert 2 <= len(rows(writer)["a"]) <= 5
    (said,) = faults(writer)
    assert said.startswith("FakeSource: takes 0.")
    assert said.endswith(" s, longer than the period: samples are missing")


def test_a_device_that_never_gives_a_figure_is_recorded_with_the_reason(writer):
    lost = FakeDevice(
        "a", DeviceError("a: GPU is lost"), DeviceError("a: GPU is lost"), Reading({}, {"fan_ratio": "no fan"})
    )
    sampler = Sampler(writer, lambda: Discovery((FakeSource(lost),), ()))
    sampler.round(LIMIT_SECONDS)
    sampler.round(LIMIT_SECONDS)
    (device,) = journal.read(writer.descriptor).devices
    assert (device.uuid, device.rows) == ("a", [])
    assert device.absent == {"power_watts": "a: GPU is lost", "fan_ratio": "a: GPU is lost"}
    sampler.round(LIMIT_SECONDS)  # from now on it is there, and other reasons count
    (device,) = journal.read(writer.descriptor).devices
    assert (len(device.rows), device.absent) == (1, {"fan_ratio": "no fan"})


def test_a_source_that_hangs_holds_up_no_other_source(writer, hanging):
    """The first of them: the others are asked by another thread, in the same round."""
    others = [FakeSource(FakeDevice(uuid, Reading({}))) for uuid in "abc"]
    sampler = Sampler(writer, lambda: Discovery((hanging, *others), ()))
    for _ in range(3):
        sampler.round(LIMIT_SECONDS)
    assert {uuid: len(found) for uuid, found in rows(writer).items()} == {"a": 3, "b": 3, "c": 3}
    assert hanging.asked == 1  # not asked again before it has answered


def test_as_many_calls_may_hang_as_there_are_sources(writer, hanging, until):
    stuck = [FakeSource(FakeDevice(uuid, Reading({})), name=uuid) for uuid in "abcdefg"]
    for source in stuck:
        source.open = hanging.open
    sampler = Sampler(writer, lambda: Discovery((*stuck, FakeSource(FakeDevice("last", Reading({})))), ()))
    sampler.round(LIMIT_SECONDS)
    until(lambda: sampler.round(LIMIT_SECONDS) or rows(writer).keys() == {"last"})
    assert [source.asked for source in stuck] == [1] * 7


def test_a_late_answer_is_kept_with_the_time_of_its_measurement(writer, hanging):
    sampler = Sampler(writer, lambda: Discovery((hanging,), ()))
    sampler.round(0.1)
    assert rows(writer) == {}
    before = time.time()
    hanging.open.set()
    time.sleep(0.3)
    noticed = time.time()
    sampler.catch_up()
    (device,) = journal.read(writer.descriptor).devices
    assert device.rows[0][0] == 7.0
    assert before - 0.01 < device.times[0] < noticed - 0.1  # the two clocks are read one after the other
    sampler.round(LIMIT_SECONDS)
    assert hanging.asked == 2


def test_a_source_that_does_not_answer_is_said_once_and_when_it_does(writer, hanging, until, monkeypatch):
    monkeypatch.setattr("trimtab_slurm.sampler.SILENT_SECONDS", 0.2)
    sampler = Sampler(writer, lambda: Discovery((hanging,), ()))
    sampler.round(0.3)
    for _ in range(3):
        sampler.round(3600.0)  # who is known not to answer is not waited for
    assert faults(writer) == ["stuck driver: no answer for 0.2 s, and no figures until there is one"]
    hanging.open.set()
    until(lambda: sampler.catch_up() or rows(writer))
    sampler.catch_up()
    assert faults(writer)[1].startswith("stuck driver: answered after 0.")
    sampler.round(LIMIT_SECONDS)
    assert len(rows(writer)["hung"]) == 2
    assert len(faults(writer)) == 2


def test_who_has_not_answered_at_the_end_is_said(writer, hanging):
    sampler = Sampler(writer, lambda: Discovery((hanging,), ()))
    sampler.round(0.1)
    sampler.end("SIGTERM")
    assert faults(writer) == ["stuck driver: no answer in the last 0.1 s of sampling"]
    found = journal.read(writer.descriptor)
    assert (found.ended, found.events[-1][1:]) == (True, ("sampler", "stopped: SIGTERM"))


def test_drivers_that_do_not_answer_are_said_and_measured_when_they_do(writer, hanging, until, monkeypatch):
    monkeypatch.setattr("trimtab_slurm.sampler.SILENT_SECONDS", 0.2)
    device = FakeDevice("a", Reading({}))

    def discover():
        hanging.open.wait()
        return Discovery((FakeSource(device),), ())

    sampler = Sampler(writer, discover)
    sampler.round(0.3)
    assert faults(writer) == ["the drivers: no answer for 0.2 s, and no figures until there is one"]
    hanging.open.set()
    until(lambda: sampler.catch_up() or rows(writer))
    sampler.round(LIMIT_SECONDS)
    assert len(rows(writer)["a"]) == 2


def test_drivers_that_fail_are_said_and_not_asked_again(writer):
    asked = []

    def discover():
        asked.append(1)
        raise RuntimeError("no such driver")

    sampler = Sampler(writer, discover)
    for _ in range(3):
        sampler.round(LIMIT_SECONDS)
    assert faults(writer) == ["the drivers: RuntimeError: no such driver"]
    assert len(asked) == 1


def test_events_of_a_device_have_the_time_of_the_reading_that_found_them(writer, hanging):
    hanging.present = [FakeDevice("a", Reading({}, events=[("xid", "79"), ("throttle", "power cap")]))]
    sampler = Sampler(writer, lambda: Discovery((hanging,), ()))
    sampler.round(0.1)
    hanging.open.set()
    time.sleep(0.2)
    sampler.catch_up()
    found = journal.read(writer.descriptor)
    (moment,) = found.devices[0].times
    assert found.events == [(moment, "xid", "79"), (moment, "throttle", "power cap")]


def test_processes_are_written_when_they_change(writer):
    readings = [{7: 1e9, 8: math.nan}, {7: 1e9, 8: math.nan}, None, {7: 2e9, 8: math.nan}, {8: 5.0}, {}]
    device = FakeDevice("a", *(Reading({}, processes=held) for held in readings))
    sampler = Sampler(writer, lambda: Discovery((FakeSource(device),), ()))
    for _ in readings:
        sampler.round(LIMIT_SECONDS)
    (found,) = journal.read(writer.descriptor).devices
    places = {moment: place for place, moment in enumerate(found.times)}
    changes = [(places[moment], pid, size) for moment, pid, size in found.processes]
    assert str(changes) == str([(0, 7, 1e9), (0, 8, math.nan), (3, 7, 2e9), (4, 7, 0.0), (4, 8, 5.0), (5, 8, 0.0)])


def test_a_reading_of_no_figures_is_the_devices_fault(writer):
    device = FakeDevice("a", Reading({"power_watts": "many"}), Reading({"power_watts": 1.0}))
    sampler = Sampler(writer, lambda: Discovery((FakeSource(device),), ()))
    for _ in range(2):
        sampler.round(LIMIT_SECONDS)
    assert faults(writer) == ["a: ValueError: could not convert string to float: 'many'"]
    assert len(rows(writer)["a"]) == 1


def test_reasons_for_what_is_absent_are_kept(writer):
    device = FakeDevice("a", Reading({}, {"fan_ratio": "no fan"}), Reading({}, {"power_watts": "not permitted"}))
    sampler = Sampler(writer, lambda: Discovery((FakeSource(device),), ()))
    sampler.round(LIMIT_SECONDS)
    sampler.round(LIMIT_SECONDS)
    (found,) = journal.read(writer.descriptor).devices
    assert found.absent == {"fan_ratio": "no fan", "power_watts": "not permitted"}
    assert len(found.rows) == 2


@pytest.mark.parametrize(
    ("now", "following"),
    [(10.0, 11.0), (10.3, 11.0), (11.0, 11.0), (11.5, 12.0), (19.999, 20.0)],
)
def test_missed_samples_are_not_made_up_and_the_rhythm_is_kept(now, following):
    assert next_deadline(10.0, 1.0, now) == following


@pytest.fixture
def stoppable():
    """SIGTERM waits to be asked for, as the prolog arranges."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_sampling_takes_a_first_and_a_last_sample_whatever_the_period(writer, tmp_path, stoppable):
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # it came before Python had started
    sampler = Sampler(writer, lambda: Discovery((FakeSource(FakeDevice("a", Reading({}))),), ()))
    assert sample_until_stopped(sampler, 3600.0, tmp_path) == "SIGTERM"
    assert len(rows(writer)["a"]) == 2


def test_sampling_keeps_its_period_until_its_state_vanishes(writer, tmp_path, stoppable):
    state = tmp_path / "7"
    state.mkdir()
    threading.Timer(0.55, state.rmdir).start()
    sampler = Sampler(writer, lambda: Discovery((FakeSource(FakeDevice("a", Reading({}))),), ()))
    assert sample_until_stopped(sampler, 0.1, state) == f"{state} has vanished"
    (found,) = journal.read(writer.descriptor).devices
    assert 5 <= len(found.times) <= 9  # 0.55 s, a sample in 0.1 s, and the last one; a busy machine may lose some


def test_a_disk_that_is_full_for_a_time_loses_that_time_alone(writer, tmp_path, stoppable, monkeypatch):
    sampler = Sampler(writer, lambda: Discovery((FakeSource(FakeDevice("a", Reading({}))),), ()))
    sampler.round(LIMIT_SECONDS)
    whole_write, left = os.write, [2]

    def full_at_first(descriptor, content):
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(28, "No space left on device")
        return whole_write(descriptor, content)

    monkeypatch.setattr(os, "write", full_at_first)
    threading.Timer(0.5, signal.pthread_kill, (threading.get_ident(), signal.SIGTERM)).start()
    assert sample_until_stopped(sampler, 0.1, tmp_path) == "SIGTERM"
    assert len(rows(writer)["a"]) >= 3
    (path,) = (tmp_path / "journals").iterdir()
    assert faults(writer) == [
        f"journal: [Errno 28] No space left on device: '{path}'; samples are lost until it can be written to",
        "journal: can be written to again",
    ]


def test_neither_hooks_nor_sampler_load_what_is_heavy():
    code = (
        "import sys, trimtab_slurm.hooks; print(sorted({'numpy', 'h5py', 'psutil'} & sys.modules.keys()));"
        "import trimtab_slurm.sampler, trimtab_slurm.devices.cpu;"
        "print(sorted({'numpy', 'h5py', 'psutil'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n[]\n"
