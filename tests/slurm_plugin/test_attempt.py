import json

import pytest

from trimtab_slurm.attempt import Attempt, AttemptError, from_hook

HOOK = {
    "SLURM_CLUSTER_NAME": "lab",
    "SLURM_JOB_ID": "7",
    "SLURMD_NODENAME": "n1",
    "SLURM_JOB_USER": "ann",
    "SLURM_JOB_UID": "1000",
    "SLURM_JOB_GID": "1001",
    "SLURM_JOB_RESTART_COUNT": "2",
    "SLURM_NODELIST": "n[1-2]",
    "SLURM_JOB_GPUS": "0,1",
    "SLURM_JOB_SLUID": "sABC",
}


def test_a_prolog_environment_names_an_attempt():
    assert from_hook(HOOK, 5.5) == Attempt(
        "lab", 7, 5.5, "n1", "ann", 1000, 1001, 2, ("n1", "n2"), {"SLURM_JOB_GPUS": "0,1"}, "sABC"
    )


def test_the_start_is_the_jobs_where_slurm_says_it():
    assert from_hook(HOOK | {"SLURM_JOB_START_TIME": "1780000000"}, 5.5).start_seconds == 1780000000.0
    assert from_hook(HOOK | {"SLURM_JOB_START_TIME": "0"}, 5.5).start_seconds == 5.5


def test_what_is_no_part_of_the_identity_may_be_missing():
    few = {key: HOOK[key] for key in ("SLURM_JOB_ID", "SLURMD_NODENAME", "SLURM_JOB_UID", "SLURM_JOB_GID")}
    assert from_hook(few | {"SLURM_NODELIST": "n["}, 5.5) == Attempt("cluster", 7, 5.5, "n1", "", 1000, 1001, 0, (), {})


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("SLURM_JOB_ID", ""),
        ("SLURM_JOB_ID", "7_1"),
        ("SLURM_JOB_ID", "٧"),
        ("SLURM_JOB_UID", "-1"),
        ("SLURMD_NODENAME", ""),
        ("SLURMD_NODENAME", "../n1"),
        ("SLURMD_NODENAME", ".."),
        ("SLURM_CLUSTER_NAME", "a/b"),
    ],
)
def test_what_could_leave_its_directory_or_is_no_number_is_refused(variable, value):
    with pytest.raises(AttemptError, match=variable):
        from_hook(HOOK | {variable: value}, 5.5)


def test_an_attempt_survives_json(attempt):
    assert Attempt.from_dict(json.loads(json.dumps(attempt.to_dict()))) == attempt
