"""Faults made up on purpose, as `TRIMTAB_INJECT` names them: to show what trimtab does, and to test a site's set-up.

A list such as `slow:node=n2,from_step=30,factor=1.6;kill:rank=1,during=save`. Without the variable nothing of this
runs. A run that has it says so in its first notice, so that no report shows a made-up fault as a real one.

`slow` and `outlier` burn time of the device inside the stage clock's bracket, in proportion to what was computed in
it: to everything that measures, the rank is slow. `hang`, `kill` and `fail` happen once in a process.
"""

import difflib
import errno
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from trimtab_megatron.identity import Identity, InputError

if TYPE_CHECKING:
    from trimtab_megatron.stage_clock import Timer

VARIABLE = "TRIMTAB_INJECT"
PLACES = ("save", "load", "reshape", "move")
"""Where `during` can be: reshape is its preparation, which can be taken back, move what comes after, which cannot."""

_SELECTORS = ("node", "rank", "stage", "attempt")
_SLOW = (*_SELECTORS, "from_step", "to_step", "factor")
_SUDDEN = (*_SELECTORS, "step", "during")
_KEYS = {
    "slow": _SLOW,
    "outlier": (*_SLOW, "probability", "seed"),
    "hang": _SUDDEN,
    "kill": _SUDDEN,
    "fail": _SUDDEN,
}
_NEEDED = {"slow": ("factor",), "outlier": ("factor", "probability")}
_FLOATS = ("factor", "probability")


@dataclass(frozen=True)
class Fault:
    """One entry of the list. What selects a rank is None where any will do."""

    kind: str
    """slow, outlier, hang, kill or fail."""
    node: str | None = None
    rank: int | None = None
    stage: int | None = None
    attempt: int | None = None
    """How many times the job had been requeued."""
    from_step: int = 1
    """First step that is slowed."""
    to_step: int | None = None
    """Last one."""
    factor: float = 1.0
    """What compute takes, over what it would."""
    probability: float = 1.0
    """Of a step to be slowed."""
    seed: int = 0
    """Of which steps they are."""
    step: int | None = None
    """The step before which it happens; with `during`, the number of steps before which it does not."""
    during: str | None = None
    """One of PLACES."""

    def concerns(self, who: Identity, stage: int, attempt: int) -> bool:
        """Whether it selects a rank."""
        wanted = (self.node, self.rank, self.stage, self.attempt)
        return all(
            key in (None, value) for key, value in zip(wanted, (who.node, who.rank, stage, attempt), strict=True)
        )

    def slows(self, step: int, rank: int) -> bool:
        """Whether it slows a step of a rank: the same ones in every run."""
        if step < self.from_step or (self.to_step is not None and step > self.to_step):
            return False
        return random.Random(f"{self.seed}:{rank}:{step}").random() < self.probability


def parse(text: str) -> tuple[Fault, ...]:
    """The faults of a value of TRIMTAB_INJECT. Raises InputError with the entry, the reason, and the choices."""
    return tuple(_parse_entry(entry.strip()) for entry in text.split(";") if entry.strip())


def _parse_entry(entry: str) -> Fault:
    kind, _, rest = entry.partition(":")
    if kind not in _KEYS:
        raise _refused(entry, f"{kind!r} is no fault", kind, _KEYS)
    values: dict[str, str | int | float] = {}
    for part in filter(None, rest.split(",")):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key not in _KEYS[kind]:
            raise _refused(entry, f"{key!r} is no key of {kind}", key, _KEYS[kind])
        if key in values:
            raise _refused(entry, f"{key} is given twice")
        values[key] = _parse_value(entry, key, value)
    for key in _NEEDED.get(kind, ()):
        if key not in values:
            raise _refused(entry, f"{kind} needs {key}=")
    if kind in ("hang", "kill", "fail") and not {"step", "during"} & set(values):
        raise _refused(entry, f"{kind} needs step= or during=")
    if values.get("during") == "load" and "step" in values:
        raise _refused(entry, "a load comes before the first step: leave step out")
    return Fault(kind, **values)  # type: ignore[arg-type]


def _parse_value(entry: str, key: str, value: str) -> str | int | float:
    if key == "node":
        if not value:
            raise _refused(entry, "node is empty")
        return value
    if key == "during":
        if value not in PLACES:
            raise _refused(entry, f"during={value} is no place", value, PLACES)
        return value
    try:
        number = float(value) if key in _FLOATS else int(value)
    except ValueError:
        raise _refused(entry, f"{key}={value} is not a {'number' if key in _FLOATS else 'whole number'}") from None
    if key == "factor" and not 1 <= number <= 1000:
        raise _refused(entry, f"factor={value} is not from 1 to 1000")
    if key == "probability" and not 0 <= number <= 1:
        raise _refused(entry, f"probability={value} is not from 0 to 1")
    if number < 0:
        raise _refused(entry, f"{key}={value} is negative")
    return number


