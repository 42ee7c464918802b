import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from trimtab import submit
from trimtab.cli import main
from trimtab.protocol import Job, JobError, job_from_dict

REQUEST = submit.Request(nodes=2, gpus_per_node=2, cpus_per_gpu=1, time_limit="0:10:00")
JOB = job_from_dict({"parallel": {"tensor": 2, "pipeline": 2}})


def directives(script):
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


def test_the_templates_that_come_along():
    assert submit.template_names() == ["cpu-demo", "multi-node", "single-node"]


@pytest.mark.parametrize("template", submit.template_names())
def test_a_template_leaves_the_number_of_tasks_open_and_ends_in_trimtab_run(tmp_path, template):
    request = submit.Request(nodes=1, gpus_per_node=4, cpus_per_gpu=2, time_limit="0:10:00")
    script = submit.render(template, tmp_path / "my job.toml", JOB, request)
    assert not any(line.startswith(("--ntasks", "-n ")) for line in directives(script))
    assert {"--nodes=1", "--gpus-per-node=4", "--requeue", "--signal=B:USR1@120", "--job-name=my_job"} <= set(
        directives(script)
    )
    assert script.splitlines()[-1].endswith(f"-m trimtab run '{tmp_path}/my job.toml'")
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


def test_further_arguments_go_to_sbatch():
    request = submit.Request(2, 2, 1, "1:00", sbatch_arguments=("--account=lab", "-p long"))
    assert directives(submit.render("multi-node", Path("j.toml"), JOB, request))[-2:] == ["--account=lab", "-p long"]


@pytest.mark.parametrize("argument", ["account=lab", "--account=a\nrm -rf /"])
def test_what_is_no_argument_is_refused(argument):
    with pytest.raises(JobError, match="sbatch argument"):
        submit.render("multi-node", Path("j.toml"), JOB, submit.Request(2, 2, 1, "1:00", sbatch_arguments=(argument,)))


def test_no_requeue_where_the_job_file_says_so():
    job = job_from_dict({"requeue": {"enabled": False}})
    script = submit.render("single-node", Path("j.toml"), job, submit.Request(1, 1, 1, "1:00"))
    assert "--no-requeue" in directives(script)


def test_a_request_of_another_size_is_refused_before_anything_is_submitted():
    with pytest.raises(JobError, match="allocation gives 3: choose --nodes x --gpus-per-node to match"):
        submit.render("multi-node", Path("j.toml"), JOB, submit.Request(3, 1, 1, "1:00"))


def test_an_unknown_template_lists_the_known_ones():
    with pytest.raises(JobError, match='choose from: "cpu-demo", "multi-node", "single-node"'):
        submit.render("multinode", Path("j.toml"), Job(), submit.Request(1, 1, 1, "1:00"))


def test_a_template_of_the_users_own(tmp_path):
    own = tmp_path / "own.j2"
    own.write_text("#!/bin/sh\n{% include 'common.j2' %}")
    assert submit.render(str(own), Path("j.toml"), JOB, REQUEST).startswith("#!/bin/sh\n#SBATCH --output=")
    own.write_text("{{ no_such_thing }}")
    with pytest.raises(JobError, match="no_such_thing"):
        submit.render(str(own), Path("j.toml"), JOB, REQUEST)


def test_dry_run_prints_the_script_and_a_bad_job_file_is_refused(tmp_path):
    job_file = tmp_path / "job.toml"
    job_file.write_text("[model]\nlayer = 3\n")
    refused = CliRunner().invoke(main, ["submit", str(job_file), "--dry-run"])
    assert refused.exit_code == 2
    assert "model.layer = 3: is not a key of a job file; did you mean layers?" in refused.output
    job_file.write_text("[parallel]\ntensor = 2\n")
    shown = CliRunner().invoke(main, ["submit", str(job_file), "--dry-run", "--gpus-per-node", "2"])
    assert shown.exit_code == 0
    assert shown.output.startswith("#!/bin/bash\n")


@pytest.mark.slurm
@pytest.mark.parametrize("template", submit.template_names())
def test_slurm_accepts_each_template(sandbox, template):
    request = submit.Request(nodes=1, gpus_per_node=2, cpus_per_gpu=1, time_limit="0:10:00")
    script = submit.render(template, Path("job.toml"), job_from_dict({"parallel": {"tensor": 2}}), request)
    tested = subprocess.run(
        ["sbatch", "--test-only"], input=script, env=sandbox.environment, capture_output=True, text=True
    )
    assert tested.returncode == 0, tested.stderr
