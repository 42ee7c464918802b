"""What the devices themselves say: probes of their speed, clocks, throttling, temperature. Pure."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trimtab.balance.diagnosing.findings import Evidence
from trimtab.balance.diagnosing.robust import lower_median, median
from trimtab.balance.plan import Place
from trimtab.report.devices import THROTTLED_RATIO
from trimtab.report.figures import device_name
from trimtab.report.summary import Device, Throttling
from trimtab.wording import percent
from trimtab_slurm.contents import DeviceProfile, Profile, TrainingProfile
from trimtab_slurm.devices.cpu import TASK_PREFIX
from trimtab_slurm.devices.nvml_events import POWER_CAP

CPU_PROBE_RATIO = 0.25
"""How far apart probes on CPUs have to be: ranks share cores and caches with whatever else runs there, and have been
seen to differ by 15 % from one probe to the next."""
WARMER_CELSIUS = 10.0
"""From here on a slow GPU's temperature is worth a word."""


@dataclass(frozen=True)
class Reading:
    """A GPU's typical figures while it trained, and its peers': all of its model. NaN where there is none."""

    device: Device
    clock_hertz: float
    peers_clock_hertz: float
    temperature_celsius: float
    peers_temperature_celsius: float

    @property
    def slowness(self) -> float:
        """How many times as fast its peers run."""
        return self.peers_clock_hertz / self.clock_hertz

    @property
    def throttling(self) -> list[Throttling]:
        """Why it was slower than it could be in more samples than a few; the power cap aside: many are at theirs."""
        return [each for each in self.device.throttling if each.reason != POWER_CAP and each.ratio >= THROTTLED_RATIO]


def readings(profile: Profile, devices: Sequence[Device], start_seconds: float, end_seconds: float) -> list[Reading]:
    """Of every GPU that ranks ran on, in that time."""
    samples = {device.uuid: device for node in profile.nodes for device in node.devices}
    gpus = [device for device in devices if device.ranks and device.kind != "cpu" and device.uuid in samples]
    figures = {
        device.uuid: [
            _typical(samples[device.uuid], name, start_seconds, end_seconds)
            for name in ("sm_clock_hertz", "temperature_celsius")
        ]
        for device in gpus
    }
    found = []
    for device in gpus:
        clocks, temperatures = np.array([figures[peer.uuid] for peer in gpus if peer.model == device.model]).T
        # Healthy is fast and cool: of two middle values, the faster clock and the lower temperature.
        peers = -float(lower_median(-clocks, 0)), float(lower_median(temperatures, 0))
        own = figures[device.uuid]
        found.append(Reading(device, own[0], peers[0], own[1], peers[1]))
    return found


def _typical(device: DeviceProfile, name: str, start_seconds: float, end_seconds: float) -> float:
    column = device.samples.get(name)
    if column is None:
        return float("nan")
    time_seconds = np.asarray(device.samples["time_seconds"], dtype=np.float64)
    during = np.asarray(column, dtype=np.float64)[(time_seconds >= start_seconds) & (time_seconds <= end_seconds)]
    return float(median(during, 0)) if len(during) else float("nan")


def clock_slowness(found: Sequence[Reading], least_ratio: float) -> dict[int, float]:
    """Rank -> how many times as fast its GPU's peers run, of those that are slower by at least `least_ratio`."""
    return {
        rank: reading.slowness
        for reading in found
        for rank in reading.device.ranks
        if reading.slowness >= 1 + least_ratio
    }


def probe_slowness(training: TrainingProfile, least_ratio: float) -> dict[int, float]:
    """Rank -> how many times as long as the typical rank its last probe took; 1 where it is too near to tell.

    That is below `least_ratio`, and on CPUs below CPU_PROBE_RATIO.
    """
    probes = training.probes
    if not probes:
        return {}
    on_cpus = any(uuid.startswith(TASK_PREFIX) for uuid in training.ranks["device"].tolist())
    least = max(least_ratio, CPU_PROBE_RATIO) if on_cpus else least_ratio
    order = np.argsort(probes["step"], kind="stable")
    last = dict(zip(probes["rank"][order].tolist(), probes["seconds"][order].tolist(), strict=True))
    seconds = np.array(list(last.values()), dtype=np.float64)
    slowness = seconds / lower_median(seconds, 0)
    return {
        rank: ratio if ratio >= 1 + least else 1.0
        for rank, ratio in zip(last, slowness.tolist(), strict=True)
        if math.isfinite(ratio)
    }


def by_place(slowness: Mapping[int, float], ranks: Mapping[Place, Sequence[int]]) -> dict[Place, float]:
    """A place is as slow as the slowest of its ranks; left out where nothing is known of any."""
    known = {place: [slowness[rank] for rank in own if rank in slowness] for place, own in ranks.items()}
    return {place: max(found) for place, found in known.items() if found}


def evidence(found: Sequence[Reading], probes: Mapping[int, float], least_ratio: float) -> Iterator[Evidence]:
    """What stands out, the slowest first."""
    for rank, ratio in sorted(probes.items(), key=lambda item: -item[1]):
        if ratio > 1:
            yield Evidence(
                "probe", f"rank {rank} takes {ratio - 1:.1%} longer than the typical rank for the probe's fixed work"
            )
    slow = [reading for reading in found if reading.slowness >= 1 + least_ratio or reading.throttling]
    for reading in sorted(slow, key=lambda reading: -np.nan_to_num(reading.slowness)):
        yield Evidence("device", _sentence(reading, least_ratio))


def _sentence(reading: Reading, least_ratio: float) -> str:
    device = reading.device
    ranks = " and ".join(str(rank) for rank in device.ranks)
    parts = []
    if reading.slowness >= 1 + least_ratio:
        clocks = reading.clock_hertz / 1e9, reading.peers_clock_hertz / 1e9
        parts.append(f"ran at {clocks[0]:.2f} GHz where its peers' median is {clocks[1]:.2f}")
    parts += [f"was throttled in {percent(each.ratio)} of the samples: {each.reason}" for each in reading.throttling]
    if reading.temperature_celsius - reading.peers_temperature_celsius >= WARMER_CELSIUS:
        parts.append(f"was at {reading.temperature_celsius:.0f} °C (peers {reading.peers_temperature_celsius:.0f})")
    return f"the GPU of rank {ranks} ({device_name(device)} on {device.node}) {', '.join(parts)}"
