import math
import os
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from trimtab_slurm import collect, journal
from trimtab_slurm.collect import CollectError, collect_job, collect_journal, group_attempts, node_profile, recover
from trimtab_slurm.profile import read, read_header, write
from trimtab_slurm.settings import NodeSettings

DAY = 86400.0


@pytest.fixture
def group(tmp_path, make_part):
    """A function that groups parts, given as the arguments of make_part; the groups are lists of their places."""

    def names(*parts):
        headers = []
        for place, part in enumerate(parts):
            write(tmp_path / f"{place}.h5", make_part(**part))
            headers.append((tmp_path / f"{place}.h5", read_header(tmp_path / f"{place}.h5")))
        return sorted(sorted(int(path.stem) for path in paths) for paths in group_attempts(headers))

    return names


def test_parts_of_nodes_and_training_are_one_attempt(group):
    assert group({"node": "n1"}, {"node": "n2", "start": 2.0}, {"node": "", "start": 5.0, "end": 50.0}) == [[0, 1, 2]]


def test_a_requeued_job_has_an_attempt_for_each_run(group):
    runs = [{"node": node, "restart_count": count} for count in (0, 1) for node in ("n1", "n2")]
    assert group(*runs) == [[0, 1], [2, 3]]


def test_an_id_used_again_days_later_is_another_attempt(group):
    again = {"start": 3 * DAY, "end": 3 * DAY + 60}
    assert group({"node": "n1"}, {"node": "n1", **again}, {"node": "n2", **again}) == [[0], [1, 2]]


def test_nodes_whose_clocks_are_a_minute_apart_are_one_attempt_of_ten_seconds(group):
    assert group({"node": "n1", "end": 10.0}, {"node": "n2", "start": 70.0, "end": 80.0}) == [[0, 1]]


def test_a_short_part_within_a_long_one_does_not_end_it(group):
    parts = [{"end": 3600.0}, {"node": "", "start": 10.0, "end": 20.0}, {"node": "n2", "start": 2000.0, "end": 3600.0}]
    assert group(*parts) == [[0, 1, 2]]


def test_nothing_is_no_attempt():
    assert group_attempts([]) == []


@pytest.fixture
def job(tmp_path, make_part):
    """A job directory with a part of n1."""
    (tmp_path / "7/parts").mkdir(parents=True)
    write(tmp_path / "7/parts/n1-a.h5", make_part())
    return tmp_path / "7"


def test_an_attempt_is_named_by_its_start_and_keeps_its_name(job, make_part):
    (first,) = collect_job(job)
    assert first.name == "20260528T202640Z.h5"
    assert read(first).missing_nodes == ("n2",)
    write(job / "parts/n2-a.h5", make_part("n2", -5.0))
    assert collect_job(job) == [first]
    assert read(first).missing_nodes == ()


def test_collecting_again_changes_nothing(job):
    (path,) = collect_job(job)
    content = path.read_bytes()
    assert collect_job(job) == [path]
    assert path.read_bytes() == content


def test_each_attempt_has_its_own_file_oldest_first(job, make_part):
    write(job / "parts/n1-b.h5", make_part(start=100.0, end=160.0, restart_count=1))
    write(job / "parts/n1-c.h5", make_part(start=DAY, end=DAY + 60))
    files = collect_job(job)
    assert [read(path).restart_count for path in files] == [0, 1, 0]
    assert collect_job(job) == files


def test_a_part_that_cannot_be_read_costs_no_other_and_is_named(job, make_part, caplog):
    (job / "parts/n2-a.h5").write_bytes((job / "parts/n1-a.h5").read_bytes()[:-50])
    (path,) = collect_job(job)
    assert read(path).missing_nodes == ("n2",)
    assert "n2-a.h5 is no profile, or damaged" in caplog.text


def test_a_file_that_was_damaged_is_made_anew(job):
    (path,) = collect_job(job)
    path.write_bytes(path.read_bytes()[:100])
    assert collect_job(job) == [path]
    assert read(path).expected_nodes == ("n1", "n2")


def test_a_job_that_has_no_directory_has_no_files(tmp_path):
    assert collect_job(tmp_path / "none") == []


