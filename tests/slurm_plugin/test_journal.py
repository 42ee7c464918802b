import math
import os
import re
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_slurm import journal
from trimtab_slurm.journal import DeviceRecord, JournalError, Writer, create, lock, open_existing, orphans, parse, read

doubles = st.floats(allow_nan=True)


@pytest.fixture
def written(tmp_path, attempt):
    """An open journal and its writer."""
    path, writer = create(tmp_path / "journals", attempt, 0.5)
    yield path, writer
    os.close(writer.descriptor)


def device(uuid="gpu-a", columns=("power_watts", "temperature_celsius"), absent=None):
    return DeviceRecord(uuid, "gpu", "H100", 3, "NVML", columns, absent or {})


def test_what_is_written_is_read_in_utc(written, attempt):
    path, writer = written
    assert path.stat().st_mode & 0o777 == 0o600
    begin = read(writer.descriptor).start_seconds
    writer.device(0, device())
    writer.samples([(0, journal.time.monotonic() + 5, (300.0, math.nan))])
    writer.device(0, device(absent={"temperature_celsius": "not supported"}))
    writer.event("fault", "GPU ist verloren: \N{SNOWMAN}")
    writer.end()
    found = read(writer.descriptor)
    assert (found.attempt, found.period_seconds, found.ended, found.damage) == (attempt, 0.5, True, "")
    (gpu,) = found.devices
    assert (gpu.uuid, gpu.index, gpu.columns) == ("gpu-a", 3, ("power_watts", "temperature_celsius"))
    assert gpu.absent == {"temperature_celsius": "not supported"}
    assert gpu.rows[0][0] == 300.0
    assert math.isnan(gpu.rows[0][1])
    assert gpu.times[0] == pytest.approx(begin + 5, abs=1)  # the clocks are read one after the other
    assert [event[1:] for event in found.events] == [("fault", "GPU ist verloren: \N{SNOWMAN}")]
    assert found.end_seconds == gpu.times[0]


@given(st.lists(st.lists(doubles, min_size=3, max_size=3), max_size=20), st.text())
def test_any_figures_and_texts_come_back(tmp_path_factory, rows, text):
    path = tmp_path_factory.mktemp("journal") / "any"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    writer = Writer(descriptor)
    os.write(descriptor, HEADER)
    writer.device(5, device(columns=("a", "b", "c")))
    writer.event("kind", text)
    writer.samples([(5, float(number), row) for number, row in enumerate(rows)])
    found = read(descriptor)
    os.close(descriptor)
    assert struct.pack(f"<{3 * len(rows)}d", *(value for row in found.devices[0].rows for value in row)) == struct.pack(
        f"<{3 * len(rows)}d", *(value for row in rows for value in row)
    )
    assert found.events[0][2] == text


def _header():
    body = {
        "schema": 1,
        "attempt": {
            "cluster": "lab",
            "job_id": 7,
            "start_seconds": 0.0,
            "node": "n1",
            "user": "ann",
            "uid": 1,
            "gid": 1,
            "restart_count": 0,
            "expected_nodes": [],
            "gpu_variables": {},
        },
        "period_seconds": 1.0,
        "profile_root": "",
        "staff_group": "",
        "monotonic": 100.0,
        "realtime": 1000.0,
    }
    return journal._record(journal.HEADER, journal._json(body))


HEADER = _header()


def test_cut_at_any_byte_all_whole_records_are_read_and_the_rest_is_reported(written):
    _, writer = written
    writer.device(0, device())
    ends = [os.fstat(writer.descriptor).st_size]
    for number in range(3):
        writer.samples([(0, float(number), (float(number), 0.0))])
        ends.append(os.fstat(writer.descriptor).st_size)
    content = os.pread(writer.descriptor, ends[-1], 0)
    for size in range(ends[0], len(content) + 1):
        found = parse(content[:size])
        whole = sum(end <= size for end in ends[1:])
        assert [row[0] for row in found.devices[0].rows] == [float(number) for number in range(whole)]
        assert bool(found.damage) == (size not in ends)
        assert not found.ended


def test_a_changed_byte_ends_what_is_believed(written):
    _, writer = written
    writer.device(0, device())
    begin = os.fstat(writer.descriptor).st_size
    for number in range(3):
        writer.samples([(0, float(number), (float(number), 0.0))])
    size = os.fstat(writer.descriptor).st_size
    content, length = os.pread(writer.descriptor, size, 0), (size - begin) // 3
    for position in range(begin + length, begin + 2 * length):  # the second sample
        changed = bytearray(content)
        changed[position] ^= 0x40
        found = parse(bytes(changed))
        assert len(found.devices[0].rows) == 1
        assert "after 3 records" in found.damage


@given(st.binary(max_size=300))
def test_garbage_behind_records_is_damage_and_no_error(garbage):
    found = parse(HEADER + garbage)
    assert bool(found.damage) == bool(garbage)
    assert found.attempt.job_id == 7


SAMPLE_OF_NO_DEVICE = journal._record(journal.SAMPLE, struct.pack("<Id", 3, 0.0))
NO_FIELDS = journal._record(journal.EVENT, b"{}")
NO_JSON = journal._record(journal.EVENT, b"\xff")
NO_OBJECT = journal._record(journal.DEVICE, b"5")
DEEP = journal._record(journal.EVENT, b"[" * 100_000)
NEWER = journal._record(journal.HEADER, b'{"schema": 2}')


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x" * 100,
        HEADER[:-1],
        HEADER + SAMPLE_OF_NO_DEVICE,
        HEADER + NO_FIELDS,
        HEADER + NO_JSON,
        HEADER + NO_OBJECT,
        HEADER + DEEP,
        NO_FIELDS,
        NO_JSON,
        NEWER,
    ],
)
def test_what_no_sampler_writes_is_refused(content):
    with pytest.raises(JournalError):
        parse(content)


def test_what_a_full_disk_cuts_off_is_taken_back(written, monkeypatch):
    path, writer = written
    before = os.fstat(writer.descriptor).st_size
    whole_write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, content: whole_write(descriptor, content[:10]))
    with pytest.raises(OSError, match=rf"No space left on device: '{re.escape(str(path))}'"):
        writer.event("fault", "long")
    monkeypatch.undo()
    assert os.fstat(writer.descriptor).st_size == before
    writer.event("fault", "short")
    assert [event[2] for event in read(writer.descriptor).events] == ["short"]


def test_a_journal_is_an_orphan_only_when_nobody_holds_it(written, attempt):
    path, _ = written
    assert orphans(path.parent) == []
    other, left = create(path.parent, attempt, 1.0)
    os.close(left.descriptor)
    assert orphans(path.parent) == [other]
    collector = open_existing(other)
    assert lock(collector)
    assert orphans(path.parent) == []
    os.close(collector)


def test_an_orphan_that_is_a_link_is_not_followed(tmp_path, written):
    path, _ = written
    (tmp_path / "target").write_bytes(HEADER)
    (path.parent / "x.journal").symlink_to(tmp_path / "target")
    assert orphans(path.parent) == []
