"""Recomputation of whole layers, switched between steps.

A recomputed layer keeps its input alone, and runs its forward again in the backward: a third more compute, for the
memory of all that its forward would have kept (Chen et al., 2016, "Training deep nets with sublinear memory cost").
Megatron-core fixes its own recomputation when the model is built, equally for all stages; here each layer's forward is
wrapped after the build, so that it works for any model of Megatron-core's layers and can change between steps.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
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
            layer.forward = _Recomputed(layer.forward, chunks[0].config.randomness)


class _Recomputed:
    """A layer's forward that runs again in the backward."""

    def __init__(self, forward: Callable[..., Any], randomness: Any) -> None:
        self.forward = forward
        self._randomness = randomness

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # The non-reentrant kind: it takes keywords, and inputs that need no gradient. Random states need not be kept,
        # as the forward seeds for its sample; but by the time of its backward, another microbatch is the current one.
        return checkpoint(
            self.forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=self._contexts, **kwargs
        )

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Those of the forward and of its recomputation, made at the forward."""
        randomness = self._randomness
        return nullcontext(), randomness.of(randomness.sample) if randomness else nullcontext()