def test_collectors_at_the_same_time_do_no_harm(job, make_part):
    write(job / "parts/n2-a.h5", make_part("n2"))
    results = []
    threads = [threading.Thread(target=lambda: results.append(collect_job(job))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [results[0]] * 4
    assert read(results[0][0]).missing_nodes == ()
    assert sorted(path.name for path in job.iterdir()) == ["20260528T202640Z.h5", "parts"]


def test_a_merger_that_began_before_the_last_part_was_there_does_not_have_the_last_word(job, make_part, monkeypatch):
    merge = collect.profile.merge

    def overtaken(parts, target):
        monkeypatch.setattr(collect.profile, "merge", merge)
        merge(parts, job / "slow")
        write(job / "parts/n2-a.h5", make_part("n2"))
        merge([*parts, job / "parts/n2-a.h5"], target)  # as the collector of n2 does meanwhile
        (job / "slow").replace(target)

    monkeypatch.setattr(collect.profile, "merge", overtaken)
    (path,) = collect_job(job)
    assert read(path).missing_nodes == ()


def test_a_file_that_holds_its_parts_is_not_written_again(job, make_part):
    (path,) = collect_job(job)
    before = path.stat().st_mtime_ns
    collect_job(job)
    assert path.stat().st_mtime_ns == before
    write(job / "parts/n1-a.h5", make_part(end=99.0))
    collect_job(job)
    assert read(path).end_seconds == make_part(end=99.0).end_seconds


@pytest.fixture
def left_behind(tmp_path, attempt):
    """The journal of a sampler that was killed, for a job of the user who runs the tests, and the profile root."""
    mine = replace(attempt, uid=os.geteuid(), gid=os.getegid(), start_seconds=time.time())
    path, writer = journal.create(tmp_path / "journals", mine, 0.5)
    writer.event("prolog", "job 7")
    writer.device(0, journal.DeviceRecord("a", "gpu", "m", 0, "d", ("power_watts", "fan_ratio"), {"fan_ratio": "none"}))
    writer.samples([(0, time.monotonic(), (300.0, math.nan)), (0, time.monotonic(), (310.0, math.nan))])
    os.close(writer.descriptor)
    return path, tmp_path / "profiles"


def test_a_journal_becomes_the_nodes_part(left_behind, attempt):
    path, root = left_behind
    assert collect_journal(path, root)
    assert not path.exists()
    (part,) = (root / "lab/7/parts").iterdir()
    assert part.name.startswith("n1-2")
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
    path, root = left_behind
    (root / "lab/7/parts").mkdir(parents=True)
    write(root / "lab/7/parts/n2-x.h5", replace(make_part("n2"), start_seconds=time.time(), end_seconds=time.time()))
    collect_journal(path, root)
    (whole,) = (root / "lab/7").glob("*.h5")
    assert {node.node for node in read(whole).nodes} == {"n1", "n2"}


def test_the_nodes_of_an_earlier_run_do_not_make_a_later_one_whole(left_behind, make_part):
    path, root = left_behind
    (root / "lab/7/parts").mkdir(parents=True)
    for node in ("n1", "n2"):
        write(root / f"lab/7/parts/{node}-x.h5", make_part(node))
    collect_journal(path, root)
    assert [read(file).start_seconds for file in (root / "lab/7").glob("*.h5")] == [make_part().start_seconds]


def test_a_journal_in_use_is_left_alone(left_behind):
    path, root = left_behind
    holder = journal.open_existing(path)
    assert journal.lock(holder)
    assert not collect_journal(path, root)
    os.close(holder)
    assert path.exists()


def test_a_torn_journal_gives_what_is_whole_and_says_so(left_behind):
    path, root = left_behind
    os.truncate(path, path.stat().st_size - 1)
    collect_journal(path, root)
    (part,) = (root / "lab/7/parts").iterdir()
    (node,) = read(part).nodes
    assert node.devices[0].samples["power_watts"].tolist() == [300.0]
    (damage,) = (event for event in node.events if event.kind == "journal")
    assert damage.text.startswith("damaged: cut off after 4 records, at byte")


def test_what_is_no_journal_is_put_aside(left_behind):
    path, root = left_behind
    path.write_bytes(b"garbage")
    with pytest.raises(CollectError, match=r"is kept as \.damaged: cut off"):
        collect_journal(path, root)
    assert [file.suffix for file in path.parent.iterdir()] == [".damaged"]


def test_recovery_collects_every_orphan_and_keeps_what_fails(left_behind, monkeypatch):
    path, root = left_behind
    settings = NodeSettings(journal_directory=str(path.parent), profile_root=str(root))
    root.write_text("no directory")
    assert recover(settings) == [path]
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
    collect.directories.make_job_directory(root, "lab", 7, 1000, 1001)
    (root / "lab/7/parts").rmdir()
    (root / "lab/7/parts").symlink_to(target)
    path, writer = journal.create(open_path / "journals", attempt, 0.5)
    os.close(writer.descriptor)
    with pytest.raises(CollectError, match=r"as user 1000: .*Permission"):
        collect_journal(path, root)
    assert path.exists()
    assert list(target.iterdir()) == []


def test_a_device_without_a_sample_has_empty_columns(attempt):
    record = journal.DeviceRecord("a", "gpu", "m", 0, "d", ("power_watts",))
    recorded = journal.Journal(attempt, 1.0, 0.0, 1.0, [record], [], True, "")
    (device,) = node_profile(recorded).devices
    assert device.samples["power_watts"].shape == device.samples["time_seconds"].shape == (0,)
    assert device.samples["power_watts"].dtype == np.float64
