"""What a sandbox needs of the machine: Slurm's programs, root, ports, and device nodes that stand for GPUs."""

import os
import random
import shutil
import socket
import stat
from contextlib import suppress
from pathlib import Path

from trimtab.sandbox.config import SandboxError

BINARIES = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
PORTS = range(10000, 20000)
"""Below those of trimtab's ranks, and those that Linux takes for outgoing connections."""
NVIDIA_MAJOR = 195
"""Slurm counts GPUs as device nodes; these are of the NVIDIA driver's kind, and never opened."""


def check() -> None:
    """Raises SandboxError, with what to install, where no sandbox can run."""
    missing = [name for name in BINARIES if not find_binary(name)]
    still = "`trimtab report` and `trimtab submit --dry-run` work without it."
    if missing:
        raise SandboxError(
            f"a sandbox needs Slurm and munge, and {', '.join(missing)} cannot be found. On Debian: apt-get install "
            f"munge slurm-client slurm-wlm-basic-plugins slurmctld slurmd. {still}"
        )
    if os.geteuid() != 0:
        raise SandboxError(f"a sandbox starts slurmd, which needs root; this is user id {os.geteuid()}. {still}")


def find_binary(name: str) -> str | None:
    """Daemons are in sbin, which is not on everyone's PATH."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin")


def make_device(path: Path, minor: int) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(NVIDIA_MAJOR, minor))
    except PermissionError as error:
        raise SandboxError(
            "this machine does not allow device nodes (a container without CAP_MKNOD), which stand for GPUs; "
            "`--gpus 0` works without"
        ) from error


def free_ports(count: int) -> tuple[int, ...]:
    """Ports that nothing listens on, from a random beginning: sandboxes that start together begin apart."""
    first = random.randrange(len(PORTS))
    found: list[int] = []
    for step in range(len(PORTS)):
        port = PORTS[(first + step) % len(PORTS)]
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return tuple(found)
    raise SandboxError(f"no {count} free ports between {PORTS.start} and {PORTS.stop}")


def accepts(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
