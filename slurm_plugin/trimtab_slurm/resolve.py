"""Which devices an attempt holds: what Slurm told the hook, against what the driver has. Pure; never a guess.

A uuid names its device. A number is a place in slurmd's own list of GPUs, whose order is the driver's where slurmd
asked the driver, and that of the device files where an admin wrote them down: it names a device where gres.conf proves
which of both it is, or where all orders agree. docs/devices.md says for admins what follows from that. Standard library
only.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from trimtab_slurm.gresconf import GpuList

VARIABLES = ("SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK")
"""By which slurmd tells its hooks which GPUs a job holds on the node. Numbers in the first are places in slurmd's
list; in the others they may count the job's own GPUs, from 0."""

_PLACES = VARIABLES[0]
_MOST_NAMED = 16
"""How many numbers a reason lists."""
_NO_GPU = {"nodevfiles", "none", "(null)"}
"""What stands for a job without GPUs."""
_UUID = re.compile(r"\b(GPU|MIG)-[\w./-]+", re.ASCII | re.IGNORECASE)
_NUMBERS = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?", re.ASCII)
_FIRST_RENDER_NODE = 128
"""Linux numbers /dev/dri/renderD from here."""
_DRIVERS_ORDER = "the driver's order"
_PCI = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-9a-f])", re.IGNORECASE)


@dataclass(frozen=True)
class InventoryDevice:
    """A GPU of the node, or a MIG instance of one."""

    uuid: str
    index: int | None = None
    """The driver's own; None: not known."""
    minor: int | None = None
    """Of the device file: 2 of /dev/nvidia2, 128 of /dev/dri/renderD128; None: not known, or a MIG instance."""
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
    """Uuids as the inventory spells them, in the driver's order; empty where unknown, or where none is held."""
    reason: str
    """What it was concluded from, or why it could not be."""


class _Unproved(Exception):
    """Why it cannot be said."""


def held(variables: Mapping[str, str]) -> tuple[str, ...] | None:
    """The ids of the GPUs that are held, each once, in Slurm's order: uuids where it gives any, else numbers.

    Empty where Slurm names no GPU of the job; None where it does not say which, or contradicts itself.
    """
    try:
        return _ids(variables)
    except _Unproved:
        return None


def resolve(
    variables: Mapping[str, str], inventory: Sequence[InventoryDevice], gpus: GpuList | None = None
) -> Resolution:
    """The devices of an attempt.

    `variables`: the hook's, of which VARIABLES matter; `inventory`: all devices of the node, in any order; `gpus`: what
    gres.conf proves of slurmd's list, None where it proves nothing.
    """
    try:
        ids = _ids(variables)
        if not ids:
            return Resolution("resolved", (), "Slurm names no GPU of the job")
        if not inventory:
            raise _Unproved(f"the job holds {', '.join(ids)}, and the driver has no device")
        if _UUID.fullmatch(ids[0]):
            chosen, reason = _by_uuid(ids, inventory)
        else:
            chosen, reason = _by_number({int(each) for each in ids}, inventory, gpus, listed=_PLACES in variables)
    except _Unproved as error:
        return Resolution("unknown", (), str(error))
    ordered = sorted(chosen, key=lambda device: (device.index is None, device.index or 0, device.uuid))
    return Resolution("resolved", tuple(device.uuid for device in ordered), reason)


def _ids(variables: Mapping[str, str]) -> tuple[str, ...]:
    """As `held`. Raises _Unproved."""
    given = {name: variables[name].strip() for name in VARIABLES if name in variables}
    named = [name for name, value in given.items() if _UUID.search(value)]
    if not named:
        # Of numbers, Slurm's own for the node count, if it gives any.
        named = [name for name, value in given.items() if value and (name == _PLACES or _PLACES not in given)]
        if given and not named:
            raise _Unproved(f"{' and '.join(given)} set, and empty: Slurm does not say which GPUs the job holds")
    lists = {name: _split(name, given[name]) for name in named}
    for name, ids in lists.items():
        if {*map(str.lower, ids)} != {*map(str.lower, lists[named[0]])}:
            raise _Unproved(f"{named[0]}={given[named[0]]}, but {name}={given[name]}")
    ids = lists[named[0]] if named else ()
    if given.get(_PLACES) and len(_split(_PLACES, given[_PLACES])) != len(ids):
        raise _Unproved(f"{_PLACES}={given[_PLACES]}, but {named[0]}={given[named[0]]}: not as many")
    return ids


