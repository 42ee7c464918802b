"""Checkpoints on a disk: what counts, what is noticed, what is kept."""

import json
import shutil
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab_megatron import checkpoint_files
from trimtab_megatron.checkpoint_files import (
    Complete,
    DamagedError,
    begin,
    blocks,
    check_blocks,
    checkpoint_path,
    checkpoints,
    finish,
    is_complete,
    prune,
    read_complete,
    sum_files,
)

BLOCK = 1000
"""Bytes of a block here."""
OURS = {"step-00000010", "step-00000020", "step-00000030"}
CONTENT = {"__0_0.distcp": bytes(range(250)) * 10, "__1_0.distcp": b"x" * BLOCK, "common.pt": b"", ".metadata": b"m"}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(checkpoint_files, "BLOCK_BYTES", BLOCK)


def save(directory, step):
    target = checkpoint_path(directory, step)
    begin(target, {target.name})
    for name, content in CONTENT.items():
        (target / name).write_bytes(content)
    complete = Complete(step, 8 * step, {"model.layers": 4}, "TP1", sum_files(target, ("__", "common.pt", ".metadata")))
    finish(target, complete)
    return target, complete


def test_what_was_written_is_read_and_found_sound(tmp_path):
    target, complete = save(tmp_path, 20)
    assert target == tmp_path / "step-00000020"
    assert read_complete(target) == complete
    assert complete.size_bytes == sum(map(len, CONTENT.values()))
    assert [(block.file, block.number) for block in blocks(complete)] == [
        (".metadata", 0),
        ("__0_0.distcp", 0),
        ("__0_0.distcp", 1),
        ("__0_0.distcp", 2),
        ("__1_0.distcp", 0),
    ]
    check_blocks(target, blocks(complete))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda save: (save / "complete.json").unlink(), "its save was interrupted"),
        (lambda save: shutil.rmtree(save), "its save was interrupted"),
        (lambda save: (save / "complete.json").write_text('{"step": 2'), "complete.json cannot be read"),
        (lambda save: (save / "complete.json").write_text("[]"), "complete.json cannot be read"),
        (lambda save: (save / "complete.json").write_bytes(b"\xff" * 10), "complete.json cannot be read"),
        (lambda save: (save / "__1_0.distcp").unlink(), "__1_0.distcp cannot be read (No such file or directory)"),
        (lambda save: (save / "__1_0.distcp").write_bytes(b"x" * 999), "__1_0.distcp has 999 bytes, not 1000"),
    ],
)
def test_damage_is_named(damage, reason, tmp_path):
    target, _ = save(tmp_path, 20)
    damage(target)
    with pytest.raises(DamagedError) as damaged:
        read_complete(target)
    assert reason in str(damaged.value)


def test_a_changed_figure_in_complete_json_is_noticed(tmp_path):
    target, _ = save(tmp_path, 20)
    path = target / "complete.json"
    path.write_text(path.read_text().replace('"consumed_samples": 160', '"consumed_samples": 161'))
    with pytest.raises(DamagedError, match=r"complete\.json is not what was written"):
        read_complete(target)


@settings(deadline=None, max_examples=25)
@given(place=st.integers(0, 2499), ranks=st.integers(1, 8))
def test_a_changed_byte_is_found_by_exactly_one_of_the_ranks_that_share_the_blocks(place, ranks, tmp_path_factory):
    target, complete = save(tmp_path_factory.mktemp("save"), 20)
    content = bytearray(CONTENT["__0_0.distcp"])
    content[place] ^= 1
    (target / "__0_0.distcp").write_bytes(content)
    read_complete(target)  # the size is as it was
    found = []
    for rank in range(ranks):
        try:
            check_blocks(target, blocks(complete)[rank::ranks])
        except DamagedError as damaged:
            found.append(str(damaged))
    first = place // BLOCK * BLOCK
    assert found == [f"__0_0.distcp is not what was written, from byte {first} to {first + BLOCK}"]


