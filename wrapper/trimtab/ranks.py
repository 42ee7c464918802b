"""The ranks of an attempt: starts them with srun, listens to them, gives them orders, and sees them end.

It only carries out. When to save is for `saving` to say, when ranks hang for `hanging`, what to change for `trimming`,
and how it has ended for `outcome`.
"""

import asyncio
import os
import signal
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from trimtab import launch
from trimtab.background import in_background
from trimtab.balance.deciding.ledger import Given
from trimtab.balance.measuring.steps import Step
from trimtab.control import ControlServer
from trimtab.diagnosis.answer import DiagnosisError
from trimtab.hanging import Hanging, Suspicion, suspicion
from trimtab.outcome import Outcome, Roll, Stop, Why
from trimtab.planning.observed import PlanError
from trimtab.progress import Progress
from trimtab.protocol import (
    Hello,
    Job,
    Message,
    Notice,
    Order,
    Reshaped,
    Saved,
    Setting,
    Shape,
    Stack,
    StepReport,
    job_to_json,
)
from trimtab.recorder import Recorder
from trimtab.saving import Saving
from trimtab.trimming.advising import advise
from trimtab.trimming.surroundings import Advice, Restart, Surroundings
from trimtab.trimming.trimmer import Sight, Trimmer
from trimtab.watching import Assembly

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
PROGRESS_SECONDS = 1.0
"""At most one progress line in this time."""
LOOK_SECONDS = 1.0
"""How often it is looked at what falls due."""
STACK_SECONDS = 5.0
"""How long ranks that hang have to say where they are."""
SURROUNDINGS_SECONDS = 120.0
"""How long what Slurm said of the cluster holds: a controller has more to do than to answer each window of each job."""
DRAIN_SECONDS = 2.0
"""How long the last messages of the ranks are waited for after srun has ended."""
KILL_SECONDS = 30.0
"""How long srun has to end the ranks before it is ended itself."""


@dataclass(frozen=True)
class Start:
    """What an attempt begins with; all of it has been checked."""

    job: Job
    allocated: launch.Allocation
    shape: Shape
    address: str
    """Of this node, for the ranks."""
    port: int
    """Free, for the ranks' rendezvous."""


@dataclass(frozen=True)
class Taken:
    """A step that was taken."""

    step: int
    time_seconds: float
    """UTC, at its end."""


@dataclass(frozen=True)
class End:
    """How an attempt has ended."""

    outcome: Outcome
    first: Taken | None = None
    """None: no step was taken."""
    last: Taken | None = None
    setting: Setting | None = None
    """What ran in the end; None: not known."""
    orders: tuple[Given, ...] = ()
    """All that were given, with those of earlier attempts."""
    restart: Restart | None = None
    """What it was stopped for, where it was for a better shape."""