def _split(name: str, value: str) -> tuple[str, ...]:
    """The ids in a variable, each once; () where it says that there are none. Raises _Unproved."""
    if value.lower() in _NO_GPU:
        return ()
    ids: dict[str, str] = {}
    for item in (item.strip() for item in value.split(",")):
        if _UUID.fullmatch(item):
            ids.setdefault(item.lower(), item)
        elif match := _NUMBERS.fullmatch(item):
            first, last = int(match[1]), int(match[2] or match[1])
            if last < first:
                raise _Unproved(f"{name}={value[:200]}: {item} is no range")
            ids.update((str(number), str(number)) for number in range(first, last + 1))
        elif item:
            raise _Unproved(f"{name}={value[:200]}: {item[:80]} is neither a number nor the uuid of a device")
    kinds = {_UUID.fullmatch(each) is None for each in ids}
    if len(kinds) != 1:
        raise _Unproved(f"{name}={value[:200]}: " + ("numbers among uuids" if kinds else "no device in it"))
    return tuple(ids.values())


_Choice = tuple[set[InventoryDevice], str]
"""The devices, and what they were concluded from."""


def _by_uuid(ids: Sequence[str], inventory: Sequence[InventoryDevice]) -> _Choice:
    names = {device.uuid.lower(): device for device in inventory}
    for device in inventory:
        if device.parent_uuid and device.gpu_instance is not None and device.compute_instance is not None:
            # As drivers before 470 and Slurm with them name an instance.
            old = f"MIG-{device.parent_uuid}/{device.gpu_instance}/{device.compute_instance}"
            names[old.lower()] = device
    missing = [each for each in ids if each.lower() not in names]
    if missing:
        raise _Unproved(f"{', '.join(missing)}: not a device that the driver has now")
    return {names[each.lower()] for each in ids}, "Slurm names them by uuid"


def _by_number(
    numbers: set[int], inventory: Sequence[InventoryDevice], gpus: GpuList | None, *, listed: bool
) -> _Choice:
    """`listed`: the numbers are Slurm's for the node, and do not count the job's own GPUs."""
    text = _listed(sorted(numbers))
    parents = {device.parent_uuid for device in inventory}
    devices = [device for device in inventory if device.uuid not in parents]
    by_minor = {device.minor: device for device in devices if device.minor is not None}
    if max(numbers) >= _FIRST_RENDER_NODE or parents != {""} or not listed:
        gpus = None  # its places are not what these numbers are
    if gpus and gpus.minors:
        return _by_file(numbers, gpus.minors, by_minor, text)
    whole_gpus = [device for device in inventory if not device.parent_uuid]
    # Of a GPU that is lost, drivers can say nothing, and leave its index out.
    counted = max([len(whole_gpus), *(gpu.index + 1 for gpu in whole_gpus if gpu.index is not None)])
    whole = len(numbers) == len(devices) and counted == len(whole_gpus)
    if whole and (max(numbers) < len(devices) or numbers <= by_minor.keys()):
        return set(devices), "the job holds every GPU of the node"
    if not listed:
        raise _Unproved(f"{text}: without {_PLACES}, numbers may count the job's own GPUs from 0")
    if parents != {""}:
        raise _Unproved(f"{text}: a place in slurmd's list is no MIG instance's name; a uuid is")
    if max(numbers) < counted:
        orders = _orders(devices, counted)
        if gpus and not _has_gap(by_minor, counted):
            orders = {_DRIVERS_ORDER: orders[_DRIVERS_ORDER]}
        return _by_place(numbers, orders, text)
    if numbers <= by_minor.keys() and not gpus:
        return {by_minor[number] for number in numbers}, "Slurm names them by the numbers of their device files"
    raise _Unproved(f"{text}: slurmd's list is longer than the driver's, which has {len(devices)}; a GPU may be lost")