def test_a_checkpoint_of_before_there_were_sums_is_read(tmp_path):
    target, complete = save(tmp_path, 20)
    old = {"step": 20, "consumed_samples": 160, "model": complete.model, "shape": "TP1"}
    (target / "complete.json").write_text(json.dumps(old))
    assert read_complete(target) == Complete(**old)
    assert blocks(read_complete(target)) == []


def test_a_checkpoint_of_before_its_samples_were_kept_is_read_and_its_checksum_holds(tmp_path):
    target, complete = save(tmp_path, 20)
    content = json.loads((target / "complete.json").read_text())
    del content["samples"], content["crc32"]
    crc32 = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    (target / "complete.json").write_text(json.dumps({**content, "crc32": crc32}))
    assert read_complete(target) == complete
    assert complete.samples == {}


def test_the_newest_are_kept_and_what_a_run_has_not_passed_is_left(tmp_path):
    for step in (10, 20, 30, 40, 60):
        save(tmp_path, step)
    (tmp_path / "other").mkdir()
    prune(tmp_path, 40, keep=2, rejected={"step-00000030", "step-00000060"})
    assert [save.name for save in checkpoints(tmp_path)] == ["step-00000020", "step-00000040", "step-00000060"]
    assert (tmp_path / "other").is_dir()


def test_a_new_save_clears_away_what_interrupted_ones_have_left_and_its_own_step(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step)
    for step in (10, 30):
        (checkpoint_path(tmp_path, step) / "complete.json").unlink()
    begin(checkpoint_path(tmp_path, 25), OURS)
    assert [save.name for save in checkpoints(tmp_path)] == ["step-00000020", "step-00000025"]
    begin(checkpoint_path(tmp_path, 20), OURS)
    assert list(checkpoint_path(tmp_path, 20).iterdir()) == []


def test_what_another_run_is_writing_is_left_alone(tmp_path):
    save(tmp_path, 10)
    for step in (20, 30):
        (save(tmp_path, step)[0] / "complete.json").unlink()
    begin(checkpoint_path(tmp_path, 25), OURS - {"step-00000020"})
    assert [save.name for save in checkpoints(tmp_path)] == [f"step-000000{step}" for step in (10, 20, 25)]
    with pytest.raises(FileExistsError, match="step-00000020 is there, but not of this run"):
        begin(checkpoint_path(tmp_path, 20), OURS - {"step-00000020"})
    save(tmp_path, 40)
    prune(tmp_path, 40, keep=1, rejected=set())
    assert [save.name for save in checkpoints(tmp_path)] == [f"step-000000{step}" for step in (20, 25, 40)]
    assert list(checkpoint_path(tmp_path, 20).iterdir())


def test_the_directory_is_made_when_it_is_gone(tmp_path):
    begin(checkpoint_path(tmp_path / "a" / "b", 1), set())
    assert checkpoint_path(tmp_path / "a" / "b", 1).is_dir()


@settings(deadline=None, max_examples=50)
@given(
    steps=st.lists(st.tuples(st.integers(1, 30), st.booleans(), st.booleans()), max_size=8, unique_by=lambda s: s[0]),
    step=st.integers(1, 30),
    keep=st.integers(1, 3),
)
def test_pruning_never_takes_the_newest_sound_one_and_leaves_few_complete_ones(steps, step, keep, tmp_path_factory):
    directory = tmp_path_factory.mktemp("saves")
    rejected = set()
    for number, complete, sound in [*((n, c, s) for n, c, s in steps if n != step), (step, True, True)]:
        target = checkpoint_path(directory, number)
        target.mkdir()
        if complete:
            (target / "complete.json").touch()
        if not sound:
            rejected.add(target.name)
    prune(directory, step, keep, rejected)
    passed = [save for save in checkpoints(directory) if save <= checkpoint_path(directory, step)]
    left = [save.name for save in passed if is_complete(save)]
    assert checkpoint_path(directory, step).name in left
    assert len(left) <= keep
    assert not rejected.intersection(left)
    assert len(passed) - len(left) == sum(number < step and not complete for number, complete, _ in steps)
