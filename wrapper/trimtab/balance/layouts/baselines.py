"""How others share layers out over stages, written from their descriptions, to compare `partition` with. Pure.

Beside these stands `Layout.uniform`, equal numbers of layers. All take one chunk a stage, and none looks at memory.
"""

from collections.abc import Callable

import numpy as np

from trimtab.balance.plan import Costs, Floats, Part
from trimtab.protocol import Layout


def stage_seconds(costs: Costs, layout: Layout, speeds: Floats) -> Floats:
    """[S] compute of each stage for one microbatch, nothing recomputed; speeds [S]."""
    chunks = [sum(part.compute_seconds for part in costs.chunk(layout, chunk)) for chunk in range(layout.chunks)]
    seconds: Floats = np.array(chunks).reshape(-1, layout.stages).sum(axis=0) / speeds
    return seconds


def smallest_spread(costs: Costs, stages: int, weight: Callable[[Part], float]) -> Layout:
    """DeepSpeed's rule for pipeline modules: the least difference between the heaviest and the lightest stage.

    As `partition_balanced` does since DeepSpeed pull request 4312, by dynamic programming over the parts in order that
    keeps one split for each beginning and number of stages: the one of the least spread, which is not always the
    beginning of the best whole. By default DeepSpeed weighs parts by their parameters; stages are alike to it.
    Embedding and head are parts like others; every stage gets at least one.
    """
    before = np.concatenate([[0.0], np.cumsum([weight(part) for part in (costs.embedding, *costs.layers, costs.head)])])
    parts = len(before) - 1
    if parts < stages:
        raise ValueError(f"{parts} parts for {stages} stages: each holds at least one")
    heaviest, lightest = before.copy(), before.copy()  # [parts + 1] of the split of each beginning over one stage
    choices = []
    for stage in range(1, stages):
        heavier, lighter = np.full(parts + 1, np.inf), np.zeros(parts + 1)
        choice = np.zeros(parts + 1, dtype=np.int64)
        for end in range(stage + 1, parts + 1):
            cuts = slice(stage, end)
            last = before[end] - before[cuts]
            heavy, light = np.maximum(heaviest[cuts], last), np.minimum(lightest[cuts], last)
            best = int(np.argmin(heavy - light))
            heavier[end], lighter[end], choice[end] = heavy[best], light[best], stage + best
        heaviest, lightest = heavier, lighter
        choices.append(choice)
    cuts_back = [parts]
    for choice in reversed(choices):
        cuts_back.append(int(choice[cuts_back[-1]]))
    sizes = -np.diff([*cuts_back, 0])[::-1]
    sizes[0] -= 1  # the embedding
    sizes[-1] -= 1  # the head
    return Layout(tuple(sizes.tolist()), stages)


def diffusion(costs: Costs, layout: Layout, speeds: Floats) -> Layout:
    """Greedy diffusion: from a layout, neighbors hand over the layer between them while the slower of the two gains.

    The rule of balancers that know neighbors alone (Cybenko 1989, "Dynamic load balancing for distributed memory
    multiprocessors"), with layers for load. Ends where no exchange of one layer helps.
    """
    gained = True
    while gained:
        gained = False
        for stage in range(layout.stages - 1):
            now = stage_seconds(costs, layout, speeds)[stage : stage + 2].max()
            for layers in (1, -1):
                handed = _handed(layout, stage, layers)
                if handed and stage_seconds(costs, handed, speeds)[stage : stage + 2].max() < now:
                    layout, gained = handed, True
                    break
    return layout


def _handed(layout: Layout, stage: int, layers: int) -> Layout | None:
    """With so many layers of the next stage, or fewer than none; None where a stage would be left without."""
    sizes = list(layout.layers)
    sizes[stage] += layers
    sizes[stage + 1] -= layers
    try:
        return Layout(tuple(sizes), layout.stages)
    except ValueError:
        return None
