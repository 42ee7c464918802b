"""What a plan is made for, from where it lies: a job's profile, or a job file."""

from pathlib import Path

from trimtab import jobfile
from trimtab.balance.model.accelerators import ACCELERATORS
from trimtab.diagnosis.answer import of_profile
from trimtab.planning.observed import PlanError, observed
from trimtab.planning.situation import Case, from_job, from_profile
from trimtab.report.find import Recorded, load

DEFAULT_GPU = "h100"


def of_job_file(path: Path, nodes: int | None, gpus_per_node: int | None, gpu: str | None) -> Case:
    """By default on one node that holds one replica. Raises PlanError, JobError."""
    job = jobfile.load(path)
    if gpu is not None and gpu not in ACCELERATORS:
        raise PlanError(f"--gpu {gpu}: not known; choose from: {', '.join(ACCELERATORS)}")
    one_replica = job.parallel.tensor * job.parallel.pipeline
    return from_job(path.name, job, nodes or 1, gpus_per_node or one_replica, gpu or DEFAULT_GPU)


def of_recorded(target: str, attempt: str | None, profiles: Path | None) -> Case:
    """Of a job id or a file; by default the newest attempt. Raises PlanError, DiagnosisError, ReportError."""
    if attempt == "all":
        raise PlanError("--attempt all: a plan is made for one attempt; name its number")
    (recorded,) = load(target, attempt, profiles)
    return of_attempt(recorded)


def of_attempt(recorded: Recorded) -> Case:
    """Of an attempt that has been found. Raises PlanError, DiagnosisError, ReportError."""
    summary = recorded.summary
    number = f", attempt {summary.attempt_number}" if summary.attempt_number else ""
    with recorded.profile() as profile:
        return from_profile(observed(f"Job {summary.job_id}{number}", profile), of_profile(recorded))
