"""A diagnosis of a file, with the ranks and nodes behind its places: found, as JSON, and in words."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from trimtab.balance.diagnosing.diagnose import diagnose
from trimtab.balance.diagnosing.findings import HARDWARE, Diagnosis, Evidence
from trimtab.balance.plan import Place
from trimtab.diagnosis import profiles, readings, traces
from trimtab.report.find import Recorded
from trimtab.report.summary import Device
from trimtab.wording import listed
from trimtab_slurm.contents import Profile


class DiagnosisError(Exception):
    """A file that cannot be diagnosed: names it, the reason, and what to do."""


@dataclass(frozen=True)
class Answer:
    """What is said of a file."""

    source: str
    diagnosis: Diagnosis
    ranks_of: Mapping[Place, tuple[int, ...]]
    nodes_of: Mapping[Place, tuple[str, ...]]
    """Empty for a trace: it names no nodes."""
    probed: Mapping[Place, float] = field(default_factory=dict)
    """How many times as long as the typical one a place took for the probe's fixed work; empty: none was probed."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the cause's places."""
        return tuple(sorted({rank for place in self.diagnosis.places for rank in self.ranks_of.get(place, ())}))

    @property
    def nodes(self) -> tuple[str, ...]:
        """Where slow hardware is; for other causes none."""
        if self.diagnosis.cause != HARDWARE:
            return ()
        return tuple(dict.fromkeys(node for place in self.diagnosis.places for node in self.nodes_of.get(place, ())))


def of_trace(trace_file: Path, meta_file: Path) -> Answer:
    """Diagnose a trace. Raises TraceError, DiagnosisError, and ModuleNotFoundError where a reader is not installed."""
    trace = traces.load(trace_file, meta_file)
    try:
        found = diagnose(trace.durations)
    except ValueError as error:
        raise DiagnosisError(f"{trace_file}: {error}") from error
    absent = [f"stage {stage} of replica {replica}" for replica, stage in trace.absent]
    if absent:
        limit = Evidence("limit", f"the trace has no operation of {listed(absent)}")
        found = replace(found, evidence=(*found.evidence, limit))
    return Answer(str(trace_file), found, trace.ranks, {})


def of_profile(recorded: Recorded) -> Answer:
    """Diagnose an attempt. Raises DiagnosisError, and ReportError where its file cannot be read again."""
    with recorded.profile() as profile:
        return diagnosis_of(str(recorded.file), profile, recorded.summary.devices)


def diagnosis_of(source: str, profile: Profile, seen: Sequence[Device] = ()) -> Answer:
    """Diagnose what a profile holds; `seen` are the devices that ranks ran on. Raises DiagnosisError."""
    if profile.training is None:
        raise DiagnosisError(f"{source}: holds no training part; only what `trimtab run` started has stages")
    try:
        training = profiles.read(profile.training)
        least = training.policy.clear_ratio
        probed = readings.probe_slowness(profile.training, least)
        read = readings.readings(profile, seen, training.start_seconds, training.end_seconds)
        known = readings.by_place(probed or readings.clock_slowness(read, least), training.ranks)
        found = diagnose(training.durations, training.policy, known)
    except ValueError as error:  # a JobError is one, too
        raise DiagnosisError(f"{source}: {error}") from error
    devices = readings.evidence(read, probed, least)
    found = replace(found, evidence=(*found.evidence, *_of_nodes(found, training.nodes), *devices))
    probed_places = readings.by_place(probed, training.ranks)
    return Answer(source, found, training.ranks, training.nodes, probed_places)


def _of_nodes(found: Diagnosis, nodes_of: Mapping[Place, tuple[str, ...]]) -> Iterator[Evidence]:
    """Nodes with several places, all of them slow."""
    slow = {each.place for each in found.slow_places}
    for node in dict.fromkeys(node for place in sorted(slow) for node in nodes_of.get(place, ())):
        places = {place for place, nodes in nodes_of.items() if node in nodes}
        if len(places) > 1 and places <= slow:
            text = f"all {len(places)} places on {node} are slow: look at the node rather than at one device"
            yield Evidence("node", text)


def to_json(answer: Answer) -> str:
    """Every figure; places as {"replica", "stage", "ranks"}."""
    found = answer.diagnosis

    def where(place: Place) -> dict[str, Any]:
        return {"replica": place[0], "stage": place[1], "ranks": list(answer.ranks_of.get(place, ()))}

    values = {
        "source": answer.source,
        "cause": found.cause,
        "secondary": found.secondary,
        "ranks": answer.ranks,
        "stages": found.stages,
        "nodes": answer.nodes,
        "places": [where(place) for place in found.places],
        "confidence": found.confidence,
        "slowdown_ratio": found.slowdown_ratio,
        "step_seconds": found.step_seconds,
        "ideal_seconds": found.ideal_seconds,
        "shares": dict(found.shares),
        "causes": [asdict(cost) for cost in found.causes],
        "evidence": [asdict(each) for each in found.evidence],
        "slow_places": [
            where(slow.place)
            | {"slower_ratio": slow.slower_ratio, "error_ratio": slow.error_ratio, "since_step": slow.since_step}
            for slow in found.slow_places
        ],
        "slow_links": [
            where(link.place) | {"seconds": link.seconds, "peers_seconds": link.peers_seconds}
            for link in found.slow_links
        ],
        "stage_ratios": found.stage_ratios,
        "across_replicas_ratio": found.across_replicas_ratio,
        "within_replica_ratio": found.within_replica_ratio,
    }
    return json.dumps(values, indent=2, allow_nan=False)
