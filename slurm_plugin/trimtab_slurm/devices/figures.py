"""What the GPU drivers share: the columns of a GPU, what can be true of each, and reading each on its own.

A driver's numbers go through `Figures`: into SI units, and out where they cannot be. A sentinel is no figure.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

MOST = {
    "utilization_ratio": 1.0,
    "memory_utilization_ratio": 1.0,
    "memory_used_bytes": 2.0**43,
    "memory_total_bytes": 2.0**43,
    "power_watts": 1e4,
    "energy_joules": 1e13,
    "temperature_celsius": 150.0,
    "sm_clock_hertz": 1e10,
    "memory_clock_hertz": 1e11,
    "pcie_sent_bytes_per_second": 1e12,
    "pcie_received_bytes_per_second": 1e12,
    "nvlink_sent_bytes_per_second": 1e13,
    "nvlink_received_bytes_per_second": 1e13,
    "throttle_reasons_bits": 2.0**32 - 2,
    "ecc_corrected_count": 2.0**32 - 2,
    "ecc_uncorrected_count": 2.0**32 - 2,
    "sm_active_ratio": 1.0,
    "sm_occupancy_ratio": 1.0,
    "tensor_active_ratio": 1.0,
    "dram_active_ratio": 1.0,
}
"""The columns of a GPU, and the most that each can be; the least is 0. Far above any hardware, and below the sentinels
that drivers give for "not known": all bits set, of 16, 32 or 64."""

COLUMNS = tuple(MOST)


@dataclass(frozen=True)
class Unit:
    """A driver's unit: a number of it, times `times`, over `per`, is one of the column's."""

    name: str
    times: float = 1.0
    per: float = 1.0


ONE = Unit("")
PERCENT = Unit("%", per=100.0)
BYTES = Unit("bytes")
MEGAHERTZ = Unit("MHz", times=1e6)
CELSIUS = Unit("°C")


class Absent(Exception):
    """Why a figure is not there. `final`: it never will be."""

    def __init__(self, reason: str, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final


@dataclass(frozen=True)
class Reader:
    """One question to a driver, and the columns that its answer fills."""

    columns: Mapping[str, Unit]
    ask: Callable[[], Sequence[float | Exception]]
    """The numbers in the columns' order, in the driver's units, or what one of them failed with. Raises what all of
    them failed with."""


class Figures:
    """Reads the columns of a GPU, each on its own: one that fails costs no other.

    `errors`: what the driver raises; `explain` says what an error means for a figure, and raises DeviceError where it
    means that the device is gone. `never`: columns that nobody reads, and why.
    """

    def __init__(
        self,
        readers: Sequence[Reader],
        errors: type[Exception],
        explain: Callable[[Exception], Absent],
        never: Mapping[str, str],
    ) -> None:
        self._readers = list(readers)
        self._errors = (errors, Absent)
        self._explain = explain
        self._never = dict(never)

    def read(self) -> tuple[dict[str, float], dict[str, str]]:
        """What there is now, by column, and why there is no more. Raises DeviceError."""
        values: dict[str, float] = {}
        absent, known = self._never.copy(), len(self._never)
        for reader in self._readers:
            try:
                numbers = reader.ask()
            except self._errors as error:
                numbers = [error] * len(reader.columns)
            for (column, unit), number in zip(reader.columns.items(), numbers, strict=True):
                if isinstance(number, Exception):
                    absent[column] = self._reason(column, number)
                    continue
                value = number * unit.times / unit.per
                if 0.0 <= value <= MOST[column]:
                    values[column] = value
                else:
                    absent[column] = f"the driver says {number} {unit.name}".rstrip() + ", which cannot be"
        if len(self._never) > known:
            self._readers = [each for each in self._readers if not self._never.keys() >= each.columns.keys()]
        return values, absent

    def _reason(self, column: str, error: Exception) -> str:
        absent = error if isinstance(error, Absent) else self._explain(error)
        if absent.final:  # asking again each second would cost a call, and on some drivers milliseconds, for nothing
            self._never[column] = str(absent)
        return str(absent)
