import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trimtab_slurm import cluster
from trimtab_slurm.cluster import CommandLineClient, PyslurmClient, SlurmError, SlurmSilent, command_line

SCRIPTED_PYSLURM = (Path(__file__).parent / "data/scripted/pyslurm.py").read_text()


def test_a_missing_command_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmError, match="sbatch is not on this machine's PATH"):
        CommandLineClient().submit("#!/bin/sh\n")


def test_a_command_that_hangs_is_given_up(monkeypatch, commands):
    commands(scancel="exec sleep 60")
    monkeypatch.setattr(command_line, "TIMEOUT_SECONDS", 0.2)
    with pytest.raises(SlurmSilent, match=r"scancel did not answer within 0\.2 s"):
        CommandLineClient().cancel(1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_command_that_is_ended_has_not_answered(commands, number):
    commands(scontrol=f"kill -{number.value} $$")
    with pytest.raises(SlurmSilent, match=f"scontrol was ended by {number.name} before it answered"):
        CommandLineClient().job(1)


@pytest.mark.parametrize(
    ("words", "silent"),
    [
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", True),
        ("slurm_load_jobs error: Connection reset by peer", True),
        ("scontrol: error: Socket timed out on send/recv operation", True),
        ("slurm_update error: Zero Bytes were transmitted or received", True),
        ("Slurm backup controller in standby mode", True),
        ("slurm_update error: Invalid node name specified", False),
        ("Requested operation is presently disabled for job 6", False),
    ],
)
def test_no_answer_is_told_from_a_refusal(commands, words, silent):
    commands(scontrol=f"echo '{words}' >&2; exit 1")
    with pytest.raises(SlurmError) as raised:
        CommandLineClient().nodes()
    assert isinstance(raised.value, SlurmSilent) is silent


def test_an_answer_without_a_job_id_is_an_error(commands):
    commands(sbatch="echo queued, somehow")
    with pytest.raises(SlurmError, match="'queued, somehow', which holds no job id"):
        CommandLineClient().submit("#!/bin/sh\n")


@pytest.mark.parametrize("version", ["25.11.2", "25.11.0"])
def test_pyslurm_is_used_where_it_fits_the_site(pyslurm, version):
    pyslurm(SCRIPTED_PYSLURM.replace("25.11.2", version), site="25.11.4")
    assert isinstance(cluster.client(), PyslurmClient)


def test_versions_are_compared_as_numbers(pyslurm):
    pyslurm('__version__ = "24.5.1"\n', site="24.05.3")  # as packages are numbered, and as Slurm is
    assert isinstance(cluster.client(), PyslurmClient)


@pytest.mark.parametrize(
    "module",
    [SCRIPTED_PYSLURM, "import os\nos._exit(1)\n", "raise ImportError('built for another')\n"],
    ids=["another version", "ends the process", "cannot be imported"],
)
def test_pyslurm_that_does_not_fit_is_left_alone(pyslurm, module):
    pyslurm(module, site="22.05.8")
    assert type(cluster.client()) is CommandLineClient


def test_pyslurms_errors_are_told_apart(pyslurm, commands):
    pyslurm(SCRIPTED_PYSLURM, site="25.11.4")
    slurm = cluster.client()
    commands(scontrol="echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert slurm.job(8) is None
    commands(scontrol="echo 'error: Unable to contact slurm controller (connect failure)' >&2; exit 1")
    with pytest.raises(SlurmSilent, match=r"pyslurm cannot load job 9: .*Unable to contact slurm controller"):
        slurm.job(9)
    with pytest.raises(SlurmSilent, match=r"pyslurm cannot load the nodes: .*Unable to contact slurm controller"):
        slurm.nodes()


# The contract: what holds for every client, on a real Slurm. pyslurm is built for one version of Slurm; where none can
# be installed that fits, a module that is scripted stands for it, and the real one's tests say why they are skipped.
@pytest.fixture(params=["command line", "pyslurm, scripted", "pyslurm"])
def slurm(request, sandbox, monkeypatch, pyslurm):
    for name, value in sandbox.environment.items():
        monkeypatch.setenv(name, value)
    if request.param == "command line":
        return CommandLineClient()
    if request.param == "pyslurm, scripted":
        pyslurm(SCRIPTED_PYSLURM)
        return PyslurmClient()
    found = cluster.client()
    if not isinstance(found, PyslurmClient):
        installed = cluster.bindings.pyslurm_version()
        has = f"pyslurm {installed} is built for another" if installed else "no pyslurm can be imported"
        pytest.skip(f"{has}; this is Slurm {found.version()}")
    return found


@pytest.mark.slurm
def test_a_job_is_submitted_seen_and_cancelled(slurm, tmp_path):
    script = "#!/bin/sh\n#SBATCH --nodes=2 --time=30\ntouch begun\nexec sleep 60\n"
    job_id = slurm.submit(script, [f"--output={tmp_path}/%j x.txt", f"--chdir={tmp_path}", "--exclude=n4"])
    running = _wait_for(slurm, job_id, "RUNNING")
    assert running.nodes == ("n1", "n2")
    assert running.batch_node == "n1"
    assert abs(running.start_seconds - time.time()) < 60  # the clock of the same machine
    assert running.end_seconds == running.start_seconds + 1800
    assert running.working_directory == str(tmp_path)
    assert (running.user, running.partition, running.requeueable) == ("root", "main", True)
    assert (running.excluded_nodes, running.required_nodes) == (("n4",), ())
    assert (running.least_nodes, running.most_nodes, running.tasks, running.tasks_per_node) == (2, 2, 2, 0)
    assert (running.name, running.array_job_id, running.heterogeneous) == (str(job_id), None, False)
    assert not running.ended
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    slurm.cancel(job_id)
    cancelled = _wait_for(slurm, job_id, "CANCELLED")
    assert (cancelled.exit_code, cancelled.signal, cancelled.ended) == (143, 15, True)


@pytest.mark.slurm
def test_a_requeued_job_begins_again_as_it_was_updated(slurm):
    job_id = slurm.submit("#!/bin/sh\nsleep 60\n", ["--nodes=2", "--output=/dev/null"])
    first = _wait_for(slurm, job_id, "RUNNING")
    slurm.requeue(first)
    slurm.requeue(first)  # it waits already: nothing to do
    slurm.update(first, excluded=[first.nodes[0]], nodes=1)
    again = _wait_for(slurm, job_id, "RUNNING", restart_count=1)
    assert again.excluded_nodes == (first.nodes[0],)
    assert len(again.nodes) == again.tasks == 1
    assert again.nodes[0] != first.nodes[0]
    slurm.requeue(again)
    slurm.update(again, excluded=[])
    assert slurm.job(job_id).excluded_nodes == ()
    slurm.cancel(job_id)
    _wait_for(slurm, job_id, "CANCELLED")


@pytest.mark.slurm
def test_of_an_array_one_task_is_requeued(slurm):
    script = '#!/bin/sh\ntest "$SLURM_RESTART_COUNT" || exec sleep 60\n'
    array = slurm.submit(script, ["--array=1-3", "--output=/dev/null"])
    last = _wait_for(slurm, array, "RUNNING")
    assert (last.job_id, last.array_job_id, last.name) == (array, array, f"{array}_3")
    _wait_for(slurm, array + 2, "RUNNING")
    slurm.requeue(last)
    slurm.update(last, excluded=["n1"], nodes=1)
    tasks = [slurm.job(array + offset) for offset in range(3)]
    assert [(task.array_task_id, task.restart_count, task.excluded_nodes) for task in tasks] == [
        (3, 1, ("n1",)),
        (1, 0, ()),
        (2, 0, ()),
    ]
    for offset in range(3):
        slurm.cancel(array + offset)
        _wait_for(slurm, array + offset, "CANCELLED")


@pytest.mark.slurm
def test_a_running_job_gives_back_the_nodes_that_it_does_not_keep(slurm, tmp_path, monkeypatch):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    job_id = slurm.submit("#!/bin/sh\nexec sleep 60\n", ["--nodes=3", "--output=/dev/null"])
    job = _wait_for(slurm, job_id, "RUNNING")
    slurm.shrink(job, [job.nodes[0], job.nodes[2]])
    assert slurm.job(job_id).nodes == (job.nodes[0], job.nodes[2])
    assert list(here.iterdir()) == []
    slurm.cancel(job_id)
    _wait_for(slurm, job_id, "CANCELLED")


@pytest.mark.slurm
def test_a_signal_reaches_the_tasks_of_the_steps_of_a_name_alone(slurm, tmp_path):
    task = "import signal; signal.signal(signal.SIGUSR1, lambda *_: exit(5)); open('ready', 'w'); signal.pause()"
    script = (
        "#!/bin/sh\nsrun --overlap --job-name=data sleep 60 &\n"
        f'srun --overlap --job-name=ranks "{sys.executable}" -c "{task}"\ncode=$?\nkill -0 $! && exit $code\n'
    )
    job_id = slurm.submit(script, ["--output=/dev/null", f"--chdir={tmp_path}"])
    job = _wait_for(slurm, job_id, "RUNNING")
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    slurm.signal_steps(job, "ranks", signal.SIGUSR1)
    assert _wait_for(slurm, job_id, "FAILED").exit_code == 5
    slurm.signal_steps(job, "ranks", signal.SIGUSR1)  # it has ended: nothing to do


@pytest.mark.slurm
def test_what_slurm_refuses_is_said_in_its_own_words(slurm):
    job_id = slurm.submit("#!/bin/sh\nexec sleep 60\n", ["--no-requeue", "--output=/dev/null"])
    job = _wait_for(slurm, job_id, "RUNNING")
    assert not job.requeueable
    with pytest.raises(SlurmError, match="Requested operation is presently disabled"):
        slurm.requeue(job)
    with pytest.raises(SlurmError, match="Job is no longer pending execution"):
        slurm.update(job, excluded=["n3"])
    slurm.cancel(job_id)
    _wait_for(slurm, job_id, "CANCELLED")


@pytest.mark.slurm
def test_what_slurm_knows_of_nodes_and_itself(slurm):
    assert slurm.node_address("n1") == "127.0.0.1"
    nodes = slurm.nodes("main")
    assert nodes == slurm.nodes()
    assert slurm.nodes("elsewhere") == ()
    assert [node.name for node in nodes] == ["n1", "n2", "n3", "n4"]
    assert {(node.partitions[0], node.features, node.cpus, node.gpus, node.usable) for node in nodes} == {
        ("main", (), 4, 2, True)
    }
    assert slurm.node_states() == {node.name: node.state for node in nodes}
    printed = subprocess.run(["slurmctld", "-V"], capture_output=True, text=True, check=True).stdout
    assert slurm.version() == printed.split()[-1]
    assert slurm.job(999_999) is None
    slurm.cancel(999_999)  # as one that has ended long ago: nothing to do


@pytest.mark.slurm
def test_an_output_file_may_have_spaces_in_its_name(sandbox, tmp_path):
    slurm = CommandLineClient(sandbox.environment)
    job_id = slurm.submit("#!/bin/sh\nexit 7\n", [f"--output={tmp_path}/%j x.txt"])
    failed = _wait_for(slurm, job_id, "FAILED")
    assert failed.stdout == f"{tmp_path}/{job_id} x.txt"
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
def test_a_controller_that_is_not_there_is_silent_not_an_unknown_job(sandbox, tmp_path):
    conf = (sandbox.directory / "slurm.conf").read_text()
    port = next(line for line in conf.splitlines() if line.startswith("SlurmctldPort="))
    conf = conf.replace(port, "SlurmctldPort=9").replace("MessageTimeout=60", "MessageTimeout=1")
    (tmp_path / "slurm.conf").write_text(conf)
    with pytest.raises(SlurmSilent, match="Unable to contact slurm controller"):
        CommandLineClient({**sandbox.environment, "SLURM_CONF": str(tmp_path / "slurm.conf")}).job(1)


@pytest.fixture
def commands(monkeypatch, tmp_path):
    """Makes shell scripts, by name, that stand for Slurm's commands."""
    directory = tmp_path / "commands"
    directory.mkdir()
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")

    def make(**bodies):
        for name, body in bodies.items():
            (directory / name).write_text(f"#!/bin/sh\n{body}\n")
            (directory / name).chmod(0o755)

    return make


@pytest.fixture
def pyslurm(monkeypatch, tmp_path, commands):
    """Makes a module that stands for pyslurm, and a site of a version."""
    monkeypatch.delitem(sys.modules, "pyslurm", raising=False)

    def make(module, *, site=None):
        directory = tmp_path / "modules"
        directory.mkdir()
        (directory / "pyslurm.py").write_text(module)
        monkeypatch.setenv("PYTHONPATH", str(directory))
        monkeypatch.syspath_prepend(directory)
        if site:
            commands(scontrol=f"echo slurm-wlm {site}")

    yield make
    sys.modules.pop("pyslurm", None)


def _wait_for(slurm, job_id, state, restart_count=0):
    deadline = time.monotonic() + 60
    while (job := slurm.job(job_id)).state != state or job.restart_count < restart_count:
        assert time.monotonic() < deadline, f"job {job_id} is {job.state} ({job.reason}), not {state}"
        time.sleep(0.1)
    return job
