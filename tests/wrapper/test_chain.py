import json
import os
import stat
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.balance.deciding.ledger import Given
from trimtab.balance.deciding.situation import Fault, Kind
from trimtab.protocol import Batch, Job, Layout, Model, Parallel, Setting, Shape, job_to_json
from trimtab.requeue import store
from trimtab.requeue.chain import Attempt, Chain, Exclusion, Wanted, changed_keys, fingerprint

SETTING = Setting(Layout((5, 3), 2), (4, 4), (0, 1))
ATTEMPT = Attempt(7, 0, 1000.0, ("n1", "n2"), Shape(1, 2, 2), SETTING)
ENDED = replace(
    ATTEMPT,
    first_step=1,
    last_step=30,
    first_step_seconds=1010.5,
    last_step_seconds=1300.25,
    ended_seconds=1302.0,
    exit_code=3,
    cause="rank failed",
    why="rank 3 (node n2, stage 1, pid 12) vanished after step 30",
    node="n2",
    requeued=True,
)
FULL = Chain(
    attempts=(ENDED, replace(ATTEMPT, restart_count=1, started_seconds=1400.0)),
    exclusions=(Exclusion("n2", "twice as slow as its peers", 1301.0),),
    asked=("n2",),
    wanted=Wanted("0123456789abcdef", 2, Parallel(pipeline=2, layout="Ettttt|tttL"), Batch(), SETTING, "n2 is slow"),
    orders=(Given(1200.0, Kind.LAYERS, Fault("hardware", ((0, 1), (1, 1))), 1.5, 0.1, None, refused=True),),
)


def test_a_chain_outlives_its_attempt(tmp_path):
    directory = tmp_path / "checkpoints/7"
    store.save(directory, FULL)
    assert store.load(directory) == (FULL, "")


def test_a_chain_of_before_it_kept_the_job_file_is_read(tmp_path):
    store.save(tmp_path, FULL)
    file = tmp_path / store.FILE
    values = json.loads(file.read_text())
    del values["chain"]["job"]
    file.write_text(json.dumps(values))
    assert store.load(tmp_path) == (FULL, "")


def test_what_a_job_file_says_otherwise_than_before():
    now = Job(model=Model(layers=8), batch=Batch(2, 16))
    before = job_to_json(replace(now, batch=Batch(2, 8), parallel=Parallel(pipeline=2, recomputed_layers=(1, 0))))
    assert changed_keys(before, now) == (
        "parallel.pipeline 2 -> 1",
        "parallel.recomputed_layers [1, 0] -> []",
        "batch.global_batch_size 8 -> 16",
    )
    assert changed_keys(job_to_json(now), now) == changed_keys("", now) == ()


def test_no_chain_is_an_empty_one(tmp_path):
    assert store.load(tmp_path / "not there") == (Chain(), "")


