import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_slurm.journal import Damage, Journal, Record, read


def write(path, samples):
    journal = Journal(path)
    journal.write("A", {"attempt": "x"})
    journal.write("D", {"uuid": "d0"})
    for moment, value in samples:
        journal.sample(0, moment, [value, 2.0])
    journal.write("E", {"time_seconds": 9.0})
    journal.close()
    return path


@given(st.lists(st.tuples(st.floats(allow_nan=False), st.floats(allow_nan=False)), max_size=20))
def test_what_is_written_is_read(tmp_path_factory, samples):
    records = list(read(write(tmp_path_factory.mktemp("j") / "j", samples)))
    assert [(record.time_seconds, record.values[0]) for record in records if record.kind == "S"] == samples
    assert records[0] == Record("A", {"attempt": "x"})
    assert records[-1] == Record("E", {"time_seconds": 9.0})


def test_truncation_at_any_byte_loses_only_the_torn_record(tmp_path):
    path = write(tmp_path / "j", [(1.0, 1.0), (2.0, 2.0)])
    whole = path.read_bytes()
    records = list(read(path))
    sizes, torn = [], tmp_path / "torn"
    for length in range(len(whole)):
        torn.write_bytes(whole[:length])
        intact = [record for record in read(torn) if isinstance(record, Record)]
        assert intact == records[: len(intact)]
        sizes.append(len(intact))
    assert sizes == sorted(sizes)  # a longer prefix never holds less
    assert sizes[-1] == len(records) - 1


def test_garbage_is_damage_and_not_a_sample(tmp_path):
    path = write(tmp_path / "j", [(1.0, 1.0), (2.0, 2.0)])
    content = bytearray(path.read_bytes())
    content[-60] ^= 0xFF
    path.write_bytes(content)
    *intact, damage = read(path)
    assert isinstance(damage, Damage)
    assert damage.lost_bytes == len(content) - damage.offset
    assert all(isinstance(record, Record) for record in intact)


def test_a_huge_length_is_damage(tmp_path):
    path = tmp_path / "j"
    path.write_bytes(b"\xff" * 64)
    assert list(read(path)) == [Damage(0, 64)]


def test_a_journal_is_its_owners_alone_and_never_opened_over_another(tmp_path):
    path = write(tmp_path / "j", [])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        Journal(path)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    with pytest.raises(FileExistsError):
        Journal(link)
    assert not (tmp_path / "target").exists()
