"""The files of `trimtab-node resolve`: a hook's environment as lines of KEY=VALUE, a node's devices as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from trimtab_slurm.gresconf import GpuList, gres_list
from trimtab_slurm.resolve import InventoryDevice


class InventoryError(ValueError):
    """A file that cannot be used: names it, the entry, the reason, and the way out."""


def read_environment(path: Path) -> dict[str, str]:
    """The variables of a file, a line each, as `env` prints them; blank lines do not count, values may hold an =.

    Raises InventoryError.
    """
    environment = {}
    for number, line in enumerate(_read(path).split("\n"), 1):
        name, equals, value = line.partition("=")
        if not line.strip():
            continue
        if not equals or not name.strip():
            raise InventoryError(f"{path}: line {number}: {line[:80]!r} is no KEY=VALUE; write one as `env` prints it")
        environment[name.strip()] = value.rstrip("\r")
    return environment


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
        return path.read_text(encoding="utf-8")
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
