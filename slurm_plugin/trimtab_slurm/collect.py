"""From journals to profiles: a node's journal becomes its part, the parts of an attempt become one file.

Everything can be done again, by several processes at once, and gives the same files: a part is named by its node and
start, a file is replaced whole. What is in a user's directory is read and written as that user.
"""

import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from trimtab_slurm import directories, faults, journal, profile
from trimtab_slurm.detach import KEPT_DESCRIPTOR
from trimtab_slurm.directories import job_directory
from trimtab_slurm.journal import Journal
from trimtab_slurm.profile import DeviceProfile, Event, Header, NodeProfile, Profile
from trimtab_slurm.settings import NodeSettings, load_or_default

__all__ = [
    "PARTS",
    "collect_job",
    "collect_journal",
    "collect_locked",
    "group_attempts",
    "job_directory",
    "recover",
    "stamp",
]

CLOCK_SKEW_SECONDS = 300.0
"""How far the clocks of two nodes may be apart: munge, and with it Slurm, refuses more."""
PARTS = "parts"
"""Where the parts are, below a job's directory."""
MOST_MERGES = 5
"""How often a merge is done again because others merged at the same time."""
PROFILES = "[!.]*.h5"
"""Not those that are still being written."""

log = logging.getLogger(__name__)


class CollectError(OSError):
    """What could not be written, and why. A journal stays where it is, to be tried again."""


def collect_job(directory: Path) -> list[Path]:
    """Merge the parts in a job's directory into one file for each attempt; returns all such files, oldest first.

    A file that holds all its parts is left as it is. Run by root, it acts as the owner of the directory; by someone who
    may only read, it merges nothing. A part that cannot be read at all is left out, with a warning logged. Raises
    OSError where a file cannot be written, and ProfileError where a part turns out to be damaged within.
    """
    if not directory.is_dir():
        return []
    if os.access(directory, os.W_OK):
        status = directory.stat()
        _as_user(status.st_uid, status.st_gid, lambda: _merge_parts(directory))
    return sorted(directory.glob(PROFILES))


def collect_journal(path: Path, profile_root: Path) -> bool:
    """Make the node's part of a journal that nobody holds, and remove the journal; False where somebody holds it.

    Raises OSError; the journal is then kept.
    """
    try:
        descriptor = journal.open_existing(path)
    except FileNotFoundError:
        return False
    try:
        if not journal.lock(descriptor):
            return False
        collect_locked(descriptor, path, profile_root)
        return True
    finally:
        os.close(descriptor)


def collect_locked(descriptor: int, path: Path, profile_root: Path) -> None:
    """As `collect_journal`, of a journal whose lock this process holds."""
    if os.fstat(descriptor).st_nlink == 0:
        return  # another was faster
    try:
        recorded = journal.read(descriptor)
    except journal.JournalError as error:
        path.rename(path.with_suffix(".damaged"))
        raise CollectError(f"{path} cannot be used, and is kept as .damaged: {error}") from error
    attempt = recorded.attempt
    directory = directories.make_job_directory(profile_root, attempt.cluster, attempt.job_id, attempt.uid, attempt.gid)
    _as_user(attempt.uid, attempt.gid, lambda: _write_part(directory, recorded))
    path.unlink()


def recover(settings: NodeSettings) -> list[Path]:
    """Collect every journal whose sampler is gone; returns those that still could not be, with a line in syslog."""
    return _collect_all(journal.orphans(Path(settings.journal_directory)), Path(settings.profile_root))


def _collect_all(journals: Sequence[Path], profile_root: Path) -> list[Path]:
    failed = []
    for path in journals:
        try:
            collect_journal(path, profile_root)
        except OSError as error:
            faults.warn(f"collect: {faults.describe(error)}")
            failed.append(path)
    return failed


def group_attempts(headers: Sequence[tuple[Path, Header]]) -> list[list[Path]]:
    """Which parts of one job directory belong to the same attempt: those with the same restart count whose times meet.

    Times of different nodes meet when they are no farther apart than clocks may be. An id that is used again, days
    later, begins a new group.
    """
    groups: list[list[Path]] = []
    count, end_seconds = -1, 0.0
    for path, header in sorted(headers, key=lambda item: (item[1].restart_count, item[1].start_seconds, item[0])):
        if header.restart_count == count and header.start_seconds <= end_seconds + CLOCK_SKEW_SECONDS:
            groups[-1].append(path)
            end_seconds = max(end_seconds, header.end_seconds)
        else:
            groups.append([path])
            count, end_seconds = header.restart_count, header.end_seconds
    return groups


def node_profile(recorded: Journal) -> NodeProfile:
    """A journal as the node's part of a profile; damage becomes an event."""
    events = [Event(*event) for event in recorded.events]
    if recorded.damage:
        events.append(Event(recorded.end_seconds, "journal", f"damaged: {recorded.damage}; what follows is lost"))
    if not recorded.ended:
        events.append(Event(recorded.end_seconds, "sampler", "ended without a word: killed, or the node went down"))
    return NodeProfile(
        node=recorded.attempt.node,
        start_seconds=recorded.start_seconds,
        end_seconds=recorded.end_seconds,
        sampler_period_seconds=recorded.period_seconds,
        devices=tuple(map(_device_profile, recorded.devices)),
        events=tuple(sorted(events, key=lambda event: event.time_seconds)),
    )


