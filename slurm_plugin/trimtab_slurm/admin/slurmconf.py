"""slurm.conf, as far as the hooks are concerned: a tolerant reader. It is never written to. Standard library only."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PLACES = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf")
"""Where it is unless SLURM_CONF says: on the node, or where a slurmd that has none keeps the controller's."""

_INCLUDE = re.compile(r"include\s+(\S.*)", re.IGNORECASE)
_PAIR = re.compile(r'([A-Za-z]\w*)\s*[-+*/]?=\s*("[^"]*"|[^\s"]+)')


class SlurmConfError(ValueError):
    """A slurm.conf that is missing or cannot be read: says which, why, and the way out."""


@dataclass(frozen=True)
class SlurmConf:
    """The keys of a slurm.conf and of what it includes."""

    path: Path
    values: Mapping[str, tuple[str, ...]]
    """Key in lower case -> everything that it was set to, in order."""
    missing: tuple[str, ...] = ()
    """Files that it includes and that could not be read."""

    def all(self, key: str) -> tuple[str, ...]:
        """Every value of a key."""
        return self.values.get(key.lower(), ())

    def last(self, key: str) -> str:
        """The value that counts where a key may be set once; empty where it is not set."""
        return (self.all(key) or ("",))[-1]

    def flags(self, key: str) -> set[str]:
        """The words of a list, in lower case."""
        return {word.strip().lower() for word in self.last(key).split(",") if word.strip()}


def find(given: Path | None) -> Path | None:
    """The slurm.conf that is meant: the one given, SLURM_CONF's, or the first that exists; None: none, or /dev/null.

    Absolute. Raises SlurmConfError where the one given, or SLURM_CONF's, is missing: none is another answer than that.
    """
    source = "--slurm-conf"
    if given is None and (named := os.environ.get("SLURM_CONF")):
        source, given = "SLURM_CONF", Path(named)
    if given is None:
        return next((Path(place) for place in PLACES if os.access(place, os.F_OK)), None)
    try:
        given.stat()
    except OSError as error:
        way_out = "give slurmd's with --slurm-conf, or /dev/null for none"
        raise SlurmConfError(f"{source} {given}: {error.strerror}; {way_out}") from error
    return None if given == Path(os.devnull) else given.absolute()


def read(path: Path) -> SlurmConf:
    """Read a slurm.conf. Raises SlurmConfError."""
    values: dict[str, list[str]] = {}
    missing: list[str] = []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise SlurmConfError(f"{path} cannot be read: {error.strerror}; name another with --slurm-conf") from error
    _add(text, path.parent, {path}, values, missing)
    return SlurmConf(path, {key: tuple(all_values) for key, all_values in values.items()}, tuple(missing))


def _add(text: str, directory: Path, seen: set[Path], values: dict[str, list[str]], missing: list[str]) -> None:
    for line in _lines(text):
        if not (include := _INCLUDE.fullmatch(line)):
            for key, value in _PAIR.findall(line):
                values.setdefault(key.lower(), []).append(value.strip('"'))
            continue
        name = include[1].strip('"').replace("%c", (values.get("clustername") or [""])[-1])
        if (path := directory / name) in seen:
            continue
        try:
            included = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            missing.append(f"{path}: {error.strerror}")
            continue
        _add(included, directory, seen | {path}, values, missing)


def _lines(text: str) -> list[str]:
    """Lines without comments, continued ones joined."""
    uncommented = (re.sub(r"(?<!\\)#.*", "", line).rstrip() for line in text.splitlines())
    joined = re.sub(r"\\\n", " ", "\n".join(uncommented))
    return [line.strip() for line in joined.splitlines() if line.strip()]
