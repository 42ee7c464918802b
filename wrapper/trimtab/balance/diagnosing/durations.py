"""What the operations of a job took: the diagnosis' input, from a trace or from a profile. Pure."""

from dataclasses import dataclass

import numpy as np

from trimtab.balance.plan import Floats, Schedule

LEAST_STEPS = 3
"""With fewer, what stays cannot be told from what varies."""


@dataclass(frozen=True)
class Durations:
    """What the operations of a job took in some steps, and what the step took beside them.

    Raises ValueError where shapes disagree, where a duration is not positive, or where too little is there.
    """

    forward_seconds: Floats
    """[T, R, C, M] of each microbatch on each chunk; NaN where absent."""
    backward_seconds: Floats
    """[T, R, C, M] likewise."""
    stages: int
    microbatches: tuple[int, ...] = ()
    """[R] of a step, where the last axis is 1: durations are then means over so many. Empty: measured one by one."""
    steps: tuple[int, ...] = ()
    """[T] their numbers, ascending; empty: 0 to T - 1."""
    transfer_seconds: Floats | None = None
    """[T, R, S] of link s, from stage s to stage (s + 1) % S and back; NaN where not measured; None: nowhere."""
    overhead_seconds: float = 0.0
    """What a step takes beside its longest pipeline."""
    workload: Floats | None = None
    """[T, R, W] measures of a step's work on a replica that are known: tokens, squared lengths. None: not known."""

    def __post_init__(self) -> None:
        shape = self.forward_seconds.shape
        if len(shape) != 4 or self.backward_seconds.shape != shape or not all(shape):
            raise ValueError(
                f"durations are [steps, replicas, chunks, microbatches]: forward {shape}, backward "
                f"{self.backward_seconds.shape}"
            )
        if self.microbatches and (len(self.microbatches) != shape[1] or min(self.microbatches) < 1 or shape[3] != 1):
            means = f"means over {list(self.microbatches)} microbatches"
            raise ValueError(f"{means}, but durations of {shape[1]} replicas and {shape[3]} microbatches")
        if self.stages < 1 or shape[2] % self.stages:
            raise ValueError(f"{shape[2]} chunks cannot be shared out equally over {self.stages} stages")
        if shape[0] < LEAST_STEPS:
            raise ValueError(f"{shape[0]} steps: at least {LEAST_STEPS} are needed to tell what stays from what varies")
        if self.steps and len(self.steps) != shape[0]:
            raise ValueError(f"{len(self.steps)} numbers for {shape[0]} steps")
        for kind, seconds in (("forward", self.forward_seconds), ("backward", self.backward_seconds)):
            known = np.isfinite(seconds)
            if (np.isinf(seconds) | (seconds <= 0)).any():
                raise ValueError(f"a {kind} duration is not a positive number")
            if lost := np.flatnonzero(~known.any(axis=(0, 1, 3))).tolist():
                raise ValueError(f"no {kind} duration of chunk {lost[0]} on any replica")

    @property
    def passes(self) -> tuple[int, ...]:
        """[R] microbatches of a step."""
        _, replicas, _, microbatches = self.forward_seconds.shape
        return self.microbatches or (microbatches,) * replicas

    @property
    def seconds(self) -> Floats:
        """[K, T, R, C, M]"""
        return np.stack([self.forward_seconds, self.backward_seconds])

    @property
    def numbers(self) -> tuple[int, ...]:
        """[T] the steps' numbers."""
        return self.steps or tuple(range(len(self.forward_seconds)))

    @property
    def schedule(self) -> Schedule:
        """1F1B, interleaved with several chunks a stage: as Megatron-core runs them."""
        return Schedule.ONE_F_ONE_B if self.forward_seconds.shape[2] == self.stages else Schedule.INTERLEAVED
