"""RMSNorm: the operation, and the plain torch reference that defines it.

Shape suffixes: h is the hidden size, ``...`` any leading sizes (Megatron's are [s, b]).
"""

import torch
from torch import Tensor

from trimtab_kernels.dispatch import takes_triton


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """Normalize the last dimension of x by its root mean square, and scale it by the weight.

    x is [..., h] with any strides, weight is [h]; the result is [..., h] in x's dtype. Differentiable in both.
    Arithmetic is in float32, or in float64 where x is. eps is added to the mean square, inside the root. With
    zero_centered the scale is 1 + weight, so that weight decay pulls the scale towards one.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), equation 4.
    """
    if x.dim() == 0 or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: x {list(x.shape)} does not fit weight {list(weight.shape)}: "
            "the weight needs one dimension, as long as the last of x"
        )
    if takes_triton("rms_norm", x, weight):
        from trimtab_kernels import rms_norm_triton

        y: Tensor = rms_norm_triton.rms_norm(x, weight, eps, zero_centered)[0]
        return y
    return rms_norm_reference(x, weight, eps, zero_centered)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """What rms_norm means, in plain torch: the truth in tests, and the path taken where Triton cannot run."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(dtype)
    scale = weight.to(dtype) + 1 if zero_centered else weight.to(dtype)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * scale).to(x.dtype)
