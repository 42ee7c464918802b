"""How near simulated steps come to measured ones, and what a simulation takes.

    .venv/bin/python benchmarks/simulate.py [--steps 30]

Trains the demonstration (examples/demo) in a sandbox with Megatron-core on CPUs, with two stages, each on one rank and
on two: first with equal layers, whose steps 6 to 15 calibrate the model, then with other layouts and other numbers of
microbatches, which it predicts from those ten steps. Beside the prediction stands what the simulation makes of the
compute that the later steps turned out to have: an error in that is the simulation's, the rest that of the stages'
costs. Compute is measured in CPU time, steps in wall time, so the ranks get a higher priority than what else the
machine does. Needs root and Slurm, as the sandbox does. Prints; asserts nothing.
"""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from trimtab import sandbox
from trimtab.balance.measuring.measure import costs_of, measure, samples_of
from trimtab.balance.pipeline.calibrate import overheads_seconds, stages_at_once
from trimtab.balance.pipeline.estimate import estimate
from trimtab.balance.pipeline.simulate import simulate
from trimtab.balance.plan import Costs, Floats, Hardware, ParameterMemory, Part, Plan, Schedule
from trimtab.protocol import Layout, job_from_json, layout_of
from trimtab.report.stages import stage_matrix
from trimtab_slurm import profile
from trimtab_slurm.contents import TrainingProfile

DEMO = Path(__file__).parents[1] / "examples/demo/job.toml"
STAGES, WARM_UP, CALIBRATION = 2, 5, 10
CASES = (((4, 4), 8), ((5, 3), 8), ((3, 5), 8), ((4, 4), 4), ((5, 3), 16))
"""(layers of each stage, microbatches); the first calibrates."""


@click.command()
@click.option("--steps", default=30, show_default=True, type=click.IntRange(WARM_UP + CALIBRATION + 5))
def main(steps: int) -> None:
    """Print the time of large simulations, then measured and simulated steps."""
    print_times()
    directory = Path(tempfile.mkdtemp(prefix="trimtab-"))
    directory.chmod(0o755)  # munged wants all users to reach its socket
    try:
        box, _ = sandbox.up(directory, sandbox.Spec())
        for tensor in (1, 2):
            print_comparison(box.environment, directory, tensor, steps)
    finally:
        sandbox.down(directory)
        shutil.rmtree(directory, ignore_errors=True)


def print_times() -> None:
    """Of one simulation of 64 stages and 512 microbatches by each schedule."""
    print("one simulation of 64 stages x 512 microbatches")
    for schedule in Schedule:
        virtual = 2 if schedule is Schedule.INTERLEAVED else 1
        forward = np.random.default_rng(0).lognormal(0, 0.1, (64 * virtual, 512))
        begin = time.perf_counter()
        simulation = simulate(schedule, 64, forward, forward, forward)
        seconds = time.perf_counter() - begin
        print(f"{schedule:>12}{len(simulation.operations.kind):>9,} operations{seconds:>7.2f} s")


def print_comparison(environment: dict[str, str], directory: Path, tensor: int, steps: int) -> None:
    """Of steps on so many ranks a stage: measured, and simulated by what the first case has taught."""
    print(f"\nTP{tensor} x PP{STAGES}: {tensor * STAGES} ranks on {os.cpu_count()} cores")
    print(f"{'layout':>8}{'microbatches':>14}{'measured':>10}{'predicted':>18}{'from its compute':>18}")
    runs = (
        Run.of(train(environment, directory, demo_job(layers, microbatches, tensor, steps), nodes=tensor))
        for layers, microbatches in CASES
    )
    first = next(runs)
    model = calibrate(first)
    for run in itertools.chain([first], runs):
        layout, measured = "|".join(map(str, run.layout.layers)), run.later_step_seconds
        errors = (
            f"{seconds * 1e3:>7.0f} ms {seconds / measured - 1:+.1%}"
            for seconds in (predict(model, run), follow(model, run))
        )
        print(
            f"{layout:>8}{run.microbatches:>14}{measured * 1e3:>7.0f} ms{''.join(f'{error:>18}' for error in errors)}",
            flush=True,
        )
    beside, at_once = model.hardware.overhead_seconds, model.hardware.stages_at_once
    print(
        f"beside the pipeline: {beside * 1e3:.0f} ms; stages that compute at once: {min(at_once, STAGES):.2f} at most"
    )


def demo_job(layers: tuple[int, ...], microbatches: int, tensor: int, steps: int) -> dict[str, Any]:
    """The demonstration with another layout and number of microbatches."""
    job = tomllib.loads(DEMO.read_text())
    job["parallel"] = {"tensor": tensor, "pipeline": STAGES, "layout": str(Layout(layers, STAGES))}
    job["batch"]["global_batch_size"] = job["batch"]["microbatch_size"] * microbatches
    job["train"]["steps"] = steps
    return job


