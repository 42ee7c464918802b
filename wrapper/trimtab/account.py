"""What has been told of a run so far: the training part of a profile, at any time while it grows.

Steps are put together as soon as all ranks have reported them, and kept as columns: in memory they take what the
profile takes, however many ranks there are.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from trimtab import stacks
from trimtab.balance.measuring.steps import StageStep, Step, assemble
from trimtab.protocol import (
    Failed,
    Hello,
    JobError,
    Notice,
    Probe,
    Reshaped,
    Saved,
    Setting,
    Shape,
    Stack,
    StepReport,
    job_from_json,
    setting_from,
    setting_of,
)
from trimtab.wording import data_size, duration, number_spans
from trimtab_slurm.contents import Column, Event, Profile, Table, TrainingProfile
from trimtab_slurm.devices.cpu import task_uuid

MOST_BEHIND_STEPS = 64
"""Ranks meet in every step: what a step still lacks when so many later ones have begun has been lost."""

# Columns by the kind of number in them: q whole, d real.
_STEP_COLUMNS = {
    "step": "q",
    "time_seconds": "d",
    "duration_seconds": "d",
    "loss": "d",
    "gradient_norm": "d",
    "learning_rate": "d",
    "tokens": "q",
    "consumed_samples": "d",
}
_STAGE_COLUMNS = {
    "step": "q",
    "replica": "q",
    "stage": "q",
    "forward_seconds": "d",
    "backward_seconds": "d",
    "microbatches": "q",
    "tokens": "q",
    "squared_lengths": "q",
    "peak_memory_bytes": "q",
}


@dataclass(frozen=True)
class RunIdentity:
    """Which attempt this is."""

    cluster: str
    job_id: int
    user: str
    restart_count: int
    start_seconds: float
    nodes: tuple[str, ...]
    job: str
    """The job file's content as JSON."""
    tensor: int
    pipeline: int
    data: int

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline * self.data


@dataclass(frozen=True)
class OrderRecord:
    """What the wrapper set out to change: why, what it expected, and what became of it. None: there is no figure."""

    number: int
    """Place among the orders of the attempt, from 1. A later record of the same number takes the place of the first."""
    step: int
    """The first step that ran, or was to run, under it."""
    time_seconds: float
    """UTC, when it was given."""
    kind: str
    """What a user would call it: move layers, move microbatches, toggle recompute, checkpoint, exclude a node, ..."""
    before: str
    after: str
    reason: str
    before_seconds: float | None = None
    """Step time that was measured before it."""
    predicted_seconds: float | None = None
    """Step time that was expected of it."""
    measured_seconds: float | None = None
    """Step time that was measured after it."""
    cost_seconds: float | None = None
    """How long training stood still for it."""
    moved_bytes: float | None = None
    outcome: str = "given"
    """given, carried out, "refused: ...", asked for (of the user), or told only (dry run)."""


