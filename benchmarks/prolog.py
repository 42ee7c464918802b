"""What trimtab's hooks add to the start of a job: `srun -N1 true` against a prolog in sh, and against none.

    .venv/bin/python benchmarks/prolog.py [--rounds 50]

Three sandboxes of one node run side by side and differ in their hooks alone. A round starts one job in each, in an
order that changes, so that whatever else the machine does meets all three. Prints; asserts nothing.
"""

import random
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import click

from trimtab import sandbox as boxes
from trimtab.sandbox.config import Places

SH_HOOK = "#!/bin/sh\nexit 0\n"
NONE, SH, TRIMTAB = "no prolog", "prolog in sh", "trimtab's prolog"


@click.command()
@click.option("--rounds", default=50, show_default=True, help="Jobs for each kind of prolog.")
@click.option(
    "--alloc/--no-alloc", default=True, show_default=True, help="PrologFlags=Alloc, as docs/install.md has it."
)
def main(rounds: int, alloc: bool) -> None:
    """Print how long `srun -N1 true` takes with each kind of prolog, and the differences within rounds."""
    root = Path(tempfile.mkdtemp(prefix="trimtab-"))
    root.chmod(0o755)
    directories = {kind: root / str(number) for number, kind in enumerate((NONE, SH, TRIMTAB))}
    try:
        sandboxes = {kind: _up(directory, kind, alloc) for kind, directory in directories.items()}
        for sandbox in sandboxes.values():
            _seconds(sandbox)  # what is only read once
        seconds: dict[str, list[float]] = {kind: [] for kind in sandboxes}
        for _ in range(rounds):
            for kind in random.sample(list(sandboxes), len(sandboxes)):
                seconds[kind].append(_seconds(sandboxes[kind]))
    finally:
        for directory in directories.values():
            boxes.down(directory)
        shutil.rmtree(root)
    _print(seconds)


def _up(directory: Path, kind: str, alloc: bool) -> boxes.Sandbox:
    sandbox, _ = boxes.up(directory, boxes.Spec(nodes=1))
    places = Places(directory)
    if kind == SH:
        for which in ("prolog", "epilog"):
            places.hook(which).write_text(SH_HOOK)
    left_out = (("Prolog=", "Epilog=") if kind == NONE else ()) + (() if alloc else ("PrologFlags=",))
    lines = places.slurm_conf.read_text().splitlines(keepends=True)
    places.slurm_conf.write_text("".join(line for line in lines if not line.startswith(left_out)))
    subprocess.run(["scontrol", "reconfigure"], env=sandbox.environment, check=True)
    time.sleep(2)  # slurmd takes the new configuration when it comes to it
    return sandbox


def _seconds(sandbox: boxes.Sandbox) -> float:
    begin = time.perf_counter()
    subprocess.run(["srun", "--quiet", "-N1", "-n1", "--gpus-per-node=1", "true"], env=sandbox.environment, check=True)
    return time.perf_counter() - begin


def _print(seconds: dict[str, list[float]]) -> None:
    rows = [(kind, values) for kind, values in seconds.items()]
    for less, more in ((SH, NONE), (TRIMTAB, NONE), (TRIMTAB, SH)):
        rows.append((f"{less} - {more}", [a - b for a, b in zip(seconds[less], seconds[more], strict=True)]))
    print(f"{'milliseconds':36}{'median':>8}{'p90':>8}{'p99':>8}{'most':>8}")
    for name, values in rows:
        cuts = statistics.quantiles(values, n=100, method="inclusive")
        figures = (statistics.median(values), cuts[89], cuts[98], max(values))
        print(f"{name:36}" + "".join(f"{figure * 1000:8.0f}" for figure in figures))
    print(f"{len(seconds[NONE])} rounds")


if __name__ == "__main__":
    main()
