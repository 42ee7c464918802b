"""Which of its two paths an operation takes: its Triton kernel, or the plain torch reference beside it."""

import functools
import importlib.util
import logging
import os

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

# Found, not imported: the import takes a second that a CPU rank has no use for, and torch.compile cannot trace it.
TRITON_FOUND = importlib.util.find_spec("triton") is not None
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def takes_triton(operation: str, *inputs: Tensor) -> bool:
    """Whether these inputs take the Triton kernel.

    Inputs on a GPU do, and inputs on the CPU where Triton interprets its kernels (TRITON_INTERPRET=1); all others
    take the reference, as they should. Where a kernel should run and cannot, the reason is logged, once; a graph
    of torch.compile takes the same path, but cannot log.
    """
    on_gpu = all(x.is_cuda for x in inputs)
    on_interpreter = all(x.is_cpu for x in inputs) and os.environ.get("TRITON_INTERPRET") == "1"
    if not (on_gpu or on_interpreter):
        return False
    reason = _reason_against_triton(inputs)
    if reason is not None and not torch.compiler.is_compiling():
        _log_once(operation, reason)
    return reason is None


def _reason_against_triton(inputs: tuple[Tensor, ...]) -> str | None:
    """Why kernels cannot run here on these inputs, and what to do about it; None where they can."""
    if not TRITON_FOUND:
        return f"triton is not installed: install the version that belongs to torch {torch.__version__}"
    for x in inputs:
        if x.dtype not in DTYPES:
            return f"its kernel has no {x.dtype}: convert the inputs to float32, bfloat16 or float16"
    return None


@functools.cache
def _log_once(operation: str, reason: str) -> None:
    logger.warning("%s takes the slower torch path: %s", operation, reason)
