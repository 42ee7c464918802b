"""From the parts in a job's directory to one file for each attempt, the attempts of a job linked as a chain.

Several processes may do this at once, on several nodes and without a lock, and any of them may be killed: a file is
replaced whole, and each looks again at what is there after what it has written, until there is nothing to do. What is
in a user's directory is read and written as that user.
"""

import logging
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from trimtab_slurm import profile
from trimtab_slurm.as_user import as_user
from trimtab_slurm.contents import Header, ProfileError
from trimtab_slurm.directories import PARTS

CLOCK_SKEW_SECONDS = 300.0
"""How far the clocks of two nodes may be apart: munge, and with it Slurm, refuses more."""
MOST_ROUNDS = 5
"""How often it is looked again because others merged at the same time."""
UNFINISHED_SECONDS = 3600.0
"""A file that was begun so long ago, and has not been written to since, is a killed process's."""

_FILE = re.compile(r"\d{8}T\d{6}Z(-restart\d+)?\.h5")
_PART = re.compile(r".+-(\d{8}T\d{6}(?:\.\d{6})?Z)\.h5")

log = logging.getLogger(__name__)


def collect_job(directory: Path) -> list[Path]:
    """Merge the parts in a job's directory into one file for each attempt; returns all such files, oldest first.

    A file that holds all its parts is left as it is. Run by root, it acts as the owner of the directory; by someone who
    may only read, it merges nothing. A part that is damaged is left out, and named in the file and in the log. Raises
    OSError where a file cannot be written.
    """
    if not directory.is_dir():
        return []
    if os.access(directory, os.W_OK):
        status = directory.stat()
        as_user(status.st_uid, status.st_gid, lambda: merge_parts(directory))
    return files(directory)


def files(directory: Path) -> list[Path]:
    """The files of the attempts in a job's directory, oldest first."""
    return sorted((path for path in directory.iterdir() if _FILE.fullmatch(path.name)), key=lambda path: path.stem)


def merge_parts(directory: Path, *, only_whole: bool = False) -> None:
    """Merge until every attempt's file holds its parts; with `only_whole`, of attempts alone whose nodes are all there.

    Looking again matters: the merger of another node may have begun before the last part was there, and have put its
    file in place after the one that has them all, or beside it. Raises OSError.
    """
    _sweep(directory)
    for _ in range(MOST_ROUNDS):
        merged = False
        attempts, unplaced = _survey(directory)
        for attempt in attempts:
            if attempt.is_current:
                for duplicate in attempt.duplicates:
                    duplicate.unlink(missing_ok=True)
            elif attempt.is_whole or not only_whole:
                left_out = profile.merge(
                    attempt.parts, attempt.target, attempt.unusable, attempt.number, attempt.previous
                )
                for reason in left_out.values():
                    log.warning("left out of %s: %s", attempt.target.name, reason)
                merged = True
        if not merged:
            for reason in unplaced:
                log.warning("left out: %s", reason)
            return


def group_attempts(headers: Iterable[tuple[Path, Header]]) -> list[list[Path]]:
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


def chains(restart_counts: Iterable[tuple[Path, int | None]]) -> list[list[Path]]:
    """The attempts of a job directory, oldest first, in chains: a job that was requeued has one attempt for each run.

    Where the restart count does not rise, the job id has been used again, and a new chain begins. A count of None is a
    file's that cannot be read: it is taken to belong where it stands.
    """
    found: list[list[Path]] = []
    latest = -1
    for path, count in restart_counts:
        if not found or (count is not None and (count == 0 or count <= latest)):
            found.append([])
            latest = -1
        found[-1].append(path)
        latest = latest if count is None else count
    return found


