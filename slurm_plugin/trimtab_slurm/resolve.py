"""Which devices an attempt holds: what Slurm told the hook, against what the driver has. Pure; never a guess.

A uuid names its device. An index is a place in slurmd's own list of GPUs, whose order is the driver's where slurmd
asked the driver, and that of the device files where an admin wrote them down: it names a device only where all orders
agree. Standard library only.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

VARIABLES = ("SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK")
"""By which slurmd tells its hooks which GPUs a job holds on the node."""


@dataclass(frozen=True)
class InventoryDevice:
    """A GPU of the node, or a MIG instance of one."""

    uuid: str
    index: int
    """The driver's own."""
    minor: int | None = None
    """Of the device file; None where the driver does not say, and of a MIG instance."""
    pci: str = ""
    parent_uuid: str = ""
    """Of a MIG instance: its GPU. Empty: a whole GPU."""
    gpu_instance: int | None = None
    compute_instance: int | None = None


@dataclass(frozen=True)
class Resolution:
    """Which devices an attempt holds, or why that cannot be said."""

    status: str
    """resolved; unknown."""
    devices: tuple[str, ...]
    """Uuids, in the inventory's order; empty where unknown, or where none is held."""
    reason: str
    """What it was concluded from, or why it could not be."""


def held(variables: Mapping[str, str]) -> tuple[str, ...] | None:
    """The ids of the GPUs that are held, each once, in Slurm's order and spelling.

    Empty where Slurm names no GPU at all; None where it names the variable, and nothing in it.
    """
    present = [name for name in VARIABLES if name in variables]
    filled = next((name for name in present if variables[name]), None)
    if filled is None:
        return None if present else ()
    ids: dict[str, None] = {}
    for item in filter(None, (item.strip() for item in variables[filled].split(","))):
        if match := re.fullmatch(r"(\d{1,4})-(\d{1,4})", item, re.ASCII):
            ids.update(dict.fromkeys(str(index) for index in range(int(match[1]), int(match[2]) + 1)))
        else:
            ids[item] = None
    return tuple(ids)


def resolve(variables: Mapping[str, str], inventory: Sequence[InventoryDevice]) -> Resolution:
    """The devices of an attempt. `variables`: of VARIABLES, those that the hook's environment has."""
    ids = held(variables)
    if ids is None:
        return Resolution("unknown", (), "Slurm names GPUs of the job, and says not which")
    if not ids:
        return Resolution("resolved", (), "Slurm names no GPU of the job")
    known = {device.uuid for device in inventory}
    if known.issuperset(ids):
        return Resolution("resolved", ids, "Slurm names them by uuid")
    whole = [device.uuid for device in inventory if device.uuid not in {each.parent_uuid for each in inventory}]
    if len(ids) == len(whole):
        return Resolution("resolved", tuple(whole), "the job holds every GPU of the node")
    return Resolution("unknown", (), f"{', '.join(ids)}: places in slurmd's list, whose order is not known")
