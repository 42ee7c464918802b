"""When the ranks shall save: often enough for what a failure would cost, seldom enough for what a save costs. Pure."""

import math

from trimtab.protocol import Train

FIRST_SAVE_SECONDS = 300.0
"""Until a save has shown what it takes."""


def interval_seconds(save_seconds: float, mtbf_seconds: float) -> float:
    """The time between saves with which a run gets through soonest.

    Daly, 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps", equation 37, for saves
    that take `save_seconds` and failures that come every `mtbf_seconds` on average.
    """
    if save_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    share = save_seconds / (2 * mtbf_seconds)
    return math.sqrt(2 * save_seconds * mtbf_seconds) * (1 + math.sqrt(share) / 3 + share / 9) - save_seconds


class Saving:
    """Tells when a save is due in an attempt on so many nodes. Times are seconds on any one clock."""

    def __init__(self, train: Train, nodes: int, began_seconds: float) -> None:
        self._longest_seconds = 60 * train.longest_checkpoint_minutes
        self._mtbf_seconds = 3600 * train.node_mtbf_hours / nodes
        # Where steps are counted, the ranks do; where there is no directory, nobody can.
        self._automatic = bool(train.checkpoint_directory) and not train.checkpoint_interval_steps
        self._last_seconds = began_seconds
        self._interval_seconds = min(FIRST_SAVE_SECONDS, self._longest_seconds)
        self._asked = False

    def saved(self, now_seconds: float, took_seconds: float) -> None:
        """A save has ended."""
        self._last_seconds, self._asked = now_seconds, False
        self._interval_seconds = min(interval_seconds(took_seconds, self._mtbf_seconds), self._longest_seconds)

    def due(self, now_seconds: float) -> bool:
        """Whether the ranks shall save now: told once, and again where a save has not come in the longest time."""
        wait_seconds = self._longest_seconds if self._asked else self._interval_seconds
        if not self._automatic or now_seconds - self._last_seconds < wait_seconds:
            return False
        self._last_seconds, self._asked = now_seconds, True
        return True
