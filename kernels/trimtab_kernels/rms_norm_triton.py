"""RMSNorm in Triton, forward and backward, as two operators that torch.compile sees whole.

Importing this module imports triton and registers ``trimtab::rms_norm`` and ``trimtab::rms_norm_backward``.

With s the scale (weight, or 1 + weight) and r = 1 / sqrt(mean(x^2) + eps) of a row::

    y = x r s        dx = r (dy s - x r mean(dy s x r))        dweight = sum over rows of dy x r

All of it is memory traffic, so each kernel reads its inputs once while a row fits one block. The hidden size H is a
compile-time constant: a column loop of one turn then unrolls, and the compiler keeps the loaded block for both loops.
The weight's gradient is summed without atomics, in an order that depends on sizes and device alone: every program sums
its rows in registers and writes one row of partial sums, and those are summed last.

Names: i_ index, o_ offset, m_ mask, p_ pointer, b_ block in registers. Shapes: R = ROWS, C = BLOCK columns.
"""

# Triton compiles kernels from a language of its own, in which Python's annotations and naming rules do not hold.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803

from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

REGISTERS_PER_MULTIPROCESSOR = 65536
# The backward kernel needs up to this many with the tiles below (tests/kernels/test_rms_norm_compiled.py).
REGISTERS_PER_THREAD = 128


@dataclass(frozen=True)
class Tile:
    """What one program holds in registers at a time."""

    ROWS: int
    BLOCK: int
    num_warps: int


