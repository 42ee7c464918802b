"""The collector: a node's journal becomes its part of a profile, and the last part of an attempt its file.

Collecting again gives the same part: it is named by the node and the moment at which its journal began. Root reads the
journal; what is in a user's directory is written as that user.
"""

import logging
import os
import signal
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trimtab_slurm import directories, faults, journal, profile
from trimtab_slurm.as_user import as_user
from trimtab_slurm.contents import Column, DeviceProfile, Event, NodeProfile, Profile, Table, units
from trimtab_slurm.detach import KEPT_DESCRIPTOR
from trimtab_slurm.journal import DeviceRecord, Journal
from trimtab_slurm.merging import merge_parts, stamp
from trimtab_slurm.settings import NodeSettings, load_or_default

COLLECTOR = "collector"
"""Kind of a journal's events that are no longer of the attempt."""


class CollectError(OSError):
    """What could not be written, and why. A journal stays where it is, to be tried again."""


def collect_journal(path: Path, settings: NodeSettings | None) -> bool:
    """Make the node's part of a journal that nobody holds, and remove the journal; False where somebody holds it.

    `settings`: None where node.toml cannot be believed: what it said when the job began then counts. Raises OSError;
    the journal is then kept.
    """
    try:
        descriptor = journal.open_existing(path)
    except FileNotFoundError:
        return False
    try:
        if not journal.lock(descriptor):
            return False
        collect_locked(descriptor, path, settings)
        return True
    finally:
        os.close(descriptor)


def collect_locked(descriptor: int, path: Path, settings: NodeSettings | None) -> None:
    """As `collect_journal`, of a journal whose lock this process holds."""
    status = os.fstat(descriptor)
    if status.st_nlink == 0:
        return  # another was faster
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise CollectError(f"{path} is not used: it belongs to user {status.st_uid}, who may have made it up")
    try:
        recorded = journal.read(descriptor)
    except journal.JournalError as error:
        path.rename(path.with_suffix(".damaged"))
        raise CollectError(f"{path} cannot be used, and is kept as .damaged: {error}") from error
    attempt = recorded.attempt
    faults.introduce(f"collector of job {attempt.job_id} on {attempt.node}")
    if recorded.damage:
        faults.warn(_lost(recorded))
    profile_root, staff_group = _destination(recorded, settings)
    staff, doubt = directories.staff_gid(staff_group)
    if doubt:
        faults.warn(doubt)
    try:
        directory = directories.make_job_directory(
            profile_root, attempt.cluster, attempt.job_id, attempt.uid, attempt.gid, staff
        )
        as_user(attempt.uid, attempt.gid, lambda: _write_part(directory, recorded))
    except OSError as error:
        text = f"the profile could not be written at first: {error}"
        if (COLLECTOR, text) not in {event[1:] for event in recorded.events}:
            with suppress(OSError):  # of the profile that will be written one day
                journal.Writer(descriptor).event(COLLECTOR, text)
        raise
    path.unlink()


def recover(settings: NodeSettings, job_id: int | None = None) -> list[tuple[Path, str]]:
    """Collect the journals, of one job or all, whose sampler is gone; returns those that still could not be, and why.

    Raises OSError where another user could have put journals there.
    """
    directory = Path(settings.journal_directory)
    if not directory.exists():
        return []  # nor is it made: this may be no node
    os.close(directories.open_own(directory, 0o700))
    return _collect_all(journal.orphans(directory, job_id), settings)


def _destination(recorded: Journal, settings: NodeSettings | None) -> tuple[Path, str]:
    """The profile root, and the group that may read the profile."""
    if settings is not None:
        return Path(settings.profile_root), settings.staff_group
    return Path(recorded.profile_root or NodeSettings().profile_root), recorded.staff_group


def _collect_all(journals: Sequence[Path], settings: NodeSettings | None) -> list[tuple[Path, str]]:
    failed = []
    for path in journals:
        faults.introduce("collector")
        try:
            collect_journal(path, settings)
        except OSError as error:
            faults.warn(faults.describe(error))
            failed.append((path, str(error)))
    return failed