class Account:
    """Takes the lines of a journal as they come."""

    def __init__(self, identity: RunIdentity) -> None:
        self._identity = identity
        self._end_seconds = identity.start_seconds
        self.ended = False
        """Whether the wrapper has said how it ended."""
        self._exit_code = -1
        self._outcome = "the wrapper has not said how it ended: it was killed, or is still at work"
        self._ranks: dict[int, Hello] = {}
        self._pending: dict[int, list[StepReport]] = {}
        self._closed: set[int] = set()
        self._job = job_from_json(identity.job)
        self._steps, self._stages = _Columns(_STEP_COLUMNS), _Columns(_STAGE_COLUMNS)
        self._probes: list[Probe] = []
        self._saves: list[tuple[float, Saved]] = []
        self._settings: dict[int, Setting] = {}
        self._orders: dict[int, OrderRecord] = {}
        self._events: list[Event] = []
        self._refusals: set[str] = set()
        """What ranks found at fault in their input: told once for all of them."""

    def take(self, line: Mapping[str, Any]) -> None:
        """Count one line in: `time_seconds`, `kind` and `body`, as the recorder writes them."""
        body, self._end_seconds = line["body"], line["time_seconds"]
        match line["kind"]:
            case "Hello":
                hello = Hello(token="", **body | {"layers": tuple(body["layers"])})
                self._ranks[hello.rank] = hello
            case "StepReport":
                self._take_report(StepReport(**body))
            case "Probe":
                self._probes.append(Probe(**body))
            case "Saved":
                saved = Saved(**body)
                self._saves.append((line["time_seconds"], saved))
                self._tell(
                    "checkpoint",
                    f"saved {saved.directory}: {data_size(saved.size_bytes)}, training stood still for "
                    f"{duration(saved.seconds)}",
                )
            case "Reshaped":
                self._take_reshaped(Reshaped(**body | {"setting": setting_from(body["setting"])}))
            case "Stack":
                self._tell(stacks.EVENT_KIND, stacks.stack_text(Stack(**body)))
            case "Notice":
                notice = Notice(**body)
                self._tell(notice.kind, notice.text)
            case "Failed":
                self._take_failed(Failed(**body))
            case "event":
                self._tell(body["kind"], body["text"])
            case "setting":
                self._settings[body["first_step"]] = setting_from(body["setting"])
            case "order":
                record = OrderRecord(**body)
                self._orders[record.number] = record
            case "end":
                self.ended = True
                self._exit_code, self._outcome = body["exit_code"], body["outcome"]

    def _tell(self, kind: str, text: str) -> None:
        self._events.append(Event(self._end_seconds, kind, text))

    def _take_failed(self, failed: Failed) -> None:
        if failed.error not in self._refusals:
            self._tell("failed", f"rank {failed.rank}: {failed.error}")
        if failed.bad_input:
            self._refusals.add(failed.error)

    def _take_report(self, report: StepReport) -> None:
        if report.step in self._closed or report.rank not in self._ranks:
            return
        reports = self._pending.setdefault(report.step, [])
        reports.append(report)
        if len(reports) == self._identity.world_size:
            self._close(report.step)
        elif len(self._pending) > MOST_BEHIND_STEPS:
            self._close(min(self._pending))

    def _close(self, number: int) -> None:
        step = assemble(self._pending.pop(number), self._ranks)
        self._closed.add(number)
        self._steps.add(step)
        for stage in step.stages:
            self._stages.add(stage)

    def _take_reshaped(self, reshaped: Reshaped) -> None:
        if reshaped.refused:
            stays = f"refused: {reshaped.refused}; {reshaped.setting} stays"
            self._tell("reshape", f"after step {reshaped.step} {stays}")
            return
        self._settings[reshaped.step + 1] = reshaped.setting
        self._tell(
            "reshape",
            f"from step {reshaped.step + 1} on {reshaped.setting}: training stood still for "
            f"{duration(reshaped.seconds)}, {data_size(reshaped.moved_bytes)} were moved, the layers themselves are "
            f"{data_size(reshaped.least_bytes)}",
        )

    def training(self) -> TrainingProfile:
        """All of it, as it is now."""
        identity = self._identity
        unfinished = [assemble(reports, self._ranks) for reports in self._pending.values()]
        steps = self._steps_table(unfinished)
        settings = self._settings_from(int(steps["step"][0])) if len(steps["step"]) else self._settings
        return TrainingProfile(
            start_seconds=identity.start_seconds,
            end_seconds=self._end_seconds,
            attributes={
                "tensor": identity.tensor,
                "pipeline": identity.pipeline,
                "data": identity.data,
                "nodes": ",".join(identity.nodes),
                "exit_code": self._exit_code,
                "outcome": self._outcome,
                "trigger_ratio": self._job.balance.trigger_ratio,
                "window_steps": self._job.balance.window_steps,
                "job": identity.job,
            },
            steps=steps,
            stages=self._stages.table([stage for step in unfinished for stage in step.stages]),
            ranks=_ranks_table([self._ranks[rank] for rank in sorted(self._ranks)]),
            events=tuple(self._events),
            probes=_probes_table(self._probes) if self._probes else {},
            settings=_settings_table(settings) if settings else {},
            orders=_orders_table([self._orders[number] for number in sorted(self._orders)]) if self._orders else {},
            checkpoints=_checkpoints_table(self._saves) if self._saves else {},
        )

    def _steps_table(self, unfinished: Sequence[Step]) -> Table:
        table, batch = self._steps.table(unfinished), self._job.batch
        steps = len(table["step"])
        sizes = {name: np.full(steps, getattr(batch, name)) for name in ("microbatch_size", "global_batch_size")}
        return {**table, **sizes}

    def _settings_from(self, first_step: int) -> Mapping[int, Setting]:
        """What ran, from the first step on: what the job says, unless it was told otherwise."""
        identity = self._identity
        if self._settings and min(self._settings) <= first_step:
            return self._settings
        try:
            initial = setting_of(self._job, Shape(identity.tensor, identity.pipeline, identity.data))
        except JobError:
            return self._settings  # of a job that no ranks could have run
        return {first_step: initial, **self._settings}

    def profile(self) -> Profile:
        """All of it, as a profile that holds only the training part."""
        identity, training = self._identity, self.training()
        return Profile(
            cluster=identity.cluster,
            job_id=identity.job_id,
            user=identity.user,
            start_seconds=identity.start_seconds,
            end_seconds=training.end_seconds,
            restart_count=identity.restart_count,
            expected_nodes=identity.nodes,
            nodes=(),
            training=training,
        )


