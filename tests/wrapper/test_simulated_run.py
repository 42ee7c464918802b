"""Simulated steps against those of a real run: Megatron-core, two stages on CPUs.

The benchmark does the same for the demonstration, and prints. The smaller model here takes a minute; what is asserted
is the error of the simulation, not a time.
"""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="training needs torch and Megatron-core: pip install 'trimtab[train]'")
pytest.importorskip("megatron.core", reason="training needs Megatron-core: pip install 'trimtab[train]'")

pytestmark = [pytest.mark.slurm, pytest.mark.mcore]


def load_benchmark():
    path = Path(__file__).parents[2] / "benchmarks" / "simulate.py"
    spec = importlib.util.spec_from_file_location("trimtab_benchmark_simulate", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look for it there
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two stages cannot run at once on one core")
def test_steps_are_predicted_from_the_first_ones_and_for_another_layout(sandbox):
    benchmark = load_benchmark()

    def trained(layers, microbatches):
        job = benchmark.demo_job(layers, microbatches, tensor=1, steps=benchmark.WARM_UP + benchmark.CALIBRATION + 10)
        job["model"] |= {"hidden_size": 192, "sequence_length": 64}
        job["data"] = {"tokenizer": "bytes"}
        return benchmark.Run.of(benchmark.train(sandbox.environment, sandbox.directory, job, nodes=1))

    calibrated, other = trained((4, 4), 8), trained((5, 3), 6)
    model = benchmark.calibrate(calibrated)
    for run, simulate, tolerance in (
        (calibrated, benchmark.predict, 0.05),
        # The other run's compute is not foreseen as well as what follows from it.
        (other, benchmark.follow, 0.05),
        (other, benchmark.predict, 0.15),
    ):
        measured, simulated = run.later_step_seconds, simulate(model, run)
        print(f"{run.layout}: {measured * 1e3:.0f} ms measured, {simulated * 1e3:.0f} ms by {simulate.__name__}")
        assert simulated == pytest.approx(measured, rel=tolerance)
