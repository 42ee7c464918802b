"""Recomputation of whole layers, switched between steps.

A recomputed layer keeps its input alone, and runs its forward again in the backward: a third more compute, for the
memory of all that its forward would have kept (Chen et al., 2016, "Training deep nets with sublinear memory cost").
Megatron-core fixes its own recomputation when the model is built, equally for all stages; here each layer's forward is
wrapped after the build, so that it works for any model of Megatron-core's layers and can change between steps.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.transformer_layer import BaseTransformerLayer
from torch.utils.checkpoint import checkpoint


def transformer_layers(chunks: Sequence[torch.nn.Module]) -> Iterator[Any]:
    """The layers of a rank, over all its chunks in order."""
    for chunk in chunks:
        yield from (module for module in chunk.modules() if isinstance(module, BaseTransformerLayer))


def recompute_layers(chunks: Sequence[DistributedDataParallel], count: int) -> None:
    """Have the first `count` layers of this rank recomputed in the backward, and the others not. Between steps only."""
    for number, layer in enumerate(transformer_layers(chunks)):
        recomputed = isinstance(layer.forward, _Recomputed)
        if recomputed and number >= count:
            layer.forward = layer.forward.forward
        elif not recomputed and number < count:
            layer.forward = _Recomputed(layer.forward)


class _Recomputed:
    """A layer's forward that runs again in the backward."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # The non-reentrant kind: it takes keywords, and inputs that need no gradient.
        return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)
