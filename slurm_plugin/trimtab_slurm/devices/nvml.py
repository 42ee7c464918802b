"""NVIDIA GPUs and their MIG instances, by nvidia-ml-py over the driver's libnvidia-ml.so.1.

A GPU is a source, so that one whose calls hang holds up itself alone; of a GPU that is split, the instances that are
held are its devices. The library is loaded and initialized once in a process and never shut down. Source of what each
call gives, and for which devices: NVIDIA's NVML API reference.
"""

import ctypes
import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pynvml

from trimtab_slurm.devices import DeviceError, DriverNotFound, Identity, Reading, Source
from trimtab_slurm.devices.figures import COLUMNS, MOST, Absent, Figures
from trimtab_slurm.devices.nvml_events import Event, Throttling, Xids
from trimtab_slurm.devices.nvml_readers import readers_of
from trimtab_slurm.resolve import InventoryDevice

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
        _preload(library or "libnvidia-ml.so.1")
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


def _preload(library: str) -> None:
    """Load a library without the interpreter's lock; whether it could be is seen when it is used.

    CDLL holds the lock while it loads, in Python 3.11: a file system that hangs would stop every thread.
    """
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.restype, dlopen.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
    dlopen(os.fsencode(library), os.RTLD_NOW | os.RTLD_GLOBAL)


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
        self._xids: Xids | None = None
        self._devices: list[NvmlDevice] = []

    def devices(self) -> Sequence["NvmlDevice"]:
        """The same at each look. Raises DeviceError."""
        if not self._devices:
            held_devices = [held.device for held in self._held]
            xids = self._xids = self._xids or Xids(self._gpu.handle, self._gpu.device, held_devices)
            self._devices = [NvmlDevice(self._version, self._gpu, held, xids) for held in self._held]
        return self._devices


class NvmlDevice:
    """A GPU or a MIG instance."""

    def __init__(self, version: str, gpu: _Found, held: _Found, xids: Xids) -> None:
        self._uuid = held.device.uuid
        self._handle = held.handle
        self._xids = xids
        self._throttling = Throttling(self._uuid)
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
        except pynvml.NVMLError as error:
            raise self._gone(error) from error
        readers, never = readers_of(gpu.handle, held.handle, held.device.gpu_instance)
        self._figures = Figures(readers, pynvml.NVMLError, self._explain, never)

    def sample(self) -> Reading:
        """The figures now, those that are rates since the sample before. Raises DeviceError where the GPU is gone."""
        self._xids.poll()
        values, absent = self._figures.read()
        processes, faults = self._processes()
        throttling = self._throttling.changes(values.get("throttle_reasons_bits"), time.monotonic())
        return Reading(values, absent, processes, [*self._xids.take(self._uuid), *throttling, *faults])

    def _processes(self) -> tuple[dict[int, float] | None, list[Event]]:
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
        """`error`: one of GONE. Names the XID errors that came before, which no reading will tell of."""
        told = "".join(f"; {text}" for _, text in self._xids.waiting(self._uuid))
        return DeviceError(f"{self._uuid} {GONE[error.value]}{told}")
