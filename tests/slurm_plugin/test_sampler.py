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
    name = "FakeSource"

    def __init__(self, *devices):
        self.present = list(devices)

    def devices(self):
        if isinstance(self.present, Exception):
            raise self.present
        return self.present


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


def test_neither_hooks_nor_sampler_load_what_is_heavy():
    code = (
        "import sys, trimtab_slurm.hooks; print(sorted({'numpy', 'h5py', 'psutil'} & sys.modules.keys()));"
        "import trimtab_slurm.sampler, trimtab_slurm.devices.cpu;"
        "print(sorted({'numpy', 'h5py', 'psutil'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n[]\n"


def test_killed_at_any_instant_a_sampler_leaves_what_it_has_written(tmp_path, attempt):
    """The kernel completes each write: at most the round that was not written yet is lost."""
    code = (
        "import sys, itertools; from pathlib import Path; from trimtab_slurm import journal; "
        "from trimtab_slurm.attempt import Attempt;"
        "path, writer = journal.create(Path(sys.argv[1]), Attempt('c', 1, 0.0, 'n', 'u', 0, 0, 0, (), ()), 1.0);"
        "writer.device(0, journal.DeviceRecord('a', 'gpu', 'm', 0, 'd', ('x_count',)));"
        "[(writer.samples([(0, 0.0, (float(number),))]), print(number, flush=True)) for number in itertools.count()]"
    )
    for trial in range(5):
        directory = tmp_path / str(trial)
        process = subprocess.Popen([sys.executable, "-c", code, directory], stdout=subprocess.PIPE)
        process.stdout.readline()
        time.sleep(0.01 * trial)
        process.kill()
        told = [int(line) for line in process.stdout.read().split(b"\n")[:-1]]
        process.wait()
        process.stdout.close()
        (path,) = journal.orphans(directory)
        found = journal.parse(path.read_bytes())
        assert found.damage == ""
        numbers = [row[0] for row in found.devices[0].rows]
        assert numbers == [float(number) for number in range(len(numbers))]
        assert len(numbers) > max(told, default=0)
