"""What a profile tells of the devices: of what kind they are, how much they hold, and how much they were used. Pure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from trimtab.balance.model.accelerators import ACCELERATORS, Accelerator
from trimtab_slurm.contents import DeviceProfile, Profile, TrainingProfile
from trimtab_slurm.devices.cpu import TASK_PREFIX

MODELS = {
    "A100-SXM4-40GB": "a100-40",
    "A100-SXM4-80GB": "a100-80",
    "H100 80GB HBM3": "h100",
    "H200": "h200",
    "B200": "b200",
    "Instinct MI300X": "mi300x",
    "Instinct MI300X OAM": "mi300x",
}
"""What drivers call the accelerators that are known, after the vendor's name. Sisters of these (PCIe, NVL, GH200) have
other clocks, memory and links, and are not known."""


@dataclass(frozen=True)
class Equipment:
    """What is known of the devices under a run."""

    accelerator: Accelerator | None
    """What all of them are; None: not known, or they are not alike."""
    likely: Accelerator
    """In whose proportions a model's parts are, then."""
    memory_bytes: tuple[float, ...]
    """[S] what the smallest device of each stage holds; infinite: not known."""
    cores: int | None
    """How many a rank may run on, where ranks compute on CPUs; None: not known, or they do not."""
    utilization_ratio: float | None
    """Mean over the devices; None: nobody measured it."""


def equipment_of(profile: Profile, training: TrainingProfile, first_seconds: float, last_seconds: float) -> Equipment:
    """As a profile has it; utilization between two moments."""
    found = [device for node in profile.nodes for device in node.devices]
    accelerator = accelerator_of(found)
    return Equipment(
        accelerator=accelerator,
        likely=accelerator or (ACCELERATORS["h100"] if found else likely_accelerator(training)),
        memory_bytes=memory_bytes(profile, training),
        cores=_cores(profile),
        utilization_ratio=utilization_ratio(profile, first_seconds, last_seconds),
    )


def likely_accelerator(training: TrainingProfile) -> Accelerator:
    """By what ranks say of their devices."""
    return ACCELERATORS["cpu" if str(training.ranks["device"][0]).startswith(TASK_PREFIX) else "h100"]


def _cores(profile: Profile) -> int | None:
    allowed = [
        used / ratio
        for node in profile.nodes
        for device in node.devices
        if device.kind == "cpu" and "utilization_cores" in device.samples
        for used, ratio in zip(
            *(device.samples[name].tolist() for name in ("utilization_cores", "utilization_ratio")), strict=True
        )
        if used > 0 and ratio > 0
    ]
    return round(float(np.median(allowed))) if allowed else None


def accelerator_named(kind: str, model: str) -> Accelerator | None:
    """By what a driver calls it."""
    if kind == "cpu":
        return ACCELERATORS["cpu"]
    name = MODELS.get(model.removeprefix("NVIDIA ").removeprefix("AMD ")) if kind == "gpu" else None
    return ACCELERATORS[name] if name else None


def accelerator_of(devices: Iterable[DeviceProfile]) -> Accelerator | None:
    """What all of them are; None: that is not known, or they are not alike. A slice of a GPU is none of them."""
    found = {accelerator_named(device.kind, device.model) for device in devices}
    return found.pop() if len(found) == 1 else None


def memory_bytes(profile: Profile, training: TrainingProfile) -> tuple[float, ...]:
    """[S] what the smallest device of each stage holds; infinite where one's is not known, as a processor's."""
    totals = {device.uuid: _total_bytes(device) for node in profile.nodes for device in node.devices}
    least = [math.inf] * int(training.attributes["pipeline"])
    known = [True] * len(least)
    for stage, uuid in zip(training.ranks["pipeline_rank"].tolist(), training.ranks["device"].tolist(), strict=True):
        total = totals.get(uuid, math.inf)
        known[stage] &= math.isfinite(total)
        least[stage] = min(least[stage], total)
    return tuple(total if sure else math.inf for total, sure in zip(least, known, strict=True))


def utilization_ratio(profile: Profile, first_seconds: float, last_seconds: float) -> float | None:
    """Mean over the devices of what each was used between two moments; None: nobody measured it."""
    means = []
    for device in (device for node in profile.nodes for device in node.devices):
        times = np.asarray(device.samples["time_seconds"], dtype=np.float64)
        used = np.asarray(device.samples.get("utilization_ratio", np.full(len(times), np.nan)), dtype=np.float64)
        within = used[(times >= first_seconds) & (times <= last_seconds)]
        within = within[np.isfinite(within)]
        if len(within):
            means.append(float(within.mean()))
    return float(np.mean(means)) if means else None


def _total_bytes(device: DeviceProfile) -> float:
    """What the device holds in all; infinite: not known."""
    column = device.samples.get("memory_total_bytes")
    if device.kind == "cpu" or column is None:
        return math.inf
    known = np.asarray(column, dtype=np.float64)
    known = known[np.isfinite(known) & (known > 0)]
    return float(known[-1]) if len(known) else math.inf
