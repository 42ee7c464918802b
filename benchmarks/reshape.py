"""What it takes to move two layers: in place, and by saving, starting the ranks again through srun, and loading.

    .venv/bin/python benchmarks/reshape.py [--size 8x256 ...]

Four ranks (TP2 x PP2, plain optimizer, fp32) on two nodes of a sandbox. In one allocation they train, move two layers
to the other stage, back, and there again; then they save and end, and are started again in the other layout from that
checkpoint. In place is the time that training stands still for a move; the other is that from the end of the last step
to the begin of the next one. Memory is the resident memory of a rank above what it has before it holds a model: before
a move, and its peak in it. Prints; asserts nothing.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import click

from trimtab import launch
from trimtab import sandbox as boxes
from trimtab.control import ControlServer
from trimtab.protocol import (
    Done,
    Hello,
    Job,
    Layout,
    Message,
    Order,
    Reshaped,
    StepReport,
    job_from_dict,
    job_to_json,
    setting_of,
)

RANKS, MOVED_LAYERS = 4, 2
INSIDE, RANK = "TRIMTAB_BENCHMARK_INSIDE", "TRIMTAB_BENCHMARK_MEMORY"
HEAD = (
    f"{'model':>9}{'million':>9}{'in place, first':>17}{'later':>8}{'restarted':>11}{'ratio':>7}"
    f"{'MB moved':>10}{'over least':>12}{'MB before':>11}{'peak':>7}{'B/parameter more':>18}"
)


@click.command()
@click.option("--size", "sizes", multiple=True, default=("8x256", "14x512", "16x768"), help="Layers x hidden size.")
def main(sizes: tuple[str, ...]) -> None:
    """Print a line for each size of the model."""
    if RANK in os.environ:
        sys.exit(rank())
    if INSIDE in os.environ:
        for size in sizes:
            print(asyncio.run(measure(size, Path(os.environ[INSIDE]))), flush=True)
        return
    print(HEAD, flush=True)
    directory = Path(tempfile.mkdtemp(prefix="trimtab-"))
    directory.chmod(0o755)
    try:
        box, _ = boxes.up(directory / "box", boxes.Spec(nodes=2))
        allocate = ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=2", "--exclusive"]
        command = [*allocate, sys.executable, __file__, *(word for size in sizes for word in ("--size", size))]
        subprocess.run(command, env=box.environment | {INSIDE: str(directory)}, check=True)
    finally:
        boxes.down(directory / "box")
        shutil.rmtree(directory)


async def measure(size: str, directory: Path) -> str:
    """The line of one size."""
    layers, hidden_size = map(int, size.split("x"))
    job = make_job(layers, hidden_size, directory)
    shape = job.shape(RANKS)
    begin = setting_of(job, shape)
    moved = replace(begin, layout=Layout((layers // 2 - MOVED_LAYERS, layers // 2 + MOVED_LAYERS), 2))

    ranks = Ranks(job, directory)
    await ranks.start()
    await ranks.until(0, 1)
    for was, will in ((begin, moved), (moved, begin), (begin, moved)):
        told, steps = len(ranks.all(Reshaped)), ranks.steps
        ranks.order(Order("reshape", "benchmark", will, was.fingerprint))
        await ranks.until(told + 1, steps + 2)
    ranks.order(Order("stop", "benchmark"))
    await ranks.end()
    moves = ranks.all(Reshaped)
    assert not any(move.refused for move in moves), moves

    steps = ranks.steps
    parallel = replace(job.parallel, layout=str(moved.layout))
    again = Ranks(replace(job, parallel=parallel, train=replace(job.train, steps=steps + 1)), directory)
    await again.start()
    await again.end()
    stopped = max(report.time_seconds for report in ranks.all(StepReport))
    went_on = min(report.time_seconds - report.duration_seconds for report in again.all(StepReport))
    assert {report.step for report in again.all(StepReport)} == {steps + 1}

    parameters = {hello.rank: hello.parameters for hello in ranks.all(Hello)}
    memory = [json.loads(line) for line in (directory / "memory").read_text().splitlines()]
    most = max(memory, key=lambda told: told["peak"])
    more = (most["peak"] - most["before"]) / parameters[most["rank"]]
    first, *later = (move.seconds for move in moves)
    restarted, million = went_on - stopped, sum(parameters.values()) / 1e6
    over_least = moves[0].moved_bytes / moves[0].least_bytes
    return (
        f"{size:>9}{million:9.1f}{first:17.2f}{median(later):8.2f}{restarted:11.2f}{restarted / median(later):7.1f}"
        f"{moves[0].moved_bytes / 1e6:10.1f}{over_least:12.3f}"
        f"{most['before'] / 1e6:11.0f}{most['peak'] / 1e6:7.0f}{more:18.1f}"
    )


def make_job(layers: int, hidden_size: int, directory: Path) -> Job:
    """Short sequences and few of them: what is measured here does not depend on what a step computes."""
    checkpoints = directory / "checkpoints"
    shutil.rmtree(checkpoints, ignore_errors=True)
    (directory / "memory").unlink(missing_ok=True)
    model = {"layers": layers, "hidden_size": hidden_size, "attention_heads": 8, "sequence_length": 32}
    return job_from_dict(
        {
            "model": model,
            "parallel": {"tensor": 2, "pipeline": 2},
            "batch": {"microbatch_size": 1, "global_batch_size": 2},
            "train": {"steps": 100_000, "warmup_steps": 1, "checkpoint_directory": str(checkpoints)},
            "data": {"tokenizer": "bytes", "cache_directory": str(directory / "tokens")},
        }
    )


class Ranks:
    """Ranks that are started as `trimtab run` does, and what they say."""

    def __init__(self, job: Job, directory: Path) -> None:
        self._job, self._directory = job, directory
        self._messages: list[Message] = []
        self._server = ControlServer(self._receive, lambda rank: None)

    async def start(self) -> None:
        """Through srun, in this allocation."""
        allocated = launch.allocation(os.environ, RANKS // 2)
        port = await self._server.start("127.0.0.1")
        environment = launch.rank_environment(
            os.environ,
            job=job_to_json(self._job),
            address="127.0.0.1",
            port=launch.free_port("127.0.0.1", launch.port_candidates(allocated.job_id, int(time.time()))),
            control=f"127.0.0.1:{port}",
            token=self._server.token,
        )
        *command, _, _ = launch.srun_command(allocated)
        log = (self._directory / "log").open("w")
        self._process = await asyncio.create_subprocess_exec(
            *command, __file__, env=environment | {RANK: str(self._directory / "memory")}, stdout=log, stderr=log
        )

    @property
    def steps(self) -> int:
        """The last step that all ranks have taken."""
        taken = dict.fromkeys(range(RANKS), 0) | {report.rank: report.step for report in self.all(StepReport)}
        return min(taken.values())

    def all(self, kind: type[Any]) -> list[Any]:
        """Messages of one kind."""
        return [message for message in self._messages if isinstance(message, kind)]

    def order(self, order: Order) -> None:
        """Give it to all."""
        self._server.send(order)

    async def until(self, moves: int, steps: int) -> None:
        """Wait until they have made so many moves and taken so many steps."""
        while len(self.all(Reshaped)) < moves or self.steps < steps:
            if self._process.returncode is not None:
                raise click.ClickException(self._complaint())
            await asyncio.sleep(0.01)

    async def end(self) -> None:
        """Wait for their end."""
        if await self._process.wait():
            raise click.ClickException(self._complaint())
        while len(self.all(Done)) < RANKS:  # what they said last may still be on its way
            await asyncio.sleep(0.01)
        await self._server.close()

    def _complaint(self) -> str:
        return (self._directory / "log").read_text()[-9000:]

    def _receive(self, rank: int, message: Message) -> None:
        self._messages.append(message)


def rank() -> int:
    """One rank, which writes its memory around each reshape to a file."""
    from trimtab_megatron import cpu

    cuda = cpu.prepare()
    cpu.prepare = lambda: cuda  # once in a process

    from trimtab_megatron import __main__ as program
    from trimtab_megatron import run as runs
    from trimtab_megatron import train
    from trimtab_megatron.control import Control
    from trimtab_megatron.world import World

    obey, prepare = train.obey, runs.prepare
    without_model = 0

    def measured_prepare(job: Job, world: World, control: Control) -> runs.Run:
        nonlocal without_model
        without_model = _resident("VmRSS")
        return prepare(job, world, control)

    def measured_obey(run: runs.Run, order: Order) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = _resident("VmRSS")
        obey(run, order)
        if order.kind == "reshape":
            told = {"before": before - without_model, "peak": _resident("VmHWM") - without_model}
            with Path(os.environ[RANK]).open("a") as file:
                file.write(json.dumps({"rank": run.world.identity.rank, **told}) + "\n")

    train.obey, runs.prepare = measured_obey, measured_prepare
    return program.main()


def _resident(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
