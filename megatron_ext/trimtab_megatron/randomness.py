"""Dropout that is keyed by (seed, sample, layer), and by the tensor rank where ranks hold different parts.

A generator that runs on gives masks that depend on all that was drawn before on the same rank: on the layout, the
replica, and what was recomputed. Here the generators are seeded anew before each layer computes a microbatch, from a
hash of the run's seed, the global index of the microbatch's first sample, and the layer's number. So a sample meets the
same masks at every pipeline and data-parallel size, in whichever order and replica, recomputed or not, and after a
restart: there is no state to move or to save.
"""

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig

from trimtab_megatron.recompute import transformer_layers
from trimtab_megatron.world import World

_BEFORE_LAYERS = 0
"""In place of a layer's number, which begins at 1: the embedding's dropout."""
_MODEL_PARALLEL = "model-parallel-rng"
"""Megatron-core's name for the generator whose draws differ between tensor-parallel ranks."""


def has_dropout(chunks: Sequence[torch.nn.Module], config: TransformerConfig) -> bool:
    """Whether anything in these chunks draws masks."""
    modules = (module for chunk in chunks for module in chunk.modules())
    return bool(config.hidden_dropout or config.attention_dropout) or any(
        isinstance(module, torch.nn.Dropout) and module.p > 0 for module in modules
    )


class Randomness:
    """The generators of one rank. A model has it as `config.randomness`; tell it each microbatch."""

    def __init__(self, seed: int, config: TransformerConfig, world: World) -> None:
        self._seed = seed
        # Under sequence parallelism a rank holds a part of the sequence, and draws all its masks apart from its peers.
        self._all_apart = config.sequence_parallel
        self._tensor_rank = world.tensor_rank
        self._generator = torch.cuda.default_generators[world.device.index] if world.cuda else torch.default_generator
        self.sample = 0
        """Global index of the first sample of the microbatch that is being computed."""

    def adopt(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Seed before each layer of these chunks computes. To be called once, before layers are recomputed."""
        for layer in transformer_layers(chunks):
            layer.forward = functools.partial(self._seeded, layer.layer_number, layer.forward)

    def begin(self, sample: int) -> None:
        """From here on the microbatch whose first sample has this global index is computed."""
        self.sample = sample
        self._seed_for(_BEFORE_LAYERS)

    @contextlib.contextmanager
    def of(self, sample: int) -> Iterator[None]:
        """Inside, an earlier microbatch is computed again."""
        current, self.sample = self.sample, sample
        try:
            yield
        finally:
            self.sample = current

    def _seeded(self, layer: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._seed_for(layer)
        return forward(*args, **kwargs)

    def _seed_for(self, place: int) -> None:
        # Setting a generator's seed and reading its state are the host's business: no device waits for them.
        apart = self._key(place, self._tensor_rank)
        self._generator.manual_seed(apart)
        tracker = tensor_parallel.get_cuda_rng_tracker()
        tracker.set_states({**tracker.get_states(), _MODEL_PARALLEL: self._generator.get_state()})
        if not self._all_apart:
            self._generator.manual_seed(self._key(place))

    def _key(self, *place: int) -> int:
        digest = hashlib.sha256(repr((self._seed, self.sample, *place)).encode()).digest()
        return int.from_bytes(digest[:8]) >> 1
