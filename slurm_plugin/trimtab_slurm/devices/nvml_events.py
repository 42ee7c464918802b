"""What happens to an NVIDIA GPU: its XID errors, and when it begins and ends to be throttled."""

from collections.abc import Sequence
from typing import Any

import pynvml

from trimtab_slurm.resolve import InventoryDevice

SETTLED_SECONDS = 10.0
"""A reason to throttle has ended when it was not seen for so long: a GPU at its power cap is in and out each second."""
MOST_EVENTS = 100
"""That are taken at one look; the rest waits."""
NO_INSTANCE = 0xFFFFFFFF

POWER_CAP = "power cap"
THROTTLING = {
    pynvml.nvmlClocksEventReasonSwPowerCap: POWER_CAP,
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

Event = tuple[str, str]
"""Kind and text, as in a reading."""


class Xids:
    """The XID errors of a GPU that nobody has been told of yet."""

    def __init__(self, handle: Any, gpu: InventoryDevice, held: Sequence[InventoryDevice]) -> None:
        """`held`: the GPU itself, or instances of it."""
        self._gpu = gpu.uuid
        self._held = held
        self._waiting: dict[str, list[Event]] = {device.uuid: [] for device in held}
        self._set: Any = None
        try:
            events = pynvml.nvmlEventSetCreate()
            pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
            self._set = events
        except pynvml.NVMLError as error:
            self._waiting[held[0].uuid].append(("fault", f"{gpu.uuid}: XID errors are not told of: NVML: {error}"))

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

    def waiting(self, uuid: str) -> Sequence[Event]:
        """Kind and text of what a device is to be told of."""
        return self._waiting[uuid]

    def take(self, uuid: str) -> Sequence[Event]:
        """The same, as told."""
        taken, self._waiting[uuid] = self._waiting[uuid], []
        return taken

    def _whose(self, event: Any) -> str:
        """The uuid of the device that an event concerns; empty: an instance's of somebody else."""
        for device in self._held:
            of_gpu_instance = event.gpuInstanceId in (NO_INSTANCE, device.gpu_instance)
            of_instance = of_gpu_instance and event.computeInstanceId in (NO_INSTANCE, device.compute_instance)
            if of_instance or not device.parent_uuid:
                return device.uuid
        return ""


class Throttling:
    """When a GPU begins and ends to be slower than it could be."""

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self._seen: dict[int, float] = {}
        """Reason -> when it was last seen."""

    def changes(self, bits: float | None, now: float) -> list[Event]:
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
            *(("throttle", f"{self._uuid} is throttled: {reason_name(reason)}") for reason in sorted(begun)),
            *(("throttle", f"{self._uuid} is no longer throttled: {reason_name(reason)}") for reason in ended),
        ]


def reason_name(reason: int) -> str:
    """A reason to throttle, one bit, in words."""
    return THROTTLING.get(reason, f"reason {reason:#x}")
