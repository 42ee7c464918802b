"""Journals become parts, parts become one file per attempt. Idempotent; each file appears whole or not at all.

A job's directory belongs to its user: what is written there is written after becoming that user.
"""

import os
import sys
import syslog
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from trimtab_slurm import attempt, journal, profile, settings
from trimtab_slurm.attempt import Attempt, stamp
from trimtab_slurm.profile import DeviceProfile, Event, NodeProfile, Profile


def journal_path(node_settings: settings.NodeSettings, sampled: Attempt) -> Path:
    """Where the samples of an attempt go while it runs."""
    return Path(node_settings.journal_directory, sampled.node, f"{sampled.name}.journal")


def job_directory(profile_root: Path, cluster: str, job_id: int) -> Path:
    """Where the profiles of a job are, all its attempts."""
    return profile_root / cluster / str(job_id)


def collect_node(path: Path, node_settings: settings.NodeSettings) -> None:
    """Make a journal the node's part in the job's directory, and remove it; merge, if it was the last part."""
    part, owner = read_journal(path)
    directory = job_directory(Path(node_settings.profile_root), owner.cluster, owner.job_id)
    target = directory / "parts" / f"{owner.node}-{stamp(owner.start_seconds)}.h5"

    def publish() -> None:
        target.parent.mkdir(mode=0o700, exist_ok=True)
        profile.write(target, part)
        present = {node.node for other in _parts(directory) for node in other.nodes}
        if set(owner.expected_nodes) <= present:
            collect_job(directory)

    if _as_user(owner, publish):
        path.unlink()


def collect_job(directory: Path) -> list[Path]:
    """One file per attempt from the parts in a job's directory; returns all of them, oldest first."""
    for parts in group_attempts(_parts(directory)):
        merged = merge(parts)
        profile.write(directory / f"{stamp(min(part.start_seconds for part in parts))}.h5", merged)
    return sorted(directory.glob("*.h5"))


def group_attempts(parts: Iterable[Profile]) -> list[list[Profile]]:
    """Parts that belong together, oldest first: of one restart count, at overlapping times.

    The times tell apart runs of a job id that was used again after the counter wrapped.
    """
    by_restart: dict[int, list[Profile]] = defaultdict(list)
    for part in sorted(parts, key=lambda part: part.start_seconds):
        by_restart[part.restart_count].append(part)
    groups: list[list[Profile]] = []
    for candidates in by_restart.values():
        group: list[Profile] = []
        for part in candidates:
            if group and part.start_seconds > max(member.end_seconds for member in group):
                groups.append(group)
                group = []
            group.append(part)
        groups.append(group)
    return sorted(groups, key=lambda group: group[0].start_seconds)


def merge(parts: Sequence[Profile]) -> Profile:
    """One attempt from its parts: at least one, each of some nodes or of the training."""
    first = min(parts, key=lambda part: part.start_seconds)
    expected = max((part.expected_nodes for part in parts), key=len)
    nodes = sorted((node for part in parts for node in part.nodes), key=lambda node: node.node)
    return replace(
        first,
        end_seconds=max(part.end_seconds for part in parts),
        expected_nodes=expected,
        nodes=tuple(nodes),
        training=next((part.training for part in parts if part.training), None),
    )


def read_journal(path: Path) -> tuple[Profile, Attempt]:
    """The part that a journal holds, however it ended. Raises AttemptError where not even its first record is whole."""
    records = list(journal.read(path))
    if not records or isinstance(records[0], journal.Damage):
        raise attempt.AttemptError(f"{path} does not say which attempt it is of")
    head = records[0].body
    owner = attempt.from_json(head["attempt"])
    devices: list[dict[str, object]] = []
    samples: dict[int, list[tuple[float, ...]]] = defaultdict(list)
    events = [Event(owner.start_seconds, "prolog", "sampling began")]
    last_seconds, ended = owner.start_seconds, False
    for record in records[1:]:
        if isinstance(record, journal.Damage):
            text = f"the journal is damaged at byte {record.offset}: {record.lost_bytes} bytes lost"
            events.append(Event(last_seconds, "journal", text))
        elif record.kind == "S":
            samples[record.device].append((record.time_seconds, *record.values))
            last_seconds = record.time_seconds
        elif record.kind == "D":
            devices.append(record.body)
        elif record.kind == "V":
            events.append(Event(**record.body))
        elif record.kind == "E":
            last_seconds, ended = record.body["time_seconds"], True
    events.append(
        Event(last_seconds, "epilog", "sampling ended" if ended else "the sampler died; the last samples are lost")
    )
    node = NodeProfile(
        node=owner.node,
        start_seconds=owner.start_seconds,
        end_seconds=last_seconds,
        sampler_period_seconds=head["sampler_period_seconds"],
        devices=tuple(_device(device, samples[number]) for number, device in enumerate(devices)),
        events=tuple(events),
    )
    part = Profile(
        cluster=owner.cluster,
        job_id=owner.job_id,
        user=owner.user,
        start_seconds=owner.start_seconds,
        end_seconds=last_seconds,
        restart_count=owner.restart_count,
        expected_nodes=owner.expected_nodes,
        nodes=(node,),
        training=None,
    )
    return part, owner


def _device(described: dict[str, object], rows: list[tuple[float, ...]]) -> DeviceProfile:
    columns: list[str] = ["time_seconds", *described.pop("columns")]  # type: ignore[misc]
    table = np.array(rows, dtype=np.float64).reshape(len(rows), len(columns))
    samples: profile.Table = {name: table[:, position] for position, name in enumerate(columns)}
    return DeviceProfile(samples=samples, **described)  # type: ignore[arg-type]


def _parts(directory: Path) -> list[Profile]:
    return [profile.read(path) for path in sorted((directory / "parts").glob("*.h5"))]


def _as_user(owner: Attempt, action: Callable[[], None]) -> bool:
    """Whether an action succeeded in a child process that has become the attempt's user, for good."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    try:
        if os.geteuid() == 0 and owner.uid != 0:
            os.setgroups([])
            os.setgid(owner.gid)
            os.setuid(owner.uid)
        action()
    except Exception as error:  # noqa: BLE001 - outermost of the child: it must not return into its parent's code
        syslog.syslog(syslog.LOG_ERR, f"job {owner.job_id}: its profile cannot be written: {error}")
        os._exit(1)
    os._exit(0)


def main(state_file: Path, config: Path) -> None:
    """Collect what a dead sampler left: `python -m trimtab_slurm.collect STATE_FILE CONFIG`, started by the epilog."""
    node_settings = settings.load(config) if config.exists() else settings.NodeSettings()
    sampled = attempt.from_json(state_file.read_text(encoding="utf-8"))
    collect_node(journal_path(node_settings, sampled), node_settings)
    state_file.unlink(missing_ok=True)
    state_file.with_suffix(".pid").unlink(missing_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
