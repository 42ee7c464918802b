"""AMD GPUs, by amdsmi, the Python library of AMD's ROCm, which is optional.

Written against amdsmi 7.0.2, and never run on hardware: docs/drivers.md says what that means.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab_slurm.devices import DeviceError, DriverNotFound, Identity, Reading, Source
from trimtab_slurm.devices.figures import (
    BYTES,
    CELSIUS,
    MEGAHERTZ,
    MOST,
    ONE,
    PERCENT,
    Absent,
    Figures,
    Reader,
    Unit,
)
from trimtab_slurm.resolve import InventoryDevice

WATTS, MICROJOULES = Unit("W"), Unit("µJ", per=1e6)

FINAL = {2, 3, 10}
"""AMDSMI_STATUS_ NOT_SUPPORTED, NOT_YET_IMPLEMENTED and NO_PERM: they do not change while a job runs."""
NOT_LOADED = 34
"""AMDSMI_STATUS_DRIVER_NOT_LOADED."""
NOT_KNOWN = {2**16 - 1, 2**32 - 1, 2**64 - 1}
"""What stands for "not known" in the driver's own fields, where amdsmi does not say N/A."""


@dataclass(frozen=True)
class _Found:
    handle: Any
    device: InventoryDevice


class AmdDriver:
    """The library, and the GPUs that it finds on this node."""

    name = "AMD SMI"
    notes = ()

    def __init__(self, amdsmi: Any, gpus: Sequence[_Found]) -> None:
        self._amdsmi = amdsmi
        self._gpus = gpus
        self.inventory = [gpu.device for gpu in gpus]

    def sources(self, uuids: Collection[str]) -> Sequence[Source]:
        """One for each GPU that is named. `uuids`: of the inventory."""
        return [AmdSource(self._amdsmi, gpu) for gpu in self._gpus if gpu.device.uuid in uuids]


def open_driver() -> AmdDriver:
    """Load the library and list the GPUs: at least one. Blocks while the driver does.

    Raises DriverNotFound where there is no library or no GPU, DeviceError where there is one that does not work.
    """
    try:
        import amdsmi
    except ImportError:
        raise DriverNotFound("AMD SMI: amdsmi is not installed") from None
    except (OSError, KeyError) as error:  # what it ends in without libamd_smi.so
        raise DriverNotFound(f"AMD SMI: amdsmi finds no libamd_smi.so: {error}") from error
    try:
        amdsmi.amdsmi_init()
        gpus = [_gpu(amdsmi, index, handle) for index, handle in enumerate(amdsmi.amdsmi_get_processor_handles())]
    except amdsmi.AmdSmiException as error:
        kind = DriverNotFound if getattr(error, "err_code", None) == NOT_LOADED else DeviceError
        raise kind(f"AMD SMI: {_text(error)}; see whether amd-smi works on this node") from error
    if not gpus:
        raise DriverNotFound("AMD SMI: no GPU on this node")
    if len({gpu.device.uuid for gpu in gpus}) < len(gpus):
        raise DeviceError("AMD SMI: several GPUs have the same uuid; partitions of a GPU cannot be told apart")
    return AmdDriver(amdsmi, gpus)


def _gpu(amdsmi: Any, index: int, handle: Any) -> _Found:
    try:
        minor = _number(amdsmi.amdsmi_get_gpu_enumeration_info(handle).get("drm_render"))
    except (amdsmi.AmdSmiException, AttributeError):  # a function of ROCm 6.4
        minor = None
    return _Found(
        handle,
        InventoryDevice(
            uuid=amdsmi.amdsmi_get_gpu_device_uuid(handle),
            index=index,
            minor=None if minor is None else int(minor),
            pci=amdsmi.amdsmi_get_gpu_device_bdf(handle),
        ),
    )


class AmdSource:
    """One GPU."""

    def __init__(self, amdsmi: Any, gpu: _Found) -> None:
        self.name = gpu.device.uuid
        self._amdsmi = amdsmi
        self._gpu = gpu
        self._devices: list[AmdDevice] = []

    def devices(self) -> Sequence["AmdDevice"]:
        """The GPU. Raises DeviceError."""
        if not self._devices:
            try:
                self._devices = [AmdDevice(self._amdsmi, self._gpu)]
            except self._amdsmi.AmdSmiException as error:
                raise DeviceError(f"{self.name}: AMD SMI: {_text(error)}") from error
        return self._devices


