"""What a plan is made for, from where it lies: a job's profile, or a job file."""

import math
from pathlib import Path

from trimtab import jobfile
from trimtab.balance.model.accelerators import ACCELERATORS
from trimtab.diagnosis.answer import of_profile
from trimtab.planning.devices import equipment_of
from trimtab.planning.observed import PlanError, observed
from trimtab.planning.situation import Case, from_job, from_run
from trimtab.report.find import Recorded, load

DEFAULT_GPU = "h100"
MOST_GPUS_OF_A_NODE = 8
"""Of what is taken where no number is given."""


def of_job_file(path: Path, nodes: int | None, gpus_per_node: int | None, gpu: str | None) -> Case:
    """By default on as many nodes as one replica takes. Raises PlanError, JobError."""
    job = jobfile.load(path)
    if gpu is not None and gpu not in ACCELERATORS:
        raise PlanError(f"--gpu {gpu}: not known; choose from: {', '.join(ACCELERATORS)}")
    one_replica = job.parallel.tensor * job.parallel.pipeline
    gpus_per_node = gpus_per_node or min(one_replica, MOST_GPUS_OF_A_NODE)
    if nodes is None:
        nodes = math.ceil(one_replica / gpus_per_node)
        if nodes > 1 and one_replica % gpus_per_node:
            raise PlanError(
                f"{path.name}: a replica of {one_replica} GPUs does not divide into nodes of {gpus_per_node}; pass "
                "--nodes and --gpus-per-node"
            )
    return from_job(path.name, job, nodes, gpus_per_node, gpu or DEFAULT_GPU)


def of_recorded(target: str, attempt: str | None, profiles: Path | None) -> Case:
    """Of a job id or a file; by default the newest attempt. Raises PlanError, DiagnosisError, ReportError."""
    if target.endswith(".parquet"):
        raise PlanError(f"{target}: a trace tells no costs of layers; trimtab diagnose {target} --meta META.yaml")
    if not target:
        raise PlanError("no target: name a job id, the HDF5 file of an attempt, or a job.toml")
    if attempt == "all":
        raise PlanError("--attempt all: a plan is made for one attempt; name its number")
    (recorded,) = load(target, attempt, profiles)
    return of_attempt(recorded)


def of_attempt(recorded: Recorded) -> Case:
    """Of an attempt that has been found. Raises PlanError, DiagnosisError, ReportError."""
    summary = recorded.summary
    number = f", attempt {summary.attempt_number}" if summary.attempt_number else ""
    with recorded.profile() as profile:
        run = observed(f"Job {summary.job_id}{number}", profile)
        equipment = equipment_of(profile, run.training, run.first_seconds, run.last_seconds)
        return from_run(run, of_profile(recorded), equipment, run.detection)
