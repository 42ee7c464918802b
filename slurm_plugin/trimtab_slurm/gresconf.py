"""gres.conf, as far as it proves in which order slurmd lists a node's GPUs. Standard library only.

Of the forms that gres.conf can have, only plain ones are taken, of which real slurmd have been seen to make the list
that is said here: docs/devices.md names them, and the versions. For all else there is a reason why nothing is proved.
"""

import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trimtab_slurm.nodelist import expand_nodes

_COMMENT = re.compile(r"#.*")
_PAIR = re.compile(r'\s*([A-Za-z]+)\s*=\s*(?:"([^"]*)"|([^\s"]+))(?=\s|$)')
_FILE = re.compile(r"(?:nvidia|renderD)(0|[1-9][0-9]*)$")
"""Device files whose number is the driver's minor number of the GPU. /dev/dri/card1 has another."""
_KEYS_OF_FILES = {"nodename", "autodetect", "name", "type", "file", "count", "cores", "cpus", "links"}
_KEYS_OF_DETECTED = {"nodename", "autodetect", "name", "type"}
_LARGEST_BYTES = 1 << 20


class GresConfError(ValueError):
    """What leaves the order open, or why it could not be read."""


@dataclass(frozen=True)
class GpuList:
    """In which order slurmd lists the GPUs of a node."""

    minors: tuple[int, ...] = ()
    """Of the device files, place by place: 2 of /dev/nvidia2; empty: all GPUs of the driver, in the driver's order."""


def read(slurm_conf: Path, node: str) -> GpuList:
    """As `gres_list`, of the gres.conf that a slurmd with this slurm.conf reads. Raises GresConfError."""
    path = slurm_conf.with_name("gres.conf")
    fake = slurm_conf.with_name("fake_gpus.conf")
    if os.path.lexists(fake):
        raise GresConfError(f"{fake} stands in for the driver")
    try:
        # Links are followed, as slurmd does. A pipe is not waited for.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
                mode = stat.S_IMODE(status.st_mode)
                raise GresConfError(f"{path} could have been written by another user ({status.st_uid}, {mode:04o})")
            content = file.read(_LARGEST_BYTES + 1)
    except OSError as error:
        raise GresConfError(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > _LARGEST_BYTES:
        raise GresConfError(f"{path} is larger than {_LARGEST_BYTES} bytes")
    try:
        return gres_list(content.decode(errors="replace"), node)
    except GresConfError as error:
        raise GresConfError(f"{path}: {error}") from error


def gres_list(text: str, node: str) -> GpuList:
    """What the text of a gres.conf says of a node. Raises GresConfError where it does not prove the order."""
    records = [record for record in map(_record, _lines(text)) if _applies(record, node)]
    detected = _detected(records)
    # slurmd takes the lines for all nodes first, wherever they stand.
    gpus = sorted(
        (record for record in records if record.get("name") == "gpu"), key=lambda record: "nodename" in record
    )
    if detected == "nvml":
        for key in (key for record in gpus for key in record if key not in _KEYS_OF_DETECTED):
            raise GresConfError(f"AutoDetect=nvml with {key}=: the order depends on what slurmd finds")
        return GpuList()
    if detected not in ("", "off"):
        raise GresConfError(f"AutoDetect={detected}: its order is not known")
    return GpuList(_minors(gpus))


def _lines(text: str) -> Iterator[str]:
    """Lines without comments, continued ones joined, blank ones left out."""
    bare = "\n".join(_COMMENT.sub("", line).rstrip() for line in text.splitlines())
    for line in bare.replace("\\\n", " ").split("\n"):
        if line.strip():
            yield line.strip()


def _record(line: str) -> dict[str, str]:
    """Key in lower case -> value, in the order of the line."""
    record: dict[str, str] = {}
    position = 0
    while match := _PAIR.match(line, position):
        key = match[1].lower()
        if key in record:
            raise GresConfError(f"{line[:80]}: {key}= stands there twice")
        record[key] = match[2] or match[3] or ""
        position = match.end()
    if line[position:].strip():  # Include, for one
        raise GresConfError(f"{line[:80]}: not understood")
    kind = next(iter(record))
    if kind not in ("autodetect", "name", "nodename") or (kind == "autodetect" and len(record) > 1):
        raise GresConfError(f"{line[:80]}: not understood")
    if kind == "name" and "autodetect" in record:
        raise GresConfError(f"{line[:80]}: AutoDetect= has no effect there")
    if not {"autodetect", "name"} & record.keys():
        raise GresConfError(f"{line[:80]}: names no GRES")
    name = record.get("name", "")
    if name != "gpu" and name.lower() == "gpu":
        raise GresConfError(f"{line[:80]}: slurmd knows gpu in small letters alone")
    return record


def _applies(record: Mapping[str, str], node: str) -> bool:
    return "nodename" not in record or node in _expanded(record["nodename"])


def _expanded(names: str) -> Sequence[str]:
    """Names of a list. A bracket that is not at the end of a name is read by slurmd in a way of its own."""
    if re.search(r"\][^,]", names):
        raise GresConfError(f"{names[:80]}: not understood")
    try:
        return expand_nodes(names)
    except ValueError as error:
        raise GresConfError(str(error)) from error


def _detected(records: Sequence[Mapping[str, str]]) -> str:
    """The value of AutoDetect that counts, in lower case; empty where there is none. A node's own goes first."""
    own = {record["autodetect"].lower() for record in records if "nodename" in record and "autodetect" in record}
    of_all = [record["autodetect"].lower() for record in records if "nodename" not in record and "autodetect" in record]
    if len(own) > 1 or len(of_all) > 1:
        raise GresConfError("AutoDetect= stands there twice")
    return next(iter([*own, *of_all]), "")


def _minors(gpus: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
    """Of the files of all lines, in the order as written."""
    if len({record.get("type") for record in gpus}) > 1:
        raise GresConfError("GPUs of several types: slurmd lists them in the order of slurm.conf")
    minors: list[int] = []
    for record in gpus:
        for key in record.keys() - _KEYS_OF_FILES:
            raise GresConfError(f"{key}=: the order is not known")
        if "file" not in record:
            raise GresConfError("GPUs without File= and AutoDetect=")
        for name in _expanded(record["file"]):
            if not (match := _FILE.search(name)):
                raise GresConfError(f"{name}: what its number means is not known")
            minors.append(int(match[1]))
    if not minors:
        raise GresConfError("no GPU of this node is in it")
    if len(set(minors)) < len(minors):
        raise GresConfError("a device file stands there twice")
    return tuple(minors)
