"""What follows from a decision: the lines of the job file to change, or the command; and everything as JSON. Pure."""

import json
import math
import shlex
from dataclasses import asdict, dataclass, replace
from typing import Any

from trimtab.balance.deciding.candidates import candidates
from trimtab.balance.deciding.decide import Considered, Decision, Verdict, doubt_of_cause, weigh
from trimtab.balance.deciding.ledger import Ledger
from trimtab.balance.deciding.situation import Kind
from trimtab.planning.situation import Case
from trimtab.protocol import Job, Layout, Parallel, layout_of

SCHEMA = 1
LOOKS_ALIKE = (
    "with one replica a slow device looks like long layers; to be sure, let it run until its devices are probed, or "
    "run two replicas"
)


@dataclass(frozen=True)
class Answer:
    """A case and what was decided."""

    case: Case
    decision: Decision

    @property
    def job_lines(self) -> tuple[str, ...]:
        """What to change in the job file, for it to begin with what is chosen; empty: nothing, or nothing that a job
        file can say."""
        chosen = self.decision.order or self.decision.considered[0]
        return job_lines(self.case.job, changed_job(self.case.job, chosen))

    @property
    def sentence(self) -> str:
        """The decision, its reason, and how it is carried out."""
        return f"{self.told} {self.to_do}".strip()

    @property
    def told(self) -> str:
        """The decision and its reason."""
        decision, situation = self.decision, self.case.situation
        order, doubt = decision.order, doubt_of_cause(situation)
        if order is None:
            cannot_run = any(one.kind is Kind.NOTHING and one.verdict is Verdict.NO_ROOM for one in decision.considered)
            return f"{_capitalized(decision.reason)}." if cannot_run else f"Change nothing: {decision.reason}."
        text = f"{_capitalized(order.kind)}: {order.change}, which {order.reason}."
        if doubt and situation.shape.data == 1 and not self.case.probed:
            doubt += f": {LOOKS_ALIKE}"
        return f"{_capitalized(doubt)}. {text}" if doubt else text

    @property
    def to_do(self) -> str:
        """How the order is carried out, in a sentence; empty: there is none."""
        order, lines = self.decision.order, self.job_lines
        if order is None:
            return f"What it was reshaped to while it ran is, in the job file{self._options}:" if lines else ""
        if order.exclude:
            nodes = f" --nodes {order.nodes}" if order.nodes else ""
            without = shlex.quote(",".join(order.exclude))
            again = f"Submit it again with: trimtab submit ...{nodes} -- --exclude={without}"
            return f"{again}, and in the job file:" if lines else again
        if lines and order.kind not in (Kind.MICROBATCHES, Kind.REPACK):
            return f"In the job file, for the next run{self._options}:"
        no_key = "No key of the job file says this: it takes an order to running ranks."
        return f"{no_key} What it was reshaped to before is, in the job file:" if lines else no_key

    @property
    def _options(self) -> str:
        """What the plan is made for, as a submission says it; empty where the nodes differ."""
        case = self.case
        if case.nodes * case.gpus_per_node != case.situation.shape.world_size:
            return ""
        return f", with --nodes {case.nodes} --gpus-per-node {case.gpus_per_node}"


def answer(case: Case) -> Answer:
    """Decide. What the fault has cost since its trigger counts as endured."""
    return Answer(case, decided(case, Ledger(), case.situation.lasting_seconds)[0])


def decided(case: Case, ledger: Ledger, since_seconds: float) -> tuple[Decision, Ledger]:
    """The decision, and the ledger that it rests on: with what the fault has cost in the last `since_seconds`."""
    situation, policy = case.situation, case.job.balance
    found = candidates(situation)
    loss_ratio = weigh(found, situation, policy, ledger).loss_ratio
    ledger = ledger.endured(situation.fault, loss_ratio * since_seconds)
    return weigh(found, situation, policy, ledger), ledger


def changed_job(job: Job, order: Considered) -> Job:
    """The job that begins with what an order asks for; the same where no key of it says that."""
    plan = order.plan
    if plan is None:
        return job
    if order.configuration is None:
        return begun_with(job, plan.layout, plan.recomputed_layers)
    tensor, microbatch_size = order.configuration.shape.tensor, order.configuration.microbatch_size
    parallel = _parallel(job.parallel, plan.layout, plan.recomputed_layers)
    parallel = replace(parallel, tensor=tensor, sequence_parallel=parallel.sequence_parallel and tensor > 1)
    return replace(job, parallel=parallel, batch=replace(job.batch, microbatch_size=microbatch_size))


