"""What a report says is to be changed: of stages that are apart what `trimtab plan` works out, else what was found."""

from collections.abc import Iterator
from dataclasses import replace

from trimtab.balance.deciding.words import unequal_shares
from trimtab.diagnosis.answer import DiagnosisError
from trimtab.planning.answer import Answer, answer, begun_with, job_lines
from trimtab.planning.observed import PlanError, job_of
from trimtab.planning.sources import of_attempt
from trimtab.protocol import Job, JobError, Layout, Shape
from trimtab.report.find import Recorded
from trimtab.report.summary import Finding, Training


def advised(recorded: Recorded) -> Recorded:
    """With what there is to be changed among the findings. Raises ReportError."""
    summary = recorded.summary
    try:
        found = tuple(_findings(recorded))
    except (PlanError, DiagnosisError, JobError) as error:
        found = (Finding("plan", f"What to change cannot be worked out: {error}."),)
    return replace(recorded, summary=replace(summary, findings=(*summary.findings, *found)))


def _findings(recorded: Recorded) -> Iterator[Finding]:
    summary, training = recorded.summary, recorded.summary.training
    if training is None:
        return
    apart = any(finding.kind == "imbalance" for finding in summary.findings)
    if apart:
        yield from _of_stages_apart(answer(of_attempt(recorded)))
    shorter = not apart and _got_shorter(training)
    unequal = training.shares is not None and training.shares.unequal_ratio > 0
    if not (shorter or unequal):
        return
    with recorded.profile() as profile:
        if profile.training is None:  # the file has been replaced since
            return
        job = job_of(f"job {summary.job_id}", profile.training)
    if shorter:
        yield from _of_what_was_found(training, job)
    if unequal and (told := unequal_shares(job, Shape(training.tensor, training.pipeline, training.data))):
        yield Finding("plan", f"{told[:1].upper()}{told[1:]}.")


def _of_stages_apart(found: Answer) -> Iterator[Finding]:
    diagnosis = found.case.diagnosis
    if diagnosis is not None:
        evidence = "; ".join(each.text for each in diagnosis.evidence)
        yield Finding("cause", f"Cause: {diagnosis.cause} (confidence {diagnosis.confidence:.0%}): {evidence}.")
    yield Finding("plan", " ".join([found.sentence, *found.job_lines]))


def _got_shorter(training: Training) -> bool:
    """Whether steps take less time under the latest setting than under the first that was measured."""
    seconds = [setting.step_seconds for setting in training.settings if setting.step_seconds]
    return len(seconds) > 1 and seconds[-1] < seconds[0]


def _of_what_was_found(training: Training, job: Job) -> Iterator[Finding]:
    """What a run was reshaped to, for the job file to begin with. Why it was is not recorded."""
    setting = training.settings[training.setting]
    after = begun_with(job, Layout(setting.layers, training.pipeline), setting.recomputed_layers)
    if lines := job_lines(job, after):
        text = (
            "What it was reshaped to while it ran has made steps shorter. For the next run to begin with it, unless it "
            "was for a slow device, in the job file:"
        )
        yield Finding("plan", " ".join([text, *lines]))
