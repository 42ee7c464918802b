"""Makes Megatron-core run where there is no CUDA: the one place that knows how.

Megatron-core asks torch.cuda for the current device, allocates on "cuda", tells dtypes by names such as
torch.cuda.FloatTensor, and keeps its random states through torch.cuda. On a machine without CUDA each of these is
answered for the CPU instead. Where CUDA exists nothing is touched.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange")


def prepare() -> bool:
    """Call it before Megatron-core is imported. Returns whether this rank trains on a GPU."""
    if torch.cuda.is_available():
        return True
    _replace_torch()
    _import_megatron()
    return False


def _replace_torch() -> None:
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for name, replacement in {
        "current_device": lambda: torch.device("cpu"),
        "synchronize": lambda device=None: None,
        "current_stream": _Stream,
        "default_stream": _Stream,
        "Stream": _Stream,
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "set_rng_state": lambda state, device="cuda": torch.set_rng_state(state),
    }.items():
        setattr(torch.cuda, name, replacement)
    tensor_type: Callable[..., Any] = torch.Tensor.type

    def cuda_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return tensor_type(self, *args, **kwargs)
        return str(tensor_type(self)).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = cuda_type  # type: ignore[method-assign, assignment]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


def _import_megatron() -> None:
    compiler = torch.compile
    # Decorates Megatron-core's fused functions as it is imported. A CPU takes longer to compile one than it gains,
    # and importing the compiler alone takes a second.
    torch.compile = lambda function: function  # type: ignore[assignment]
    from megatron.core.tensor_parallel import random

    torch.compile = compiler
    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    # Its fork warns when the state of the CPU generator changes, which here is the one that is meant.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


class _Stream:
    """A CPU computes in order: there is nothing to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: "_Stream") -> None:
        pass
