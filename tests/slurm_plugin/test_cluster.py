import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_slurm import cluster
from trimtab_slurm.cluster import CommandLineClient, PyslurmClient, SlurmError, client, parse_job, parse_node_states
from trimtab_slurm.nodelist import expand_nodes

DATA = Path(__file__).parent / "data"
VERSIONS = ["22.05.8", "24.11.5"]


@pytest.mark.parametrize(
    ("nodelist", "nodes"),
    [
        ("", ()),
        ("(null)", ()),
        ("n1", ("n1",)),
        ("n[1-4,7],gpu01", ("n1", "n2", "n3", "n4", "n7", "gpu01")),
        ("n[08-11]", ("n08", "n09", "n10", "n11")),
        ("n[098-101]", ("n098", "n099", "n100", "n101")),
        ("r[1-2]n[1-2]-ib", ("r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib")),
        ("a,b[2,1],c-d.e", ("a", "b2", "b1", "c-d.e")),
        ("[1-2]", ("1", "2")),
    ],
)
def test_node_lists_expand(nodelist, nodes):
    assert expand_nodes(nodelist) == nodes


@pytest.mark.parametrize(
    "nodelist",
    ["n[1-", "n1]", "n[3-1]", "n[a-b]", "n[1-2", "n[[1]]", "n[]", "a,,b", "a b", "n[1-99999999999]", "n[1-999][1-999]"],
)
def test_what_is_no_node_list_is_refused(nodelist):
    with pytest.raises(ValueError, match="is no node list"):
        expand_nodes(nodelist)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=50), st.integers(1, 8))
def test_a_node_list_expands_to_the_numbers_it_was_written_with(numbers, width):
    names = tuple(f"n{number:0{width}}" for number in numbers)
    assert expand_nodes("n[" + ",".join(f"{number:0{width}}" for number in numbers) + "]") == names
    assert expand_nodes(",".join(names)) == names


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("sample", ["jobs", "ended"])
def test_recorded_jobs_parse_to_their_twins(version, sample):
    text = (DATA / f"{sample}-{version}.txt").read_text()
    for twin in json.loads((DATA / f"expected-{version}.json").read_text())[sample]:
        assert asdict(parse_job(text, twin["job_id"])) == {**twin, "nodes": tuple(twin["nodes"])}


@pytest.mark.parametrize("version", VERSIONS)
def test_recorded_nodes_parse_to_their_twins(version):
    text = (DATA / f"nodes-{version}.txt").read_text()
    assert parse_node_states(text) == json.loads((DATA / f"expected-{version}.json").read_text())["nodes"]


def test_no_job_parses_to_none():
    assert parse_job("No jobs in the system\n", 1) is None


@pytest.mark.parametrize("state", ["CANCELLED", "TIMEOUT", "NODE_FAIL"])
def test_a_job_that_did_not_complete_never_has_exit_code_0(state):
    line = (DATA / "jobs-22.05.8.txt").read_text().splitlines()[0].replace("JobState=COMPLETED", f"JobState={state}")
    assert parse_job(line, 1).exit_code == 1


@pytest.mark.parametrize(
    ("state", "ended"),
    [("PENDING", False), ("RUNNING", False), ("COMPLETING", False), ("REQUEUED", False), ("SUSPENDED", False)]
    + [(state, True) for state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")],
)
def test_a_job_has_ended_in_final_states_only(state, ended):
    line = (DATA / "jobs-22.05.8.txt").read_text().splitlines()[2].replace("JobState=FAILED", f"JobState={state}")
    assert parse_job(line, 3).ended is ended


def test_a_missing_command_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmError, match="sbatch is not on this machine's PATH"):
        CommandLineClient().submit("#!/bin/sh\n")


def test_a_command_that_hangs_is_given_up(monkeypatch, tmp_path):
    _script(tmp_path / "scancel", "exec sleep 60")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(cluster, "TIMEOUT_SECONDS", 0.2)
    with pytest.raises(SlurmError, match=r"scancel did not answer within 0\.2 s"):
        CommandLineClient().cancel(1)


def test_an_answer_without_a_job_id_is_an_error(monkeypatch, tmp_path):
    _script(tmp_path / "sbatch", "echo queued, somehow")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SlurmError, match="'queued, somehow', which holds no job id"):
        CommandLineClient().submit("#!/bin/sh\n")


# pyslurm is built for one version of Slurm, and none that can be installed fits the Slurm of this test's machines:
# a module that is scripted stands for it.
PYSLURM = """
__version__ = "22.5.0"

class RPCError(Exception):
    pass

class _Job:
    id, state, state_reason = 7, "CANCELLED", "None"
    exit_code, exit_code_signal = 0, 15
    allocated_nodes, batch_host, start_time = "n[1-2]", "n1", 1796020071
    requeue_count, standard_output, working_directory, user_name = 1, "/tmp/out.txt", "/tmp", "ada"

class Job:
    @staticmethod
    def load(job_id):
        if job_id == 8:
            raise RPCError("Invalid job id specified")
        if job_id == 9:
            raise RPCError("Unable to contact slurm controller (connect failure)")
        return _Job
"""


