"""The reference, and which path a call takes."""

import logging
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trimtab_kernels import dispatch
from trimtab_kernels.rms_norm import rms_norm, rms_norm_reference


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "TRITON_FOUND", False)
    dispatch._log_once.cache_clear()


@pytest.fixture
def on_cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_reference_is_torch_rms_norm_in_float64() -> None:
    x, weight = torch.randn(3, 4, 7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    expected = torch.nn.functional.rms_norm(x, [7], weight, 1e-5)
    # Both are a dozen float64 operations on numbers of size one.
    torch.testing.assert_close(rms_norm_reference(x, weight, 1e-5), expected, rtol=0, atol=1e-14)


def test_zero_centered_scale_is_one_plus_weight() -> None:
    x, weight = torch.randn(3, 7), torch.randn(7)
    centered = rms_norm_reference(x, weight, 1e-5, zero_centered=True)
    assert torch.equal(centered, rms_norm_reference(x, weight + 1, 1e-5))


def test_float16_squares_beyond_its_range_do_not_overflow() -> None:
    y = rms_norm_reference(torch.full([1, 4], 1000.0, dtype=torch.float16), torch.ones(4), 1e-5)
    assert y.dtype == torch.float16
    assert torch.equal(y, torch.ones(1, 4, dtype=torch.float16))


@pytest.mark.parametrize("zero_centered", [False, True])
def test_reference_gradients_are_those_of_finite_differences(zero_centered: bool) -> None:
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, weight: rms_norm_reference(x, weight, 1e-5, zero_centered), (x, weight))


@pytest.mark.parametrize(("x", "weight"), [([], [1]), ([2, 3], [2]), ([2, 3], [1, 3]), ([2, 3], [])])
def test_weight_that_does_not_fit_is_refused(x: list[int], weight: list[int]) -> None:
    with pytest.raises(ValueError, match="as long as the last of x") as refusal:
        rms_norm(torch.ones(x), torch.ones(weight), 1e-5)
    assert str(x) in str(refusal.value)
    assert str(weight) in str(refusal.value)


@pytest.mark.usefixtures("on_cpu_only", "without_triton")
def test_cpu_tensors_take_the_reference_and_log_nothing(caplog: pytest.LogCaptureFixture) -> None:
    x, weight = torch.randn(3, 7), torch.randn(7)
    assert torch.equal(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))
    assert not caplog.records


def test_cpu_tensors_import_neither_triton_nor_the_compiler() -> None:
    program = (
        "import sys, torch; from trimtab_kernels.rms_norm import rms_norm;"
        "rms_norm(torch.ones(2, 3), torch.ones(3), 1e-5);"
        "print({'triton', 'torch._dynamo'} & set(sys.modules))"
    )
    environment = {"TRITON_INTERPRET": "0"}
    assert subprocess.check_output([sys.executable, "-c", program], env=environment, text=True) == "set()\n"


@pytest.mark.usefixtures("without_triton")
def test_gpu_tensors_without_triton_fall_back_and_say_why_once(caplog: pytest.LogCaptureFixture) -> None:
    with FakeTensorMode(), caplog.at_level(logging.WARNING):
        x, weight = torch.empty(2, 3, device="cuda"), torch.empty(3, device="cuda")
        assert not dispatch.takes_triton("rms_norm", x, weight)
        assert not dispatch.takes_triton("rms_norm", x, weight)
    (record,) = caplog.records
    assert "rms_norm takes the slower torch path: triton is not installed: install" in record.getMessage()


@pytest.mark.skipif(not dispatch.TRITON_FOUND, reason="the kernels need triton")
def test_gpu_tensors_take_triton_in_its_types_alone() -> None:
    with FakeTensorMode():
        weight = torch.empty(3, device="cuda")
        assert dispatch.takes_triton("rms_norm", torch.empty(2, 3, device="cuda", dtype=torch.bfloat16), weight)
        assert not dispatch.takes_triton("rms_norm", torch.empty(2, 3, device="cuda", dtype=torch.float64), weight)
        assert not dispatch.takes_triton("rms_norm", torch.empty(2, 3), weight)