class _Columns:
    """A table of steps, or of stages in steps, that grows row by row."""

    def __init__(self, kinds: Mapping[str, str]) -> None:
        self._columns: dict[str, array[Any]] = {name: array(kind) for name, kind in kinds.items()}

    def add(self, row: Step | StageStep) -> None:
        """Another row, of any step."""
        for name, column in self._columns.items():
            column.append(_figure(row, name))

    def table(self, more: Sequence[Step | StageStep]) -> dict[str, Column]:
        """A copy of it, with further rows, by ascending step."""
        joined = {
            name: np.concatenate([column, np.array([_figure(row, name) for row in more], dtype=column.typecode)])
            for name, column in self._columns.items()
        }
        order = np.argsort(joined["step"], kind="stable")
        return {name: column[order] for name, column in joined.items()}


def _figure(row: Step | StageStep, name: str) -> float:
    value: float | None = getattr(row, name)
    return np.nan if value is None else value


def _ranks_table(hellos: Sequence[Hello]) -> Table:
    return {
        "rank": _whole(hello.rank for hello in hellos),
        "node": _text(hello.node for hello in hellos),
        "local_rank": _whole(hello.local_rank for hello in hellos),
        "device": _text(hello.device or task_uuid(hello.node, hello.rank) for hello in hellos),
        "tensor_rank": _whole(hello.tensor_rank for hello in hellos),
        "pipeline_rank": _whole(hello.pipeline_rank for hello in hellos),
        "data_rank": _whole(hello.data_rank for hello in hellos),
        "layers": _text(number_spans(hello.layers) for hello in hellos),
        "parameters": _whole(hello.parameters for hello in hellos),
    }


def _probes_table(probes: Sequence[Probe]) -> Table:
    return {
        "step": _whole(probe.step for probe in probes),
        "rank": _whole(probe.rank for probe in probes),
        "seconds": _real(probe.seconds for probe in probes),
    }


def _settings_table(settings: Mapping[int, Setting]) -> Table:
    ordered = [settings[step] for step in sorted(settings)]
    return {
        "step": _whole(sorted(settings)),
        "layout": _text(str(setting.layout) for setting in ordered),
        "microbatches": _text("|".join(map(str, setting.microbatches)) for setting in ordered),
        "recomputed_layers": _text("|".join(map(str, setting.recomputed_layers)) for setting in ordered),
    }


def _orders_table(orders: Sequence[OrderRecord]) -> Table:
    makers: dict[str, Callable[[Iterable[Any]], Column]] = {
        **dict.fromkeys(("number", "step"), _whole),
        **dict.fromkeys(("kind", "before", "after", "reason", "outcome"), _text),
    }
    names = [field.name for field in fields(OrderRecord)]
    return {name: makers.get(name, _real)(getattr(order, name) for order in orders) for name in names}


def _checkpoints_table(saves: Sequence[tuple[float, Saved]]) -> Table:
    return {
        "step": _whole(saved.step for _, saved in saves),
        "time_seconds": _real(seconds for seconds, _ in saves),
        "duration_seconds": _real(saved.seconds for _, saved in saves),
        "size_bytes": _whole(saved.size_bytes for _, saved in saves),
        "directory": _text(saved.directory for _, saved in saves),
    }


def _whole(values: Iterable[int]) -> Column:
    return np.array(list(values), dtype=np.int64)


def _real(values: Iterable[float | None]) -> Column:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _text(values: Iterable[str]) -> Column:
    return np.array(list(values), dtype=np.str_)