def test_only_its_user_can_read_a_chain_and_nothing_else_is_left(tmp_path):
    store.save(tmp_path, Chain())
    store.save(tmp_path, FULL)
    assert [path.name for path in tmp_path.iterdir()] == [store.FILE]
    assert stat.S_IMODE((tmp_path / store.FILE).stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b'{"version": 2, "chain": {}}',
        b'{"version": 1, "chain": {"attempts": 3}}',
        b'{"version": 1, "chain": {"attempts": [], "exclusions": [], "asked": [1], "wanted": null, "orders": []}}',
    ],
)
def test_a_damaged_chain_is_named_and_set_aside(tmp_path, damage):
    (tmp_path / store.FILE).write_bytes(damage)
    chain, told = store.load(tmp_path)
    assert chain == Chain()
    assert told.startswith(f"{tmp_path / store.FILE} is damaged (")
    assert told.endswith("): set aside as attempts.damaged.json, the attempts are counted anew")
    assert (tmp_path / "attempts.damaged.json").read_bytes() == damage
    store.save(tmp_path, FULL)
    assert store.load(tmp_path) == (FULL, "")


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_any_cut_of_a_chain_is_damaged_or_whole(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("cut")
    store.save(directory, FULL)
    whole = (directory / store.FILE).read_bytes()
    (directory / store.FILE).write_bytes(whole[: data.draw(st.integers(0, len(whole) - 2))])
    chain, told = store.load(directory)
    assert chain == Chain()
    assert "is damaged" in told


def test_an_attempt_that_was_overtaken_writes_nothing(tmp_path):
    mine = Chain().begun(ATTEMPT)
    store.save(tmp_path, mine)
    theirs = store.load(tmp_path)[0].begun(replace(ATTEMPT, restart_count=1, started_seconds=2000.0))
    store.save(tmp_path, theirs)
    with pytest.raises(store.StaleChain, match=r"was written by job 7, restart 1, which began after this attempt"):
        store.save(tmp_path, mine.updated(ENDED))
    assert store.load(tmp_path)[0] == theirs


def test_of_two_attempts_that_begin_from_the_same_chain_one_is_refused(tmp_path):
    store.save(tmp_path, Chain().begun(ATTEMPT))
    with pytest.raises(store.StaleChain):
        store.save(tmp_path, Chain().begun(replace(ATTEMPT, job_id=8)))


def test_a_writer_that_is_killed_leaves_the_chain_before(tmp_path):
    store.save(tmp_path, FULL)
    script = """
import os, sys
from pathlib import Path
from trimtab.requeue import store
os.fsync = lambda descriptor: os.kill(os.getpid(), 9)
chain, _ = store.load(Path(sys.argv[1]))
store.save(Path(sys.argv[1]), chain)
"""
    ended = subprocess.run([sys.executable, "-c", script, tmp_path], check=False)
    assert ended.returncode == -9
    assert store.load(tmp_path) == (FULL, "")


def test_a_failed_write_leaves_the_chain_before(tmp_path, monkeypatch):
    store.save(tmp_path, FULL)

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        store.save(tmp_path, replace(FULL, exclusions=()))
    monkeypatch.undo()
    assert store.load(tmp_path) == (FULL, "")
    assert [path.name for path in tmp_path.iterdir()] == [store.FILE]


def test_a_chain_is_json_that_people_can_read(tmp_path):
    store.save(tmp_path, FULL)
    values = json.loads((tmp_path / store.FILE).read_text())
    assert values["chain"]["exclusions"][0]["reason"] == "twice as slow as its peers"
    assert values["chain"]["orders"][0]["kind"] == "move layers"


def test_a_restart_takes_from_the_last_step_before_it_to_the_first_one_after_it():
    assert Chain().restart_seconds is None
    assert Chain((ENDED,)).restart_seconds is None
    after = replace(ATTEMPT, restart_count=1, first_step_seconds=1360.75)
    assert Chain((ENDED, after)).restart_seconds == 60.5
    # The last one took no step: the restart before it is the last that was measured.
    assert Chain((ENDED, after, replace(ATTEMPT, restart_count=2))).restart_seconds == 60.5
    anew = replace(after, job_id=8, first_step_seconds=700000.0)
    assert Chain((ENDED, after, replace(ENDED, restart_count=2), anew)).restart_seconds == 60.5
    assert Chain((ENDED, anew)).restart_seconds is None


def test_a_job_submitted_anew_has_its_own_list_of_excluded_nodes():
    assert FULL.begun(replace(ATTEMPT, restart_count=2)).asked == ("n2",)
    anew = FULL.begun(replace(ATTEMPT, job_id=8))
    assert (anew.asked, anew.exclusions, len(anew.of(8))) == ((), FULL.exclusions, 1)


def test_fingerprints_tell_models_and_shapes_apart_and_nothing_else():
    job = Job(model=Model(layers=8), parallel=Parallel(pipeline=2))
    same = replace(job, train=replace(job.train, steps=500), requeue=replace(job.requeue, most_requeues=1))
    assert fingerprint(same) == fingerprint(job)
    others = [
        replace(job, model=replace(job.model, layers=12)),
        replace(job, parallel=replace(job.parallel, pipeline=4)),
        replace(job, batch=replace(job.batch, microbatch_size=1)),
    ]
    assert len({fingerprint(other) for other in [job, *others]}) == 4
