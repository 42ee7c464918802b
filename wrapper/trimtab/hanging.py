"""Whether the ranks still take steps, and who keeps the others waiting when they do not. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from trimtab.protocol import Hello, Requeue, Stack
from trimtab.wording import listed

LEAST_SECONDS = 300.0
"""Shorter pauses are no hang: file systems and networks of clusters have them."""
TIMES_LONGEST = 10.0
"""How many times the longest time between two steps so far."""
SAVE_SECONDS = 1800.0
"""What a save, a reshape or a resume may take on top, where none has shown more."""
_WAITING_FILES = ("torch/distributed/distributed_c10d.py", "p2p_communication.py")
_WAITING_CALLS = (".wait(", ".item()", "float(", ".cpu()", ".synchronize(")
"""Where the innermost frames of a rank lie that waits for others, and what its last line calls then: on a GPU, the host
waits for the device, and the device for the others."""
_INNERMOST_LINES = 6


class Hanging:
    """Tells when the ranks count as hung. Times are seconds on any one clock."""

    def __init__(self, policy: Requeue) -> None:
        self._policy = policy
        self._last_seconds: float | None = None
        self._longest_seconds = 0.0
        self._last_step = 0
        self._allowed_steps = 0

    def stepped(self, now_seconds: float, step: int) -> None:
        """A rank has reported a step."""
        if self._last_seconds is not None:
            self._longest_seconds = max(self._longest_seconds, now_seconds - self._last_seconds)
        self._last_seconds = now_seconds
        if step > self._last_step:
            self._last_step = step
            self._allowed_steps = max(0, self._allowed_steps - 1)

    def ordered(self) -> None:
        """The ranks were told something that can take longer than a step: they do it after the one they are in."""
        self._allowed_steps = 2

    @property
    def limit_seconds(self) -> float:
        """Without a step for longer than this, they hang."""
        measured_seconds = max(LEAST_SECONDS, TIMES_LONGEST * self._longest_seconds)
        return (self._policy.hang_seconds or measured_seconds) + (SAVE_SECONDS if self._allowed_steps else 0.0)

    def hung(self, now_seconds: float) -> bool:
        """Whether they do. Before the first step there is nothing to go by: start-up has its own timeouts."""
        return self._last_seconds is not None and now_seconds - self._last_seconds > self.limit_seconds


@dataclass(frozen=True)
class Suspicion:
    """Who keeps the ranks waiting."""

    ranks: tuple[int, ...]
    """Empty: nobody stands out."""
    sentence: str


def suspicion(ranks: Mapping[int, Hello], last_step: Mapping[int, int], stacks: Mapping[int, Stack]) -> Suspicion:
    """From how far each rank came, and from where each says that it is.

    A rank that does not answer is stuck as a process. Of those that answer, one that is behind in steps, or that is
    elsewhere than in a wait for others, is what the others wait for.
    """
    silent = tuple(sorted(ranks.keys() - stacks.keys()))
    if silent:
        return Suspicion(silent, f"{_named(silent, ranks)} did not answer: stuck outside of Python, or gone")
    busy = tuple(sorted(rank for rank, stack in stacks.items() if not _waits(stack.text)))
    if busy and len(busy) < len(ranks):
        return Suspicion(busy, f"{_named(busy, ranks)} did not wait for the others, who waited")
    steps = {rank: last_step.get(rank, 0) for rank in ranks}
    behind = tuple(sorted(rank for rank, step in steps.items() if step < max(steps.values())))
    if behind:
        return Suspicion(behind, f"{_named(behind, ranks)} had taken fewer steps than the others")
    return Suspicion((), "no rank stands out: all wait for each other")


def _waits(text: str) -> bool:
    lines = text.splitlines()[-_INNERMOST_LINES:]
    if any(file in line for line in lines for file in _WAITING_FILES):
        return True
    return bool(lines) and any(call in lines[-1] for call in _WAITING_CALLS)


def _named(chosen: tuple[int, ...], ranks: Mapping[int, Hello]) -> str:
    names = [f"{rank} (node {ranks[rank].node}, stage {ranks[rank].pipeline_rank})" for rank in chosen]
    return f"{'rank' if len(names) == 1 else 'ranks'} {listed(names)}"
