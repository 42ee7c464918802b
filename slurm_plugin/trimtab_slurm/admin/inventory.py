"""The files of `trimtab-node resolve`: a hook's environment as lines of KEY=VALUE, a node's devices as JSON."""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from trimtab_slurm.gresconf import GpuList, gres_list
from trimtab_slurm.resolve import InventoryDevice

_DECLARATION = re.compile(r"(?:export|declare -[a-zA-Z]*x[a-zA-Z]*)\s+(?=[^=\s])")
"""What `export -p` has before a name: of sh, and of bash, where there may be more letters."""


class InventoryError(ValueError):
    """A file that cannot be used: names it, the entry, the reason, and the way out."""


def read_environment(path: Path) -> dict[str, str]:
    """The variables of a file, a line each, as `env` or a shell's `export -p` prints them.

    Blank lines do not count, values may hold an =, and may be quoted as in a shell. Raises InventoryError.
    """
    environment = {}
    for number, line in enumerate(_read(path).split("\n"), 1):
        try:
            environment.update(_variable(line.rstrip("\r").lstrip()))
        except ValueError as error:
            raise InventoryError(f"{path}: line {number}: {line[:80]!r} {error}") from error
    return environment


def _variable(line: str) -> dict[str, str]:
    """The variable of a line; none where it is blank, or declares one without a value. Raises ValueError: why not."""
    declaration = _DECLARATION.match(line)
    assignment = line[declaration.end() :] if declaration else line
    name, equals, value = assignment.partition("=")
    if not line or (declaration and not equals and name.isidentifier()):
        return {}
    if not equals or not name:
        raise ValueError("is no KEY=VALUE; write one as `env` prints it")
    if not (name.isidentifier() and name.isascii()):
        raise ValueError(f"has {name[:80]!r} for a variable's name; write KEY=VALUE, or take the line out")
    if "\0" in value:
        raise ValueError("has NUL characters, as in /proc/PID/environ; make lines of it: tr '\\0' '\\n'")
    return {name: _unquoted(value, must=declaration is not None)}


def _unquoted(value: str, must: bool) -> str:
    """A value as a shell reads it. `must`: a shell wrote it; else it may be meant as it is. Raises ValueError."""
    try:
        words = shlex.split(value)
    except ValueError as error:
        if must:
            raise ValueError("has a quotation that does not end there; close it, or take the line out") from error
        return value
    if must and len(words) > 1:
        raise ValueError("has more after the value; quote the value, or write one as `env` prints it")
    return "".join(words) if must or (len(words) == 1 and value[0] == value[-1] and value[0] in "'\"") else value


def read_inventory(path: Path) -> list[InventoryDevice]:
    """The devices of a file, as `trimtab-node inventory` prints them. Raises InventoryError."""
    text = _read(path)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InventoryError(f"{path}: is not JSON: {error}; write a list of devices") from error
    if not isinstance(values, list):
        raise InventoryError(f"{path}: is a JSON {type(values).__name__}; write a list of devices")
    devices = [_device(f"{path}: device {number}", value) for number, value in enumerate(values)]
    seen: dict[str, int] = {}
    for number, device in enumerate(devices):
        first = seen.setdefault(device.uuid.lower(), number)
        if first != number:
            raise InventoryError(f"{path}: devices {first} and {number} are both {device.uuid}; remove one of them")
    return devices


def read_gres_conf(path: Path, node: str) -> GpuList:
    """What the gres.conf of a node proves. Raises InventoryError; GresConfError where it proves nothing."""
    if not node:
        raise InventoryError(f"{path}: of which node is not known; name it with --node, or SLURMD_NODENAME")
    return gres_list(_read(path), node)


def to_json(devices: Sequence[InventoryDevice]) -> str:
    """The text of a file that `read_inventory` reads back as these devices."""
    return json.dumps([asdict(device) for device in devices], indent=1)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # editors of other systems begin with a byte order mark
    except OSError as error:
        raise InventoryError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InventoryError(f"{path}: is no text in UTF-8: {error}") from error


def _device(where: str, value: Any) -> InventoryDevice:
    """A device from its JSON; keys that are missing or null are not known, others than ours do not matter."""
    if not isinstance(value, dict):
        raise InventoryError(f"{where}: {json.dumps(value)[:80]} is no object; write one with a uuid at least")
    known: dict[str, Any] = {}
    for field in fields(InventoryDevice):
        given = value.get(field.name)
        if given is None:
            continue
        kind, wanted = (str, "a text") if field.type is str else (int, "a whole number, 0 or more")
        if isinstance(given, bool) or not isinstance(given, kind) or (isinstance(given, int) and given < 0):
            raise InventoryError(f"{where}: {field.name} = {json.dumps(given)[:80]}: must be {wanted}, or null")
        known[field.name] = given
    if not known.get("uuid"):
        raise InventoryError(f"{where}: has no uuid; `nvidia-smi -L` shows it")
    return InventoryDevice(**known)
