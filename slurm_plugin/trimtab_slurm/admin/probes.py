"""What `trimtab doctor` asks in processes of their own, since the answer may never come: a driver, a file system.

`python -I -m trimtab_slurm.admin.probes NAME ARGUMENT...` prints the answer as JSON. Nothing but the standard library
is imported before it is asked for.
"""

import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

NOBODY = 65534
MODULES = ("numpy", "h5py", "pynvml")
"""What sampler and collector need besides the standard library."""


def modules() -> dict[str, str]:
    """Module -> why it cannot be imported; empty where it can."""
    import importlib

    found = {}
    for name in MODULES:
        try:
            importlib.import_module(name)
            found[name] = ""
        except (ImportError, OSError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def directory(name: str, gives: str) -> dict[str, Any]:
    """A directory that root writes below. `gives`: "gives" where it makes directories there that become users'."""
    path = Path(name)
    if not os.path.lexists(path):
        above = next(place for place in path.parents if place.exists())
        return {"missing": True, "trouble": _trouble(above, False)}
    status = path.lstat()
    found: dict[str, Any] = {"link": "", "directory": path.is_dir(), "uid": status.st_uid}
    found["mode"] = stat.S_IMODE(status.st_mode)
    if stat.S_ISLNK(status.st_mode):
        return found | {"link": os.path.realpath(path)}
    if found["directory"]:
        system = os.statvfs(path)
        found["free_bytes"] = system.f_bavail * system.f_frsize
        found["free_inodes"] = system.f_favail if system.f_files else None
        found["trouble"] = _trouble(path, gives == "gives")
    return found


def driver(name: str, *library: str) -> dict[str, Any]:
    """What the sampler would find. `name`: nvml or amd; `library`: of nvml, as in node.toml."""
    import importlib

    from trimtab_slurm.devices import DeviceError, DriverNotFound

    try:
        found = importlib.import_module(f"trimtab_slurm.devices.{name}").open_driver(*library)
    except DriverNotFound as error:
        return {"missing": str(error)}
    except DeviceError as error:
        return {"error": str(error)}
    instances = sum(bool(device.parent_uuid) for device in found.inventory)
    return {"gpus": len(found.inventory) - instances, "instances": instances, "notes": list(found.notes)}


def _trouble(path: Path, gives: bool) -> str:
    """Why nothing can be written there; empty where it can."""
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return f"{path} is on a read-only file system"
    if not gives or os.geteuid() != 0:
        return ""
    probe = path / f".trimtab-doctor-{os.getpid()}"
    try:
        probe.mkdir(mode=0o700)
        try:
            os.chown(probe, NOBODY, NOBODY)
        finally:
            probe.rmdir()
    except OSError as error:
        return f"root cannot make a directory in {path} and give it to a user ({error.strerror})"
    return ""


if __name__ == "__main__":
    probes: dict[str, Callable[..., dict[str, Any]]] = {"modules": modules, "directory": directory, "driver": driver}
    print(json.dumps(probes[sys.argv[1]](*sys.argv[2:])))
