"""NVIDIA GPUs and their MIG instances, by nvidia-ml-py over the driver's libnvidia-ml.so.1.

A GPU is a source, so that one whose calls hang holds up itself alone; of a GPU that is split, the instances that are
held are its devices. The library is loaded and initialized once in a process and never shut down. Source of what each
call gives, and for which devices: NVIDIA's NVML API reference.
"""

import ctypes
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pynvml

from trimtab_slurm.devices import DeviceError, DriverNotFound, Identity, Reading, Source
from trimtab_slurm.devices.figures import (
    BYTES,
    CELSIUS,
    COLUMNS,
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

MILLIWATTS, MILLIJOULES = Unit("mW", per=1e3), Unit("mJ", per=1e3)
KILOBYTES_PER_SECOND = Unit("KB/s", times=1e3)  # NVML says KB here, and KiB of NVLink
KIBIBYTES_PER_SECOND = Unit("KiB/s", times=1024.0)

GPM_SECONDS = 0.1
"""NVML wants its two samples that far apart."""
SETTLED_SECONDS = 10.0
"""A reason to throttle has ended when it was not seen for so long: a GPU at its power cap is in and out each second."""
MOST_EVENTS = 100
"""That are taken at one reading; the rest waits."""
NO_INSTANCE = 0xFFFFFFFF
ALL_LINKS = 0xFFFFFFFF
FIRST = "a figure between two readings, and this was the first"

GPM_METRICS = {
    "sm_active_ratio": pynvml.NVML_GPM_METRIC_SM_UTIL,
    "sm_occupancy_ratio": pynvml.NVML_GPM_METRIC_SM_OCCUPANCY,
    "tensor_active_ratio": pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    "dram_active_ratio": pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
}

GONE = {
    pynvml.NVML_ERROR_GPU_IS_LOST: "is lost: it has fallen off the bus; drain the node, and reset the GPU or reboot",
    pynvml.NVML_ERROR_RESET_REQUIRED: "needs a reset: drain the node, then `nvidia-smi --gpu-reset` or reboot",
}
FINAL = {
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    pynvml.NVML_ERROR_DEPRECATED,
}
"""Errors of the hardware, the driver or this user, none of which changes while a job runs."""

THROTTLING = {
    pynvml.nvmlClocksEventReasonSwPowerCap: "power cap",
    pynvml.nvmlClocksEventReasonHwSlowdown: "hardware slowdown (temperature, power brake or power supply)",
    pynvml.nvmlClocksEventReasonSyncBoost: "sync boost with a slower GPU",
    pynvml.nvmlClocksEventReasonSwThermalSlowdown: "temperature, by the driver",
    pynvml.nvmlClocksEventReasonHwThermalSlowdown: "temperature, by the hardware",
    pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "power brake from outside the GPU",
    pynvml.nvmlClocksEventReasonDisplayClockSetting: "display clock setting",
}
CHOSEN_CLOCKS = pynvml.nvmlClocksEventReasonGpuIdle | pynvml.nvmlClocksEventReasonApplicationsClocksSetting
"""Reasons for low clocks that are no throttling: nothing to do, and somebody's setting."""

XIDS = {
    13: "the program did something that the GPU cannot do (graphics engine exception)",
    31: "the program used an address that is not its own (memory page fault)",
    43: "the program was stopped after a fault of its own",
    45: "the program's work was taken off the GPU, as when it is killed",
    48: "memory error that could not be corrected (double bit)",
    61: "the GPU's own controller stopped at a breakpoint",
    62: "the GPU's own controller halted",
    63: "a bad memory row or page was set aside",
    64: "a bad memory row or page could not be set aside",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "many memory errors that were corrected",
    94: "memory error that could not be corrected; it stopped one program only",
    95: "memory error that could not be corrected, and may have reached any program on the GPU",
    119: "the GPU's system processor does not answer",
    120: "error of the GPU's system processor",
}
"""The well-known ones of NVIDIA's catalog of XID errors."""


@dataclass(frozen=True)
class _Found:
    """A GPU, or a MIG instance, as the library knows it."""

    handle: Any
    device: InventoryDevice


class NvmlDriver:
    """The library, and what it finds on this node."""

    name = "NVML"

    def __init__(self, version: str, gpus: Mapping[str, _Found], instances: Sequence[_Found], notes: Sequence[str]):
        self._version = version
        self._gpus = gpus
        self._instances = instances
        self.inventory = [found.device for found in (*gpus.values(), *instances)]
        self.notes = tuple(notes)

    def sources(self, uuids: Collection[str]) -> tuple[Source, ...]:
        """One for each GPU that is named, or has an instance that is. `uuids`: of the inventory."""
        sources = []
        for uuid, gpu in self._gpus.items():
            held = [each for each in self._instances if each.device.parent_uuid == uuid and each.device.uuid in uuids]
            if uuid in uuids:
                held = [gpu]
            if held:
                sources.append(NvmlSource(self._version, gpu, held))
        return tuple(sources)


def open_driver(library: str = "") -> NvmlDriver:
    """Load the library and list the devices: at least one. Blocks while the driver does.

    `library`: path of libnvidia-ml.so.1; empty: where the system finds it. Raises DriverNotFound where there is no
    library or no GPU, DeviceError where there is one that does not work.
    """
    try:
        if library:
            # Under its SONAME it is then already there when nvidia-ml-py asks for it.
            ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        count = pynvml.nvmlDeviceGetCount()
    except OSError as error:
        raise DriverNotFound(f'NVML: nvml_library = "{library}" in node.toml cannot be loaded: {error}') from error
    except pynvml.NVMLError as error:
        raise _unusable(error) from error
    gpus, instances, notes = {}, [], []
    for index in range(count):
        try:
            gpu = _gpu(index)
            instances += _instances(gpu)
            gpus[gpu.device.uuid] = gpu
        except pynvml.NVMLError as error:
            notes.append(f"GPU {index} of {count}: NVML: {error}; it is not measured")
    if not gpus:
        raise DeviceError("; ".join(notes)) if notes else DriverNotFound("NVML: no GPU on this node")
    return NvmlDriver(f"NVIDIA {version}", gpus, instances, notes)


def _unusable(error: Any) -> DeviceError:
    if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return DriverNotFound(
            "NVML: no libnvidia-ml.so.1; where it is in no usual place, set nvml_library in node.toml"
        )
    if error.value == pynvml.NVML_ERROR_DRIVER_NOT_LOADED:
        return DriverNotFound("NVML: the kernel's NVIDIA driver is not loaded")
    if error.value == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return DeviceError(
            "NVML: the library is of another version than the kernel's NVIDIA driver, as after an upgrade: reload the "
            "driver, or reboot the node"
        )
    return DeviceError(f"NVML: {error}; see whether nvidia-smi works on this node")


def _gpu(index: int) -> _Found:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    minor = _or(None, pynvml.nvmlDeviceGetMinorNumber, handle)
    pci = _or(None, pynvml.nvmlDeviceGetPciInfo, handle)
    uuid = pynvml.nvmlDeviceGetUUID(handle)
    return _Found(handle, InventoryDevice(uuid, index, minor, pci.busId if pci else ""))


def _instances(gpu: _Found) -> list[_Found]:
    """The MIG instances of a GPU."""
    mode, _ = _or((pynvml.NVML_DEVICE_MIG_DISABLE, None), pynvml.nvmlDeviceGetMigMode, gpu.handle)
    if mode != pynvml.NVML_DEVICE_MIG_ENABLE:
        return []
    found = []
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu.handle)):
        try:
            handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu.handle, index)
        except pynvml.NVMLError_NotFound:
            continue  # places may be empty
        device = InventoryDevice(
            uuid=pynvml.nvmlDeviceGetUUID(handle),
            index=index,
            pci=gpu.device.pci,
            parent_uuid=gpu.device.uuid,
            gpu_instance=pynvml.nvmlDeviceGetGpuInstanceId(handle),
            compute_instance=pynvml.nvmlDeviceGetComputeInstanceId(handle),
        )
        found.append(_Found(handle, device))
    return found


