"""What is asked of an NVIDIA GPU, or of a MIG instance, for its figures."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import pynvml

from trimtab_slurm.devices.figures import BYTES, CELSIUS, COLUMNS, MEGAHERTZ, ONE, PERCENT, Absent, Reader, Unit

MILLIWATTS, MILLIJOULES = Unit("mW", per=1e3), Unit("mJ", per=1e3)
KILOBYTES_PER_SECOND = Unit("KB/s", times=1e3)  # NVML says KB of PCIe, and KiB of NVLink
KIBIBYTES_PER_SECOND, MEBIBYTES_PER_SECOND = Unit("KiB/s", times=1024.0), Unit("MiB/s", times=1024.0**2)

GPM_SECONDS = 0.1
"""NVML wants its two samples that far apart."""
ALL_LINKS = 0xFFFFFFFF
FIRST = "a figure between two readings, and this was the first"

GPM_ACTIVITY = {
    "sm_active_ratio": pynvml.NVML_GPM_METRIC_SM_UTIL,
    "sm_occupancy_ratio": pynvml.NVML_GPM_METRIC_SM_OCCUPANCY,
    "tensor_active_ratio": pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    "dram_active_ratio": pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
}
GPM_PCIE = {
    "pcie_sent_bytes_per_second": pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC,
    "pcie_received_bytes_per_second": pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC,
}
"""Where there is GPM: the other way to ask waits for 20 ms each, and tells of these alone."""


def readers_of(gpu: Any, device: Any, instance: int | None) -> tuple[list[Reader], dict[str, str]]:
    """What to ask of a device, and the columns that it has no answer to, and why.

    `gpu`: the GPU's handle; `device`: the same, or that of a MIG instance of it; `instance`: whose GPU instance that
    is, None: the GPU as a whole.
    """
    readers = [Reader({"memory_used_bytes": BYTES, "memory_total_bytes": BYTES}, lambda: _memory(device))]
    no_gpm, whole = _why_no_gpm(gpu), instance is None
    if not no_gpm:
        metrics = GPM_ACTIVITY | GPM_PCIE if whole else GPM_ACTIVITY
        units = {column: MEBIBYTES_PER_SECOND if column in GPM_PCIE else PERCENT for column in metrics}
        readers.append(Reader(units, _Gpm(gpu, instance, tuple(metrics.values())).ask))
    if whole:
        readers += _whole_gpu_readers(gpu)
        if no_gpm:
            readers += _pcie_readers(gpu)
    asked = {column for reader in readers for column in reader.columns}
    only_whole = "NVML gives it of the whole GPU only, not of a MIG instance"
    return readers, {
        column: no_gpm if column in GPM_ACTIVITY else only_whole for column in COLUMNS if column not in asked
    }


def _why_no_gpm(gpu: Any) -> str:
    """Empty where the GPU's performance monitor can be asked."""
    try:
        supported = pynvml.nvmlGpmQueryDeviceSupport(gpu).isSupportedDevice
    except pynvml.NVMLError as error:
        return f"NVML: GPM: {error}"
    return "" if supported else "NVML: GPM: this GPU has none, those from Hopper on have"


def _one(column: str, unit: Unit, ask: Callable[..., Any], *arguments: Any) -> Reader:
    """What one call gives as one number."""
    return Reader({column: unit}, lambda: (ask(*arguments),))


def _pcie_readers(handle: Any) -> list[Reader]:
    ask, unit = pynvml.nvmlDeviceGetPcieThroughput, KILOBYTES_PER_SECOND
    return [
        _one("pcie_sent_bytes_per_second", unit, ask, handle, pynvml.NVML_PCIE_UTIL_TX_BYTES),
        _one("pcie_received_bytes_per_second", unit, ask, handle, pynvml.NVML_PCIE_UTIL_RX_BYTES),
    ]


