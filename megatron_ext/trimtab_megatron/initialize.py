"""Initial weights that depend on a parameter's global name and the seed alone, and so on no layout.

While the model is built, the initializers of its config (`normal`) only note the standard deviation on each weight.
Afterwards `initialize` draws each whole weight from a generator seeded by its global name, and keeps this rank's
part. What a user's module initializes by itself is left as it is.

A model that is to get its weights from elsewhere is built inside of `blank`.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.module import Float16Module
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
    """Give each noted weight of the chunks its values; inside of `blank`, none."""
    if _blank:
        return
    for name, weight in global_parameters(chunks):
        std = getattr(weight, _STD, None)
        if std is None:
            continue
        gated = bool(config.gated_linear_unit) and name.endswith("mlp.linear_fc1.weight")
        generator = torch.Generator(weight.device).manual_seed(_seed(seed, name))
        with torch.no_grad():
            weight.copy_(_part(weight, std, generator, gated, world.tensor_rank, world.shape.tensor))


@contextmanager
def blank() -> Iterator[None]:
    """Models built inside get no initial weights. Building them waits for no other rank, and draws no random number."""
    global _blank
    cpu, device = torch.get_rng_state(), torch.cuda.get_rng_state()
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
    # Tied weights are summed over their two ranks as they are built: if one of these failed the other would hang.
    tied, LanguageModule._is_in_embd_group = LanguageModule._is_in_embd_group, lambda self: False
    _blank = True
    try:
        yield
    finally:
        _blank = False
        LanguageModule._is_in_embd_group = tied
        tensor_parallel.get_cuda_rng_tracker().set_states(tracked)
        torch.cuda.set_rng_state(device)
        torch.set_rng_state(cpu)


_blank = False


def bare(chunk: torch.nn.Module) -> torch.nn.Module:
    """The model's own module inside of what Megatron-core wraps it in."""
    while isinstance(chunk, (DistributedDataParallel, Float16Module)):
        chunk = chunk.module
    return chunk


def layer_ids(chunk: torch.nn.Module) -> list[int]:
    """Global ids of the layers of a chunk."""
    return [module.layer_number - 1 for prefix, module in chunk.named_modules() if _is_layer(prefix, module)]


def global_parameters(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters with their global names: each layer by its id in the whole model, tied weights by one name."""
    for chunk in chunks:
        global_name = _names(chunk)
        for name, parameter in chunk.named_parameters():
            yield (_TIED if getattr(parameter, "shared_embedding", False) else global_name(name)), parameter


def global_tensors(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """All that the chunks keep: parameters, and the buffers that a checkpoint holds."""
    yield from global_parameters(chunks)
    for chunk in chunks:
        global_name = _names(chunk)
        for prefix, module in chunk.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    yield global_name(f"{prefix}.{name}".lstrip(".")), buffer


def _names(chunk: torch.nn.Module) -> Callable[[str], str]:
    """From names of a chunk to global ones."""
    layers = {
        prefix: f"{prefix.rpartition('.')[0]}.{module.layer_number - 1}"
        for prefix, module in chunk.named_modules()
        if _is_layer(prefix, module)
    }

    def global_name(name: str) -> str:
        local = re.match(r"(.*?\blayers\.\d+)\.", name)
        prefix = local.group(1) if local else ""
        return layers[prefix] + name[len(prefix) :] if prefix in layers else name

    return global_name


def _is_layer(prefix: str, module: torch.nn.Module) -> bool:
    return re.search(r"(^|\.)layers\.\d+$", prefix) is not None and hasattr(module, "layer_number")


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
