"""What an admin sets for the nodes: node.toml. Standard library only: the hooks read it."""

import errno
import json
import os
import stat
import tomllib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any


class SettingsError(ValueError):
    """A node.toml that cannot be used: names the file, the key, the reason, and the way out."""


@dataclass(frozen=True)
class NodeSettings:
    """Where the hooks keep things, and how often they measure. Paths are absolute."""

    journal_directory: str = "/var/lib/trimtab/journals"
    """Samples of running jobs. Local to the node, and must survive a reboot."""
    profile_root: str = "/var/lib/trimtab/profiles"
    """Profiles, in one directory for each job that belongs to its user. On a file system that all nodes share, the
    parts of all nodes become one file."""
    sampler_period_seconds: float = 1.0
    """Time between two samples."""
    python: str = ""
    """Interpreter of sampler and collector, with trimtab installed; empty: the one that runs the hooks."""
    partitions: tuple[str, ...] = ()
    """Partitions whose jobs are profiled; empty: all."""
    minimum_gpus: int = 0
    """A job that holds fewer GPUs on a node is not profiled there."""
    opt_out: str = "trimtab=off"
    """A job whose comment holds this word is not profiled; empty: none can opt out."""
    staff_group: str = ""
    """Group that may read all profiles; empty: each profile is its user's alone."""
    nvml_library: str = ""
    """Path of libnvidia-ml.so.1; empty: where the system finds it."""
    fault: str = ""
    """Faults that the sampler makes up, to test a site, separated by commas: lost:INDEX@SECONDS (that device is lost,
    so long after the start), hang:INDEX@SECONDS, slow:INDEX@SECONDS=DELAY, unsupported:COLUMN, driver, driver-hang,
    die@SECONDS, disk@SECONDS; empty: none."""

    def __post_init__(self) -> None:
        for key in ("journal_directory", "profile_root"):
            if not Path(getattr(self, key)).is_absolute():
                raise SettingsError(f"{key} = {json.dumps(getattr(self, key))}: must be an absolute path")
        for key in ("python", "nvml_library"):
            if getattr(self, key) and not Path(getattr(self, key)).is_absolute():
                raise SettingsError(f"{key} = {json.dumps(getattr(self, key))}: must be an absolute path, or empty")
        if set(self.opt_out) & set(" ,;\t\n"):
            raise SettingsError(f"opt_out = {json.dumps(self.opt_out)}: must be one word, without blanks, commas and ;")
        if self.minimum_gpus < 0:
            raise SettingsError(f"minimum_gpus = {self.minimum_gpus}: must be 0 or more")
        if not 0.01 <= self.sampler_period_seconds <= 3600:
            raise SettingsError(
                f"sampler_period_seconds = {self.sampler_period_seconds}: must be between 0.01 and 3600"
            )

    def reason_to_skip(self, partition: str, gpus: int | None, comment: str) -> str:
        """Why a job is not to be profiled on this node; empty where it is. `gpus`: held here, None: not known."""
        if self.opt_out and self.opt_out in comment.replace(",", " ").replace(";", " ").split():
            return f"its comment says {self.opt_out}"
        if self.partitions and partition not in self.partitions:
            return f"partition {partition} is not one of {', '.join(self.partitions)}"
        if gpus is not None and gpus < self.minimum_gpus:
            return f"GPUs that it holds here: {gpus}, of at least {self.minimum_gpus}"
        return ""


def load(path: Path) -> NodeSettings:
    """The settings of a file, defaults for what it leaves out. Raises SettingsError."""
    try:
        return _parse(path, path.read_bytes())
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from error


def load_trusted(path: Path) -> NodeSettings:
    """As `load`, for a privileged process: only a file that no other user can have written is believed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise SettingsError(f"{path} is no file; move it away")
            if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
                raise SettingsError(
                    f"{path} could have been written by another user (owner {status.st_uid}, mode "
                    f"{stat.S_IMODE(status.st_mode):04o}); chown it to root, and chmod go-w"
                )
            return _parse(path, file.read())
    except OSError as error:
        linked = error.errno == errno.ELOOP
        reason = (
            "is a symbolic link, which root does not follow; put a copy there"
            if linked
            else f"cannot be read: {error.strerror}"
        )
        raise SettingsError(f"{path} {reason}") from error


def load_or_default(path: Path) -> tuple[NodeSettings, str]:
    """As `load_trusted`, for a process that goes on in any case: the settings, or the defaults and why they apply."""
    try:
        return load_trusted(path), ""
    except SettingsError as error:
        return NodeSettings(), f"the defaults apply: {error}"


def render(settings: NodeSettings) -> str:
    """The text of a node.toml that `load` reads back as these settings."""
    # A JSON string is a TOML basic string.
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in asdict(settings).items())


def _parse(path: Path, content: bytes) -> NodeSettings:
    try:
        values = tomllib.loads(content.decode())
    except ValueError as error:
        raise SettingsError(f"{path} is not TOML: {error}") from error
    types = {field.name: field.type for field in fields(NodeSettings)}
    for key, value in values.items():
        if key not in types:
            import difflib

            close = difflib.get_close_matches(key, types, n=1)
            hint = f"did you mean {close[0]}?" if close else f"choose from {', '.join(types)}"
            raise SettingsError(f"{path}: unknown key {key}; {hint}")
        values[key] = _typed(f"{path}: {key}", value, types[key])
    try:
        return NodeSettings(**values)
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from error


def _typed(where: str, value: Any, kind: Any) -> Any:
    """A value of TOML as a field's type."""
    wanted, types = {
        float: ("a number", (int, float)),
        int: ("a whole number", (int,)),
        str: ("a text in quotes", (str,)),
        tuple[str, ...]: ("a list of texts in quotes", (list,)),
    }[kind]
    texts = not isinstance(value, list) or all(isinstance(item, str) for item in value)
    if isinstance(value, bool) or not isinstance(value, types) or not texts:
        raise SettingsError(f"{where} = {value!r}: must be {wanted}")
    return tuple(value) if isinstance(value, list) else kind(value)
