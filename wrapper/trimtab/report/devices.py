"""Profile -> what each device did over the attempt, and what to mind about it. Pure."""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from trimtab.report.figures import device_name
from trimtab.report.gaps import finite, mean, most
from trimtab.report.stages import Floats
from trimtab.report.summary import Device, Rank, Summary, Throttling
from trimtab.wording import listed, percent, plural
from trimtab_slurm.contents import DeviceProfile, NodeProfile, Profile, Table, coverage_ratio
from trimtab_slurm.devices.nvml_events import CHOSEN_CLOCKS, POWER_CAP, reason_name

_COLUMNS = (
    "time_seconds",
    "utilization_ratio",
    "memory_used_bytes",
    "sm_active_ratio",
    "power_watts",
    "throttle_reasons_bits",
)
LOW_COVERAGE_RATIO = 0.9
"""Below this share of the expected samples, a device's figures are not those of the whole attempt."""
THROTTLED_RATIO = 0.05
"""From this share of a GPU's samples on it is said that it was throttled, unless by its power cap, as many are."""


def devices(profile: Profile, ranks: tuple[Rank, ...]) -> tuple[Device, ...]:
    """Those that were recorded, and those that ranks ran on but nobody recorded, in the order of nodes and ranks."""
    users: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        users[rank.device].append(rank.rank)
    recorded = [
        _device(node, device, tuple(users.get(device.uuid, ()))) for node in profile.nodes for device in node.devices
    ]
    seen = {device.uuid for device in recorded}
    present = {node.node for node in profile.nodes}
    unseen = {rank.device: rank.node for rank in ranks if rank.device not in seen}
    for uuid, node in unseen.items():
        reason = "the node's recorder did not see it" if node in present else "the node left no record"
        recorded.append(Device(node, uuid, "", "", None, tuple(users[uuid]), None, None, None, 0, None, reason))
    places = {node: place for place, node in enumerate(profile.expected_nodes)}

    def order(device: Device) -> tuple[int, str, tuple[int, ...], int]:
        return places.get(device.node, len(places)), device.node, device.ranks or (1 << 30,), device.index or 0

    return tuple(sorted(recorded, key=order))


def _device(node: NodeProfile, device: DeviceProfile, ranks: tuple[int, ...]) -> Device:
    # From a file, each look at a column reads it, and all columns of all devices may not fit into memory.
    found = ((name, device.samples.get(name)) for name in _COLUMNS)
    samples = {name: column for name, column in found if column is not None}
    device = replace(device, samples=samples)
    utilization = _figures(samples, "utilization_ratio")
    known = int(np.isfinite(utilization).sum())
    reason = "" if known else device.absent.get("utilization_ratio", "")
    if not known and not reason:
        period = f"{node.sampler_period_seconds:g} s"
        reason = "no value in any sample" if len(utilization) else f"no sample; the sampling period is {period}"
    covered = coverage_ratio(device, node, "utilization_ratio" if known else "time_seconds")
    missing = [name for name in _COLUMNS if not len(finite(_figures(samples, name)))]
    throttled, reasons = _throttling(_figures(samples, "throttle_reasons_bits"))
    return Device(
        node=node.node,
        uuid=device.uuid,
        kind=device.kind,
        model=device.model,
        index=device.index,
        ranks=ranks,
        utilization_mean_ratio=mean(utilization),
        utilization_max_ratio=most(utilization),
        memory_max_bytes=most(_figures(samples, "memory_used_bytes")),
        samples=len(utilization),
        coverage_ratio=None if math.isnan(covered) else covered,
        no_data=reason,
        pci=device.pci,
        sm_active_mean_ratio=mean(_figures(samples, "sm_active_ratio")),
        power_mean_watts=mean(_figures(samples, "power_watts")),
        throttled_ratio=throttled,
        throttling=reasons,
        absent={name: device.absent[name] for name in missing if name in device.absent},
    )


def _throttling(bits: Floats) -> tuple[float | None, tuple[Throttling, ...]]:
    """The share of samples with any reason to throttle, and of those with each, the most frequent first."""
    known = bits[(bits >= 0) & (bits < 1 << 32)]
    if not len(known):
        return None, ()
    active = known.astype(np.int64) & ~CHOSEN_CLOCKS
    shares = ((reason_name(1 << place), float((active >> place & 1).mean())) for place in range(32))
    found = [Throttling(*share) for share in shares if share[1]]
    return float((active != 0).mean()), tuple(sorted(found, key=lambda reason: -reason.ratio))


def device_warnings(summary: Summary) -> Iterator[str]:
    """What a reader of the figures has to know of the devices."""
    covered = [(device.coverage_ratio, device) for device in summary.devices if device.coverage_ratio is not None]
    if low := [each for each in covered if each[0] < LOW_COVERAGE_RATIO]:
        ratio, least = min(low, key=lambda each: each[0])
        yield (
            f"{plural(len(low), 'device')} with less than {LOW_COVERAGE_RATIO:.0%} of the expected samples, the least "
            f"{device_name(least)} on {least.node} with {percent(ratio)}"
        )
    slowed = [(each, device) for device in summary.devices for each in device.throttling if each.reason != POWER_CAP]
    if often := [pair for pair in slowed if pair[0].ratio >= THROTTLED_RATIO]:
        worst, device = max(often, key=lambda pair: pair[0].ratio)
        yield (
            f"{plural(len({id(device) for _, device in often}), 'device')} throttled in at least "
            f"{THROTTLED_RATIO:.0%} of the samples, the power cap aside, the most {device_name(device)} on "
            f"{device.node} with {percent(worst.ratio)}: {worst.reason}"
        )
    if xids := [event for event in summary.events if event.kind == "xid"]:
        nodes = list(dict.fromkeys(event.source for event in xids))
        yield f"{plural(len(xids), 'XID error')} on {listed(nodes)}: see the events"


def _figures(samples: Table, column: str) -> Floats:
    """A column of figures; a device that does not give one has a column of NaN, or none."""
    if column in samples:
        return np.asarray(samples[column], dtype=np.float64)
    return np.full(len(next(iter(samples.values()), ())), np.nan)
