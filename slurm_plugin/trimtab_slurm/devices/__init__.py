"""The driver seam: what measures, behind two protocols.

A device gives a reading when asked. A source knows which devices it has at present. Sources are read at the same time,
the devices of one after another: a driver that hangs holds up its own source alone. `discover` names the sources of an
attempt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from trimtab_slurm.attempt import Attempt
from trimtab_slurm.resolve import held


class DeviceError(RuntimeError):
    """A device that could not be read this time: says which, and why."""


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
    """Devices that are read one after another. Used by one thread at a time."""

    @property
    def name(self) -> str:
        """As a fault is reported by, where no device can be named."""
        ...

    def devices(self) -> Sequence[Device]:
        """The devices at present: they may come and go. Raises DeviceError."""
        ...


@dataclass(frozen=True)
class Discovery:
    """What measures an attempt on this node."""

    sources: tuple[Source, ...]
    notes: tuple[str, ...]
    """What the attempt holds and nothing here can measure, and why."""


def discover(attempt: Attempt, nvml_library: str = "") -> Discovery:
    """The sources for an attempt: the GPUs that it holds; its tasks' processes where no GPU can be measured.

    Asks drivers, which can hang. `nvml_library`: path of libnvidia-ml.so.1; empty: where the system finds it.
    """
    from trimtab_slurm.devices.cpu import CpuSource  # each driver is imported where it is chosen

    notes: tuple[str, ...] = ()
    if ids := held(attempt.gpu_variables):
        count = f"{len(ids)} GPU{'s' if len(ids) > 1 else ''}"
        notes = (f"GPU driver not found: {count} held ({', '.join(ids)}), not measured",)
    return Discovery((CpuSource(attempt),), notes)
