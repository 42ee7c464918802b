"""What the wrapper learns of a run, kept as it comes: a journal of JSON lines, then the profile's training part.

The journal is what survives a kill of the wrapper; `recover` makes a part of it afterwards.
"""

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.balance.measuring.steps import Step, assemble
from trimtab.protocol import Failed, Hello, Message, Notice, Probe, StepReport, job_from_json
from trimtab_slurm import profile
from trimtab_slurm.contents import Column, Event, Profile, Table, TrainingProfile
from trimtab_slurm.devices.cpu import task_uuid
from trimtab_slurm.directories import PARTS
from trimtab_slurm.merging import stamp


@dataclass(frozen=True)
class RunIdentity:
    """Which attempt a journal is of."""

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


class Recorder:
    """Appends to the journal of one attempt; each line is in the file when the call returns."""

    def __init__(self, job_directory: Path, identity: RunIdentity) -> None:
        parts = job_directory / PARTS
        parts.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = parts / f"training-{stamp(identity.start_seconds)}.jsonl"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        self._file = os.fdopen(descriptor, "a", buffering=1, encoding="utf-8")
        self._write("identity", asdict(identity))

    def message(self, message: Message) -> None:
        """Keep a message of a rank."""
        body = asdict(message)
        body.pop("token", None)
        self._write(type(message).__name__, body)

    def event(self, kind: str, text: str) -> None:
        """Keep something that happened in the wrapper."""
        self._write("event", {"kind": kind, "text": text})

    def finish(self, exit_code: int, outcome: str) -> Path:
        """Note the end, and turn the journal into the training part; returns the part's path."""
        self._write("end", {"exit_code": exit_code, "outcome": outcome})
        self._file.close()
        return _make_part(self.path, _intact(self.path))

    def _write(self, kind: str, body: dict[str, Any]) -> None:
        line = {"time_seconds": time.time(), "kind": kind, "body": body}
        self._file.write(json.dumps(line) + "\n")


def recover(job_directory: Path) -> list[Path]:
    """Make the training part of each journal that has none yet: its wrapper was killed, or is still at work."""
    journals = sorted((job_directory / PARTS).glob("training-*.jsonl"))
    return [_make_part(journal, lines) for journal in journals if (lines := _intact(journal))]


def _make_part(journal: Path, lines: Sequence[dict[str, Any]]) -> Path:
    part = journal.with_suffix(".h5")
    profile.write(part, training_part(lines))
    if lines[-1]["kind"] == "end":
        journal.unlink()
    return part


def training_part(lines: Sequence[dict[str, Any]]) -> Profile:
    """A journal's lines as a Profile that holds only the training part. The first line is the identity."""
    identity = RunIdentity(**lines[0]["body"] | {"nodes": tuple(lines[0]["body"]["nodes"])})
    end_seconds = lines[-1]["time_seconds"]
    hellos: dict[int, Hello] = {}
    reports: dict[int, list[StepReport]] = defaultdict(list)
    probes: list[Probe] = []
    events: list[Event] = []
    ending: dict[str, Any] = {
        "exit_code": -1,
        "outcome": "the wrapper has not said how it ended: it was killed, or is still at work",
    }
    for line in lines[1:]:
        body = line["body"]
        match line["kind"]:
            case "Hello":
                hello = Hello(token="", **body | {"layers": tuple(body["layers"])})
                hellos[hello.rank] = hello
            case "StepReport":
                reports[body["step"]].append(StepReport(**body))
            case "Probe":
                probes.append(Probe(**body))
            case "Notice":
                notice = Notice(**body)
                events.append(Event(line["time_seconds"], notice.kind, notice.text))
            case "Failed":
                failed = Failed(**body)
                events.append(Event(line["time_seconds"], "failed", f"rank {failed.rank}: {failed.error}"))
            case "event":
                events.append(Event(line["time_seconds"], body["kind"], body["text"]))
            case "end":
                ending = body
    job = job_from_json(identity.job)
    steps = [assemble(reports[step], hellos) for step in sorted(reports)]
    training = TrainingProfile(
        start_seconds=identity.start_seconds,
        end_seconds=end_seconds,
        attributes={
            "tensor": identity.tensor,
            "pipeline": identity.pipeline,
            "data": identity.data,
            "exit_code": ending["exit_code"],
            "outcome": ending["outcome"],
            "trigger_ratio": job.balance.trigger_ratio,
            "window_steps": job.balance.window_steps,
            "job": identity.job,
        },
        steps=_steps_table(steps, job.batch.microbatch_size, job.batch.global_batch_size),
        stages=_stages_table(steps),
        ranks=_ranks_table([hellos[rank] for rank in sorted(hellos)]),
        events=tuple(events),
        probes=_probes_table(probes) if probes else {},
    )
    return Profile(
        cluster=identity.cluster,
        job_id=identity.job_id,
        user=identity.user,
        start_seconds=identity.start_seconds,
        end_seconds=end_seconds,
        restart_count=identity.restart_count,
        expected_nodes=identity.nodes,
        nodes=(),
        training=training,
    )


