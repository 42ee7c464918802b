"""What the wrapper's recording takes: a step's reports, a snapshot, the training part, and the report of a chain.

    .venv/bin/python benchmarks/record.py [--steps 2000]

The reports of 512 ranks (TP8, PP8, DP8) are made up; what is written goes to the directory for temporary files. Prints;
asserts nothing.
"""

import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
from click.testing import CliRunner

from trimtab.cli import main as trimtab
from trimtab.protocol import Batch, Hello, Job, Parallel, Reshaped, Setting, StepReport, job_to_json, setting_of
from trimtab.protocol.job import Model, Shape
from trimtab.recorder import Recorder, RunIdentity

SHAPE = Shape(8, 8, 8)
ATTEMPTS = 3
SETTINGS = 10


@click.command()
@click.option("--steps", default=2000, show_default=True, help="Steps of an attempt.")
def main(steps: int) -> None:
    """Print seconds of each, and the memory at the end."""
    root = Path(tempfile.mkdtemp(prefix="trimtab-"))
    try:
        job = Job(model=Model(layers=64), parallel=Parallel(8, 8), batch=Batch(1, 64))
        for attempt in range(ATTEMPTS):
            _record(root / "lab/1", job, attempt, steps)
        timed("report of the chain", lambda: _report(root, root / "page.html"))
    finally:
        shutil.rmtree(root)


def _record(directory: Path, job: Job, attempt: int, steps: int) -> None:
    identity = RunIdentity("lab", 1, "ann", attempt, 1.78e9 + 1e5 * attempt, ("n1",), job_to_json(job), 8, 8, 8)
    recorder = Recorder(directory, identity)
    for rank in range(512):
        places = rank % 8, rank // 64, rank // 8 % 8
        recorder.message(Hello("", rank, "n1", rank, 1, *places, (places[1],), 1, f"GPU-{rank}"))
    first, setting = 1 + attempt * (steps - 50), setting_of(job, SHAPE)
    begin = time.perf_counter()
    for step in range(first, first + steps):
        for rank in range(512):
            loss = 9.0 / step if rank == 511 else None
            recorder.message(StepReport(rank, step, time.time(), 2.0, 0.25, 0.5, 8, 64, 512, 1 << 34, loss=loss))
        if (step - first) % (steps // SETTINGS) == 1:
            setting = Setting(setting.layout, setting.microbatches, ((step % 2),) * 8)
            recorder.message(Reshaped(0, step, setting, "", 0.5, 1 << 30, 1 << 30))
    print(f"attempt {attempt + 1}: {steps} steps of 512 ranks")
    print(f"  {'reports of a step':24} {(time.perf_counter() - begin) / steps:8.4f} s")
    timed("  snapshot", recorder.snapshot)
    timed("  training part", lambda: recorder.finish(75, "stopped"))
    print(f"  {'peak memory':24} {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:8.0f} MB")


def _report(root: Path, page: Path) -> None:
    result = CliRunner().invoke(trimtab, ["report", "1", "--profiles", str(root), "--html", str(page)])
    if result.exit_code:
        raise click.ClickException(result.output)


def timed(what: str, call: Callable[[], object]) -> None:
    """Print how long it takes."""
    begin = time.perf_counter()
    call()
    print(f"{what:26} {time.perf_counter() - begin:8.3f} s")


if __name__ == "__main__":
    main()
