"""The worked example's model, in which each layer counts its microbatches in a buffer of a checkpoint."""

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[2] / "examples" / "own_model"))

from my_model import build_model as build_example


def build_model(**arguments: Any) -> torch.nn.Module:
    """A GPT as GPT-2 had it."""
    model = build_example(**arguments)
    for layer in model.decoder.layers:
        layer.register_buffer("calls", torch.zeros(1, dtype=torch.int64))
        layer.register_forward_pre_hook(_count)
    return model


def _count(layer: Any, _: Any) -> None:
    layer.calls += 1