def _or(default: Any, ask: Callable[..., Any], *arguments: Any) -> Any:
    """What the library answers; the default where it does not know, unless the GPU is gone."""
    try:
        return ask(*arguments)
    except pynvml.NVMLError as error:
        if error.value in GONE:
            raise
        return default


class NvmlSource:
    """One GPU: itself, or those of its MIG instances that are held."""

    def __init__(self, version: str, gpu: _Found, held: Sequence[_Found]) -> None:
        self.name = gpu.device.uuid
        self._version = version
        self._gpu = gpu
        self._held = held
        self._xids: _Xids | None = None
        self._devices: list[NvmlDevice] = []

    def devices(self) -> Sequence["NvmlDevice"]:
        """The same at each look. Raises DeviceError."""
        if not self._devices:
            xids = self._xids = self._xids or _Xids(self._gpu, self._held)
            self._devices = [NvmlDevice(self._version, self._gpu, held, xids) for held in self._held]
        return self._devices


class NvmlDevice:
    """A GPU or a MIG instance."""

    def __init__(self, version: str, gpu: _Found, held: _Found, xids: "_Xids") -> None:
        self._uuid = held.device.uuid
        self._handle = held.handle
        self._xids = xids
        self._throttling = _Throttling(self._uuid)
        self._lists_processes = True
        try:
            self.identity = Identity(
                uuid=self._uuid,
                kind="gpu" if held is gpu else "mig",
                model=_or("", pynvml.nvmlDeviceGetName, held.handle),
                index=held.device.index or 0,
                driver=version,
                columns=COLUMNS,
                pci=held.device.pci,
                parent_uuid=held.device.parent_uuid,
            )
            readers, never = _readers(gpu, held)
        except pynvml.NVMLError as error:
            raise self._gone(error) from error
        self._figures = Figures(readers, pynvml.NVMLError, self._explain, never)

    def sample(self) -> Reading:
        """The figures now, those that are rates since the sample before. Raises DeviceError where the GPU is gone."""
        self._xids.poll()
        values, absent = self._figures.read()
        processes, faults = self._processes()
        throttling = self._throttling.changes(values.get("throttle_reasons_bits"), time.monotonic())
        return Reading(values, absent, processes, [*self._xids.take(self._uuid), *throttling, *faults])

    def _processes(self) -> tuple[dict[int, float] | None, list[tuple[str, str]]]:
        """Process id -> bytes; or why that is not known, once."""
        if not self._lists_processes:
            return None, []
        try:
            found = pynvml.nvmlDeviceGetComputeRunningProcesses_v3(self._handle)
        except pynvml.NVMLError as error:
            self._lists_processes = error.value not in FINAL
            reason = self._explain(error)
            return None, [] if self._lists_processes else [("fault", f"{self._uuid}: processes not known: {reason}")]
        most = MOST["memory_used_bytes"]
        sizes = {each.pid: each.usedGpuMemory for each in found}
        return {pid: math.nan if size is None or size > most else float(size) for pid, size in sizes.items()}, []

    def _explain(self, error: Any) -> Absent:
        if error.value in GONE:
            raise self._gone(error) from error
        older = " (the driver is older than that)" if error.value == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND else ""
        return Absent(f"NVML: {error}{older}", error.value in FINAL)

    def _gone(self, error: Any) -> DeviceError:
        """With the XID errors that came before, which no reading will tell of."""
        told = "".join(f"; {text}" for _, text in self._xids.waiting(self._uuid))
        return DeviceError(f"{self._uuid} {GONE.get(error.value, f'NVML: {error}')}{told}")


