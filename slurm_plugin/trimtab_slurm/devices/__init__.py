"""The driver seam: what measures, behind two protocols.

A device gives a reading when asked. A source knows which devices it has at present, which are read one after another: a
call that hangs holds up the rest of its source, and no other. `discover` names the sources of an attempt.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from trimtab_slurm import gresconf
from trimtab_slurm.attempt import Attempt
from trimtab_slurm.gresconf import GpuList, GresConfError
from trimtab_slurm.resolve import InventoryDevice, held, resolve


class DeviceError(RuntimeError):
    """A device that could not be read this time: says which, and why."""


class DriverNotFound(DeviceError):
    """This node has no GPU of that driver's, as far as can be seen."""


@dataclass(frozen=True)
class Identity:
    """What a device is; does not change while it exists."""

    uuid: str
    kind: str
    """cpu: the processes of one task; gpu: a whole GPU; mig: a MIG instance."""
    model: str
    index: int
    """The driver's own; of a task, its rank."""
    driver: str
    """Name and version of what is read."""
    columns: tuple[str, ...]
    """Names of the figures of a reading, each ending in its unit."""
    pci: str = ""
    """Bus id; empty for what is on no bus of its own."""
    parent_uuid: str = ""
    """The GPU that a MIG instance is part of."""


@dataclass(frozen=True)
class Reading:
    """The figures of one moment."""

    values: Mapping[str, float]
    """By column. One that is not there, or is NaN, was not measured."""
    absent: Mapping[str, str] = field(default_factory=dict)
    """Column -> why it was not."""
    processes: Mapping[int, float] | None = None
    """Process id -> bytes of the device's memory that it holds, NaN where not known; None: not known which."""
    events: Sequence[tuple[str, str]] = ()
    """Kind and text of what has happened to the device since the reading before."""


class Device(Protocol):
    """Something with figures: a GPU, or the processes of a task."""

    @property
    def identity(self) -> Identity: ...

    def sample(self) -> Reading:
        """The figures now. Raises DeviceError."""
        ...


class Source(Protocol):
    """Devices that are read one after another. Used by one thread at a time, not always by the same one."""

    @property
    def name(self) -> str:
        """As a fault is reported by, where no device can be named."""
        ...

    def devices(self) -> Sequence[Device]:
        """The devices at present: they may come and go. Raises DeviceError."""
        ...


class Driver(Protocol):
    """A library that knows GPUs. Used by one thread; its sources may be read by others meanwhile."""

    @property
    def name(self) -> str: ...

    @property
    def inventory(self) -> Sequence[InventoryDevice]:
        """All GPUs of the node, and the instances that they are split into."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """GPUs that the driver knows to be there and can say nothing of, and why."""
        ...

    def sources(self, uuids: Collection[str]) -> Sequence[Source]:
        """What reads these devices of the inventory."""
        ...


@dataclass(frozen=True)
class Discovery:
    """What measures an attempt on this node."""

    sources: tuple[Source, ...]
    notes: tuple[str, ...]
    """What the attempt holds and nothing here can measure, and why."""


def discover(attempt: Attempt, nvml_library: str = "") -> Discovery:
    """The sources for an attempt: the GPUs that it holds; its tasks' processes where no GPU can be measured.

    Asks drivers, and reads gres.conf, both of which can hang; of a job without GPUs, neither. `nvml_library`: path of
    libnvidia-ml.so.1; empty: where the system finds it.
    """
    from trimtab_slurm.devices.cpu import CpuSource  # each driver is imported where it is chosen

    notes: tuple[str, ...] = ()
    ids = held(attempt.gpu_variables)
    if ids is None:
        notes = (f"GPUs not known, not measured: {resolve(attempt.gpu_variables, ()).reason}",)
    elif ids:
        gpus = _gpus(attempt, ids, nvml_library)
        if gpus.sources:
            return gpus
        notes = gpus.notes
    return Discovery((CpuSource(attempt),), notes)


def _gpus(attempt: Attempt, ids: Sequence[str], nvml_library: str) -> Discovery:
    """What measures the GPUs that are held; without sources where none can be."""
    what = f"{len(ids)} GPU{'s' if len(ids) > 1 else ''} held ({', '.join(ids)}), not measured"
    try:
        driver = open_driver(nvml_library)
    except DriverNotFound as error:
        return Discovery((), (f"GPU driver not found: {what}: {error}",))
    except DeviceError as error:
        return Discovery((), (f"GPU driver does not work: {what}: {error}",))
    resolution = resolve(attempt.gpu_variables, driver.inventory, _gpu_list(attempt.node))
    if resolution.status != "resolved":
        return Discovery((), (f"GPUs not known: {what}: {resolution.reason}", *driver.notes))
    return Discovery(tuple(driver.sources(resolution.devices)), tuple(driver.notes))


def _gpu_list(node: str) -> GpuList | None:
    """What the node's gres.conf proves: the one beside SLURM_CONF, which slurmd sets for its hooks."""
    slurm_conf = os.environ.get("SLURM_CONF")
    try:
        return gresconf.read(Path(slurm_conf), node) if slurm_conf else None
    except GresConfError:
        return None  # `trimtab doctor` says why


def open_driver(nvml_library: str) -> Driver:
    """The first driver that has GPUs. Raises DriverNotFound where none has, DeviceError where one does not work."""
    from trimtab_slurm.devices import amd, nvml

    faults = []
    for open_one in (lambda: nvml.open_driver(nvml_library), amd.open_driver):
        try:
            return open_one()
        except DeviceError as error:
            faults.append(error)
    broken = [error for error in faults if not isinstance(error, DriverNotFound)]
    kind = DeviceError if broken else DriverNotFound
    raise kind("; ".join(map(str, broken or faults)))
