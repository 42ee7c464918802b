"""Initial weights that depend on a parameter's global name and the seed alone, and so on no layout.

While the model is built, the initializers of its config (`normal`) only note the standard deviation on each weight.
Afterwards `initialize` draws each whole weight from a generator seeded by its global name, and keeps this rank's
part. What a user's module initializes by itself is left as it is.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from trimtab_megatron.world import World

_STD = "trimtab_init_std"
_TIED = "embedding.word_embeddings.weight"


def normal(std: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """An initializer for a TransformerConfig: notes that the weight is to be normal with this deviation."""

    def note(weight: torch.Tensor) -> torch.Tensor:
        setattr(weight, _STD, std)
        return weight

    return note


def initialize(chunks: Sequence[torch.nn.Module], config: TransformerConfig, seed: int, world: World) -> None:
    """Give each noted weight of the chunks its values."""
    for name, weight in global_parameters(chunks):
        std = getattr(weight, _STD, None)
        if std is None:
            continue
        gated = bool(config.gated_linear_unit) and name.endswith("mlp.linear_fc1.weight")
        generator = torch.Generator(weight.device).manual_seed(_seed(seed, name))
        with torch.no_grad():
            weight.copy_(_part(weight, std, generator, gated, world.tensor_rank, world.shape.tensor))


def global_parameters(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters with their global names: each layer by its id in the whole model, tied weights by one name."""
    for chunk in chunks:
        layers = {
            prefix: f"{path}.{module.layer_number - 1}"
            for prefix, module in chunk.named_modules()
            if re.search(r"(^|\.)layers\.\d+$", prefix) and hasattr(module, "layer_number")
            for path in [prefix.rpartition(".")[0]]
        }
        for name, parameter in chunk.named_parameters():
            if getattr(parameter, "shared_embedding", False):
                yield _TIED, parameter
                continue
            local = re.match(r"(.*?\blayers\.\d+)\.", name)
            prefix = local.group(1) if local else ""
            yield (layers[prefix] + name[len(prefix) :] if prefix in layers else name), parameter


def _part(
    weight: torch.Tensor, std: float, generator: torch.Generator, gated: bool, tensor_rank: int, tensor: int
) -> torch.Tensor:
    """This rank's part of the whole weight, whose tensor-parallel dimension Megatron-core has noted.

    A gated weight is two halves, [gate; up], and each rank holds a part of both.
    """
    dimension = getattr(weight, "partition_dim", -1) if getattr(weight, "tensor_model_parallel", False) else -1
    shape = list(weight.shape)
    if dimension >= 0:
        shape[dimension] *= tensor
    whole = torch.empty(shape, device=weight.device).normal_(0.0, std, generator=generator)
    if dimension < 0:
        return whole
    if gated:
        return torch.cat([half.chunk(tensor, dimension)[tensor_rank] for half in whole.chunk(2, dimension)], dimension)
    return whole.chunk(tensor, dimension)[tensor_rank]


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8]) >> 1