def _whole_gpu_readers(handle: Any) -> list[Reader]:
    clock, ecc = pynvml.nvmlDeviceGetClockInfo, pynvml.nvmlDeviceGetTotalEccErrors
    corrected, uncorrected = pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    temperature = _newest("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature")
    throttling = _newest("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
    nvlink = ("nvlink_sent_bytes_per_second", "nvlink_received_bytes_per_second")
    return [
        Reader({"utilization_ratio": PERCENT, "memory_utilization_ratio": PERCENT}, lambda: _utilization(handle)),
        _one("power_watts", MILLIWATTS, pynvml.nvmlDeviceGetPowerUsage, handle),
        _one("energy_joules", MILLIJOULES, pynvml.nvmlDeviceGetTotalEnergyConsumption, handle),
        _one("temperature_celsius", CELSIUS, temperature, handle, pynvml.NVML_TEMPERATURE_GPU),
        _one("sm_clock_hertz", MEGAHERTZ, clock, handle, pynvml.NVML_CLOCK_SM),
        _one("memory_clock_hertz", MEGAHERTZ, clock, handle, pynvml.NVML_CLOCK_MEM),
        _one("throttle_reasons_bits", ONE, throttling, handle),
        _one("ecc_corrected_count", ONE, ecc, handle, corrected, pynvml.NVML_VOLATILE_ECC),
        _one("ecc_uncorrected_count", ONE, ecc, handle, uncorrected, pynvml.NVML_VOLATILE_ECC),
        Reader(dict.fromkeys(nvlink, KIBIBYTES_PER_SECOND), _NvLink(handle).ask),
    ]


def _newest(*names: str) -> Callable[..., Any]:
    """A function that NVML has renamed, newest name first: under the first name that the library knows."""
    functions = [getattr(pynvml, name) for name in names if hasattr(pynvml, name)]

    def ask(*arguments: Any) -> Any:
        for function in functions[:-1]:
            try:
                return function(*arguments)
            except pynvml.NVMLError_FunctionNotFound:
                continue
        return functions[-1](*arguments)

    return ask


def _utilization(handle: Any) -> Sequence[float]:
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
    return rates.gpu, rates.memory


def _memory(handle: Any) -> Sequence[float | Exception]:
    """Used and total. The second version of the call: what the first says is used has the driver's own part in it."""
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    if memory.used > memory.total:
        return Absent(f"the driver says {memory.used} bytes of {memory.total}, which cannot be"), memory.total
    return memory.used, memory.total


class _NvLink:
    """Bytes a second over all links of a GPU, from counters."""

    fields = (
        (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, ALL_LINKS),
        (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, ALL_LINKS),
    )

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._before: tuple[float, list[int]] | None = None

    def ask(self) -> Sequence[float | Exception]:
        """KiB a second, sent and received, since it was asked before."""
        answers = pynvml.nvmlDeviceGetFieldValues(self._handle, self.fields)
        now = time.monotonic()
        counters = [answer.value.ullVal for answer in answers]
        before, self._before = self._before, (now, counters)
        return [
            pynvml.NVMLError(answer.nvmlReturn) if answer.nvmlReturn else _rate(before, place, now, counter)
            for place, (answer, counter) in enumerate(zip(answers, counters, strict=True))
        ]


def _rate(before: tuple[float, list[int]] | None, place: int, now: float, counter: int) -> float | Absent:
    if before is None:
        return Absent(FIRST)
    then, counters = before
    if counter < counters[place]:
        return Absent(f"the counter fell from {counters[place]} to {counter} KiB")
    return (counter - counters[place]) / (now - then)


class _Gpm:
    """What the GPU's own performance monitor (GPM) counts between two samples of it."""

    def __init__(self, gpu: Any, instance: int | None, metrics: Sequence[int]) -> None:
        """`instance`: None for the whole GPU; `metrics`: NVML_GPM_METRIC_..."""
        self._gpu = gpu
        self._instance = instance
        self._count = len(metrics)
        self._request = pynvml.c_nvmlGpmMetricsGet_t(pynvml.NVML_GPM_METRICS_GET_VERSION, self._count)
        for place, metric in enumerate(metrics):
            self._request.metrics[place].metricId = metric
        self._before: Any = None
        self._spare: Any = None
        self._taken = -math.inf

    def ask(self) -> Sequence[float | Exception]:
        """The metrics, in their own units, since it was asked before."""
        now = time.monotonic()
        if now - self._taken < GPM_SECONDS:
            raise Absent(f"less than {GPM_SECONDS:g} s after the reading before")
        self._spare = self._spare or pynvml.nvmlGpmSampleAlloc()
        if self._instance is None:
            pynvml.nvmlGpmSampleGet(self._gpu, self._spare)
        else:
            pynvml.nvmlGpmMigSampleGet(self._gpu, self._instance, self._spare)
        self._taken = now
        before, self._before, self._spare = self._before, self._spare, self._before
        if before is None:
            raise Absent(FIRST)
        self._request.sample1, self._request.sample2 = before, self._before
        pynvml.nvmlGpmMetricsGet(self._request)
        answers = self._request.metrics[: self._count]
        return [pynvml.NVMLError(each.nvmlReturn) if each.nvmlReturn else each.value for each in answers]
