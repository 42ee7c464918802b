"""What a report says of stages that are apart: the cause, and what to change, as `trimtab plan` works them out."""

from collections.abc import Iterator
from dataclasses import replace

from trimtab.diagnosis.answer import DiagnosisError
from trimtab.planning.answer import Answer, answer
from trimtab.planning.observed import PlanError
from trimtab.planning.sources import of_attempt
from trimtab.protocol import JobError
from trimtab.report.find import Recorded
from trimtab.report.summary import Finding


def advised(recorded: Recorded) -> Recorded:
    """With a cause and a plan among the findings where an imbalance is. Raises ReportError."""
    summary = recorded.summary
    if not any(finding.kind == "imbalance" for finding in summary.findings):
        return recorded
    try:
        found = tuple(_findings(answer(of_attempt(recorded))))
    except (PlanError, DiagnosisError, JobError) as error:
        found = (Finding("plan", f"What to change cannot be worked out: {error}."),)
    return replace(recorded, summary=replace(summary, findings=(*summary.findings, *found)))


def _findings(found: Answer) -> Iterator[Finding]:
    diagnosis = found.case.diagnosis
    if diagnosis is not None:
        evidence = "; ".join(each.text for each in diagnosis.evidence)
        yield Finding("cause", f"Cause: {diagnosis.cause} (confidence {diagnosis.confidence:.0%}): {evidence}.")
    yield Finding("plan", " ".join([found.sentence, *found.job_lines]))
