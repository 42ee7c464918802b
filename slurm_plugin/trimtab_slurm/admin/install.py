"""Put trimtab's part on a node, and take it away again: exactly what was written, and nothing that was changed since.

What is written is listed in installed.json, with its SHA-256, before it is. Files are replaced whole: a hook is run by
a slurmd that drains the node when it finds half of one.
"""

import errno
import json
import os
import re
import stat
import subprocess
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from trimtab_slurm.admin import registration, running, trust
from trimtab_slurm.admin.nodefiles import CONFIG, HOOKS, STATE, File, digest, directories, files
from trimtab_slurm.admin.slurmconf import SlurmConf

MANIFEST = Path("etc/trimtab/installed.json")
OLDEST_PYTHON = (3, 11)
PYTHON_SECONDS = 30.0
"""How long an interpreter may take to start."""
RECORD_SECONDS = 60.0
"""How long the profiles of samplers that are ended may take to be written."""


class InstallError(RuntimeError):
    """What stands in the way of installing or removing: names it, the reason, and the way out."""


@dataclass(frozen=True)
class Manifest:
    """What was written below a prefix; paths are relative to it."""

    files: dict[str, str]
    """Path -> SHA-256 of what was written."""
    directories: Sequence[str]
    """Those that were made, outer ones first."""
    above: Sequence[str] = ()
    """Absolute: those that were made on the way to the prefix, outer ones first."""


def install(prefix: Path, python: str) -> Iterator[str]:
    """Write everything below a prefix; yields what was done with each file. Raises InstallError.

    `python`: the absolute path of the interpreter that is to run the hooks. A node.toml that is not as it was
    installed is kept.
    """
    _check_prefix(prefix)
    _check_python(python)
    wanted, before = files(prefix, python), read_manifest(prefix) or Manifest({}, ())
    kept = _changed_config(prefix, wanted[CONFIG], before)
    if kept:
        del wanted[CONFIG]
    made = _missing_directories(prefix, own={} if kept else directories(prefix))  # else it says where what is kept
    manifest = Manifest(
        {**before.files, **{str(path): file.digest for path, file in wanted.items()}},
        sorted({*before.directories, *(str(path.relative_to(prefix)) for path in made if path not in prefix.parents)}),
        sorted({*before.above, *(str(path) for path in made if path in prefix.parents)}),
    )
    try:
        for path, mode in made.items():
            path.mkdir()
            path.chmod(mode)  # whatever the umask is
        _write(prefix / MANIFEST, File((json.dumps(asdict(manifest), indent=1) + "\n").encode(), 0o644))
        for path, file in wanted.items():
            yield f"{_write(prefix / path, file)} {prefix / path}"
    except OSError as error:
        raise InstallError(f"{error.filename or prefix}: {error.strerror}; mend that, and install again") from error
    if kept:
        yield f"kept {prefix / CONFIG}, which is not as it was installed"


def uninstall(prefix: Path, conf: SlurmConf | None) -> Iterator[str]:
    """Remove what `install` wrote, and end the samplers; yields what was done. Raises InstallError.

    Refused while slurm.conf runs the hooks: slurmd would drain every node. Profiles and journals stay.
    """
    manifest = read_manifest(prefix)
    if manifest is None:
        yield f"nothing is installed below {prefix}: there is no {prefix / MANIFEST}"
        return
    for which, hook in HOOKS.items():
        if conf and (by := registration.runs(conf, which, prefix / hook)):
            raise InstallError(
                f"{conf.path} still runs {prefix / hook} ({by}), and slurmd drains a node where that is missing: take "
                "it out there, `scontrol reconfigure`, and uninstall again; where that file is not in use, give "
                "--slurm-conf /dev/null"
            )
    hooks = {str(hook) for hook in HOOKS.values()}
    try:
        for name, written in manifest.files.items():
            if name in hooks:
                yield from _remove(prefix / name, written)
        yield from _end_samplers(prefix / STATE, prefix / CONFIG)  # which they read in the end
        for name, written in manifest.files.items():
            if name not in hooks:
                yield from _remove(prefix / name, written)
        (prefix / MANIFEST).unlink()
        for name in (*reversed(manifest.directories), *reversed(manifest.above)):
            yield from _remove_directory(prefix / name)
    except OSError as error:
        raise InstallError(f"{error.filename or prefix}: {error.strerror}; run as root") from error