def stamp(seconds: float, *, exact: bool = False) -> str:
    """A moment as it stands in names, UTC: 20260131T235959Z; exact: 20260131T235959.123456Z."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y%m%dT%H%M%S.%fZ" if exact else "%Y%m%dT%H%M%SZ")


@dataclass(frozen=True)
class _Attempt:
    """What is there of one attempt, and what its file should be."""

    target: Path
    parts: Mapping[Path, Header]
    unusable: Mapping[Path, str]
    """Parts that cannot be read at all, and why."""
    number: int
    previous: str
    file: Header | None
    """What `target` holds; None where it is not there."""
    duplicates: tuple[Path, ...]
    """Other files of the attempt, from mergers that saw fewer parts."""

    @property
    def is_whole(self) -> bool:
        """Whether each node of the allocation has left a part."""
        expected = next(iter(self.parts.values())).expected_nodes
        return {node for header in self.parts.values() for node in header.nodes}.issuperset(expected)

    @property
    def is_current(self) -> bool:
        """Whether the file holds all parts as they are now, and stands at its place in the chain."""
        if self.file is None or (self.file.attempt_number, self.file.previous) != (self.number, self.previous):
            return False
        wanted = frozenset[str]().union(*(header.parts for header in self.parts.values()))
        return self.file.parts.issuperset(wanted | set(map(profile.part_id, self.unusable)))


def _survey(directory: Path) -> tuple[list[_Attempt], list[str]]:
    """The attempts that have parts in a job's directory, oldest first; why parts cannot be used that are of none."""
    parts, unusable = _headers((directory / PARTS).glob("[!.]*.h5"))
    present, _ = _headers(files(directory))
    claimed: dict[Path, tuple[list[Path], list[Path]]] = {}  # file: its parts, and all files of its attempt
    places = {path: (header.start_seconds, header.restart_count) for path, header in present.items()}
    for group in group_attempts(parts.items()):
        own = [path for path, header in present.items() if _meet(header, [parts[part] for part in group])]
        start, count = min(parts[part].start_seconds for part in group), parts[group[0]].restart_count
        restart = f"-restart{count}" if count else ""
        target = own[0] if own else directory / f"{stamp(start)}{restart}.h5"
        claimed[target] = group, own
        places = {path: place for path, place in places.items() if path not in own} | {target: (start, count)}
    ordered = sorted(places, key=lambda path: (places[path], path))
    attempts = []
    for chain in chains((path, places[path][1]) for path in ordered):
        for place, target in enumerate(chain):
            if target not in claimed:
                continue
            group, own = claimed[target]
            members = {part: parts[part] for part in group}
            attempts.append(
                _Attempt(
                    target=target,
                    parts=members,
                    unusable={part: reason for part, reason in unusable.items() if _is_of(part, members.values())},
                    number=place + 1,
                    previous=chain[place - 1].name if place else "",
                    file=present.get(target),
                    duplicates=tuple(path for path in own[1:] if _names(present[path]) <= _names(present[target])),
                )
            )
    placed = {part for attempt in attempts for part in attempt.unusable}
    return attempts, [reason for part, reason in unusable.items() if part not in placed]


def _headers(paths: Iterable[Path]) -> tuple[dict[Path, Header], dict[Path, str]]:
    """What can be read, oldest first, and why the rest cannot."""
    found: dict[Path, Header] = {}
    unusable: dict[Path, str] = {}
    for path in sorted(paths):
        try:
            found[path] = profile.read_header(path)
        except ProfileError as error:
            if path.is_symlink() or path.exists():  # else it has just been removed
                unusable[path] = str(error)
    return dict(sorted(found.items(), key=lambda item: (item[1].start_seconds, item[0]))), unusable


def _meet(header: Header, members: Sequence[Header]) -> bool:
    """Whether a file is of the attempt that these parts are of."""
    start, end = min(each.start_seconds for each in members), max(each.end_seconds for each in members)
    return (
        header.restart_count == members[0].restart_count
        and header.start_seconds <= end + CLOCK_SKEW_SECONDS
        and start <= header.end_seconds + CLOCK_SKEW_SECONDS
    )


def _is_of(part: Path, members: Iterable[Header]) -> bool:
    """Whether a part that cannot be read is of this attempt, by the time in its name."""
    match = _PART.fullmatch(part.name)
    if not match:
        return False
    try:
        seconds = datetime.fromisoformat(match[1]).timestamp()
    except ValueError:
        return False
    return any(
        each.start_seconds - CLOCK_SKEW_SECONDS <= seconds <= each.end_seconds + CLOCK_SKEW_SECONDS for each in members
    )


def _names(header: Header) -> set[str]:
    return {part.rpartition("@")[0] for part in header.parts}


def _sweep(directory: Path) -> None:
    """Remove what killed processes have begun."""
    old = time.time() - UNFINISHED_SECONDS
    for path in (*directory.glob(".*.h5.*"), *(directory / PARTS).glob(".*.h5.*")):
        with suppress(FileNotFoundError):  # another sweeps too
            if path.lstat().st_mtime < old:
                path.unlink()
