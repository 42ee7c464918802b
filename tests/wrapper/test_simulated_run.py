"""Simulated steps against those of a real run: Megatron-core, two stages on CPUs.

The benchmark compares more layouts, and prints. This takes a minute and a half; what is asserted is the error of the
simulation, not a time.
"""

import os

import pytest

pytest.importorskip("torch", reason="training needs torch and Megatron-core: pip install 'trimtab[train]'")
pytest.importorskip("megatron.core", reason="training needs Megatron-core: pip install 'trimtab[train]'")

from benchmarks import simulate as benchmark

pytestmark = [pytest.mark.slurm, pytest.mark.mcore]


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two stages cannot run at once on one core")
def test_simulated_steps_are_as_long_as_those_of_megatron_core(sandbox):
    def trained(layers, microbatches):
        job = benchmark.demo_job(layers, microbatches, tensor=1, steps=benchmark.WARM_UP + benchmark.CALIBRATION + 10)
        job["data"] = {"tokenizer": "bytes"}  # without the demonstration's vocabulary, which takes a while to learn
        return benchmark.Run.of(benchmark.train(sandbox.environment, sandbox.directory, job, nodes=1))

    calibrated, other = trained((4, 4), 8), trained((5, 3), 6)
    model = benchmark.calibrate(calibrated)
    # What steps take beside their pipelines differs by some percent between runs.
    for run, tolerance in (calibrated, 0.05), (other, 0.10):
        measured, simulated = run.later_step_seconds, benchmark.follow(model, run)
        print(f"{run.layout}: {measured * 1e3:.0f} ms measured, {simulated * 1e3:.0f} ms simulated")
        assert simulated == pytest.approx(measured, rel=tolerance)
