import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from random import Random

import h5py
import pytest

from trimtab_slurm import merging
from trimtab_slurm.merging import chains, collect_job, group_attempts
from trimtab_slurm.profile import read, read_header, write

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
    assert [read_header(path).restart_count for path in files] == [0, 1, 0]
    assert collect_job(job) == files


def test_a_part_that_cannot_be_read_costs_no_other_and_is_named(job, make_part, caplog):
    torn = (job / "parts/n1-a.h5").read_bytes()[:-50]
    (job / "parts/n2-20260528T202641.500000Z.h5").write_bytes(torn)
    (job / "parts/n3-some-other-day.h5").write_bytes(torn)
    write(job / "parts/n1-b.h5", make_part(start=100.0, end=160.0, restart_count=1))
    first, second = collect_job(job)
    assert read(first).missing_nodes == read(second).missing_nodes == ("n2",)
    (event,) = read(first).events
    assert "n2-20260528T202641.500000Z.h5 is no profile, or damaged: " in event.text
    assert "left out of 20260528T202640Z.h5: " in caplog.text
    assert "n3-some-other-day.h5 is no profile, or damaged" in caplog.text
    before = first.read_bytes()
    assert collect_job(job) == [first, second]
    assert first.read_bytes() == before
    write(job / "parts/n2-20260528T202641.500000Z.h5", make_part("n2"))  # its node has collected it again
    collect_job(job)
    assert (read(first).missing_nodes, read(first).events) == ((), ())


def test_the_attempts_of_a_requeued_job_are_linked_and_those_of_a_recycled_id_are_not(job, make_part):
    def run(name, start, count):
        write(job / f"parts/n1-{name}.h5", make_part(start=start, end=start + 60, restart_count=count))

    run("c", 200.0, 2)  # the sampler of restart 1 has left nothing yet
    run("d", 30 * DAY, 0)
    run("e", 30 * DAY + 100, 1)
    links = [(path.name, read_header(path).attempt_number, read_header(path).previous) for path in collect_job(job)]
    assert links == [
        ("20260528T202640Z.h5", 1, ""),
        ("20260528T203000Z-restart2.h5", 2, "20260528T202640Z.h5"),
        ("20260627T202640Z.h5", 1, ""),
        ("20260627T202820Z-restart1.h5", 2, "20260627T202640Z.h5"),
    ]
    run("b", 100.0, 1)  # recovered after a reboot
    links = [(path.name, read_header(path).attempt_number, read_header(path).previous) for path in collect_job(job)]
    assert links[1:3] == [
        ("20260528T202820Z-restart1.h5", 2, "20260528T202640Z.h5"),
        ("20260528T203000Z-restart2.h5", 3, "20260528T202820Z-restart1.h5"),
    ]


def test_a_node_that_is_given_back_ends_early_and_what_comes_later_still_gets_in(job, make_part):
    """n2 is given back at 30 s; the ranks then start anew on n1, and the part of n1 comes when the job has ended."""
    (job / "parts/n1-a.h5").unlink()
    write(job / "parts/training-1.h5", make_part("", 1.0, 29.0))
    write(job / "parts/n2-a.h5", make_part("n2", 0.0, 30.0))
    (path,) = collect_job(job)
    assert (read(path).missing_nodes, read(path).earlier_trainings) == (("n1",), ())
    write(job / "parts/training-2.h5", make_part("", 31.0, 599.0, expected=("n1",)))
    assert collect_job(job) == [path]
    assert len(read(path).earlier_trainings) == 1
    write(job / "parts/n1-a.h5", make_part("n1", 0.0, 600.0))
    assert collect_job(job) == [path]
    whole = read(path)
    assert (whole.expected_nodes, whole.missing_nodes) == (("n1", "n2"), ())
    assert [node.end_seconds - whole.start_seconds for node in whole.nodes] == [600.0, 30.0]
    first, last = (*whole.earlier_trainings, whole.training)
    assert [each.start_seconds - whole.start_seconds for each in (first, last)] == [1.0, 31.0]


def test_trainings_that_are_far_apart_are_one_attempt_once_the_node_that_spans_them_is_there(job, make_part):
    (job / "parts/n1-a.h5").unlink()
    for number, start in enumerate((0.0, 1000.0)):
        write(job / f"parts/training-{number}.h5", make_part("", start, start + 60, expected=("n1",)))
    assert len(collect_job(job)) == 2
    write(job / "parts/n1-a.h5", make_part("n1", 0.0, 2000.0, expected=("n1",)))
    (path,) = collect_job(job)
    assert len(read(path).earlier_trainings) == 1


