"""What a sandbox is, as its directory records it: read by everyone, changed by one at a time.

What is started is recorded at once, by process identity, so that whatever happens to the command that started it, a
later one can end it.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from trimtab.sandbox import processes
from trimtab.sandbox.config import Places, SandboxError, Spec
from trimtab.sandbox.processes import Process


@dataclass(frozen=True)
class Sandbox:
    """A sandbox as it was recorded, whole or not."""

    directory: Path
    spec: Spec
    daemons: tuple[Process, ...]

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment, for the sandbox: of another Slurm's job no variable is left."""
        others = ("SLURM", "SBATCH_", "SALLOC_", "SRUN_")
        places = Places(self.directory)
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith(others)},
            "SLURM_CONF": str(places.slurm_conf),
            "TRIMTAB_NODE_CONFIG": str(places.node_config),
        }

    @property
    def lost(self) -> tuple[str, ...]:
        """Names of the daemons that do not run (any more); empty when it is whole."""
        running = {daemon.name for daemon in self.daemons if processes.alive(daemon)}
        return tuple(name for name in ("munged", "slurmctld", *self.spec.node_names) if name not in running)

    def write(self) -> None:
        """Record it."""
        values = {"spec": asdict(self.spec), "daemons": [asdict(daemon) for daemon in self.daemons]}
        state = Places(self.directory).state
        fresh = state.with_suffix(".new")
        fresh.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        fresh.replace(state)


def default_directory() -> Path:
    """The directory of this user's sandbox, unless told."""
    return Path(f"/tmp/trimtab-sandbox-{os.getuid()}")


def find(directory: Path) -> Sandbox | None:
    """The sandbox that is recorded in a directory. Raises SandboxError when its record cannot be read."""
    directory = plain(directory)
    record = Places(directory).state
    try:
        values = json.loads(record.read_text(encoding="utf-8"))
        daemons = tuple(Process(**daemon) for daemon in values["daemons"])
        return Sandbox(directory, Spec(**values["spec"]), daemons)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise SandboxError(f"{record} is no record of a sandbox ({error}); remove {directory} by hand") from error


def plain(directory: Path) -> Path:
    """The absolute path as the kernel spells it; but a link itself stays one, to be refused."""
    directory = directory.absolute()
    return directory if directory.is_symlink() else directory.resolve()


@contextmanager
def lock(directory: Path, *, create: bool) -> Iterator[bool]:
    """Hold the directory alone; yields whether it exists. Raises SandboxError for one that is not this user's own."""
    while True:
        if create:
            directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        try:
            handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            yield False
            return
        except OSError as error:
            raise SandboxError(f"{directory} is no directory of ours: {error.strerror}") from error
        try:
            status = os.fstat(handle)
            if status.st_uid != os.getuid() or status.st_mode & 0o022:
                raise SandboxError(
                    f"{directory} is another user's, or others may write to it; choose another with --dir"
                )
            fcntl.flock(handle, fcntl.LOCK_EX)
            if directory.exists() and os.path.samestat(status, directory.stat()):
                yield True
                return
        finally:
            os.close(handle)
