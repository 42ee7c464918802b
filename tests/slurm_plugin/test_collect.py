import math
import os
import re
import time
from dataclasses import replace

import numpy as np
import pytest

from trimtab_slurm import directories, journal
from trimtab_slurm.collect import CollectError, collect_journal, node_profile, recover
from trimtab_slurm.profile import read, write
from trimtab_slurm.settings import NodeSettings


@pytest.fixture
def left_behind(tmp_path, attempt):
    """The journal of a sampler that was killed, for a job of the user who runs the tests; the settings; the root."""
    mine = replace(attempt, uid=os.geteuid(), gid=os.getegid(), start_seconds=time.time())
    path, writer = journal.create(tmp_path / "journals", mine, 0.5)
    writer.event("prolog", "job 7")
    writer.device(0, journal.DeviceRecord("a", "gpu", "m", 0, "d", ("power_watts", "fan_ratio"), {"fan_ratio": "none"}))
    writer.samples([(0, time.monotonic(), (300.0, math.nan)), (0, time.monotonic(), (310.0, math.nan))])
    os.close(writer.descriptor)
    root = tmp_path / "profiles"
    return path, NodeSettings(journal_directory=str(path.parent), profile_root=str(root)), root


def test_a_journal_becomes_the_nodes_part(left_behind, attempt):
    path, settings, root = left_behind
    assert collect_journal(path, settings)
    assert not path.exists()
    (part,) = (root / "lab/7/parts").iterdir()
    assert re.fullmatch(r"n1-\d{8}T\d{6}\.\d{6}Z\.h5", part.name)
    found = read(part)
    assert (found.cluster, found.job_id, found.user, found.expected_nodes) == ("lab", 7, "ann", ("n1", "n2"))
    (node,) = found.nodes
    (device,) = node.devices
    assert device.samples["power_watts"].tolist() == [300.0, 310.0]
    assert device.absent == {"fan_ratio": "none"}
    assert [event.kind for event in node.events] == ["prolog", "sampler"]
    assert "killed" in node.events[1].text
    assert not list((root / "lab/7").glob("*.h5"))  # n2's part is still to come


def test_the_last_part_of_the_allocation_makes_the_attempts_file(left_behind, make_part):
    path, settings, root = left_behind
    (root / "lab/7/parts").mkdir(parents=True)
    write(root / "lab/7/parts/n2-x.h5", replace(make_part("n2"), start_seconds=time.time(), end_seconds=time.time()))
    collect_journal(path, settings)
    (whole,) = (root / "lab/7").glob("*.h5")
    assert {node.node for node in read(whole).nodes} == {"n1", "n2"}


def test_the_nodes_of_an_earlier_run_do_not_make_a_later_one_whole(left_behind, make_part):
    path, settings, root = left_behind
    (root / "lab/7/parts").mkdir(parents=True)
    for node in ("n1", "n2"):
        write(root / f"lab/7/parts/{node}-x.h5", make_part(node))
    collect_journal(path, settings)
    assert [read(file).start_seconds for file in (root / "lab/7").glob("*.h5")] == [make_part().start_seconds]


def test_a_journal_in_use_is_left_alone(left_behind):
    path, settings, _ = left_behind
    holder = journal.open_existing(path)
    assert journal.lock(holder)
    assert not collect_journal(path, settings)
    os.close(holder)
    assert path.exists()


def test_a_torn_journal_gives_what_is_whole_and_says_so(left_behind):
    path, settings, root = left_behind
    os.truncate(path, path.stat().st_size - 1)
    collect_journal(path, settings)
    (part,) = (root / "lab/7/parts").iterdir()
    (node,) = read(part).nodes
    assert node.devices[0].samples["power_watts"].tolist() == [300.0]
    (damage,) = (event for event in node.events if event.kind == "journal")
    assert damage.text.startswith("damaged: cut off after 4 records, at byte")


def test_what_is_no_journal_is_put_aside(left_behind):
    path, settings, _ = left_behind
    path.write_bytes(b"garbage")
    with pytest.raises(CollectError, match=r"is kept as \.damaged: cut off"):
        collect_journal(path, settings)
    assert [file.suffix for file in path.parent.iterdir()] == [".damaged"]


def test_recovery_collects_every_orphan_and_keeps_what_fails(left_behind, monkeypatch):
    path, settings, root = left_behind
    root.write_text("no directory")
    ((failed, reason),) = recover(settings)
    assert (failed, reason) == (path, f"[Errno 20] Not a directory: '{root}'")
    assert path.exists()
    root.unlink()
    assert recover(settings) == []
    assert list(path.parent.iterdir()) == []
    assert len(list((root / "lab/7/parts").iterdir())) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_in_a_users_directory_root_writes_as_that_user_and_follows_no_trap(open_path, attempt):
    """The user has put a link where the parts go: what the user may not write, root does not write either."""
    root, target = open_path / "profiles", open_path / "target"
    target.mkdir()
    directories.make_job_directory(root, "lab", 7, 1000, 1001)
    (root / "lab/7/parts").rmdir()
    (root / "lab/7/parts").symlink_to(target)
    path, writer = journal.create(open_path / "journals", attempt, 0.5)
    os.close(writer.descriptor)
    with pytest.raises(OSError, match=r"as user 1000: .*Permission"):
        collect_journal(path, NodeSettings(profile_root=str(root)))
    assert path.exists()
    assert list(target.iterdir()) == []


def test_a_profile_that_could_not_be_written_at_first_says_so_once_and_ends_when_the_attempt_did(
    left_behind, monkeypatch
):
    path, settings, root = left_behind

    def read_only(name, mode=0o777, *, dir_fd=None, mkdir=os.mkdir):
        if str(name).startswith(".7-"):
            raise OSError(30, "Read-only file system", name)
        mkdir(name, mode, dir_fd=dir_fd)

    with monkeypatch.context() as patched:
        patched.setattr(os, "mkdir", read_only)
        for _ in range(3):
            with pytest.raises(OSError, match="Read-only file system"):
                collect_journal(path, settings)
    assert collect_journal(path, settings)
    (part,) = (root / "lab/7/parts").iterdir()
    (node,) = read(part).nodes
    (fault,) = (event for event in node.events if event.kind == "fault")
    where = f"[Errno 30] Read-only file system: '{root}/lab/7'"
    assert fault.text == f"the profile could not be written at first: {where}"
    assert fault.time_seconds == node.end_seconds == node.devices[0].samples["time_seconds"][-1]


def test_a_device_without_a_sample_has_empty_columns(attempt):
    record = journal.DeviceRecord("a", "gpu", "m", 0, "d", ("power_watts",))
    recorded = journal.Journal(attempt, 1.0, 0.0, 1.0, [record], [], True, "")
    (device,) = node_profile(recorded).devices
    assert device.samples["power_watts"].shape == device.samples["time_seconds"].shape == (0,)
    assert device.samples["power_watts"].dtype == np.float64
