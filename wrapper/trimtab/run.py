"""`trimtab run`: the batch script's one command. Starts the ranks with srun, listens to them, and sees them end."""

import asyncio
import importlib.util
import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from trimtab import launch, places
from trimtab.balance.measuring.steps import Step
from trimtab.control import ControlServer
from trimtab.outcome import Outcome, Roll, Stop
from trimtab.progress import Progress
from trimtab.protocol import Job, Message, Order, Shape, StepReport, job_to_json
from trimtab.recorder import Recorder, RunIdentity
from trimtab.watching import Assembly, Lookout
from trimtab_slurm.cluster import CommandLineClient

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
PROGRESS_SECONDS = 1.0
"""At most one progress line in this time."""
DRAIN_SECONDS = 2.0
"""How long the last messages of the ranks are waited for after srun has ended."""


@dataclass(frozen=True)
class Plan:
    """A run that has passed every check."""

    job: Job
    allocated: launch.Allocation
    shape: Shape
    address: str
    port: int


def prepare(job: Job, ranks_per_node: int | None) -> Plan:
    """Check the job against allocation and machine. Raises JobError or LaunchError; nothing is started before it."""
    allocated = launch.allocation(os.environ, ranks_per_node)
    shape = job.shape(allocated.world_size)
    for module in ("torch", "megatron"):
        if importlib.util.find_spec(module) is None:
            raise launch.LaunchError(f"{module} is not installed for {sys.executable}: pip install 'trimtab[train]'")
    address = CommandLineClient().node_address(allocated.nodes[0])
    port = launch.free_port(address, launch.port_candidates(allocated.job_id, allocated.restart_count))
    return Plan(_with_paths(job, allocated), allocated, shape, address, port)


def run(plan: Plan) -> Outcome:
    """Train, and return how it ended. Its exit codes are those of `outcome.ExitCode`, or 128 + n after signal n."""
    return asyncio.run(_Run(plan).train())


class _Run:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        allocated, job, shape = plan.allocated, plan.job, plan.shape
        self._recorder = Recorder(
            places.job_directory(allocated.cluster, allocated.job_id),
            RunIdentity(
                cluster=allocated.cluster,
                job_id=allocated.job_id,
                user=allocated.user,
                restart_count=allocated.restart_count,
                start_seconds=time.time(),
                nodes=allocated.nodes,
                job=job_to_json(job),
                tensor=shape.tensor,
                pipeline=shape.pipeline,
                data=shape.data,
            ),
        )
        self._roll = Roll(job.train.steps)
        self._assembly = Assembly(allocated.world_size)
        self._lookout = Lookout(job.balance)
        self._progress = Progress(job.train.steps, job.balance)
        self._printed_seconds = 0.0
        self._stop: Stop | None = None
        self._server = ControlServer(self._receive, self._roll.lose)
        print(f"trimtab: job {allocated.job_id}, {shape} on {', '.join(allocated.nodes)}", flush=True)

    async def train(self) -> Outcome:
        plan = self._plan
        port = await self._server.start(plan.address)
        loop = asyncio.get_running_loop()
        environment = launch.rank_environment(
            os.environ,
            job=job_to_json(plan.job),
            address=plan.address,
            port=plan.port,
            control=f"{plan.address}:{port}",
            token=self._server.token,
        )
        # In a session of its own, so that a Ctrl-C at a terminal reaches the ranks as an order, once, through us.
        srun = await asyncio.create_subprocess_exec(
            *launch.srun_command(plan.allocated), env=environment, start_new_session=True
        )
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number, srun)
        try:
            exit_code = await srun.wait()
        finally:
            self._give_up(srun)
        await self._drain()
        await self._server.close()
        outcome = self._roll.outcome(exit_code, self._stop)
        self._recorder.finish(outcome.exit_code, outcome.sentence)
        return outcome

    def _receive(self, rank: int, message: Message) -> None:
        self._recorder.message(message)
        self._roll.hear(rank, message)
        if isinstance(message, StepReport) and (step := self._assembly.add(message, self._roll.ranks)):
            self._see(step)

    def _see(self, step: Step) -> None:
        line = self._progress.line(step)
        now = time.monotonic()
        if step.step == self._plan.job.train.steps or now - self._printed_seconds >= PROGRESS_SECONDS:
            self._printed_seconds = now
            print(line, flush=True)
        sight = self._lookout.see(step)
        if sight.event:
            self._recorder.event("imbalance", sight.event)
            print(f"trimtab: {sight.event}", flush=True)
        if sight.probe and self._stop is None:
            self._server.send(Order("probe", sight.probe))

    def _on_signal(self, number: signal.Signals, srun: asyncio.subprocess.Process) -> None:
        print(f"trimtab: {number.name}: the ranks save and stop at the next step", flush=True)
        self._recorder.event("signal", number.name)
        if self._stop is not None:
            return  # the ranks are saving: a second signal must not spoil it
        self._stop = Stop.by_signal(number)
        self._server.send(Order("stop", number.name))
        grace_seconds = self._plan.job.requeue.grace_seconds if self._roll.ranks else 0
        asyncio.get_running_loop().call_later(grace_seconds, self._give_up, srun)

    @staticmethod
    def _give_up(srun: asyncio.subprocess.Process) -> None:
        if srun.returncode is None:
            srun.terminate()

    async def _drain(self) -> None:
        deadline = time.monotonic() + DRAIN_SECONDS
        while time.monotonic() < deadline and len(self._roll.done) + len(self._roll.broken) < len(self._roll.ranks):
            await asyncio.sleep(0.05)


def _with_paths(job: Job, allocated: launch.Allocation) -> Job:
    directory = job.train.checkpoint_directory.replace("{job_id}", str(allocated.job_id))
    if directory:
        directory = os.fspath(Path(allocated.submit_directory, directory).absolute())
    return replace(job, train=replace(job.train, checkpoint_directory=directory))