def test_an_attempt_whose_parts_are_gone_keeps_its_place(job, make_part):
    (first,) = collect_job(job)
    (job / "parts/n1-a.h5").unlink()
    write(job / "parts/n1-b.h5", make_part(start=100.0, end=160.0, restart_count=1))
    _, second = collect_job(job)
    assert (read_header(second).attempt_number, read_header(second).previous) == (2, first.name)


def test_attempts_that_begin_within_one_second_have_files_of_their_own(job, make_part):
    write(job / "parts/n1-b.h5", make_part(start=0.5, end=60.0, restart_count=1))
    files = collect_job(job)
    assert [path.name for path in files] == ["20260528T202640Z.h5", "20260528T202640Z-restart1.h5"]
    assert [read_header(path).restart_count for path in files] == [0, 1]


@pytest.mark.parametrize(
    ("counts", "wanted"),
    [
        ([0, 1, 2], [[0, 1, 2]]),
        ([0, 2, 5], [[0, 1, 2]]),
        ([0, 0, 1, 1], [[0], [1, 2], [3]]),
        ([3, 0], [[0], [1]]),
        ([None, 1, None, 2], [[0, 1, 2, 3]]),
        ([2, None, 1], [[0, 1], [2]]),
        ([], []),
    ],
)
def test_a_restart_count_that_does_not_rise_begins_a_new_chain(counts, wanted):
    paths = [Path(str(place)) for place in range(len(counts))]
    found = chains(zip(paths, counts, strict=True))
    assert [[int(path.name) for path in chain] for chain in found] == wanted


def test_what_killed_mergers_have_begun_is_removed_and_what_is_being_written_is_not(job):
    for name, age_seconds in [(".old.h5.x1", 7200), (".new.h5.x2", 60), ("parts/.old.h5.x3", 7200)]:
        (job / name).touch()
        os.utime(job / name, (0, time.time() - age_seconds))
    (path,) = collect_job(job)
    assert sorted(str(left.relative_to(job)) for left in job.rglob("*")) == [
        *sorted([path.name, ".new.h5.x2", "parts", "parts/n1-a.h5"])
    ]


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
    merge = merging.profile.merge

    def overtaken(parts, target, *rest):
        monkeypatch.setattr(merging.profile, "merge", merge)
        merge(parts, job / "slow", *rest)
        write(job / "parts/n2-a.h5", make_part("n2"))
        collect_job(job)  # as the collector of n2 does meanwhile
        (job / "slow").replace(target)
        return {}

    monkeypatch.setattr(merging.profile, "merge", overtaken)
    (path,) = collect_job(job)
    assert read(path).missing_nodes == ()


@pytest.mark.parametrize("late", [1.0, -1.0])
def test_of_two_files_that_mergers_made_of_one_attempt_one_remains(job, make_part, monkeypatch, late):
    """Another merger sees the part of a node that began a second earlier or later, and names its file by that."""
    merge = merging.profile.merge

    def overtaken(parts, target, *rest):
        monkeypatch.setattr(merging.profile, "merge", merge)
        (job / "parts/n1-a.h5").rename(job / "n1-a")
        write(job / "parts/n2-a.h5", make_part("n2", late))
        collect_job(job)
        (job / "n1-a").rename(job / "parts/n1-a.h5")
        return merge(parts, target, *rest)

    monkeypatch.setattr(merging.profile, "merge", overtaken)
    (path,) = collect_job(job)
    assert path.name == ("20260528T202640Z.h5" if late > 0 else "20260528T202639Z.h5")
    assert sorted(path.name for path in job.iterdir()) == [path.name, "parts"]
    assert read(path).missing_nodes == ()


def test_a_users_copy_of_a_file_is_left_alone(job):
    (path,) = collect_job(job)
    (job / "copy.h5").write_bytes(path.read_bytes())
    assert collect_job(job) == [path]
    assert (job / "copy.h5").exists()


def test_a_file_that_holds_its_parts_is_not_written_again(job, make_part):
    (path,) = collect_job(job)
    before = path.stat().st_mtime_ns
    collect_job(job)
    assert path.stat().st_mtime_ns == before
    write(job / "parts/n1-a.h5", make_part(end=99.0))
    collect_job(job)
    assert read(path).end_seconds == make_part(end=99.0).end_seconds


