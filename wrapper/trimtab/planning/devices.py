"""What a profile tells of the devices: of what kind they are, how much they hold, and how much they were used. Pure."""

import math
from collections.abc import Iterable

import numpy as np

from trimtab.balance.model.accelerators import ACCELERATORS, Accelerator
from trimtab_slurm.contents import DeviceProfile, Profile, TrainingProfile

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


def accelerator_of(devices: Iterable[DeviceProfile]) -> Accelerator | None:
    """What all of them are; None: that is not known, or they are not alike. A slice of a GPU is none of them."""
    found = {_name_of(device) for device in devices}
    name = found.pop() if len(found) == 1 else None
    return ACCELERATORS[name] if name else None


def _name_of(device: DeviceProfile) -> str | None:
    if device.kind == "cpu":
        return "cpu"
    model = device.model.removeprefix("NVIDIA ").removeprefix("AMD ")
    return MODELS.get(model) if device.kind == "gpu" else None


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