@pytest.fixture
def fake_pyslurm(monkeypatch, tmp_path):
    _script(tmp_path / "scontrol", "echo slurm-wlm 22.05.8")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pyslurm", raising=False)
    yield tmp_path / "pyslurm.py"
    sys.modules.pop("pyslurm", None)


def test_pyslurm_of_the_sites_version_answers_for_jobs(fake_pyslurm):
    fake_pyslurm.write_text(PYSLURM.replace("22.5.0", "22.05.0"))
    slurm = client()
    assert isinstance(slurm, PyslurmClient)
    job = slurm.job(7)
    assert (job.job_id, job.state, job.exit_code, job.signal) == (7, "CANCELLED", 143, 15)
    assert (job.nodes, job.batch_node, job.start_seconds) == (("n1", "n2"), "n1", 1796020071.0)
    assert (job.restart_count, job.stdout, job.working_directory, job.user) == (1, "/tmp/out.txt", "/tmp", "ada")
    assert slurm.job(8) is None
    with pytest.raises(SlurmError, match="Unable to contact slurm controller"):
        slurm.job(9)
    assert slurm.version() == "22.05.8"


@pytest.mark.parametrize(
    "module",
    [PYSLURM.replace("22.5.0", "25.11.2"), "import os\nos._exit(1)\n", "raise ImportError('built for another')\n"],
    ids=["another version", "ends the process", "cannot be imported"],
)
def test_pyslurm_that_does_not_fit_is_left_alone(fake_pyslurm, module):
    fake_pyslurm.write_text(module)
    assert type(client()) is CommandLineClient


@pytest.mark.slurm
def test_a_job_is_submitted_seen_and_cancelled(sandbox, tmp_path):
    slurm = CommandLineClient(sandbox.environment)
    script = "#!/bin/sh\n#SBATCH --nodes=2\ntouch begun\nexec sleep 60\n"
    job_id = slurm.submit(script, [f"--output={tmp_path}/%j x.txt", f"--chdir={tmp_path}"])
    running = _wait_for(slurm, job_id, "RUNNING")
    assert running.nodes == ("n1", "n2")
    assert running.batch_node == "n1"
    assert abs(running.start_seconds - time.time()) < 60  # the clock of the same machine
    assert running.stdout == f"{tmp_path}/{job_id} x.txt"
    assert running.working_directory == str(tmp_path)
    assert running.user == "root"
    assert not running.ended
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    slurm.cancel(job_id)
    cancelled = _wait_for(slurm, job_id, "CANCELLED")
    assert (cancelled.exit_code, cancelled.signal, cancelled.ended) == (143, 15, True)


@pytest.mark.slurm
def test_a_failed_job_has_its_exit_code(sandbox):
    slurm = CommandLineClient(sandbox.environment)
    job_id = slurm.submit("#!/bin/sh\nexit 7\n", ["--output=/dev/null"])
    failed = _wait_for(slurm, job_id, "FAILED")
    assert (failed.exit_code, failed.signal, failed.reason) == (7, 0, "NonZeroExitCode")


@pytest.mark.slurm
def test_test_only_queues_nothing(sandbox):
    slurm = CommandLineClient(sandbox.environment)
    would_be = slurm.submit("#!/bin/sh\ntrue\n", test_only=True)
    assert would_be > 0
    assert slurm.job(would_be) is None


@pytest.mark.slurm
@pytest.mark.parametrize("test_only", [False, True])
def test_slurms_own_words_say_why_a_job_was_refused(sandbox, test_only):
    with pytest.raises(SlurmError, match=r"^sbatch: .*[Ii]nvalid partition"):
        CommandLineClient(sandbox.environment).submit("#!/bin/sh\ntrue\n", ["--partition=nowhere"], test_only=test_only)


@pytest.mark.slurm
def test_what_slurm_knows_of_nodes_and_itself(sandbox):
    slurm = CommandLineClient(sandbox.environment)
    assert slurm.node_address("n1") == "127.0.0.1"
    assert set(slurm.node_states()) == {"n1", "n2", "n3", "n4"}
    printed = subprocess.run(["slurmctld", "-V"], capture_output=True, text=True, check=True).stdout
    assert slurm.version() == printed.split()[-1]
    assert slurm.job(999_999) is None
    slurm.cancel(999_999)  # as one that has ended long ago: nothing to do


@pytest.mark.slurm
def test_a_controller_that_is_not_there_is_an_error_not_an_unknown_job(sandbox, tmp_path):
    conf = (sandbox.directory / "slurm.conf").read_text()
    port = next(line for line in conf.splitlines() if line.startswith("SlurmctldPort="))
    conf = conf.replace(port, "SlurmctldPort=9").replace("MessageTimeout=60", "MessageTimeout=1")
    (tmp_path / "slurm.conf").write_text(conf)
    with pytest.raises(SlurmError, match="Unable to contact slurm controller"):
        CommandLineClient({**sandbox.environment, "SLURM_CONF": str(tmp_path / "slurm.conf")}).job(1)


def _wait_for(slurm, job_id, state):
    deadline = time.monotonic() + 60
    while (job := slurm.job(job_id)).state != state:
        assert time.monotonic() < deadline, f"job {job_id} is {job.state} ({job.reason}), not {state}"
        time.sleep(0.1)
    return job


def _script(path, body):
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