def _intact(journal: Path) -> list[dict[str, Any]]:
    """The lines up to the first damaged one: a kill can only have torn the last."""
    lines: list[dict[str, Any]] = []
    for line in journal.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines


def _steps_table(steps: Sequence[Step], microbatch_size: int, global_batch_size: int) -> Table:
    return {
        "step": _whole(step.step for step in steps),
        "time_seconds": _real(step.time_seconds for step in steps),
        "duration_seconds": _real(step.duration_seconds for step in steps),
        "loss": _real(step.loss for step in steps),
        "gradient_norm": _real(step.gradient_norm for step in steps),
        "learning_rate": _real(step.learning_rate for step in steps),
        "tokens": _whole(step.tokens for step in steps),
        "microbatch_size": _whole(microbatch_size for _ in steps),
        "global_batch_size": _whole(global_batch_size for _ in steps),
        "consumed_samples": _real(step.consumed_samples for step in steps),
    }


def _stages_table(steps: Sequence[Step]) -> Table:
    stages = [stage for step in steps for stage in step.stages]
    return {
        "step": _whole(stage.step for stage in stages),
        "replica": _whole(stage.replica for stage in stages),
        "stage": _whole(stage.stage for stage in stages),
        "forward_seconds": _real(stage.forward_seconds for stage in stages),
        "backward_seconds": _real(stage.backward_seconds for stage in stages),
        "microbatches": _whole(stage.microbatches for stage in stages),
        "tokens": _whole(stage.tokens for stage in stages),
        "squared_lengths": _whole(stage.squared_lengths for stage in stages),
        "peak_memory_bytes": _whole(stage.peak_memory_bytes for stage in stages),
    }


def _ranks_table(hellos: Sequence[Hello]) -> Table:
    return {
        "rank": _whole(hello.rank for hello in hellos),
        "node": _text(hello.node for hello in hellos),
        "local_rank": _whole(hello.local_rank for hello in hellos),
        "device": _text(hello.device or task_uuid(hello.node, hello.rank) for hello in hellos),
        "tensor_rank": _whole(hello.tensor_rank for hello in hellos),
        "pipeline_rank": _whole(hello.pipeline_rank for hello in hellos),
        "data_rank": _whole(hello.data_rank for hello in hellos),
        "layers": _text(_spans(hello.layers) for hello in hellos),
        "parameters": _whole(hello.parameters for hello in hellos),
    }


def _probes_table(probes: Sequence[Probe]) -> Table:
    return {
        "step": _whole(probe.step for probe in probes),
        "rank": _whole(probe.rank for probe in probes),
        "seconds": _real(probe.seconds for probe in probes),
    }


def _spans(layers: Sequence[int]) -> str:
    """(0, 1, 2, 5) -> "0-2,5"."""
    spans: list[list[int]] = []
    for layer in sorted(layers):
        if spans and layer == spans[-1][-1] + 1:
            spans[-1][1:] = [layer]
        else:
            spans.append([layer])
    return ",".join("-".join(map(str, span)) for span in spans)


def _whole(values: Iterable[int]) -> Column:
    return np.array(list(values), dtype=np.int64)


def _real(values: Iterable[float | None]) -> Column:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _text(values: Iterable[str]) -> Column:
    return np.array(list(values), dtype=np.str_)