def train(environment: dict[str, str], directory: Path, job: dict[str, Any], *, nodes: int) -> TrainingProfile:
    """Run a job to its end, with two ranks a node; what it recorded."""
    work = Path(tempfile.mkdtemp(dir=directory, prefix="job-"))
    sections = (
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in section.items())
        for name, section in job.items()
    )
    (work / "job.toml").write_text("\n".join(sections))
    command = [sys.executable, "-m", "trimtab", "submit", "job.toml", "--template", "cpu-demo", "--follow"]
    command += ["--nodes", str(nodes), "--gpus-per-node", "2", "--time", "0:20:00"]
    # A task's session is scheduled as one against the other sessions; without autogroups there is nothing to write to.
    first = work / "first.sh"
    first.write_text("#!/bin/sh\n[ ! -w /proc/$PPID/autogroup ] || echo -15 > /proc/$PPID/autogroup\n")
    first.chmod(0o755)
    environment = environment | {"SLURM_TASK_PROLOG": str(first)}
    ended = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)
    found = re.search(r"submitted job (\d+)", ended.stdout + ended.stderr)
    if ended.returncode or not found:
        raise RuntimeError(f"the job failed:\n{ended.stdout}{ended.stderr}")
    (path,) = (directory / "profiles/sandbox" / found[1]).glob("*.h5")
    training = profile.read(path).training
    if training is None:
        raise RuntimeError(f"{path} holds no training")
    return training


@dataclass(frozen=True)
class Run:
    """What one replica's run has measured, of T steps."""

    training: TrainingProfile
    layout: Layout
    microbatches: int
    tensor: int
    step_seconds: Floats
    """[T]"""
    forward_seconds: Floats
    """[T, 1, S]"""
    backward_seconds: Floats
    """[T, 1, S]"""

    @classmethod
    def of(cls, training: TrainingProfile) -> "Run":
        """From its profile."""
        job = json.loads(str(training.attributes["job"]))
        matrix = stage_matrix(training)
        return cls(
            training,
            layout_of(job_from_json(str(training.attributes["job"]))),
            job["batch"]["global_batch_size"] // job["batch"]["microbatch_size"],
            int(training.attributes["tensor"]),
            np.asarray(training.steps["duration_seconds"], dtype=np.float64),
            matrix.forward_seconds[:, None],
            matrix.backward_seconds[:, None],
        )

    @property
    def plan(self) -> Plan:
        """What it ran."""
        return Plan(self.layout, Schedule.ONE_F_ONE_B, (self.microbatches,), (0,) * STAGES)

    @property
    def later_step_seconds(self) -> float:
        """Median of the steps after those that calibrate."""
        return float(np.median(self.step_seconds[WARM_UP + CALIBRATION :]))


@dataclass(frozen=True)
class Model:
    """What was learned from a run."""

    costs: Costs
    hardware: Hardware


def calibrate(run: Run) -> Model:
    """From the first steps after warming up. One layout does not tell the embedding's cost: it is taken as next to
    nothing beside a layer, since it looks up and adds."""
    layer, embedding = (Part(s, s, s, parameters=1, activation_bytes=0, recomputed_bytes=0) for s in (1.0, 0.01))
    prior = Costs((layer,) * sum(run.layout.layers), embedding, layer, boundary_bytes=0)
    window = slice(WARM_UP, WARM_UP + CALIBRATION)
    samples = samples_of(run.training.stages)
    measured = measure(samples.select(np.isin(samples.step, run.training.steps["step"][window])), [run.layout], prior)
    step, forward, backward = run.step_seconds[window], run.forward_seconds[window], run.backward_seconds[window]
    hardware = Hardware(measured.speeds, (np.inf,) * STAGES, ())
    if run.tensor * STAGES > (os.cpu_count() or 1):
        # Ranks that share cores wait for each other's turn, microbatch by microbatch: that grows with the compute.
        hardware = replace(hardware, stages_at_once=stages_at_once(step.tolist(), forward, backward))
    else:
        beside = overheads_seconds(step.tolist(), forward, backward, run.plan, hardware)
        hardware = replace(hardware, overhead_seconds=float(np.median(beside)))
    return Model(costs_of(measured, prior), hardware)


def predict(model: Model, run: Run) -> float:
    """Seconds of a step of a run by the model, from nothing of the run but its plan."""
    return estimate(model.costs, ParameterMemory(0, 0, 0), run.plan, model.hardware).step_seconds


def follow(model: Model, run: Run) -> float:
    """Seconds of a later step of a run by simulation of what its stages did compute: what of an error is not theirs."""
    later = slice(WARM_UP + CALIBRATION, None)
    steps, forward, backward = run.step_seconds[later], run.forward_seconds[later], run.backward_seconds[later]
    beside = overheads_seconds(steps.tolist(), forward, backward, run.plan, model.hardware)
    return float(np.median(steps - beside)) + model.hardware.overhead_seconds


if __name__ == "__main__":
    main()