def _lost(recorded: Journal) -> str:
    return f"damaged: {recorded.damage}; what follows is lost"


def node_profile(recorded: Journal) -> NodeProfile:
    """A journal as the node's part of a profile; damage becomes an event."""
    events = [Event(*event) for event in recorded.events if event[1] != COLLECTOR]
    moments = [event.time_seconds for event in events]
    moments += [seconds for device in recorded.devices for seconds in device.times[-1:]]
    end_seconds = max(moments, default=recorded.start_seconds)
    # What collectors said later, maybe after a reboot, by another monotonic clock.
    events += [Event(end_seconds, "fault", text) for _, kind, text in recorded.events if kind == COLLECTOR]
    if recorded.damage:
        events.append(Event(end_seconds, "journal", _lost(recorded)))
    if not recorded.ended:
        events.append(Event(end_seconds, "sampler", "ended without a word: killed, or the node went down"))
    return NodeProfile(
        node=recorded.attempt.node,
        start_seconds=recorded.start_seconds,
        end_seconds=end_seconds,
        sampler_period_seconds=recorded.period_seconds,
        devices=tuple(map(_device_profile, recorded.devices)),
        events=tuple(sorted(events, key=lambda event: event.time_seconds)),
    )


def _device_profile(record: DeviceRecord) -> DeviceProfile:
    values = np.frombuffer(record.values).reshape(-1, len(record.columns))
    figures = {name: _column(name, values[:, place]) for place, name in enumerate(record.columns)}
    samples: Table = {"time_seconds": np.frombuffer(record.times), **figures}
    return DeviceProfile(
        uuid=record.uuid,
        kind=record.kind,
        model=record.model,
        index=record.index,
        driver=record.driver,
        samples=samples,
        absent=dict(record.absent),
        pci=record.pci,
        parent_uuid=record.parent_uuid,
        processes=_process_table(record),
    )


def _column(name: str, values: npt.NDArray[np.float64]) -> Column:
    """A ratio in 24 bits is finer than any that a driver measures, and half as long. The rest is not copied: a job of a
    week has a gigabyte of it."""
    return values.astype(np.float32) if units(name, "f") == "ratio" else values


def _process_table(record: DeviceRecord) -> Table:
    if not record.processes:
        return {}
    times, pids, sizes = zip(*record.processes, strict=True)
    return {
        "time_seconds": np.array(times, dtype=np.float64),
        "pid": np.array(pids, dtype=np.int64),
        "memory_used_bytes": np.array(sizes, dtype=np.float64),
    }


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
        sluid=attempt.sluid,
        nodes=(node,),
        training=None,
    )
    parts = directory / directories.PARTS
    parts.mkdir(mode=directories.OWN_MODE, exist_ok=True)
    # Two attempts may begin on a node within one second.
    profile.write(parts / f"{attempt.node}-{stamp(node.start_seconds, exact=True)}.h5", part)
    # By the names alone: on a thousand nodes, all but the last few need not open a thousand files.
    present = {path.name.rpartition("-")[0] for path in parts.glob("[!.]*.h5")}
    if present.issuperset(attempt.expected_nodes):
        merge_parts(directory, only_whole=True)


class _ToSyslog(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        faults.warn(self.format(record))


def main() -> None:
    """The collector's process: CONFIG JOURNAL... as hooks start it, --held CONFIG JOURNAL as a sampler does at its end.

    A journal that is held is this process's KEPT_DESCRIPTOR, and locked: nobody else can come between.
    """
    faults.report_uncaught("collector")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.umask(0o022)
    logging.basicConfig(handlers=[_ToSyslog()], format="%(message)s")
    held = sys.argv[1] == "--held"
    config, *journals = map(Path, sys.argv[2 if held else 1 :])
    settings: NodeSettings | None
    settings, doubt = load_or_default(config)
    if doubt:
        faults.warn(f"{doubt}; what it said when the job began counts")
        settings = None
    if held:
        collect_locked(KEPT_DESCRIPTOR, journals[0], settings)
    else:
        _collect_all(journals, settings)


if __name__ == "__main__":
    main()