class _Xids:
    """The XID errors of a GPU that nobody has been told of yet."""

    def __init__(self, gpu: _Found, held: Sequence[_Found]) -> None:
        self._gpu = gpu.device.uuid
        self._held = held
        self._waiting: dict[str, list[tuple[str, str]]] = {each.device.uuid: [] for each in held}
        self._set: Any = None
        try:
            events = pynvml.nvmlEventSetCreate()
            pynvml.nvmlDeviceRegisterEvents(gpu.handle, pynvml.nvmlEventTypeXidCriticalError, events)
            self._set = events
        except pynvml.NVMLError as error:
            uuid = held[0].device.uuid
            self._waiting[uuid].append(("fault", f"{uuid}: XID errors are not told of: NVML: {error}"))

    def poll(self) -> None:
        """See what has happened."""
        if self._set is None:
            return
        for _ in range(MOST_EVENTS):
            try:
                event = pynvml.nvmlEventSetWait_v2(self._set, 0)
            except pynvml.NVMLError:  # in time, or with its GPU gone, which its figures will tell
                return
            if uuid := self._whose(event):
                where = self._gpu if event.gpuInstanceId == NO_INSTANCE else uuid
                meaning = XIDS.get(event.eventData, "see NVIDIA's catalog of XID errors")
                self._waiting[uuid].append(("xid", f"XID {event.eventData} on {where}: {meaning}"))

    def waiting(self, uuid: str) -> Sequence[tuple[str, str]]:
        """Kind and text of what a device is to be told of."""
        return self._waiting[uuid]

    def take(self, uuid: str) -> Sequence[tuple[str, str]]:
        """The same, as told."""
        taken, self._waiting[uuid] = self._waiting[uuid], []
        return taken

    def _whose(self, event: Any) -> str:
        """The uuid of the device that an event concerns; empty: an instance's of somebody else."""
        for held in self._held:
            device = held.device
            of_gpu_instance = event.gpuInstanceId in (NO_INSTANCE, device.gpu_instance)
            of_instance = of_gpu_instance and event.computeInstanceId in (NO_INSTANCE, device.compute_instance)
            if of_instance or not device.parent_uuid:
                return device.uuid
        return ""


