"""Which of its two paths an operation takes: its Triton kernel, or the plain torch reference beside it."""

import functools
import logging
import os

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def takes_triton(operation: str, *inputs: Tensor) -> bool:
    """Whether these inputs take the Triton kernel.

    Inputs on a GPU do, and inputs on the CPU where Triton interprets its kernels (TRITON_INTERPRET=1); all others
    take the reference, as they should. Where a kernel should run and cannot, the reason is logged, once.
    """
    on_gpu = all(x.is_cuda for x in inputs)
    on_interpreter = all(x.is_cpu for x in inputs) and os.environ.get("TRITON_INTERPRET") == "1"
    return (on_gpu or on_interpreter) and _can_run(operation, *(x.dtype for x in inputs))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _can_run(operation: str, *dtypes: torch.dtype) -> bool:
    """Constant to torch.compile, which can trace neither the import nor the log."""
    return _can_run_logged(operation, *dtypes)


@functools.cache
def _can_run_logged(operation: str, *dtypes: torch.dtype) -> bool:
    reason = reason_against_triton(*dtypes)
    if reason is not None:
        logger.warning("%s takes the slower torch path: %s", operation, reason)
    return reason is None


def reason_against_triton(*dtypes: torch.dtype) -> str | None:
    """Why kernels cannot run here on inputs of these types, and what to do about it; None where they can."""
    for dtype in dtypes:
        if dtype not in _DTYPES:
            return f"its kernel takes {', '.join(map(str, _DTYPES))}, not {dtype}: convert the input to one of them"
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"triton cannot be imported ({error}): install the version that belongs to torch {torch.__version__}"
    return None