@dataclass
class Ranks:
    """Those of an attempt that is about to run."""

    start: Start
    setting: Setting
    """What they shall come to before their first step."""
    recorder: Recorder
    trimmer: Trimmer
    surroundings: Callable[[Taken | None], Surroundings]
    """Asks Slurm, so it is called in a thread; with the first step that was taken."""
    remember: Callable[[Sequence[Given]], None]
    """Keeps the orders that were given, for whoever comes after a wrapper that is killed; called in a thread too."""
    _server: ControlServer = field(init=False)
    _stop: Stop | None = None
    _hung: Suspicion | None = None
    _restart: Restart | None = None
    _stacks: dict[int, Stack] = field(default_factory=dict)
    _first: Taken | None = None
    _last: Taken | None = None
    _printed_seconds: float = 0.0
    _decision: asyncio.Task[None] | None = None
    _remembering: asyncio.Task[None] | None = None
    _srun: asyncio.subprocess.Process | None = None
    _grace: asyncio.TimerHandle | None = None
    _known: Surroundings | None = None

    def __post_init__(self) -> None:
        job, allocated = self.start.job, self.start.allocated
        self._roll = Roll(job.train.steps)
        self._assembly = Assembly(allocated.world_size)
        self._progress = Progress(job.train.steps, job.balance)
        self._saving = Saving(job.train, len(allocated.nodes), time.monotonic())
        self._hanging = Hanging(job.requeue)
        self._server = ControlServer(self._receive, self._lose)

    async def train(self) -> End:
        """Train. Signals are heard meanwhile alone: before and after they are held back."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        await asyncio.sleep(0)
        exit_code = 0
        if self._stop is None:
            exit_code = await self._see_ranks_through()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        return End(
            outcome=self._roll.outcome(exit_code, self._stop, self._hung),
            first=self._first,
            last=self._last,
            setting=self.trimmer.setting,
            orders=self.trimmer.orders,
            restart=self._restart,
        )

    async def _see_ranks_through(self) -> int:
        """From their start to their end; returns srun's exit code."""
        srun = self._srun = await self._start_ranks()
        if self.setting != self.trimmer.setting:
            replaces = self.trimmer.setting.fingerprint
            self._server.send(Order("reshape", "as the attempt before ended", self.setting, replaces))
        if self._stop is not None:  # told while they were started: they hold nothing yet
            self._end_ranks(srun)
        watch = asyncio.get_running_loop().create_task(self._look_after(srun))
        try:
            exit_code = await srun.wait()
        finally:
            watch.cancel()
            self._end_ranks(srun)
        await self._drain()
        await self._server.close()
        if self._decision is not None:
            self._decision.cancel()
        if self._remembering is not None:  # what is kept after the end must not be overwritten by it
            await asyncio.wait([self._remembering], timeout=DRAIN_SECONDS)
        return exit_code

    async def _start_ranks(self) -> asyncio.subprocess.Process:
        start = self.start
        port = await self._server.start(start.address)
        environment = launch.rank_environment(
            os.environ,
            job=job_to_json(start.job),
            address=start.address,
            port=start.port,
            control=f"{start.address}:{port}",
            token=self._server.token,
        )
        # In a session of its own, so that a Ctrl-C at a terminal reaches the ranks as an order, once, through us.
        return await asyncio.create_subprocess_exec(
            *launch.srun_command(start.allocated), env=environment, start_new_session=True
        )

    def _receive(self, rank: int, message: Message) -> None:
        self.recorder.message(message)
        self._roll.hear(rank, message)
        match message:
            case StepReport():
                self._hanging.stepped(time.monotonic(), message.step)
                if self._saves_after(message.step):
                    self._hanging.ordered()
                self._last = Taken(message.step, message.time_seconds)
                self._first = self._first or self._last
                if step := self._assembly.add(message, self._roll.ranks):
                    self._see(step)
            case Saved():
                self._saving.saved(time.monotonic(), message.seconds)
                if self._stop is not None or message.step == self.start.job.train.steps:
                    _say(f"trimtab: saved {message.directory}")
            case Stack():
                self._stacks[rank] = message
            case Notice(kind="signal") if not (self._stop or self._hung or self._roll.broken):  # nor sent by srun
                self._tell("signal", f"rank {rank} was sent {message.text}: the ranks save and stop at the next step")
                self._begin_to_stop(Stop.by_preemption())
            case Notice(kind=kind) if kind not in ("signal", "reshape"):  # which are told otherwise
                _say(f"trimtab: {message.text}")
            case Reshaped():
                _say(f"trimtab: {_reshaped(message)}")
        self._act_on(self.trimmer.hear(message))

    def _lose(self, rank: int) -> None:
        self._roll.lose(rank)
        if rank not in self._roll.done and self._stop is None:
            self.recorder.event("control", f"the connection of rank {rank} has ended")

    def _saves_after(self, step: int) -> bool:
        """Whether the ranks save by themselves before their next step, or instead of it."""
        train = self.start.job.train
        interval = train.checkpoint_interval_steps
        return step == train.steps or bool(interval and step % interval == 0)

    def _see(self, step: Step) -> None:
        line = self._progress.line(step, self.trimmer.setting)
        now = time.monotonic()
        if step.step == self.start.job.train.steps or now - self._printed_seconds >= PROGRESS_SECONDS:
            self._printed_seconds = now
            _say(line)
        self._act_on(self.trimmer.see(step))

    def _act_on(self, sight: Sight) -> None:
        for kind, sentence in sight.events:
            self._tell(kind, sentence)
        for record in sight.records:
            self.recorder.order(record)
        if self._stop is not None:
            return
        if sight.probe:
            self._server.send(Order("probe", sight.probe))
        if sight.due and (self._decision is None or self._decision.done()):
            self._decision = asyncio.get_running_loop().create_task(self._decide())

    async def _decide(self) -> None:
        try:
            surroundings = await self._look_around()
            question = self.trimmer.question(self.recorder.snapshot(), surroundings)
            advice = await in_background(lambda: advise(question))
        except (PlanError, DiagnosisError) as error:
            self._act_on(self.trimmer.undecided(str(error)))
            return
        except Exception as error:  # noqa: BLE001 - whatever is wrong with deciding, training goes on
            traceback.print_exc()
            self._act_on(self.trimmer.undecided(f"{type(error).__name__}: {error}"))
            return
        if self._stop is None:
            self._act_on(self.trimmer.given(advice))
            self._carry_out(advice)

    async def _look_around(self) -> Surroundings:
        """What Slurm says of the cluster, or has said a little while ago."""
        now_seconds = time.time()
        if self._known is None or now_seconds - self._known.now_seconds > SURROUNDINGS_SECONDS:
            self._known = await in_background(lambda: self.surroundings(self._first))
        left_seconds = self._known.seconds_left
        if left_seconds is not None:
            left_seconds -= now_seconds - self._known.now_seconds
        return _on(self._roll.ranks.values(), replace(self._known, now_seconds=now_seconds, seconds_left=left_seconds))

    def _carry_out(self, advice: Advice) -> None:
        if advice.order is not None:
            self._hanging.ordered()
            self._server.send(advice.order)
            orders = self.trimmer.orders
            remembering = in_background(lambda: self.remember(orders))
            self._remembering = asyncio.get_running_loop().create_task(remembering)
        elif advice.restart is not None:
            self._restart = advice.restart
            self._begin_to_stop(Stop(Why.RESHAPE, "to begin again"))

    async def _look_after(self, srun: asyncio.subprocess.Process) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = time.monotonic()
            if self._stop is None and self._roll.last_step and self._saving.due(now):
                self._hanging.ordered()
                self._server.send(Order("checkpoint", "as much time has passed as a failure may cost"))
            if self._hung is None and self._hanging.hung(now):
                await self._look_into_hang(srun)

    async def _look_into_hang(self, srun: asyncio.subprocess.Process) -> None:
        self._tell("hang", f"no rank has taken a step for {self._hanging.limit_seconds:.0f} s: they are asked where")
        self._stacks.clear()
        self._server.send(Order("stacks", "no step is taken"))
        deadline = time.monotonic() + STACK_SECONDS
        while len(self._stacks) < len(self._roll.ranks) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        if not self._hanging.hung(time.monotonic()):
            self._tell("hang", "they have gone on")
            return
        self._hung = suspicion(self._roll.ranks, self._roll.last_step, self._stacks)
        if len(self._stacks) < len(self._roll.ranks) and srun.returncode is None:
            srun.send_signal(signal.SIGUSR2)  # which it hands on: those that cannot answer write theirs to the log
            await asyncio.sleep(1.0)
        for stack in self._stacks.values():
            _say(f"trimtab: rank {stack.rank} after step {stack.step}:\n{stack.text}")
        self._tell("hang", self._hung.sentence)
        self._end_ranks(srun)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stop is None:
            self._begin_to_stop(Stop.by_signal(number))
            self._tell("signal", f"{number.name}: the ranks save and stop at the next step")
        else:  # they are saving: another signal must not spoil it
            self.recorder.event("signal", number.name)
        if self._grace is None and self._srun is not None:
            grace_seconds = self.start.job.requeue.grace_seconds if self._roll.ranks else 0
            self._grace = asyncio.get_running_loop().call_later(grace_seconds, self._end_ranks, self._srun)

    def _begin_to_stop(self, stop: Stop) -> None:
        self._stop = stop
        self._hanging.ordered()
        self._server.send(Order("stop", stop.reason))

    def _end_ranks(self, srun: asyncio.subprocess.Process) -> None:
        if srun.returncode is None:
            srun.terminate()
            asyncio.get_running_loop().call_later(KILL_SECONDS, _kill, srun)

    async def _drain(self) -> None:
        deadline = time.monotonic() + DRAIN_SECONDS
        while time.monotonic() < deadline and len(self._roll.done) + len(self._roll.broken) < len(self._roll.ranks):
            await asyncio.sleep(0.05)

    def _tell(self, kind: str, sentence: str) -> None:
        self.recorder.event(kind, sentence)
        _say(f"trimtab: {sentence}")


def _say(text: str) -> None:
    with suppress(OSError):  # a full disk under the job's output must not end the training
        print(text, flush=True)


def _kill(srun: asyncio.subprocess.Process) -> None:
    if srun.returncode is None:
        srun.kill()


def _on(ranks: Collection[Hello], surroundings: Surroundings) -> Surroundings:
    """With the devices of the ranks, where all have GPUs of one kind, or with the cores that this one computes on."""
    models = {rank.device_model for rank in ranks}
    if models == {""}:
        return replace(surroundings, cores=len(os.sched_getaffinity(0)))
    if len(models) > 1:
        return surroundings
    least_bytes = min(rank.device_memory_bytes for rank in ranks)
    return replace(surroundings, gpu_model=models.pop(), gpu_memory_bytes=least_bytes)


def _reshaped(message: Reshaped) -> str:
    if message.refused:
        return f"the ranks stay as they are: {message.refused}"
    return f"after step {message.step}: {message.setting}; training stood still for {message.seconds:.2f} s"
