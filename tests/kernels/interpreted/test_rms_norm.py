"""RMSNorm's kernels on the CPU, against the reference in float64. Run by ../test_interpreter.py."""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor

from trimtab_kernels import dispatch
from trimtab_kernels.rms_norm import rms_norm, rms_norm_reference
from trimtab_kernels.rms_norm_triton import rms_norm as operator
from trimtab_kernels.rms_norm_triton import rms_norm_backward as backward_operator

EPS = 1e-5
# Relative L2 distance to float64: some ten roundings of 6e-8 in float32, one of 5e-4 to the output in float16.
TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3}


@pytest.fixture(autouse=True)
def poisoned_outputs() -> Iterator[None]:
    """Memory that torch.empty hands out holds NaN, so that what a kernel does not write shows."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def distance(result: Tensor, truth: Tensor) -> float:
    return float((result.double() - truth).norm() / truth.norm())


def check(x: Tensor, weight: Tensor, dy: Tensor, zero_centered: bool = False) -> None:
    """Output and both gradients are near float64's, in the inputs' types, and the inputs are left as they were."""
    before = [t.clone() for t in (x, weight, dy)]
    x.requires_grad_()
    weight.requires_grad_()
    y = rms_norm(x, weight, EPS, zero_centered)
    assert "trimtab_rms_norm" in str(y.grad_fn), "the reference was taken"
    results = y, *torch.autograd.grad(y, (x, weight), dy)

    x64, weight64 = (t.detach().double().requires_grad_() for t in (x, weight))
    y64 = rms_norm_reference(x64, weight64, EPS, zero_centered)
    truths = y64, *torch.autograd.grad(y64, (x64, weight64), dy.double())
    for name, result, truth, like in zip(("y", "dx", "dweight"), results, truths, (x, x, weight), strict=True):
        assert (result.shape, result.dtype) == (like.shape, like.dtype)
        assert distance(result.detach(), truth.detach()) < TOLERANCES[like.dtype], name
    for now, then in zip((x, weight, dy), before, strict=True):
        assert torch.equal(now.detach(), then)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("rows", "hidden"),
    [
        (1, 2),
        (1000, 3),  # several tiles of many short rows for each partial sum
        (33, 127),
        (17, 128),
        (7, 2049),
        (5, 4096),
        (4, 8193),  # one column in the last block
        (4, 16384),
    ],
)
def test_agrees_with_float64(rows: int, hidden: int, dtype: torch.dtype, zero_centered: bool) -> None:
    x, dy = (torch.randn(rows, hidden).to(dtype) for _ in range(2))
    check(x, torch.randn(hidden).to(dtype), dy, zero_centered)


def test_sequence_batch_hidden_with_a_float32_weight() -> None:
    x, dy = (torch.randn(5, 3, 65).half() for _ in range(2))
    check(x, torch.randn(65), dy)


@pytest.mark.parametrize(
    "strided",
    [
        pytest.param(lambda: torch.randn(65, 9).t(), id="transposed"),
        pytest.param(lambda: torch.randn(9, 130)[:, ::2], id="every second column"),
        pytest.param(lambda: torch.randn(9, 100)[:, 20:85], id="some columns"),
        pytest.param(lambda: torch.randn(18, 65)[::2], id="every second row"),
        pytest.param(lambda: torch.randn(65).expand(9, 65), id="one row for all"),
        pytest.param(lambda: torch.randn(9, 1).expand(9, 65), id="one value a row"),
        pytest.param(lambda: torch.randn(3, 65, 3).transpose(1, 2), id="permuted"),
        pytest.param(lambda: torch.randn(3, 4, 65)[:, :3], id="gaps"),
        pytest.param(lambda: torch.randn(65), id="vector"),
    ],
)
def test_any_strides(strided: Callable[[], Tensor]) -> None:
    x, dy = strided(), torch.randn(strided().shape)
    check(x, torch.randn(65), dy)
    check(dy, torch.randn(130)[::2], strided())


def test_offsets_beyond_32_bits() -> None:
    """The third row lies 2^31 elements into memory of which no more than three rows are ever touched."""
    storage = torch.UntypedStorage(2 * (2**31 + 65))
    far = torch.empty(0, dtype=torch.float16).set_(storage, 0, (3, 65), (2**30, 1))
    far.copy_(torch.randn(3, 65))
    check(far.detach(), torch.randn(65), torch.randn(3, 65).half())
    check(torch.randn(3, 65).half(), torch.randn(65), far.detach())


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # NumPy computes for the interpreter.
@pytest.mark.parametrize("hidden", [65, 8193])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_what_is_not_finite_spreads_as_in_the_reference(poison: float, hidden: int) -> None:
    """1e30 is finite and its square is not."""
    results = []
    x, weight, dy = torch.randn(3, hidden), torch.randn(hidden), torch.randn(3, hidden)
    x[1, 7], dy[2, 5] = poison, poison
    for norm in (rms_norm, rms_norm_reference):
        x.requires_grad_()
        weight.requires_grad_()
        y = norm(x, weight, EPS)
        results.append((y.detach(), *torch.autograd.grad(y, (x, weight), dy)))
    for result, truth in zip(*results, strict=True):
        assert torch.equal(result.isnan(), truth.isnan())
        assert torch.equal(result.isinf(), truth.isinf())


def test_no_rows_give_no_output_and_a_zero_weight_gradient() -> None:
    x, weight = torch.empty(0, 65, requires_grad=True), torch.randn(65, requires_grad=True)
    y = rms_norm(x, weight, EPS)
    y.sum().backward()
    assert y.shape == (0, 65)
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.zeros(65))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_runs_without_gradients(mode: Callable[[], AbstractContextManager[None]]) -> None:
    x, weight = torch.randn(3, 65), torch.randn(65, requires_grad=True)
    with mode():
        y = rms_norm(x, weight, EPS)
    assert not y.requires_grad
    torch.testing.assert_close(y, rms_norm_reference(x, weight, EPS).detach(), rtol=1e-6, atol=1e-6)


def test_second_derivative_is_refused() -> None:
    x, weight = torch.randn(3, 65, requires_grad=True), torch.randn(65, requires_grad=True)
    (dx,) = torch.autograd.grad(rms_norm(x, weight, EPS).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="rms_norm has no second derivative"):
        dx.sum().backward()


def test_float64_falls_back_and_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    dispatch._log_once.cache_clear()
    x, weight = torch.randn(3, 65, dtype=torch.float64), torch.randn(65)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(rms_norm(x, weight, EPS), rms_norm_reference(x, weight, EPS))
    (record,) = caplog.records
    assert "its kernel has no torch.float64: convert the inputs" in record.getMessage()


def test_operators_keep_the_rules_of_torch_library() -> None:
    """Schema, fake outputs (strides and types included), autograd registration, and dynamic shapes under AOT."""
    x = torch.randn(3, 2, 65).transpose(0, 1).requires_grad_()
    weight = torch.randn(65, requires_grad=True)
    torch.library.opcheck(operator, (x, weight, EPS, True))
    detached = x.detach(), weight.detach()
    rstd = operator(*detached, EPS, True)[1]
    torch.library.opcheck(backward_operator, (torch.randn(x.shape), *detached, rstd, True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernel", "reference"])
def test_compiles_as_one_graph_with_the_same_gradients(dtype: torch.dtype) -> None:
    def double(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(2 * x, weight, EPS)

    x, weight = torch.randn(3, 65, dtype=dtype, requires_grad=True), torch.randn(65, requires_grad=True)
    dy = torch.randn(3, 65, dtype=dtype)
    results = []
    for function in (torch.compile(double, fullgraph=True, backend="aot_eager"), double):
        y = function(x, weight)
        results.append((y.detach(), *torch.autograd.grad(y, (x, weight), dy)))
    for compiled, eager in zip(*results, strict=True):
        assert torch.equal(compiled, eager)