class AmdDevice:
    """A GPU. Raises amdsmi's exceptions when it is made."""

    def __init__(self, amdsmi: Any, gpu: _Found) -> None:
        self._amdsmi = amdsmi
        self._handle = gpu.handle
        readers = _readers(amdsmi, gpu.handle)
        self.identity = Identity(
            uuid=gpu.device.uuid,
            kind="gpu",
            model=amdsmi.amdsmi_get_gpu_asic_info(gpu.handle)["market_name"],
            index=gpu.device.index or 0,
            driver=f"amdgpu {amdsmi.amdsmi_get_gpu_driver_info(gpu.handle)['driver_version']}",
            columns=tuple(column for reader in readers for column in reader.columns),
            pci=gpu.device.pci,
        )
        self._figures = Figures(readers, amdsmi.AmdSmiException, _explain, {})

    def sample(self) -> Reading:
        """The figures now."""
        values, absent = self._figures.read()
        return Reading(values, absent, self._processes())

    def _processes(self) -> dict[int, float] | None:
        try:
            found = self._amdsmi.amdsmi_get_gpu_process_list(self._handle)
        except self._amdsmi.AmdSmiException:
            return None
        sizes = {each["pid"]: _number(each["memory_usage"]["vram_mem"]) for each in found}
        most = MOST["memory_used_bytes"]
        return {pid: math.nan if size is None or size > most else size for pid, size in sizes.items()}


def _explain(error: Any) -> Absent:
    return Absent(f"AMD SMI: {_text(error)}", getattr(error, "err_code", None) in FINAL)


def _text(error: Any) -> str:
    """In one line: what amdsmi says has several."""
    return str(getattr(error, "err_info", None) or " ".join(str(error).split()))


def _number(value: Any) -> float | None:
    """What amdsmi gives, unless it stands for "not known"."""
    return float(value) if isinstance(value, int | float) and value not in NOT_KNOWN else None


def _known(*values: Any) -> float | Absent:
    """The first number among them."""
    numbers = [number for value in values if (number := _number(value)) is not None]
    return numbers[0] if numbers else Absent(f"the driver says {' and '.join(map(str, values))}")


def _readers(amdsmi: Any, handle: Any) -> list[Reader]:
    """What to ask of a GPU: the columns that mean the same as another vendor's."""

    def activity() -> Sequence[float | Exception]:
        answer = amdsmi.amdsmi_get_gpu_activity(handle)
        return _known(answer["gfx_activity"]), _known(answer["umc_activity"])

    def memory() -> Sequence[float | Exception]:
        kind = amdsmi.AmdSmiMemoryType.VRAM
        used = amdsmi.amdsmi_get_gpu_memory_usage(handle, kind)
        total = amdsmi.amdsmi_get_gpu_memory_total(handle, kind)
        if used > total:
            return Absent(f"the driver says {used} bytes of {total}, which cannot be"), total
        return used, total

    def power() -> Sequence[float | Exception]:
        answer = amdsmi.amdsmi_get_power_info(handle)  # the one of newer GPUs, the other of MI200 and older
        return (_known(answer["current_socket_power"], answer["average_socket_power"]),)

    def energy() -> Sequence[float | Exception]:
        answer = amdsmi.amdsmi_get_energy_count(handle)
        return (answer["energy_accumulator"] * answer["counter_resolution"],)

    def temperature() -> Sequence[float | Exception]:
        sensor, metric = amdsmi.AmdSmiTemperatureType.HOTSPOT, amdsmi.AmdSmiTemperatureMetric.CURRENT
        return (amdsmi.amdsmi_get_temp_metric(handle, sensor, metric),)

    def clock(kind: Any) -> Sequence[float | Exception]:
        return (_known(amdsmi.amdsmi_get_clock_info(handle, kind)["clk"]),)

    def ecc() -> Sequence[float | Exception]:
        answer = amdsmi.amdsmi_get_gpu_total_ecc_count(handle)
        return answer["correctable_count"], answer["uncorrectable_count"]

    return [
        Reader({"utilization_ratio": PERCENT, "memory_utilization_ratio": PERCENT}, activity),
        Reader({"memory_used_bytes": BYTES, "memory_total_bytes": BYTES}, memory),
        Reader({"power_watts": WATTS}, power),
        Reader({"energy_joules": MICROJOULES}, energy),
        Reader({"temperature_celsius": CELSIUS}, temperature),
        Reader({"sm_clock_hertz": MEGAHERTZ}, lambda: clock(amdsmi.AmdSmiClkType.GFX)),
        Reader({"memory_clock_hertz": MEGAHERTZ}, lambda: clock(amdsmi.AmdSmiClkType.MEM)),
        Reader({"ecc_corrected_count": ONE, "ecc_uncorrected_count": ONE}, ecc),
    ]
