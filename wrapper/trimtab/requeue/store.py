"""A chain's file, `attempts.json` in the checkpoint directory: read and written so that no moment can spoil it."""

import json
import os
import tempfile
import types
import typing
from dataclasses import MISSING, asdict, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from trimtab.requeue.chain import Attempt, Chain

FILE = "attempts.json"
VERSION = 1


class StaleChain(RuntimeError):
    """A later attempt has begun: what this one would write is out of date."""


def load(directory: Path) -> tuple[Chain, str]:
    """The chain of a checkpoint directory, empty where there is none, and what there is to say about it.

    A damaged file is set aside, and a chain begins anew: training goes on, only its limits count from 0. Raises
    OSError where the file is there and cannot be read.
    """
    path = directory / FILE
    try:
        return _parse(path.read_bytes()), ""
    except FileNotFoundError:
        return Chain(), ""
    except (ValueError, KeyError, TypeError) as error:
        aside = path.with_suffix(".damaged.json")
        path.replace(aside)
        return Chain(), f"{path} is damaged ({error}): set aside as {aside.name}, the attempts are counted anew"


def save(directory: Path, chain: Chain) -> None:
    """Write the chain; whoever reads meanwhile, and after any crash, finds the old one or the new one.

    Raises StaleChain, and leaves the file alone, where another attempt has begun after this chain's last one: a batch
    script that Slurm believes dead can still run on a node that it cannot reach. OSError where it cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    written = load(directory)[0].attempts
    mine = chain.attempts
    if written and (len(written) > len(mine) or _identity(written[-1]) != _identity(mine[len(written) - 1])):
        raise StaleChain(
            f"{directory / FILE} was written by job {written[-1].job_id}, restart {written[-1].restart_count}, which "
            "began after this attempt: nothing is written"
        )
    text = json.dumps({"version": VERSION, "chain": asdict(chain)}, indent=1) + "\n"
    descriptor, name = tempfile.mkstemp(dir=directory, prefix=f".{FILE}-")  # 0600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(directory / FILE)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _identity(attempt: Attempt) -> tuple[int, int, float]:
    return attempt.job_id, attempt.restart_count, attempt.started_seconds


def _parse(text: bytes) -> Chain:
    values = json.loads(text)
    if values["version"] != VERSION:
        raise ValueError(f"of version {values['version']}, not {VERSION}")
    chain: Chain = _build(Chain, values["chain"])
    return chain


def _build(kind: Any, value: Any) -> Any:
    """A value of the type `kind` from what JSON holds of it. Raises ValueError, KeyError or TypeError."""
    arguments = typing.get_args(kind)
    if isinstance(kind, types.UnionType):
        return None if value is None else _build(arguments[0], value)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{value!r} is no list")
        kinds = arguments[:1] * len(value) if arguments[1] is ... else arguments
        return tuple(_build(each, entry) for each, entry in zip(kinds, value, strict=True))
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        there = (field.name for field in fields(kind) if field.name in value or field.default is MISSING)
        values = {name: _build(hints[name], value[name]) for name in there}
        return typing.cast(Any, kind)(**values)
    if issubclass(kind, Enum):
        return kind(value)
    if kind is float and isinstance(value, int):
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{value!r} is no {kind.__name__}")
    return value
