"""What a sampler has written is there, whatever happens to it and to its journal."""

import os
import random
import signal
import struct
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from trimtab_slurm import collect, journal
from trimtab_slurm.devices import Discovery, Identity, Reading
from trimtab_slurm.journal import JournalError
from trimtab_slurm.profile import read
from trimtab_slurm.sampler import LIMIT_SECONDS, Sampler
from trimtab_slurm.settings import NodeSettings

KILLS = 200
AT_A_TIME = 6
LONGEST_SECONDS = 0.4
"""Until a sampler is killed: starting Python takes a third of it and more."""

COUNTING = '''
"""A sampler whose two devices count their samples, in the value and in a file that outlives the process."""

import mmap, os, struct, sys

from trimtab_slurm import sampler
from trimtab_slurm.devices import Discovery, Identity, Reading


class Device:
    def __init__(self, index):
        self.identity = Identity(f"gpu-{index}", "gpu", "H100", index, "fake", ("sample_count",))
        self.count, self.place = 0, 8 * index

    def sample(self):
        self.count += 1
        struct.pack_into("<Q", shared, self.place, self.count)
        return Reading({"sample_count": float(self.count)})


class Source:
    name = "fake"

    def __init__(self, index):
        self._devices = [Device(index)]

    def devices(self):
        return self._devices


shared = mmap.mmap(os.open(sys.argv.pop(1), os.O_RDWR), 16)
sampler.discover = lambda attempt, library: Discovery((Source(0), Source(1)), ())
sampler.main()
'''


@pytest.fixture
def counting(tmp_path, start_sampler):
    """A function that starts a sampler of devices that count, and gives it and the counts of a moment."""
    program = tmp_path / "counting.py"
    program.write_text(COUNTING)

    def start(number):
        counts = tmp_path / f"counts-{number}"
        counts.write_bytes(bytes(16))
        started = start_sampler(period=0.01, program=(program, counts))
        return started, lambda: struct.unpack("<QQ", counts.read_bytes())

    return start


def test_killed_at_any_instant_a_sampler_loses_no_more_than_what_it_had_in_its_hands(counting):
    seed = time.time_ns()
    print(f"seed {seed}")  # of a test that failed, pytest shows it
    instants = random.Random(seed)
    delays = [instants.uniform(0.0, LONGEST_SECONDS) for _ in range(KILLS)]

    def kill(number):
        sampler, counts = counting(number)
        time.sleep(delays[number])
        sampler.signal(signal.SIGKILL)
        assert os.WTERMSIG(sampler.wait()) == signal.SIGKILL
        found = sampler.journal()
        written = [0, 0]
        for device in found.devices:
            # Each sample that was written, once, in order.
            assert [row[0] for row in device.rows] == [1.0 + place for place in range(len(device.rows))]
            assert list(device.times) == sorted(device.times)
            written[device.index] = len(device.rows)
        # No sample is asked for before the last one was written.
        assert all(taken - 1 <= kept <= taken for taken, kept in zip(counts(), written, strict=True))
        assert found.damage == "" or found.damage.startswith("cut off")
        if number % 10 == 0:
            assert collect.collect_journal(sampler.path, sampler.settings)
            node = sampler.part()
            assert [len(device.samples["sample_count"]) for device in node.devices] == [
                kept for kept in written if kept
            ]
            assert node.events[-1].text == "ended without a word: killed, or the node went down"
        return sum(written)

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        samples = list(pool.map(kill, range(KILLS)))
    assert 0 < sum(map(bool, samples)) < KILLS  # before the first sample, and after many


@pytest.fixture
def killed(counting, until):
    """A real journal of a sampler that was killed: its content, and where each record ends."""
    sampler, _ = counting(0)
    until(lambda: len(sampler.journal().devices) == 2 and len(sampler.journal().devices[1].times) >= 5)
    sampler.signal(signal.SIGKILL)
    sampler.wait()
    content = sampler.path.read_bytes()
    assert sampler.journal().damage == ""
    return content, record_ends(content)


def record_ends(content):
    ends = [0]
    while ends[-1] < len(content):
        (length,) = struct.unpack_from("<I", content, ends[-1])
        ends.append(ends[-1] + journal._FRAME.size + length)
    return ends[1:]