def read_manifest(prefix: Path) -> Manifest | None:
    """What is installed below a prefix; None where nothing is. Raises InstallError."""
    path = prefix / MANIFEST
    try:
        if found := trust.opening(path):
            raise InstallError(f"{path} says what to remove, and another user could have written it: {found}")
        manifest = Manifest(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise InstallError(f"{path} cannot be read ({error}); remove it, and install again") from error
    for name in (*manifest.files, *manifest.directories):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise InstallError(f"{path} names {name}, which is not below {prefix}; remove it, and install again")
    for name in manifest.above:
        if Path(name) not in prefix.parents:
            raise InstallError(f"{path} names {name}, which is not above {prefix}; remove it, and install again")
    return manifest


def _check_prefix(prefix: Path) -> None:
    if not re.fullmatch(r"/[\w./+-]*", str(prefix), re.ASCII):
        raise InstallError(f"--prefix {prefix}: slurm.conf takes an absolute path of letters, digits and ._+-/ here")
    for path in _targets(prefix):
        existing = next(place for place in path.parents if place.exists())
        if found := trust.opening(existing):
            raise InstallError(f"{path} would be where another user can write: {found}; choose another --prefix")
        if not os.access(existing, os.W_OK):
            raise InstallError(
                f"{path} cannot be written, as user {os.geteuid()}: run as root, or choose another --prefix"
            )


def _check_python(python: str) -> None:
    """Refuse an interpreter that could not run the hooks as slurmd would have it, or that others can change."""
    package = Path(__file__).parent.parent
    code = (
        f"import sys; print(*sys.version_info[:2]); sys.path.insert(0, {str(package.parent)!r}); "
        f"sys.version_info < {OLDEST_PYTHON} or __import__('trimtab_slurm.hooks')"
    )
    command = [python, "-I", "-S", "-c", code]
    try:
        done = subprocess.run(command, env={}, capture_output=True, text=True, timeout=PYTHON_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallError(f"{python} cannot run the hooks: {error}") from error
    version = tuple(map(int, done.stdout.split()))
    if version and version < OLDEST_PYTHON:
        raise InstallError(f"{python} is Python {version[0]}.{version[1]}; the hooks need 3.11 or newer")
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise InstallError(
            f"{python} cannot run the hooks without an environment, and slurmd gives them none: {reason}; install "
            "trimtab with a Python that needs none, such as the system's"
        )
    named = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    libraries = [path for path in named if path.exists()]  # a distribution's own Python names some that it lacks
    for found in (trust.opening_below(package), *map(trust.opening, (Path(python), *libraries))):
        if found:
            raise InstallError(
                f"the hooks would run as root what another user can change: {found}; {found.mend}, or install trimtab "
                "elsewhere"
            )


def _changed_config(prefix: Path, wanted: File, before: Manifest) -> bool:
    """Whether there is a node.toml that is neither the one wanted nor the one that was written before."""
    path = prefix / CONFIG
    if path.exists() and not path.is_file():  # to read a FIFO would be to wait for ever
        raise InstallError(f"{path} is no file; mv {path} {path}.old, and install again")
    try:
        present = digest(path.read_bytes())
    except FileNotFoundError:
        return False
    return present not in (wanted.digest, before.files.get(str(CONFIG)))


def _targets(prefix: Path) -> list[Path]:
    """Every file and directory that is installed."""
    return [*(prefix / path for path in (MANIFEST, *files(prefix, ""))), *directories(prefix)]


def _missing_directories(prefix: Path, own: Mapping[Path, int]) -> dict[Path, int]:
    """The directories to be made and their modes, outer ones first; `own`: those that a node keeps things in."""
    wanted = [*own, *((prefix / path).parent for path in (MANIFEST, *files(prefix, "")))]
    every = {path for place in wanted for path in (place, *place.parents)}
    return {path: own.get(path, 0o755) for path in sorted(every) if not path.exists()}


def _write(path: Path, file: File) -> str:
    """Replace a file whole; says whether it had to be written. Raises OSError."""
    with suppress(FileNotFoundError):
        status = path.lstat()
        same = stat.S_ISREG(status.st_mode) and stat.S_IMODE(status.st_mode) == file.mode
        if same and status.st_uid == os.geteuid() and path.read_bytes() == file.content:
            return "unchanged"
    fresh = path.with_name(f".{path.name}.new")  # hidden: a pattern of slurm.conf may take any other name for a script
    fresh.unlink(missing_ok=True)
    try:
        with fresh.open("xb") as opened:
            os.fchmod(opened.fileno(), file.mode)
            opened.write(file.content)
            opened.flush()
            os.fsync(opened.fileno())
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    return "wrote"


def _remove(path: Path, written: str) -> Iterator[str]:
    try:
        present = digest(path.read_bytes())
    except FileNotFoundError:
        return
    if present != written:
        yield f"kept {path}, which was changed since it was installed"
        return
    path.unlink()
    yield f"removed {path}"


def _remove_directory(path: Path) -> Iterator[str]:
    try:
        path.rmdir()
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        yield f"kept {path}, which is not empty"


def _end_samplers(state_directory: Path, config: Path) -> Iterator[str]:
    """End the samplers that no epilog will tell to stop any more, and wait until their profiles are written."""
    if state_directory.exists() and not trust.opening(state_directory):
        for job in running.jobs(state_directory):
            yield f"ended the sampler of job {job.job_id} on {job.node}"
            job.end()
        for node in state_directory.iterdir():
            with suppress(OSError):
                node.rmdir()
    deadline = time.monotonic() + RECORD_SECONDS
    while left := running.recorders(config):
        if time.monotonic() > deadline:
            raise InstallError(f"processes {', '.join(map(str, left))} still write profiles; uninstall again later")
        time.sleep(0.1)
