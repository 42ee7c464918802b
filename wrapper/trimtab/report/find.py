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
from trimtab.report.summarize import carried_out, outcome, shape_name, summarize
from trimtab.report.summary import Attempt, Summary
from trimtab.report.trainings import number_of_trainings, only
from trimtab_slurm import collect, merging, profile, settings
from trimtab_slurm.contents import Profile, ProfileError
from trimtab_slurm.settings import SettingsError


class ReportError(Exception):
    """No report can be given: says of what, why, and what to do."""


@dataclass(frozen=True)
class Recorded:
    """One attempt, summed up: of several trainings in one file, one of them."""

    file: Path
    place: int
    """Which of the file's trainings, from 0."""
    summary: Summary

    @contextmanager
    def profile(self) -> Iterator[Profile]:
        """What it was summed up from, as `trimtab_slurm.profile.opened` gives it. Raises ReportError."""
        with _opened(self.file) as found:
            yield only(found, self.place)


@dataclass(frozen=True)
class _Training:
    """One training of a file, or a file without one, in short."""

    file: Path
    place: int
    """As of `Recorded`."""
    attempt: Attempt
    run: Run | None


def load(target: str, attempt: str | None, profiles: Path | None) -> list[Recorded]:
    """The attempts that a report is wanted of, at least one, each with the chain that it belongs to.

    Each training counts as an attempt, of which a file may hold several. `target` is a job id or a profile; `attempt` a
    number from 1, "all", or None for the newest; `profiles` is where to look instead of the node's and the user's own
    profile root. A file of one training is read as it is, without the chain. Raises ReportError.
    """
    is_job = re.fullmatch(r"[0-9]+", target) is not None
    files, earlier = _files(int(target), profiles) if is_job else ([Path(target)], [])
    found: list[_Training] = []
    for file in files:
        found += _trainings(file, len(found) + 1)
    chosen = _chosen(attempt, len(found))
    if not chosen:
        others = f"; of an earlier job of this id, name the file: {', '.join(map(str, earlier))}" if earlier else ""
        named = f"job {target}" if is_job else target
        raise ReportError(f"{named} has no attempt {attempt}; choose from 1 to {len(found)}, or all{others}")
    wanted = [_read(found[number - 1]) for number in chosen]
    if not is_job and len(found) == 1:
        return wanted
    attempts, chain = linked([each.attempt for each in found], [each.run for each in found])

    def placed(recorded: Recorded, number: int) -> Recorded:
        previous = found[number - 2].file.name if number > 1 else recorded.summary.previous
        summary = replace(recorded.summary, attempts=attempts, chain=chain, attempt_number=number, previous=previous)
        return replace(recorded, summary=replace(summary, findings=findings(summary)))

    return [placed(*each) for each in zip(wanted, chosen, strict=True)]


def _chosen(attempt: str | None, count: int) -> Sequence[int]:
    """The numbers, from 1 to `count`, of those that are asked for; empty: there is none of this number."""
    if attempt is None:
        return [count]
    if attempt == "all":
        return range(1, count + 1)
    return [int(attempt)] if attempt.isdecimal() and 1 <= int(attempt) <= count else []


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


def _read(found: _Training) -> Recorded:
    with _opened(found.file) as profile:
        return Recorded(found.file, found.place, summarize(only(profile, found.place)))


@contextmanager
def _opened(file: Path) -> Iterator[Profile]:
    try:
        with profile.opened(file) as found:
            yield found
    except ProfileError as error:
        raise ReportError(str(error)) from error


def _trainings(file: Path, number: int) -> list[_Training]:
    """All of a file, at least one, numbered from `number` on. A file that cannot be read does not hide the others."""
    try:
        with _opened(file) as found:
            return [_training(file, place, number + place, found) for place in range(number_of_trainings(found))]
    except ReportError as error:
        return [_Training(file, 0, Attempt(number, None, None, "damaged", str(error), str(file)), None)]


def _training(file: Path, place: int, number: int, profile: Profile) -> _Training:
    found = only(profile, place)
    end = outcome(found)
    attempt = Attempt(
        number=number,
        start_seconds=found.start_seconds,
        duration_seconds=found.end_seconds - found.start_seconds,
        state=end.state,
        sentence=end.sentence,
        file=str(file),
        nodes=found.expected_nodes,
        shape=shape_name(found.training) if found.training else "",
        orders=carried_out(found.training) if found.training else 0,
    )
    return _Training(file, place, attempt, run_of(found.training) if found.training else None)
