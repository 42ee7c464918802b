"""Which links between stages take longer than their peers. Pure.

A transfer is what is left of a send and its receive once waiting is taken out: from when both have begun until the
first of them ends (the other may be held up by something else that it was batched with).
"""

from dataclasses import dataclass

import numpy as np

from trimtab.balance.diagnosing.robust import MEDIAN_SIGMA, critical, lower_median, mean, median
from trimtab.balance.plan import Floats, Place


@dataclass(frozen=True)
class SlowLink:
    """A link that takes longer than its peers, waiting excluded."""

    place: Place
    """Replica, and the stage from which it leads to the next."""
    seconds: float
    peers_seconds: float


def typical_transfers(transfer_seconds: Floats) -> Floats:
    """[R, S] median over steps, from [T, R, S]; 0 where nothing was measured."""
    return np.nan_to_num(median(transfer_seconds, 0))


def slow_links(transfer_seconds: Floats, crossings: int, least_seconds: float) -> tuple[SlowLink, ...]:
    """Those that cost more than `least_seconds` a step, with so many `crossings` of each, and that beyond chance.

    The peers of a link are the same link of the other replicas; with one replica, the other links of the pipeline.
    The slowest first.
    """
    typical = median(transfer_seconds, 0)  # [R, S]
    replicas = len(typical)
    peers = np.broadcast_to(
        lower_median(typical, 0) if replicas > 1 else lower_median(typical, 1)[:, None], typical.shape
    )
    excess = typical - peers
    steps = np.maximum(np.isfinite(transfer_seconds).sum(axis=0), 1)
    spread = np.sqrt(mean((transfer_seconds - typical) ** 2, 0))
    with np.errstate(invalid="ignore"):
        slow = (excess * crossings > least_seconds) & (
            excess > critical(excess.size, len(transfer_seconds) - 1) * MEDIAN_SIGMA * spread / np.sqrt(steps)
        )
    found = [
        SlowLink((replica, stage), float(typical[replica, stage]), float(peers[replica, stage]))
        for replica, stage in np.argwhere(slow).tolist()
    ]
    return tuple(sorted(found, key=lambda link: -link.seconds))
