"""Runs every test in interpreted/ under Triton's interpreter, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels need triton")


def test_kernels_are_right_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", str(Path(__file__).parent / "interpreted")]
    run = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}, text=True, capture_output=True
    )
    assert run.returncode == 0, run.stdout[-10_000:] + run.stderr[-2_000:]
