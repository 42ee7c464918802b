"""What a stage holds at its peak: weights, gradients and optimizer state, and the activations in flight. Closed forms.

A stage keeps the activations of a microbatch from its forward to the end of its backward (where the backward is split:
to the end of its weight gradients), so what it holds at once follows from the order of its operations alone. With S
stages, of which `stage` is the one looked at, from 0, v chunks on each, and M microbatches:

- GPipe: M (Huang et al. 2019, section 2.3).
- 1F1B: min(S - stage, M) (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training", section 2.2.1).
- Interleaved: the forwards of the warm-up and the one after it, 2 (S - stage - 1) + (v - 1) S + 1, at most M v
  (Narayanan et al. 2021, section 2.2.2; the warm-up as Megatron-core's `get_pp_rank_microbatches` counts it, in groups
  of S microbatches).
- ZB-H1: min(S, M); ZB-H2: min(2 S - 1, M), on every stage: weight gradients wait (Qi et al. 2023, section 2).

What a layer keeps, and what it keeps instead where it is recomputed, are the costs' (Korthikanti et al. 2022, "Reducing
Activation Recomputation in Large Transformer Models", section 4). While a recomputed layer's backward runs, all of its
activations are there once more: the largest of them counts. Buffers of communication and allocator are not counted.
"""

import numpy as np
import numpy.typing as npt

from trimtab.balance.plan import Costs, ParameterMemory, Plan, Schedule

Counts = npt.NDArray[np.int64]


def in_flight(schedule: Schedule, stages: int, virtual: int, stage: int, microbatches: int) -> int:
    """How many microbatches of its chunks a stage holds at most; one that is in two chunks counts twice."""
    return int(in_flight_mixes(schedule, stages, virtual, stage, microbatches).sum(axis=1).max())


def in_flight_mixes(schedule: Schedule, stages: int, virtual: int, stage: int, microbatches: int) -> Counts:
    """[K, virtual] how many microbatches of each of its chunks a stage holds at once, at the K instants that count.

    Whatever it holds at another instant, it holds at least that much of every chunk at one of these.
    """
    behind = stages - 1 - stage
    match schedule:
        case Schedule.GPIPE:
            most = microbatches
        case Schedule.ONE_F_ONE_B:
            most = behind + 1
        case Schedule.INTERLEAVED:
            return _interleaved_mixes(stages, virtual, 2 * behind + (virtual - 1) * stages, microbatches)
        case Schedule.ZERO_BUBBLE_1:
            most = stages
        case Schedule.ZERO_BUBBLE_2:
            most = 2 * stages - 1
    return np.full((1, virtual), min(most, microbatches), dtype=np.int64)


def _interleaved_mixes(stages: int, virtual: int, warm_up: int, microbatches: int) -> Counts:
    """After the warm-up each forward is followed by a backward: what is held before each of these backwards."""
    total, period = microbatches * virtual, stages * virtual
    backwards = np.arange(min(period, max(1, total - warm_up)))  # [K] done before; later they only repeat
    forwards = np.minimum(warm_up + 1 + backwards, total)

    def done(count: Counts, turn: Counts) -> Counts:
        """[K, virtual] of the first `count` operations, those of the chunk that is `turn`-th in each group."""
        whole, rest = np.divmod(count[:, None], period)
        counts: Counts = stages * whole + np.clip(rest - turn * stages, 0, stages)
        return counts

    chunks = np.arange(virtual)
    held: Counts = np.unique(done(forwards, chunks) - done(backwards, virtual - 1 - chunks), axis=0)
    # [K, K] whether the second mix is at least the first in every chunk: only its own may be.
    covered = (held[:, None, :] <= held[None, :, :]).all(axis=2)
    mixes: Counts = held[covered.sum(axis=1) == 1]
    return mixes


def stage_memory_bytes(costs: Costs, memory: ParameterMemory, plan: Plan) -> tuple[float, ...]:
    """[S] what a rank of each stage holds at most, in the replica with the most microbatches."""
    layout, microbatches = plan.layout, max(plan.microbatches)
    peaks = []
    for stage, transient in enumerate(transient_bytes(costs, plan)):
        chunks = range(stage, layout.chunks, layout.stages)
        parameters = sum(part.parameters for chunk in chunks for part in costs.chunk(layout, chunk))
        kept = [sum(part.activation_bytes for part in costs.chunk(layout, chunk)) for chunk in chunks]
        recomputed = set(_recomputed(plan, stage))
        for turn, chunk in enumerate(chunks):
            kept[turn] -= sum(_saved_bytes(costs, layer) for layer in layout.chunk_layers(chunk) if layer in recomputed)
        mixes = in_flight_mixes(plan.schedule, layout.stages, layout.virtual, stage, microbatches)
        peaks.append(float(parameters * memory.total_bytes + (mixes @ kept).max() + transient))
    return tuple(peaks)


def transient_bytes(costs: Costs, plan: Plan) -> tuple[float, ...]:
    """[S] the most activations that a recomputed layer of each stage has once more, while its backward runs."""
    return tuple(
        max([0.0, *(_saved_bytes(costs, layer) for layer in _recomputed(plan, stage))])
        for stage in range(plan.layout.stages)
    )


def _recomputed(plan: Plan, stage: int) -> tuple[int, ...]:
    return plan.layout.stage_layers(stage)[: plan.recomputed_layers[stage]]


def _saved_bytes(costs: Costs, layer: int) -> float:
    """Of one microbatch, by recomputing a layer."""
    return costs.layers[layer].activation_bytes - costs.layers[layer].recomputed_bytes
