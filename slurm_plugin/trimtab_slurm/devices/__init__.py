"""The driver seam: what measures, behind two protocols.

A driver knows which devices an attempt has at present; a device gives a reading when asked. `discover` names the
drivers of this machine, in the order in which they are preferred.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from trimtab_slurm.attempt import Attempt


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


@dataclass(frozen=True)
class Reading:
    """The figures of one moment."""

    values: Mapping[str, float]
    """By column. One that is not there, or is NaN, was not measured."""
    absent: Mapping[str, str] = field(default_factory=dict)
    """Column -> why it was not."""


class Device(Protocol):
    """Something with figures: a GPU, or the processes of a task."""

    @property
    def identity(self) -> Identity: ...

    def sample(self) -> Reading:
        """The figures now. Raises DeviceError."""
        ...


class Driver(Protocol):
    """One way of measuring."""

    def devices(self) -> Sequence[Device]:
        """The attempt's devices at present: they may come and go."""
        ...


@dataclass(frozen=True)
class Discovery:
    """What measures an attempt on this node."""

    drivers: tuple[Driver, ...]
    notes: tuple[str, ...]
    """What the attempt holds and nothing here can measure."""


def discover(attempt: Attempt) -> Discovery:
    """The drivers for an attempt: those of its GPUs first; its tasks' processes where no GPU can be measured."""
    from trimtab_slurm.devices.cpu import CpuDriver  # each driver is imported where it is chosen

    notes: tuple[str, ...] = ()
    if attempt.gpus:
        count = f"{len(attempt.gpus)} GPU{'s' if len(attempt.gpus) > 1 else ''}"
        notes = (f"GPU driver not found: {count} held ({', '.join(attempt.gpus)}), not measured",)
    return Discovery((CpuDriver(attempt),), notes)