def _refused(entry: str, reason: str, name: str = "", choices: Iterable[str] = ()) -> InputError:
    text = f"{VARIABLE}: {entry!r}: {reason}"
    if near := difflib.get_close_matches(name, choices, n=1):
        text += f"; did you mean {near[0]}?"
    if choices:
        text += f"; choose from: {', '.join(choices)}"
    return InputError(text)


class Faults:
    """The faults of one rank. Call `before_step` and `during` where these are; both return unless it is time."""

    def __init__(self, faults: Sequence[Fault] = (), rank: int = 0) -> None:
        self._slow = [fault for fault in faults if fault.kind == "slow"]
        self._outliers = [fault for fault in faults if fault.kind == "outlier"]
        self._sudden = [fault for fault in faults if fault.kind in _ENDS]
        self._rank = rank
        self._step = 0

    @classmethod
    def of_rank(cls, faults: Iterable[Fault], who: Identity, stage: int) -> "Faults":
        """Those that select this rank of this attempt."""
        attempt = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        return cls([fault for fault in faults if fault.concerns(who, stage, attempt)], who.rank)

    def before_step(self, step: int) -> None:
        """What happens before a step, counted from 1; may not return, or raise MemoryError."""
        self._step = step
        self._come_true(lambda fault: fault.during is None and fault.step == step, "step")

    def during(self, place: str) -> None:
        """What happens in the middle of one of PLACES; may not return, or raise MemoryError, in a save OSError."""
        self._come_true(lambda fault: fault.during == place and self._step >= (fault.step or 0), place)

    def factor(self) -> float:
        """What the compute of the current step takes, over what it would."""
        return self._product([*self._slow, *self._outliers])

    def lasting_factor(self) -> float:
        """The same without outliers, which are over when their step is."""
        return self._product(self._slow)

    def slow(self, timer: "Timer", cuda: bool) -> "Timer":
        """A timer of the compute of steps, inside of which that takes longer."""
        return SlowedTimer(timer, cuda, self.factor) if self._slow or self._outliers else timer

    def slow_probe(self, timer: "Timer", cuda: bool) -> "Timer":
        """A timer of a probe, likewise."""
        return SlowedTimer(timer, cuda, self.lasting_factor) if self._slow else timer

    def _product(self, faults: Iterable[Fault]) -> float:
        product = 1.0
        for fault in faults:
            if fault.slows(self._step, self._rank):
                product *= fault.factor
        return product

    def _come_true(self, is_due: Callable[[Fault], bool], place: str) -> None:
        for fault in filter(is_due, list(self._sudden)):
            self._sudden.remove(fault)
            _ENDS[fault.kind](place)


class SlowedTimer:
    """A timer inside of which compute takes `factor()` times as long: the rest is burnt before it stops."""

    def __init__(self, timer: "Timer", cuda: bool, factor: Callable[[], float]) -> None:
        self._timer = timer
        self._burner = _GpuBurner() if cuda else _CpuBurner()
        self._factor = factor

    def start(self, barrier: bool = False) -> None:
        self._timer.start(barrier)
        self._burner.start()

    def stop(self, barrier: bool = False) -> None:
        factor = self._factor()
        if factor > 1:
            self._burner.burn(factor)
        self._timer.stop(barrier)

    def read_seconds(self) -> float:
        return self._timer.read_seconds()


class _CpuBurner:
    def start(self) -> None:
        self._started = time.process_time()

    def burn(self, factor: float) -> None:
        """Until the CPU time since the start is `factor` times what it is now."""
        end = self._started + factor * (time.process_time() - self._started)
        while time.process_time() < end:
            pass


class _GpuBurner:
    """Waits for the device, as the stage clock never does: only then is it known how much there is to burn."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._values = torch.zeros(1024, 1024, device="cuda")
        self._product = torch.empty_like(self._values)
        self._begin, self._now = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def start(self) -> None:
        self._begin.record()

    def burn(self, factor: float) -> None:
        end = factor * self._milliseconds()
        while self._milliseconds() < end:
            self._torch.mm(self._values, self._values, out=self._product)

    def _milliseconds(self) -> float:
        self._now.record()
        self._now.synchronize()
        return float(self._begin.elapsed_time(self._now))


def _hang(place: str) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(3600)


def _kill(place: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fail(place: str) -> NoReturn:
    if place == "save":
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (injected)")
    raise MemoryError(f"out of memory (injected at {place})")


_ENDS: dict[str, Callable[[str], None]] = {"hang": _hang, "kill": _kill, "fail": _fail}
