"""How long a pipeline takes with many sets of durations, all run through its schedule at once. Pure."""

from collections.abc import Sequence

import numpy as np

from trimtab.balance.pipeline.simulate import simulate
from trimtab.balance.plan import Floats, Schedule


class Replay:
    """One pipeline's schedule, run with many sets of durations at once.

    A schedule fixes the order of each stage's operations, whatever they take: so one simulation gives an order in which
    every operation comes after those that it waits for, and all steps and replicas go through it together. Equal to
    `simulate` for each of them.
    """

    def __init__(self, schedule: Schedule, stages: int, chunks: int, microbatches: int) -> None:
        """Raises ValueError where the schedule cannot run in this shape."""
        operations = simulate(schedule, stages, np.ones((chunks, microbatches)), 1.0, 0.0).operations
        order = np.argsort(operations.start_seconds, kind="stable")
        order = order[operations.kind[order] != "W"]  # the backward is taken whole
        columns = (operations.kind == "F", operations.chunk, operations.microbatch)
        self._program = list(zip(*(column[order].tolist() for column in columns), strict=True))
        self._stages, self._chunks = stages, chunks

    def duration_seconds(
        self,
        forward_seconds: Floats,
        backward_seconds: Floats,
        transfer_seconds: Floats,
        occupied_seconds: Sequence[float] = (),
    ) -> Floats:
        """[...] until the last operation ends, from durations [..., C, M] and transfers [..., S], which broadcast.

        M may be 1: all microbatches take the same. Link s takes its transfer to bring something from stage s to stage
        (s + 1) % S, or back. Before that it is occupied for `occupied_seconds`, [S] or none, and transfers of one
        direction queue for it.
        """
        forward, backward = (
            np.ascontiguousarray(np.moveaxis(seconds, (-2, -1), (0, 1)))
            for seconds in (forward_seconds, backward_seconds)
        )
        last = forward.shape[1] - 1
        batch = forward.shape[2:]
        transfer = np.moveaxis(np.broadcast_to(transfer_seconds, (*batch, self._stages)), -1, 0)
        clocks = [np.zeros(batch) for _ in range(self._stages)]
        next_free = [np.zeros(batch) for _ in range(self._stages)]  # when the way to the next stage is free again
        back_free = [np.zeros(batch) for _ in range(self._stages)]  # likewise, from the next stage back

        def arrival(free: list[Floats], link: int, end: Floats) -> Floats:
            if occupied_seconds:
                end = free[link] = np.maximum(free[link], end) + occupied_seconds[link]
            there: Floats = end + transfer[link]
            return there

        there: dict[tuple[int, int], Floats] = {}  # when the input of a forward is there
        back: dict[tuple[int, int], Floats] = {}  # and of a backward
        for is_forward, chunk, microbatch in self._program:
            stage, cell = chunk % self._stages, (chunk, min(microbatch, last))
            arrived = (there if is_forward else back).pop((chunk, microbatch), 0.0)
            end = np.maximum(clocks[stage], arrived) + (forward if is_forward else backward)[cell]
            clocks[stage] = end
            if is_forward and chunk + 1 < self._chunks:
                there[chunk + 1, microbatch] = arrival(next_free, stage, end)
            elif is_forward:
                back[chunk, microbatch] = end
            elif chunk > 0:
                back[chunk - 1, microbatch] = arrival(back_free, (stage - 1) % self._stages, end)
        return np.asarray(np.max(clocks, axis=0))


class Replays:
    """The pipelines of replicas that need not have the same number of microbatches: see Replay."""

    def __init__(self, schedule: Schedule, stages: int, chunks: int, microbatches: Sequence[int]) -> None:
        """`microbatches` [R]. Raises ValueError where the schedule cannot run in this shape."""
        self._stages, self._counts = stages, np.asarray(microbatches)
        self._replays = {count: Replay(schedule, stages, chunks, count) for count in set(microbatches)}

    def duration_seconds(
        self,
        forward_seconds: Floats,
        backward_seconds: Floats,
        transfer_seconds: Floats,
        occupied_seconds: Sequence[float] = (),
    ) -> Floats:
        """[..., R] from durations [..., R, C, M] and transfers that broadcast to [..., R, S].

        Of a replica with fewer microbatches than the last axis has, the first ones count.
        """
        batch = forward_seconds.shape[:-2]
        transfer = np.broadcast_to(transfer_seconds, (*batch, self._stages))
        durations = np.empty(batch)
        for count, replay in self._replays.items():
            alike = self._counts == count
            durations[..., alike] = replay.duration_seconds(
                forward_seconds[..., alike, :, :],
                backward_seconds[..., alike, :, :],
                transfer[..., alike, :],
                occupied_seconds,
            )
        return durations
