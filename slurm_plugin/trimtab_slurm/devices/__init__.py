"""The driver seam: what a sampler can measure. One module for each kind of device."""

from collections.abc import Sequence
from typing import Protocol


class DeviceGone(Exception):
    """The device will give no more samples: says why."""


class Device(Protocol):
    """Something of a job that can be sampled."""

    @property
    def uuid(self) -> str:
        """Unique in its cluster, and the same over the attempt."""

    @property
    def kind(self) -> str:
        """cpu, gpu or mig."""

    @property
    def model(self) -> str:
        """What it is, for humans."""

    @property
    def index(self) -> int:
        """Its number among its kind on the node."""

    @property
    def driver(self) -> str:
        """What the figures come from."""

    @property
    def columns(self) -> Sequence[str]:
        """Names of the figures, ending in their units."""

    def sample(self) -> Sequence[float]:
        """One value for each column, NaN where the device gives none. Raises DeviceGone."""
