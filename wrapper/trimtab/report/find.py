"""From what the user names, a job or a file, to the attempts that are recorded of it."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from trimtab import places
from trimtab.recorder import recover
from trimtab.report.advice import findings
from trimtab.report.chain import Run, linked, run_of
from trimtab.report.summarize import outcome, shape_name, summarize
from trimtab.report.summary import Attempt, Summary
from trimtab_slurm import collect, merging, profile, settings
from trimtab_slurm.contents import Profile, ProfileError
from trimtab_slurm.settings import SettingsError


class ReportError(Exception):
    """No report can be given: says of what, why, and what to do."""


@dataclass(frozen=True)
class Recorded:
    """One attempt, summed up."""

    file: Path
    summary: Summary

    @contextmanager
    def profile(self) -> Iterator[Profile]:
        """What it was summed up from, as `trimtab_slurm.profile.opened` gives it. Raises ReportError."""
        with _opened(self.file) as found:
            yield found


def load(target: str, attempt: str | None, profiles: Path | None) -> list[Recorded]:
    """The attempts that a report is wanted of, at least one, each with the chain that it belongs to.

    `target` is a job id or a profile; `attempt` a number from 1, "all", or None for the newest; `profiles` is where
    to look instead of the node's and the user's own profile root. Raises ReportError.
    """
    if not re.fullmatch(r"[0-9]+", target):
        if attempt is not None:
            raise ReportError(f"{target}: --attempt goes with a job id; a file holds one attempt")
        return [_read(Path(target))]
    files, earlier = _files(int(target), profiles)
    if attempt is None:
        chosen = files[-1:]
    elif attempt == "all":
        chosen = files
    elif attempt.isdecimal() and 1 <= int(attempt) <= len(files):
        chosen = [files[int(attempt) - 1]]
    else:
        others = f"; of an earlier job of this id, name the file: {', '.join(map(str, earlier))}" if earlier else ""
        raise ReportError(f"job {target} has no attempt {attempt}; choose from 1 to {len(files)}, or all{others}")
    wanted = {file: _read(file) for file in chosen}
    attempts, chain = linked(*_attempts(files))

    def placed(recorded: Recorded) -> Recorded:
        number = files.index(recorded.file) + 1
        summary = replace(recorded.summary, attempts=attempts, chain=chain, attempt_number=number)
        return replace(recorded, summary=replace(summary, findings=findings(summary)))

    return [placed(recorded) for recorded in wanted.values()]


def _files(job_id: int, profiles: Path | None) -> tuple[list[Path], list[Path]]:
    """One profile for each attempt of the newest job of this id, oldest first, at least one; those of earlier ones."""
    try:
        roots = [profiles] if profiles else places.profile_roots()
    except (SettingsError, OSError) as error:
        raise ReportError(f"cannot tell where profiles are: {error}; pass --profiles DIR") from error
    if not profiles:
        _recover_samples(job_id)
    by_cluster: dict[str, Path] = {}
    for root in roots:
        for directory in sorted(root.glob(f"*/{job_id}")):
            by_cluster.setdefault(directory.parent.name, directory)
    if not by_cluster:
        looked = ", ".join(map(str, roots))
        raise ReportError(f"job {job_id}: no profile below {looked}; pass --profiles DIR if it is elsewhere")
    if len(by_cluster) > 1:
        found = ", ".join(map(str, by_cluster.values()))
        raise ReportError(f"job {job_id}: several clusters have one of this id ({found}); name the file itself")
    (directory,) = by_cluster.values()
    try:
        files = _merged(directory)
    except OSError as error:
        raise ReportError(f"job {job_id}: cannot read its profiles: {error}") from error
    if not files:
        raise ReportError(
            f"job {job_id}: nothing is recorded in {directory} yet; a profile appears when the job has ended on a node"
        )
    *earlier, newest = merging.chains((file, _restart_count(file)) for file in files)
    return newest, [file for chain in earlier for file in chain]


def _restart_count(file: Path) -> int | None:
    try:
        return profile.read_header(file).restart_count
    except ProfileError:
        return None


def _recover_samples(job_id: int) -> None:
    """As root, on a node of the job: collect what dead samplers have left behind. What cannot be, syslog names."""
    if os.geteuid() == 0:
        with suppress(SettingsError, OSError):  # no node, or none whose node.toml can be believed
            collect.recover(settings.load_trusted(places.node_config()), job_id)


def _merged(directory: Path) -> list[Path]:
    """With what the wrapper left behind, of a job of one's own; root merges another's as that user."""
    if directory.stat().st_uid == os.geteuid():
        recover(directory)
    return merging.collect_job(directory)


def _read(file: Path) -> Recorded:
    with _opened(file) as found:
        return Recorded(file, summarize(found))


@contextmanager
def _opened(file: Path) -> Iterator[Profile]:
    try:
        with profile.opened(file) as found:
            yield found
    except ProfileError as error:
        raise ReportError(str(error)) from error


def _attempts(files: Sequence[Path]) -> tuple[list[Attempt], list[Run | None]]:
    """All attempts in short, and the steps of each. One that cannot be read does not hide the others."""
    attempts: list[Attempt] = []
    runs: list[Run | None] = []
    for number, file in enumerate(files, start=1):
        try:
            with _opened(file) as found:
                attempt, run = _attempt(number, file, found), run_of(found.training) if found.training else None
        except ReportError as error:
            attempt, run = Attempt(number, None, None, "damaged", str(error), str(file)), None
        attempts.append(attempt)
        runs.append(run)
    return attempts, runs


def _attempt(number: int, file: Path, found: Profile) -> Attempt:
    end = outcome(found)
    return Attempt(
        number=number,
        start_seconds=found.start_seconds,
        duration_seconds=found.end_seconds - found.start_seconds,
        state=end.state,
        sentence=end.sentence,
        file=str(file),
        nodes=found.expected_nodes,
        shape=shape_name(found.training) if found.training else "",
    )
