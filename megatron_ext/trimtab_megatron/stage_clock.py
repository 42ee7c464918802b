"""Forward and backward compute of one stage, without its waiting for other stages.

Megatron-core's schedules call `config.timers(name)` around the compute of each microbatch and, under other names,
around sends and receives. This clock is such a `timers`, and keeps only the compute. Unlike Megatron-core's own it
never synchronizes the device: on a GPU it records events, to be read once the step has been taken.

On a CPU it takes the CPU time of the process, not the wall time: of two ranks that share a core, each would otherwise
look twice as slow. Waiting for peers costs no CPU time there.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

FORWARD, BACKWARD = "forward-compute", "backward-compute"


@dataclass(frozen=True)
class StageTimes:
    """Compute of one stage, summed over microbatches."""

    forward_seconds: float
    backward_seconds: float


class Timer(Protocol):
    """What a schedule expects `timers(name)` to return, and the sum of what it timed since it was last read."""

    def start(self, barrier: bool = False) -> None: ...
    def stop(self, barrier: bool = False) -> None: ...
    def read_seconds(self) -> float: ...


class StageClock:
    """Give it to a model as `config.timers`; read it once a step."""

    def __init__(self, cuda: bool, slow: Callable[[Timer, bool], Timer] | None = None) -> None:
        """`slow` puts a timer of compute, and whether it is of a GPU, into one inside of which compute takes longer."""
        timers = [make_timer(cuda) for _ in range(2)]
        if slow is not None:
            timers = [slow(timer, cuda) for timer in timers]
        self._timers = dict(zip((FORWARD, BACKWARD), timers, strict=True))
        self._ignored = _IgnoredTimer()

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        return self._timers.get(name, self._ignored)

    def read(self) -> StageTimes:
        """What was timed since the last call. On a GPU it waits for the events: call it after the optimizer step."""
        return StageTimes(self._timers[FORWARD].read_seconds(), self._timers[BACKWARD].read_seconds())


def make_timer(cuda: bool) -> Timer:
    """A timer of compute: by events on a GPU, where reading it waits for the last; by CPU time of the process else."""
    return _EventTimer() if cuda else _CpuTimer()


class _CpuTimer:
    def __init__(self) -> None:
        self._started = 0.0
        self._total = 0.0

    def start(self, barrier: bool = False) -> None:
        self._started = time.process_time()

    def stop(self, barrier: bool = False) -> None:
        self._total += time.process_time() - self._started

    def read_seconds(self) -> float:
        total, self._total = self._total, 0.0
        return total


class _EventTimer:
    def __init__(self) -> None:
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._used = 0

    def start(self, barrier: bool = False) -> None:
        if self._used == len(self._events):
            self._events.append((_event(), _event()))
        self._events[self._used][0].record()

    def stop(self, barrier: bool = False) -> None:
        self._events[self._used][1].record()
        self._used += 1

    def read_seconds(self) -> float:
        used, self._used = self._events[: self._used], 0
        if not used:
            return 0.0
        used[-1][1].synchronize()
        return float(sum(begin.elapsed_time(end) for begin, end in used)) / 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class _IgnoredTimer:
    def start(self, barrier: bool = False) -> None:
        pass

    def stop(self, barrier: bool = False) -> None:
        pass

    def read_seconds(self) -> float:
        return 0.0