class _Throttling:
    """When a GPU begins and ends to be slower than it could be."""

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self._seen: dict[int, float] = {}
        """Reason -> when it was last seen."""

    def changes(self, bits: float | None, now: float) -> list[tuple[str, str]]:
        """The events that reasons make, seen at the time `now` in seconds. None: they are not known."""
        if bits is None:
            return []
        active = int(bits) & ~CHOSEN_CLOCKS
        reasons = {1 << place for place in range(active.bit_length()) if active >> place & 1}
        begun = reasons - self._seen.keys()
        self._seen |= dict.fromkeys(reasons, now)
        ended = [reason for reason, seen in self._seen.items() if now - seen >= SETTLED_SECONDS]
        for reason in ended:
            del self._seen[reason]
        return [
            *(("throttle", f"{self._uuid} is throttled: {_named(reason)}") for reason in sorted(begun)),
            *(("throttle", f"{self._uuid} is no longer throttled: {_named(reason)}") for reason in ended),
        ]


def _named(reason: int) -> str:
    return THROTTLING.get(reason, f"reason {reason:#x}")


def _readers(gpu: _Found, held: _Found) -> tuple[list[Reader], dict[str, str]]:
    """What to ask of a device, and the columns that it has no answer to, and why."""
    instance = held.device.gpu_instance
    readers = [Reader({"memory_used_bytes": BYTES, "memory_total_bytes": BYTES}, lambda: _memory(held.handle))]
    never = {}
    if held is gpu:
        readers += _whole_gpu_readers(gpu.handle)
    else:
        reason = "NVML gives it of the whole GPU only, not of a MIG instance"
        never = {column: reason for column in COLUMNS if column not in {**readers[0].columns, **GPM_METRICS}}
    support = _or(None, pynvml.nvmlGpmQueryDeviceSupport, gpu.handle)
    if support and support.isSupportedDevice:
        readers.append(Reader(dict.fromkeys(GPM_METRICS, PERCENT), _Gpm(gpu.handle, instance).ask))
    else:
        never |= dict.fromkeys(
            GPM_METRICS, "NVML: no GPM: it needs a GPU of Hopper or later, and a driver that knows it"
        )
    return readers, never


def _whole_gpu_readers(handle: Any) -> list[Reader]:
    def one(column: str, unit: Unit, ask: Callable[..., Any], *arguments: Any) -> Reader:
        return Reader({column: unit}, lambda: (ask(handle, *arguments),))

    nvlink = {
        "nvlink_sent_bytes_per_second": KIBIBYTES_PER_SECOND,
        "nvlink_received_bytes_per_second": KIBIBYTES_PER_SECOND,
    }
    pcie, ecc = pynvml.nvmlDeviceGetPcieThroughput, pynvml.nvmlDeviceGetTotalEccErrors
    temperature = _newest("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature")
    throttling = _newest("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
    return [
        Reader(
            {"utilization_ratio": PERCENT, "memory_utilization_ratio": PERCENT},
            lambda: _utilization(handle),
        ),
        one("power_watts", MILLIWATTS, pynvml.nvmlDeviceGetPowerUsage),
        one("energy_joules", MILLIJOULES, pynvml.nvmlDeviceGetTotalEnergyConsumption),
        one("temperature_celsius", CELSIUS, temperature, pynvml.NVML_TEMPERATURE_GPU),
        one("sm_clock_hertz", MEGAHERTZ, pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM),
        one("memory_clock_hertz", MEGAHERTZ, pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_MEM),
        one("pcie_sent_bytes_per_second", KILOBYTES_PER_SECOND, pcie, pynvml.NVML_PCIE_UTIL_TX_BYTES),
        one("pcie_received_bytes_per_second", KILOBYTES_PER_SECOND, pcie, pynvml.NVML_PCIE_UTIL_RX_BYTES),
        one("throttle_reasons_bits", ONE, throttling),
        one("ecc_corrected_count", ONE, ecc, pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_VOLATILE_ECC),
        one("ecc_uncorrected_count", ONE, ecc, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC),
        Reader(nvlink, _NvLink(handle).ask),
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
    """What the GPU's own performance monitor counts between two samples of it, in percent."""

    def __init__(self, gpu: Any, instance: int | None) -> None:
        self._gpu = gpu
        self._instance = instance
        self._request = pynvml.c_nvmlGpmMetricsGet_t(pynvml.NVML_GPM_METRICS_GET_VERSION, len(GPM_METRICS))
        for place, metric in enumerate(GPM_METRICS.values()):
            self._request.metrics[place].metricId = metric
        self._before: Any = None
        self._spare: Any = None
        self._taken = -math.inf

    def ask(self) -> Sequence[float | Exception]:
        """As GPM_METRICS, since it was asked before."""
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
        answers = self._request.metrics[: len(GPM_METRICS)]
        return [pynvml.NVMLError(each.nvmlReturn) if each.nvmlReturn else each.value for each in answers]