def _by_file(numbers: set[int], minors: Sequence[int], by_minor: Mapping[int, InventoryDevice], text: str) -> _Choice:
    """By the device files that gres.conf lists: these are what Slurm gives to the job, whatever the driver's order."""
    if max(numbers) >= len(minors):
        raise _Unproved(f"{text}: gres.conf lists {len(minors)} device files; slurmd may have read another one")
    files = {minors[number] for number in numbers}
    if missing := sorted(files - by_minor.keys()):
        names = _listed(missing)
        raise _Unproved(f"{text}: device file {names} by gres.conf, which is no device's that the driver has now")
    return {by_minor[minor] for minor in files}, "places in gres.conf's list of device files"


def _has_gap(minors: Collection[int], counted: int) -> bool:
    """Whether there are other minor numbers than so many GPUs have: slurmd may have listed a GPU that is gone."""
    return max(minors) - _first_file(minors) >= counted


def _by_place(numbers: set[int], orders: Mapping[str, Mapping[int, InventoryDevice]], text: str) -> _Choice:
    """By the order of slurmd's list, where all that it can be lead to the same devices."""
    readings = {name: [places.get(number) for number in sorted(numbers)] for name, places in orders.items()}
    (first, chosen), *others = readings.items()
    for other, reading in others:
        if set(reading) != set(chosen):
            raise _Unproved(
                f"{text}: {_uuids(chosen)} in {first}, {_uuids(reading)} in {other}; slurmd's list can have either, "
                "only uuids or a plain gres.conf would tell"
            )
    if None in chosen:
        raise _Unproved(f"{text}: {_uuids(chosen)} in {first}")
    how = "whatever its order" if others else f"by {first}"
    return {device for device in chosen if device}, f"places in slurmd's list, {how}"


def _orders(devices: Sequence[InventoryDevice], counted: int) -> dict[str, dict[int, InventoryDevice]]:
    """The orders that slurmd's list can have: place -> device. Raises _Unproved where one is not known.

    `counted`: GPUs by the driver's count, of which `devices` may lack some.
    """
    by_index = {device.index: device for device in devices if device.index is not None}
    by_minor = {device.minor: device for device in devices if device.minor is not None}
    by_pci = {_pci(device): device for device in devices}
    for what, known in (("an index", by_index), ("a minor number", by_minor)):
        if len(known) < len(devices):
            raise _Unproved(f"the driver does not say {what} of its own for each GPU, which slurmd's list can go by")
    first_file = _first_file(by_minor)
    orders = {
        _DRIVERS_ORDER: by_index,
        # A number that no device has may be that of a GPU which was there when slurmd made its list.
        "the numbers of device files": {minor - first_file: device for minor, device in by_minor.items()},
    }
    if counted == len(devices):
        orders["the order of device files"] = dict(enumerate(by_minor[minor] for minor in sorted(by_minor)))
        if () not in by_pci and len(by_pci) == len(devices):
            orders["the order on the PCI bus"] = dict(enumerate(by_pci[address] for address in sorted(by_pci)))
    return orders


def _first_file(minors: Collection[int]) -> int:
    """The number from which device files of this kind are numbered."""
    return _FIRST_RENDER_NODE if min(minors) >= _FIRST_RENDER_NODE else 0


def _pci(device: InventoryDevice) -> tuple[int, ...]:
    """The address as numbers, in their order on the bus; () where it is not known."""
    match = _PCI.fullmatch(device.pci)
    return tuple(int(part or "0", 16) for part in match.groups()) if match else ()


def _uuids(devices: Sequence[InventoryDevice | None]) -> str:
    return ",".join(device.uuid if device else "a device that is gone" for device in devices)


def _listed(numbers: Sequence[int]) -> str:
    """The numbers, of many the first."""
    return ",".join(map(str, numbers[:_MOST_NAMED])) + (f",... ({len(numbers)})" if len(numbers) > _MOST_NAMED else "")
