import json

import pytest
from click.testing import CliRunner

from trimtab.cli import main
from trimtab_slurm import profile as profiles_of


def plan(*arguments):
    return CliRunner().invoke(main, ["plan", *map(str, arguments)])


@pytest.fixture
def recorded(tmp_path, profile):
    """A directory of profiles that has the one of job 42."""
    path = tmp_path / "lab" / "42" / "20260528T202640Z.h5"
    path.parent.mkdir(parents=True)
    profiles_of.write(path, profile)
    return path


def test_a_file_and_a_job_id_give_the_same_plan(recorded, tmp_path):
    by_file = plan(recorded)
    by_job = plan(42, "--profiles", tmp_path)
    assert (by_file.exit_code, by_job.exit_code) == (0, 0)
    assert by_file.output.startswith("Job 42\n")
    assert by_job.output.startswith("Job 42, attempt 1\n")
    assert by_file.output.splitlines()[1:] == by_job.output.splitlines()[1:]
    assert 'layout = "Ettttt|tttL"' in by_file.output


def test_json_is_one_object(recorded):
    found = json.loads(plan(recorded, "--json").output)
    assert found["order"] == "move layers"


def test_a_job_file_is_planned_before_it_has_run(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text("[parallel]\ntensor = 2\npipeline = 2\n")
    found = plan(path, "--gpu", "a100-80", "--nodes", "2", "--gpus-per-node", "2", "--json")
    assert found.exit_code == 0
    values = json.loads(found.output)
    assert values["shape"] == {"tensor": 2, "pipeline": 2, "data": 1}
    assert values["step_seconds"] is None
    assert "A100 80GB SXM" in values["assumptions"][0]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["none.h5"], "none.h5 does not exist"),
        (["none.toml"], 'job file = "none.toml": does not exist'),
        (["job.toml", "--gpu", "abacus"], "--gpu abacus: not known; choose from: a100-40, "),
        (["job.toml", "--nodes", "3"], "needs a multiple of 4 ranks, but the allocation gives 3"),
        (["job.toml", "--attempt", "1"], "--attempt and --profiles go with a job that has run, not with a job file"),
        (["42", "--nodes", "2"], "--nodes, --gpus-per-node and --gpu go with a job file, not with a job that has run"),
        ([""], "no target: name a job id, the HDF5 file of an attempt, or a job.toml"),
        (["trace.parquet"], "trimtab diagnose trace.parquet --meta META.yaml"),
        (["42", "--attempt", "all"], "--attempt all: a plan is made for one attempt; name its number"),
    ],
)
def test_what_cannot_be_planned_is_refused(tmp_path, monkeypatch, arguments, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text("[parallel]\npipeline = 4\n")
    found = plan(*arguments, *(["--gpus-per-node", "1"] if "--nodes" in arguments and arguments[0] != "42" else []))
    assert found.exit_code == 2
    assert found.stdout == ""
    assert reason in found.stderr
    assert found.stderr.startswith("trimtab: ")
    assert "Traceback" not in found.output
