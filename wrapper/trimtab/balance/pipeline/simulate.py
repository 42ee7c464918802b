"""How long a pipeline takes: each operation starts as soon as its stage is free and its input is there. Pure.

A stage takes its operations in the order of the schedule (`schedules`). A forward waits for the chunk before it, a
backward for the chunk after it, the last chunk's backward for its own forward. What crosses to another stage takes the
link's latency and bytes / bandwidth. Transfers of one direction queue behind one another, for as long as their bytes
occupy the link; the two directions do not hinder each other. A send does not hold up its sender.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trimtab.balance.pipeline.schedules import SPLITTING, Operation, stage_orders
from trimtab.balance.plan import Floats, Link, Schedule


@dataclass(frozen=True)
class Operations:
    """What was run when: columns, stage by stage, each in its order."""

    kind: npt.NDArray[np.str_]
    """F, B or W (`schedules.Kind`); where the schedule does not split the backward, B is all of it."""
    stage: npt.NDArray[np.intp]
    chunk: npt.NDArray[np.intp]
    microbatch: npt.NDArray[np.intp]
    start_seconds: Floats
    end_seconds: Floats


@dataclass(frozen=True)
class Simulation:
    """One step of one pipeline; times count from its first operation."""

    duration_seconds: float
    """Until the last operation of all stages ends."""
    busy_seconds: Floats
    """[S] in operations."""
    peak_bytes: Floats
    """[S] static bytes and the most activations alive at once. Those of a chunk's microbatch live from its forward to
    the end of its backward, where that is split to the end of its weight gradients."""
    lower_bound_seconds: float
    """The longest way through one stage, links without queues: its first microbatch reaches it, it works without a
    pause up to some operation, and that operation's microbatch goes on to the end."""
    upper_bound_seconds: float
    """All operations and transfers, one after another."""
    operations: Operations

    @property
    def bubble_ratio(self) -> Floats:
        """[S] share of the duration in which a stage is idle."""
        return np.maximum(0.0, 1 - self.busy_seconds / self.duration_seconds)  # below 0 it is rounding


@dataclass(frozen=True)
class _Wires:
    """What a transfer takes from each stage to the next, and back: [S] each."""

    latency_seconds: list[float]
    occupied_seconds: list[float]

    def crossing_seconds(self, chunks: int) -> Floats:
        """[C - 1] from each chunk to the next, without queues."""
        both = np.add(self.latency_seconds, self.occupied_seconds)
        return both[np.arange(chunks - 1) % len(both)]