def counts_of(found):
    return [[row[0] for row in device.rows] for device in found.devices]


def test_a_journal_cut_at_any_byte_of_its_last_two_records_keeps_all_before(killed, tmp_path):
    content, ends = killed
    before = counts_of(journal.parse(content[: ends[-3]]))
    both = counts_of(journal.parse(content[: ends[-2]]))
    assert sum(map(len, both)) == sum(map(len, before)) + 1  # the last two are samples
    settings = NodeSettings(profile_root=str(tmp_path / "profiles"))
    noise = random.Random(0)
    path = tmp_path / "cut.journal"
    for size in range(ends[-3], len(content)):
        for rest in (b"", noise.randbytes(len(content) - size)):
            path.write_bytes(content[:size] + rest)
            found = journal.parse(path.read_bytes())
            assert counts_of(found) == (before if size < ends[-2] else both)
            assert bool(found.damage) == (size not in ends or rest != b"")
            assert collect.collect_journal(path, settings)
            (part,) = (tmp_path / "profiles").rglob("parts/[!.]*.h5")
            (node,) = read(part).nodes
            assert [device.samples["sample_count"].tolist() for device in node.devices] == counts_of(found)
            said = [event.text for event in node.events if event.kind == "journal"]
            assert said == ([f"damaged: {found.damage}; what follows is lost"] if found.damage else [])
            part.unlink()


def test_bytes_that_are_changed_anywhere_make_no_sample_up(killed):
    content, _ = killed
    truth = journal.parse(content)
    seed = time.time_ns()
    print(f"seed {seed}")  # of a test that failed, pytest shows it
    chosen = random.Random(seed)
    refused = 0
    for _ in range(3000):
        changed = bytearray(content)
        for _ in range(chosen.choice((1, 1, 2, 8))):
            changed[chosen.randrange(len(changed))] ^= chosen.randrange(1, 256)
        if changed == content:
            continue
        try:
            found = journal.parse(bytes(changed))
        except JournalError:  # its header was hit
            refused += 1
            continue
        assert found.damage
        for device in found.devices:
            (true,) = (each for each in truth.devices if each.uuid == device.uuid)
            assert device.times == true.times[: len(device.times)]
            assert device.rows == true.rows[: len(device.rows)]
        assert found.events == truth.events[: len(found.events)]
    assert 0 < refused < 3000


def test_a_clock_that_is_set_back_while_the_job_runs_leaves_times_in_order(tmp_path, start_sampler, monkeypatch):
    """Of an hour: samples and events go on from the time that it was when the journal was made."""
    path, writer = journal.create(tmp_path / "journals", start_sampler.attempt, 1.0)
    device = ScriptedDevice()
    sampler = Sampler(writer, lambda: Discovery((device,), ()))
    wall_clock = time.time
    begin = wall_clock()
    sampler.round(LIMIT_SECONDS)
    monkeypatch.setattr(time, "time", lambda: wall_clock() - 3600.0)
    for _ in range(2):
        sampler.round(LIMIT_SECONDS)
    writer.event("epilog", "as another process says it")
    sampler.end("SIGTERM")
    monkeypatch.undo()
    os.close(writer.descriptor)
    settings = NodeSettings(profile_root=str(tmp_path / "profiles"))
    assert collect.collect_journal(path, settings)
    (part,) = (tmp_path / "profiles").rglob("parts/[!.]*.h5")
    (node,) = read(part).nodes
    (series,) = node.devices
    times = series.samples["time_seconds"]
    assert len(times) == 3
    assert (times[1:] > times[:-1]).all()
    moments = [event.time_seconds for event in node.events]
    assert moments == sorted(moments)
    assert node.start_seconds <= times[0] <= times[-1] <= node.end_seconds
    assert begin - 60 < node.start_seconds <= node.end_seconds < begin + 60


class ScriptedDevice:
    """A device, and the source of it."""

    name = "scripted"
    identity = Identity("gpu-a", "gpu", "H100", 0, "fake", ("power_watts",))

    def devices(self):
        return [self]

    def sample(self):
        return Reading({"power_watts": 300.0})
