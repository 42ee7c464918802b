"""node.toml: where the node's part of trimtab keeps what. Standard library only: the hooks load it."""

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path


class SettingsError(ValueError):
    """A node.toml that cannot be taken: names file, key and reason."""


@dataclass(frozen=True)
class NodeSettings:
    """What an admin sets for a node."""

    state_directory: str = "/run/trimtab"
    """Which attempts are being sampled now. Below root alone."""
    journal_directory: str = "/var/lib/trimtab/journals"
    """Samples of running jobs. Below root alone, local to the node."""
    profile_root: str = "/var/lib/trimtab/profiles"
    """Finished profiles, `<cluster>/<job id>/` below it; shared by all nodes of the cluster."""
    sampler_period_seconds: float = 1.0
    """Time between two samples of a device."""


def load(path: Path) -> NodeSettings:
    """The settings of a file. Raises SettingsError for an unknown key, a wrong type, or no file."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{path}: {error}") from error
    known = {field.name: field.type for field in fields(NodeSettings)}
    for key, value in values.items():
        if key not in known:
            raise SettingsError(f"{path}: {key} is not a setting; choose from: {', '.join(known)}")
        if known[key] is str and not (isinstance(value, str) and value.startswith("/")):
            raise SettingsError(f"{path}: {key} = {value!r} must be an absolute path in quotes")
        if known[key] is float and (isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0.01):
            raise SettingsError(f"{path}: {key} = {value!r} must be a number of at least 0.01")
    return NodeSettings(**values)


def render(settings: NodeSettings) -> str:
    """The text of a node.toml with these settings."""
    lines = (f"{field.name} = {_toml(getattr(settings, field.name))}" for field in fields(settings))
    return "\n".join(lines) + "\n"


def _toml(value: str | float) -> str:
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return repr(value)