def tile(hidden: int) -> Tile:
    """The tile for rows of this length: 16 elements a thread, few enough for four live blocks in float32."""
    block = min(max(triton.next_power_of_2(hidden), 16), 8192)
    rows = max(2048 // block, 1)
    return Tile(rows, block, num_warps=rows * block // (16 * 32))


@triton.jit
def load_block(p_base, o_h, m):
    return tl.load(p_base + o_h, mask=m, other=0.0).to(tl.float32)


@triton.jit
def load_scale(p_weight, o_h, H: tl.constexpr, ZERO_CENTERED: tl.constexpr):
    b_weight = load_block(p_weight, o_h, o_h < H)
    return b_weight + 1.0 if ZERO_CENTERED else b_weight


@triton.jit(do_not_specialize=["rows"])
def forward_kernel(
    p_x,
    p_weight,
    p_y,
    p_rstd,
    stride_x,
    rows,
    eps,
    H: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program i normalizes the i-th tile of rows."""
    o_row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]  # [R, 1]
    m_row = o_row < rows
    p_x += o_row * stride_x
    p_y += o_row * H

    b_squares = tl.zeros([ROWS, BLOCK], tl.float32)
    for i_h in range(0, H, BLOCK):
        o_h = i_h + tl.arange(0, BLOCK)[None, :]  # [1, C]
        b_x = load_block(p_x, o_h, m_row & (o_h < H))
        b_squares += b_x * b_x
    b_rstd = tl.rsqrt(tl.sum(b_squares, 1, keep_dims=True) / H + eps)  # [R, 1]

    for i_h in range(0, H, BLOCK):
        o_h = i_h + tl.arange(0, BLOCK)[None, :]
        m = m_row & (o_h < H)
        b_y = load_block(p_x, o_h, m) * b_rstd * load_scale(p_weight, o_h, H, ZERO_CENTERED)
        tl.store(p_y + o_h, b_y.to(p_y.dtype.element_ty), mask=m)
    tl.store(p_rstd + o_row, b_rstd, mask=m_row)


@triton.jit(do_not_specialize=["rows"])
def projection_kernel(
    p_dy,
    p_x,
    p_weight,
    p_rstd,
    p_projection,
    stride_dy,
    stride_x,
    rows,
    H: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """mean(dy s x r) of every row, for rows that are longer than a block."""
    o_row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]  # [R, 1]
    m_row = o_row < rows
    p_dy += o_row * stride_dy
    p_x += o_row * stride_x

    b_products = tl.zeros([ROWS, BLOCK], tl.float32)
    for i_h in range(0, H, BLOCK):
        o_h = i_h + tl.arange(0, BLOCK)[None, :]  # [1, C]
        m = m_row & (o_h < H)
        b_dnormed = load_block(p_dy, o_h, m) * load_scale(p_weight, o_h, H, ZERO_CENTERED)
        b_products += b_dnormed * load_block(p_x, o_h, m)
    b_rstd = tl.load(p_rstd + o_row, mask=m_row, other=0.0)
    tl.store(p_projection + o_row, tl.sum(b_products, 1, keep_dims=True) * b_rstd / H, mask=m_row)


@triton.jit(do_not_specialize=["rows"])
def backward_kernel(
    p_dy,
    p_x,
    p_weight,
    p_rstd,
    p_projection,
    p_dx,
    p_partial,
    stride_dy,
    stride_x,
    rows,
    H: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (i, j) takes block j of columns of every tile of rows i, i + programs, i + 2 programs, ...

    p_projection holds what projection_kernel wrote; it is not read where a row fits one block.
    """
    i_program = tl.program_id(0)
    o_h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]  # [1, C]
    m_h = o_h < H
    b_scale = load_scale(p_weight, o_h, H, ZERO_CENTERED)

    b_dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    for i_tile in range(i_program, tl.cdiv(rows, ROWS), tl.num_programs(0)):
        o_row = (i_tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]  # [R, 1]
        m_row = o_row < rows
        b_dy = load_block(p_dy + o_row * stride_dy, o_h, m_row & m_h)
        b_rstd = tl.load(p_rstd + o_row, mask=m_row, other=0.0)
        b_normed = load_block(p_x + o_row * stride_x, o_h, m_row & m_h) * b_rstd
        b_dnormed = b_dy * b_scale
        if H <= BLOCK:
            b_projection = tl.sum(b_dnormed * b_normed, 1, keep_dims=True) / H
        else:
            b_projection = tl.load(p_projection + o_row, mask=m_row, other=0.0)
        b_dx = (b_dnormed - b_normed * b_projection) * b_rstd
        tl.store(p_dx + o_row * H + o_h, b_dx.to(p_dx.dtype.element_ty), mask=m_row & m_h)
        b_dweight += b_dy * b_normed
    p_partial += i_program.to(tl.int64) * H
    tl.store(p_partial + o_h, tl.sum(b_dweight, 0, keep_dims=True), mask=m_h)


@torch.library.custom_op("trimtab::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
    """y [..., h] for x [..., h] and weight [h]; and r [rows] in float32, which the backward needs."""
    y, rstd = _new_outputs(x)
    x = _as_rows(x)
    rows, hidden = x.shape
    t = tile(hidden)
    with torch.cuda.device_of(x):
        forward_kernel[triton.cdiv(rows, t.ROWS),](
            x, weight.contiguous(), y, rstd, x.stride(0), rows, eps, hidden, zero_centered, **asdict(t)
        )
    return y, rstd


@torch.library.custom_op("trimtab::rms_norm_backward", mutates_args=())
def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """dx [..., h] and dweight [h], in the types of x and weight, for dy [..., h]."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dy, x, weight = _as_rows(dy), _as_rows(x), weight.contiguous()
    rows, hidden = x.shape
    t = tile(hidden)
    tiles, blocks = triton.cdiv(rows, t.ROWS), triton.cdiv(hidden, t.BLOCK)
    programs = min(tiles, max(_concurrent_programs(t, x.device) // blocks, 1))
    partial = torch.empty(programs, hidden, dtype=torch.float32, device=x.device)
    projection = torch.empty_like(rstd) if blocks > 1 else None
    strides = dy.stride(0), x.stride(0)
    with torch.cuda.device_of(x):
        if projection is not None:
            projection_kernel[tiles,](
                dy, x, weight, rstd, projection, *strides, rows, hidden, zero_centered, **asdict(t)
            )
        backward_kernel[programs, blocks](
            dy, x, weight, rstd, projection, dx, partial, *strides, rows, hidden, zero_centered, **asdict(t)
        )
    return dx, partial.sum(0).to(weight.dtype)


def _as_rows(x: Tensor) -> Tensor:
    """x as [rows, h], of any row stride but adjacent columns: a view where that exists, else a copy."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()


def _new_outputs(x: Tensor) -> tuple[Tensor, Tensor]:
    rows = x.numel() // x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return y, torch.empty(rows, dtype=torch.float32, device=x.device)


def _concurrent_programs(t: Tile, device: torch.device) -> int:
    """How many backward programs a device holds at once, so that all of them start and end together.

    The interpreter counts as three: partial sums of several tiles each, as on a device.
    """
    if device.type == "cpu":
        return 3
    gpu = torch.cuda.get_device_properties(device)
    return gpu.multi_processor_count * (REGISTERS_PER_MULTIPROCESSOR // (REGISTERS_PER_THREAD * 32 * t.num_warps))


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
    return _new_outputs(x)


@rms_norm_backward.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, zero_centered: bool) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty_like(weight)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, ctx.zero_centered = inputs
    ctx.save_for_backward(x, weight, output[1])


def _backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, None]:
    x, weight, rstd = ctx.saved_tensors
    dx, dweight = rms_norm_backward(dy, x, weight, rstd, ctx.zero_centered)
    return dx, dweight, None, None


def _refuse(ctx: Any, *gradients: Tensor) -> None:
    raise NotImplementedError(
        "rms_norm has no second derivative in its Triton kernel: differentiate rms_norm_reference instead"
    )


rms_norm.register_autograd(_backward, setup_context=_save_for_backward)
rms_norm_backward.register_autograd(_refuse)
