"""What the compiler makes of RMSNorm's kernels for GPUs this machine does not have."""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="the kernels need triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton interprets in this process (TRITON_INTERPRET=1)", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from trimtab_kernels import rms_norm_triton as kernels  # noqa: E402
from trimtab_kernels.rms_norm_triton import backward_kernel, forward_kernel, projection_kernel, tile  # noqa: E402

# Triton 3.7's own: it builds syntax trees in a way that Python 3.13 deprecates. Nothing of ours is let through.
pytestmark = pytest.mark.filterwarnings(
    r"ignore:AnnAssign\.__init__ missing 1 required positional argument.*:DeprecationWarning"
)

# Bytes of shared memory that one block may use (CUDA C++ Programming Guide, technical specifications).
SHARED_LIMITS = {80: 166912, 90: 232448, 100: 232448}
PTXAS = {80: "ptxas", 90: "ptxas", 100: "ptxas-blackwell"}

Compile = Callable[..., Any]


@pytest.fixture
def compile_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compile:
    """Compiles a kernel as its launch does: same tile, aligned pointers, strides that are multiples of 16."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))

    def compile_kernel(kernel: Any, hidden: int, dtype: str = "bf16", arch: int = 90) -> Any:
        t = tile(hidden)
        constants = {"H": hidden, "ZERO_CENTERED": True, "ROWS": t.ROWS, "BLOCK": t.BLOCK}
        if kernel is backward_kernel and hidden <= t.BLOCK:
            constants["p_projection"] = None
        types = {"p_rstd": "fp32", "p_projection": "fp32", "p_partial": "fp32"}
        signature = {}
        for name in kernel.arg_names:
            if name in constants:
                signature[name] = "constexpr"
            elif name.startswith("p_"):
                signature[name] = "*" + types.get(name, dtype)
            else:
                signature[name] = "fp32" if name == "eps" else "i32"
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(kernel.arg_names)
            if signature[name].startswith("*") or name.startswith("stride_")
        }
        source = ASTSource(kernel, signature, constants, aligned)
        return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": t.num_warps})

    return compile_kernel


def resources(compiled: Any, arch: int, directory: Path) -> tuple[int, int]:
    """Registers a thread, and bytes spilled, as ptxas reports them."""
    source = directory / "kernel.ptx"
    source.write_text(compiled.asm["ptx"])
    target = re.search(r"^\.target (\w+)", compiled.asm["ptx"], re.MULTILINE)
    assert target is not None
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin" / PTXAS[arch]
    command = [str(ptxas), "-v", f"--gpu-name={target[1]}", str(source), "-o", str(directory / "kernel.cubin")]
    said = subprocess.run(command, check=True, text=True, capture_output=True).stderr
    (registers,) = re.findall(r"Used (\d+) registers", said)
    (spills,) = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    return int(registers), sum(map(int, spills))


@pytest.mark.parametrize("arch", SHARED_LIMITS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("kernel", "hidden"),
    [
        (forward_kernel, 128),
        (backward_kernel, 128),
        (forward_kernel, 4096),
        (backward_kernel, 4096),
        (forward_kernel, 16384),
        (projection_kernel, 16384),
        (backward_kernel, 16384),
    ],
    ids=lambda value: value if isinstance(value, int) else value.__name__,
)
def test_kernel_fits(compile_kernel: Compile, tmp_path: Path, kernel: Any, hidden: int, dtype: str, arch: int) -> None:
    compiled = compile_kernel(kernel, hidden, dtype, arch)
    registers, spilled = resources(compiled, arch, tmp_path)
    assert spilled == 0
    assert compiled.metadata.shared <= SHARED_LIMITS[arch]
    # What the number of backward programs counts on.
    assert registers <= kernels.REGISTERS_PER_THREAD
    # Atomics would make the order of a sum, and so its last bits, differ from run to run.
    assert not re.search(r"\b(atom|red)\.", compiled.asm["ptx"])


@pytest.mark.parametrize(
    ("kernel", "hidden", "loads"),
    [
        (forward_kernel, 4096, ["x", "weight"]),
        (forward_kernel, 16384, ["x", "x", "weight"]),
        (backward_kernel, 4096, ["dy", "x", "weight", "rstd"]),
        (backward_kernel, 16384, ["dy", "x", "weight", "rstd", "projection"]),
    ],
)
def test_row_that_fits_a_block_is_read_once(
    compile_kernel: Compile, kernel: Any, hidden: int, loads: list[str]
) -> None:
    assert compile_kernel(kernel, hidden).asm["ttgir"].count("tt.load") == len(loads)


@pytest.mark.parametrize("hidden", [5000, 10000])
@pytest.mark.parametrize("kernel", [forward_kernel, backward_kernel], ids=lambda kernel: kernel.__name__)
def test_rows_are_addressed_in_64_bits(compile_kernel: Compile, kernel: Any, hidden: int) -> None:
    products = re.findall(r"arith\.muli (.*) : (?:tensor<[\dx]*)?(i\d+)", compile_kernel(kernel, hidden).asm["ttir"])
    assert len([operands for operands, kind in products if kind == "i64"]) >= 2
    # Only a block's first column, which is below the hidden size, may be a product in 32 bits.
    narrow = [operands for operands, kind in products if kind == "i32"]
    assert all(operands.endswith("%c8192_i32") for operands in narrow), narrow