def _device_profile(record: journal.DeviceRecord) -> DeviceProfile:
    values = np.array(record.rows, dtype=np.float64).reshape(len(record.rows), len(record.columns))
    samples: profile.Table = {"time_seconds": np.array(record.times, dtype=np.float64)}
    samples |= {name: np.ascontiguousarray(values[:, place]) for place, name in enumerate(record.columns)}
    return DeviceProfile(
        uuid=record.uuid,
        kind=record.kind,
        model=record.model,
        index=record.index,
        driver=record.driver,
        samples=samples,
        absent={name: reason for name, reason in record.absent.items() if np.isnan(samples[name]).all()},
    )


def _write_part(directory: Path, recorded: Journal) -> None:
    """Write the node's part; merge the attempts that are whole with it."""
    attempt = recorded.attempt
    node = node_profile(recorded)
    part = Profile(
        cluster=attempt.cluster,
        job_id=attempt.job_id,
        user=attempt.user,
        start_seconds=min(attempt.start_seconds, node.start_seconds),
        end_seconds=node.end_seconds,
        restart_count=attempt.restart_count,
        expected_nodes=attempt.expected_nodes,
        nodes=(node,),
        training=None,
    )
    parts = directory / PARTS
    parts.mkdir(mode=0o700, exist_ok=True)
    profile.write(parts / f"{attempt.node}-{stamp(node.start_seconds)}.h5", part)
    # By the names alone: on a thousand nodes, all but the last few need not open a thousand files.
    present = {path.name.rpartition("-")[0] for path in parts.glob("*.h5")}
    if present.issuperset(attempt.expected_nodes):
        try:
            _merge_parts(directory, whole=True)
        except profile.ProfileError as error:
            faults.warn(f"collect: {error}")  # another's part: this one is written, and its journal is done with


def _merge_parts(directory: Path, *, whole: bool = False) -> None:
    """Merge until every attempt's file holds its parts; with `whole`, of attempts alone whose nodes are all there.

    Looking again matters: the merger of another node may have begun before the last part was there, and have put its
    file in place after the one that has them all.
    """
    for _ in range(MOST_MERGES):
        stale = _stale(directory, whole)
        for parts, target in stale:
            profile.merge(parts, target)
        if not stale:
            return


def _stale(directory: Path, whole: bool) -> list[tuple[list[Path], Path]]:
    """The attempts whose file lacks a part: their parts, and the file."""
    parts, files = _readable(directory / PARTS), _readable(directory)
    headers = dict(parts)
    stale = []
    for group in group_attempts(parts):
        members = [headers[path] for path in group]
        present = {node for header in members for node in header.nodes}
        if whole and not present.issuperset(members[0].expected_nodes):
            continue
        same = (file for file in files if len(group_attempts([file, (group[0], members[0])])) == 1)
        target, header = next(same, (directory / f"{stamp(min(part.start_seconds for part in members))}.h5", None))
        if header is None or not header.parts.issuperset(map(profile.part_id, group)):
            stale.append((group, target))
    return stale


def _readable(directory: Path) -> list[tuple[Path, Header]]:
    """The profiles in a directory, oldest first."""
    found = []
    for path in directory.glob(PROFILES):
        try:
            found.append((path, profile.read_header(path)))
        except profile.ProfileError as error:
            log.warning("left out: %s", error)
    return sorted(found, key=lambda item: (item[1].start_seconds, item[0]))


def _as_user(uid: int, gid: int, action: Callable[[], object]) -> None:
    """As root, do something as another user, in a process of its own; at once, where this process is not root.

    Raises CollectError with what went wrong there.
    """
    if os.geteuid() != 0 or uid == 0:
        action()
        return
    import h5py  # noqa: F401  now, since the user may not be able to read where trimtab is installed

    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(gid)
            os.setuid(uid)
            action()
            status = 0
        except (OSError, ValueError, RuntimeError) as error:
            os.write(writer, faults.describe(error).encode()[:4096])
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        text = answer.read().decode(errors="replace")
    _, status = os.waitpid(child, 0)
    if status:
        raise CollectError(f"as user {uid}: {text or 'ended without a word'}")


def stamp(seconds: float) -> str:
    """A moment as it stands in the names of parts and profiles, UTC: 20260131T235959Z."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y%m%dT%H%M%SZ")


def main() -> None:
    """The collector's process: CONFIG JOURNAL... as hooks start it, --held CONFIG JOURNAL as a sampler does at its end.

    A journal that is held is this process's KEPT_DESCRIPTOR, and locked: nobody else can come between.
    """
    faults.report_uncaught("collect")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.umask(0o022)
    held = sys.argv[1] == "--held"
    config, *journals = map(Path, sys.argv[2 if held else 1 :])
    settings, doubt = load_or_default(config)
    if doubt:
        faults.warn(f"collect: {doubt}")
    if held:
        collect_locked(KEPT_DESCRIPTOR, journals[0], Path(settings.profile_root))
    else:
        _collect_all(journals, Path(settings.profile_root))


if __name__ == "__main__":
    main()
