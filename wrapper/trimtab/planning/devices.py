"""What a profile tells of the devices: of what kind they are, how much they hold, and how much they were used. Pure."""

import math
from collections.abc import Iterable

import numpy as np

from trimtab.balance.model.accelerators import ACCELERATORS, Accelerator
from trimtab_slurm.contents import DeviceProfile, Profile, TrainingProfile

GIB_80_BYTES = 60 * 2**30
"""Above this, a model that is sold with 40 and with 80 GB is the larger one."""


def accelerator_of(devices: Iterable[DeviceProfile]) -> Accelerator | None:
    """What the first of them is; None: none is known by its model's name."""
    for device in devices:
        model = device.model.upper().replace(" ", "").replace("-", "")
        if device.kind == "cpu":
            return ACCELERATORS["cpu"]
        if "A100" in model:
            return ACCELERATORS["a100-80" if _total_bytes(device) > GIB_80_BYTES else "a100-40"]
        for name in ("h100", "h200", "b200", "mi300x"):
            if name.upper() in model:
                return ACCELERATORS[name]
    return None


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