def simulate(
    schedule: Schedule,
    stages: int,
    forward_seconds: npt.ArrayLike,
    backward_input_seconds: npt.ArrayLike,
    backward_weight_seconds: npt.ArrayLike,
    *,
    links: Sequence[Link] = (),
    boundary_bytes: float = 0.0,
    activation_bytes: npt.ArrayLike = 0.0,
    static_bytes: npt.ArrayLike = 0.0,
) -> Simulation:
    """Run one step of a pipeline.

    The three times are [C, M] as forward_seconds is, or broadcast to it; finite, and not all 0. Chunk c is on stage
    c % stages. `links` is [S], or empty where transfers take no time; boundary_bytes cross in one transfer.
    activation_bytes broadcasts to [C], static_bytes to [S]. Raises ValueError where the schedule cannot run so.
    """
    forward = np.asarray(forward_seconds, dtype=np.float64)
    chunks, microbatches = forward.shape
    if chunks % stages:
        raise ValueError(f"{chunks} chunks cannot be shared out equally over {stages} stages")
    if links and len(links) != stages:
        raise ValueError(f"{len(links)} links for {stages} stages: there is one from each to the next, or none at all")
    backward, weight = (
        np.broadcast_to(np.asarray(seconds, dtype=np.float64), forward.shape)
        for seconds in (backward_input_seconds, backward_weight_seconds)
    )
    if schedule not in SPLITTING:
        backward, weight = backward + weight, np.zeros_like(forward)
    # A single stage has nobody to send to.
    used = links if links and stages > 1 else [Link(0.0, np.inf)] * stages
    wires = _Wires([link.latency_seconds for link in used], [boundary_bytes / link.bytes_per_second for link in used])
    orders = stage_orders(schedule, stages, chunks // stages, microbatches)
    starts = _start_seconds(orders, forward, backward, weight, wires)
    operations = _columns(orders, starts, {"F": forward, "B": backward, "W": weight})
    static = np.broadcast_to(np.asarray(static_bytes, dtype=np.float64), (stages,))
    activations = np.broadcast_to(np.asarray(activation_bytes, dtype=np.float64), (chunks,))
    busy = (forward + backward + weight).sum(axis=1)
    duration = float(operations.end_seconds.max())
    upper = float(busy.sum() + 2 * microbatches * wires.crossing_seconds(chunks).sum())
    return Simulation(
        duration_seconds=duration,
        busy_seconds=busy.reshape(-1, stages).sum(axis=0),
        peak_bytes=static + [_peak_bytes(order, activations, schedule) for order in orders],
        # Sums in another order differ in their last digit: a bound that is met is met exactly.
        lower_bound_seconds=min(duration, _lower_bound_seconds(operations, forward, backward, weight, wires)),
        upper_bound_seconds=max(duration, upper),
        operations=operations,
    )


def _start_seconds(
    orders: Sequence[Sequence[Operation]], forward: Floats, backward: Floats, weight: Floats, wires: _Wires
) -> list[list[float]]:
    """When each stage starts each of its operations.

    A stage runs until an input is missing; what brings that input wakes it. Each direction of a link has one sender,
    which sends in its own order: so the queue is known when the sender's operation is.
    """
    stages, (chunks, microbatches) = len(orders), forward.shape
    seconds = {"F": forward.tolist(), "B": backward.tolist(), "W": weight.tolist()}
    missing = np.inf
    # [C][M] when the input of an operation is there; that of weight gradients is on the stage by the schedule's order.
    arrival = {kind: [[missing] * microbatches for _ in range(chunks)] for kind in ("F", "B")}
    arrival["W"] = [[0.0] * microbatches] * chunks
    arrival["F"][0] = [0.0] * microbatches
    next_free = [0.0] * stages  # [S] when the way from a stage to the next is free again
    back_free = [0.0] * stages  # [S] likewise, from the next stage back to it
    starts: list[list[float]] = [[] for _ in orders]
    clocks = [0.0] * stages
    awake = list(range(stages))
    while awake:
        stage = awake.pop()
        order, begun, clock = orders[stage], starts[stage], clocks[stage]
        while len(begun) < len(order):
            kind, chunk, microbatch = order[len(begun)]
            came = arrival[kind][chunk][microbatch]
            if came == missing:
                break
            start = came if came > clock else clock
            begun.append(start)
            clock = start + seconds[kind][chunk][microbatch]
            if kind == "F" and chunk == chunks - 1:
                arrival["B"][chunk][microbatch] = clock
            elif kind == "F":
                next_free[stage] = sent = max(next_free[stage], clock) + wires.occupied_seconds[stage]
                arrival["F"][chunk + 1][microbatch] = sent + wires.latency_seconds[stage]
                awake.append((stage + 1) % stages)
            elif kind == "B" and chunk > 0:
                before = (stage - 1) % stages
                back_free[before] = sent = max(back_free[before], clock) + wires.occupied_seconds[before]
                arrival["B"][chunk - 1][microbatch] = sent + wires.latency_seconds[before]
                awake.append(before)
        clocks[stage] = clock
    return starts


def _columns(
    orders: Sequence[Sequence[Operation]], starts: Sequence[Sequence[float]], seconds: dict[str, Floats]
) -> Operations:
    flat = [operation for order in orders for operation in order]
    kind = np.array([operation[0] for operation in flat])
    chunk = np.array([operation[1] for operation in flat], dtype=np.intp)
    microbatch = np.array([operation[2] for operation in flat], dtype=np.intp)
    start = np.concatenate([np.array(begun) for begun in starts])
    took = np.select([kind == name for name in seconds], [table[chunk, microbatch] for table in seconds.values()])
    return Operations(kind, chunk % len(orders), chunk, microbatch, start, start + took)


def _peak_bytes(order: Sequence[Operation], activation_bytes: Floats, schedule: Schedule) -> float:
    """The most activations alive on a stage. Its order alone decides: it runs one operation at a time."""
    freeing = "W" if schedule in SPLITTING else "B"
    sign = {"F": 1.0, freeing: -1.0}
    held = [sign.get(kind, 0.0) * activation_bytes[chunk] for kind, chunk, _ in order]
    return float(np.cumsum(held).max())


def _lower_bound_seconds(
    operations: Operations, forward: Floats, backward: Floats, weight: Floats, wires: _Wires
) -> float:
    """See Simulation. With the work of the first stage up to a forward, it holds the way of each single microbatch."""
    stages, (chunks, microbatches) = len(wires.latency_seconds), forward.shape
    cross = wires.crossing_seconds(chunks)
    reach = np.concatenate([[0.0], np.cumsum(forward[:-1, 0] + cross)])[:stages]
    # [C, M] after an operation of a chunk, what its microbatch still has before it.
    home = np.zeros((chunks, microbatches))
    home[1:] = np.cumsum(backward[:-1] + cross[:, None], axis=0)
    home += weight[0]
    out = np.zeros((chunks, microbatches))
    out[:-1] = np.cumsum((forward[1:] + cross[:, None])[::-1], axis=0)[::-1]
    out += backward[-1] + home[-1]
    cells = operations.chunk, operations.microbatch
    after = np.select([operations.kind == "F", operations.kind == "B"], [out[cells], home[cells]])
    took = operations.end_seconds - operations.start_seconds
    longest = 0.0
    for stage in range(stages):
        own = operations.stage == stage
        longest = max(longest, float(reach[stage] + (np.cumsum(took[own]) + after[own]).max()))
    return longest
