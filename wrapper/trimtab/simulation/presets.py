"""Models by name: the sizes of Llama as its authors published them. Light: the command line reads it for its help."""

from collections.abc import Mapping
from types import MappingProxyType


def _sizes(
    layers: int, hidden: int, heads: int, groups: int, mlp: int, vocabulary: int, sequence: int
) -> dict[str, int]:
    return {
        "layers": layers,
        "hidden_size": hidden,
        "attention_heads": heads,
        "query_groups": groups,
        "ffn_hidden_size": mlp,
        "vocabulary_size": vocabulary,
        "sequence_length": sequence,
    }


PRESETS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        # Touvron et al. 2023, "Llama 2".
        "7b": _sizes(32, 4096, 32, 32, 11008, 32000, 4096),
        "13b": _sizes(40, 5120, 40, 40, 13824, 32000, 4096),
        # Grattafiori et al. 2024, "The Llama 3 Herd of Models", table 3.
        "8b": _sizes(32, 4096, 32, 8, 14336, 128256, 8192),
        "70b": _sizes(80, 8192, 64, 8, 28672, 128256, 4096),
        "405b": _sizes(126, 16384, 128, 8, 53248, 128256, 8192),
    }
)
"""The arguments of `Sizes`. Sequences are as long as in pre-training; those of 70b as in fine-tuning."""

SEQUENCES_PER_GPU = 4
"""Of a global batch that nobody names: a choice, on which a pipeline's bubble hangs; the output says how much."""