COLLECT = """
import sys
from pathlib import Path
from trimtab_slurm.merging import collect_job
collect_job(Path(sys.argv[1]))
"""


def columns(path):
    """Every column's stored bytes, by its place in the file."""
    found = {}

    def add(name, member):
        if isinstance(member, h5py.Dataset) and member.size and member.dtype.kind != "O":
            found[name] = member.id.read_direct_chunk((0,))[1]

    with h5py.File(path) as file:
        file.visititems(add)
    return found


def test_collecting_anew_gives_the_same_columns_byte_for_byte(job, make_part):
    write(job / "parts/n2-a.h5", make_part("n2"))
    (path,) = collect_job(job)
    before = columns(path)
    assert len(before) == 8
    path.unlink()
    collect_job(job)
    assert columns(path) == before


def test_a_collector_that_is_killed_at_any_instant_leaves_the_old_file_or_the_new_one(job, make_part):
    (path,) = collect_job(job)
    old = path.read_bytes()
    for number in range(2, 12):
        write(job / f"parts/n{number}-a.h5", make_part(f"n{number}"))
    before = time.monotonic()
    collect_job(job)
    whole_seconds, new = time.monotonic() - before, path.read_bytes()
    random, seen = Random(1), []
    for _ in range(60):
        path.write_bytes(old)
        child = os.fork()
        if child == 0:
            collect_job(job)
            os._exit(0)
        time.sleep(random.uniform(0, 1.2 * whole_seconds))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        seen.append({old: "old", new: "new"}[path.read_bytes()])
        assert {left.name for left in job.glob("[!.]*")} == {path.name, "parts"}
    assert set(seen) == {"old", "new"}
    unfinished = list(job.glob(".*"))
    assert unfinished
    for left in unfinished:
        os.utime(left, (0, 0))
    collect_job(job)
    assert {left.name for left in job.iterdir()} == {path.name, "parts"}


def test_collectors_of_several_nodes_at_once_put_one_file_in_place(job, make_part):
    for number in range(2, 20):
        write(job / f"parts/n{number}-a.h5", make_part(f"n{number}", start=-number))
    processes = [subprocess.Popen([sys.executable, "-c", COLLECT, job]) for _ in range(4)]
    assert [process.wait() for process in processes] == [0, 0, 0, 0]
    (path,) = (path for path in job.iterdir() if path.name != "parts")
    assert path.name == "20260528T202621Z.h5"
    assert len(read(path).nodes) == 19


UNLIKE_LOCAL = """
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
int flock(int fd, int operation) { errno = ENOLCK; return -1; }
int lockf(int fd, int command, off_t length) { errno = ENOLCK; return -1; }
int link(const char *from, const char *to) { errno = EPERM; return -1; }
int fsync(int fd) {
    struct stat status;
    if (fstat(fd, &status) == 0 && S_ISDIR(status.st_mode)) { errno = EINVAL; return -1; }
    return syscall(SYS_fsync, fd);
}
int fcntl(int fd, int command, ...) {
    va_list rest;
    va_start(rest, command);
    long argument = va_arg(rest, long);
    va_end(rest);
    if (command == F_SETLK || command == F_SETLKW || command == F_GETLK) { errno = ENOLCK; return -1; }
    return syscall(SYS_fcntl, fd, command, argument);
}
int fcntl64(int fd, int command, ...) __attribute__((alias("fcntl")));
"""


def test_no_lock_no_hard_link_and_no_sync_of_directories_is_needed(job, make_part, tmp_path):
    (tmp_path / "unlike.c").write_text(UNLIKE_LOCAL)
    library = tmp_path / "unlike.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", library, tmp_path / "unlike.c"], check=True)
    write(job / "parts/n2-a.h5", make_part("n2"))
    environment = os.environ | {"LD_PRELOAD": str(library)}

    def run(code):
        return subprocess.run([sys.executable, "-c", code, job], env=environment, capture_output=True, text=True)

    assert "No locks available" in run("import h5py, sys; h5py.File(sys.argv[1] + '/x.h5', 'w', locking=True)").stderr
    (job / "x.h5").unlink(missing_ok=True)
    assert run(COLLECT).stderr == ""
    (path,) = job.glob("*.h5")
    assert read(path).missing_nodes == ()