def begun_with(job: Job, layout: Layout, recomputed_layers: tuple[int, ...]) -> Job:
    """The job that begins with them; the same where it does so already. `recomputed_layers` is [S]."""
    own = job.parallel.recomputed_layers
    if layout == layout_of(job) and _any(recomputed_layers) == _any(own):
        return job
    return replace(job, parallel=_parallel(job.parallel, layout, recomputed_layers))


def _parallel(own: Parallel, layout: Layout, recomputed_layers: tuple[int, ...]) -> Parallel:
    """Equal shares need no text, but in the place of another one."""
    equal = len(set(layout.layers)) == 1
    return replace(
        own,
        pipeline=layout.stages,
        virtual=layout.virtual,
        layout="" if equal and not own.layout else str(layout),
        recomputed_layers=_any(recomputed_layers),
    )


def _any(recomputed_layers: tuple[int, ...]) -> tuple[int, ...]:
    """As a job file has it: none at all need no counts."""
    return recomputed_layers if any(recomputed_layers) else ()


def job_lines(before: Job, after: Job) -> tuple[str, ...]:
    """The keys of a job file that differ, below their sections."""
    lines = []
    for name in ("parallel", "batch"):
        old, new = asdict(getattr(before, name)), asdict(getattr(after, name))
        changed = [f"{key} = {json.dumps(value)}" for key, value in new.items() if value != old[key]]
        lines += [f"[{name}]", *changed] if changed else []
    return tuple(lines)


def to_json(answer: Answer) -> str:
    """Every figure. What is not known is null; there is no NaN."""
    case, decision = answer.case, answer.decision
    situation, detection, diagnosis = case.situation, case.detection, case.diagnosis
    values = {
        "schema": SCHEMA,
        "title": case.title,
        "ended": case.ended,
        "shape": asdict(situation.shape),
        "nodes": case.nodes,
        "gpus_per_node": case.gpus_per_node,
        "gpu": case.gpu or None,
        "schedule": situation.plan.schedule,
        "layout": str(situation.plan.layout),
        "microbatches": situation.plan.microbatches,
        "step_seconds": situation.step_seconds,
        "measured_steps": case.measured_steps,
        "overhead_seconds": situation.hardware.overhead_seconds,
        "stages_at_once": situation.hardware.stages_at_once,
        "seconds_left": situation.seconds_left,
        "utilization_ratio": situation.utilization_ratio,
        "needed_bytes": case.needed_bytes,
        "device_bytes": case.device_bytes,
        "imbalance": detection
        and {
            "triggered": detection.triggered,
            "since_step": detection.since_step,
            "place": detection.place,
            "ratio": detection.ratio,
            "lower_ratio": detection.lower_ratio,
        },
        "diagnosis": diagnosis
        and {
            "cause": diagnosis.cause,
            "places": diagnosis.places,
            "confidence": diagnosis.confidence,
            "evidence": [evidence.text for evidence in diagnosis.evidence],
        },
        "considered": [_considered(one) for one in decision.considered],
        "order": decision.order and decision.order.kind,
        "reason": decision.reason,
        "job_file": answer.job_lines,
        "to_do": answer.to_do,
        "assumptions": case.assumptions,
    }
    return json.dumps(_known(values), indent=2, allow_nan=False)


def _considered(one: Considered) -> dict[str, Any]:
    return {
        "kind": one.kind,
        "change": one.change,
        "layout": str(one.plan.layout) if one.plan else None,
        "predicted_step_seconds": one.predicted_step_seconds,
        "gain_ratio": one.gain_ratio,
        "cost_seconds": one.cost_seconds,
        "horizon_seconds": one.horizon_seconds,
        "net_seconds": one.net_seconds,
        "fits": one.fits,
        "fullest_stage": one.room and one.room.stage,
        "peak_memory_bytes": one.room and one.room.needed_bytes,
        "memory_bytes": one.room and one.room.held_bytes,
        "verdict": one.verdict,
        "reason": one.reason,
    }


def _known(value: Any) -> Any:
    """With None for every number that is none, or has no end."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _known(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_known(each) for each in value]
    return value


def _capitalized(text: str) -> str:
    """The first letter alone: names keep theirs."""
    return text[:1].upper() + text[1:]
