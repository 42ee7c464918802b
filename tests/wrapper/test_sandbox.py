import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from trimtab import sandbox as boxes
from trimtab.cli import main
from trimtab.sandbox import SandboxError, Spec, config, machine, processes
from trimtab.sandbox.config import Places
from trimtab_slurm.profile import read

# --- what it is asked to be, and Slurm's files ---


def test_slurm_conf_describes_the_nodes_and_names_no_key_twice():
    spec, places = Spec(nodes=2, gpus=3, gpu_type="h200", cpus=8), Places(Path("/tmp/box"))
    text = config.slurm_conf(spec, places, "host", (10001, 10002, 10003))
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    described = [line for line in lines if line.startswith(("NodeName=", "PartitionName="))]
    assert described == [
        "NodeName=n1 NodeHostname=host NodeAddr=127.0.0.1 Port=10002 CPUs=8 RealMemory=16384 Gres=gpu:h200:3",
        "NodeName=n2 NodeHostname=host NodeAddr=127.0.0.1 Port=10003 CPUs=8 RealMemory=16384 Gres=gpu:h200:3",
        "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=30",
        "PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=2 PreemptMode=OFF",
    ]
    settings = dict(line.split("=", 1) for line in lines if line not in described)
    assert len(settings) == len(lines) - len(described)
    assert settings["SlurmctldPort"] == settings["FirstJobId"] == "10001"
    assert settings["AuthInfo"] == "socket=/tmp/box/munge/socket,cred_expire=5"
    assert (settings["Prolog"], settings["Epilog"]) == ("/tmp/box/prolog", "/tmp/box/epilog")
    assert not {"CredType", "SwitchType"} & set(settings)  # Slurm 24.11 refuses their old values


def test_slurm_conf_without_gpus_names_none():
    spec, places = Spec(nodes=1, gpus=0), Places(Path("/tmp/box"))
    text = config.slurm_conf(spec, places, "host", (10001, 10002))
    assert "Gres=" not in text
    assert config.gres_conf(spec, places) == ""


@pytest.mark.parametrize(("profiles", "root"), [("", "/tmp/box/profiles"), ("/data/profiles", "/data/profiles")])
def test_the_hooks_keep_everything_below_the_sandbox_but_profiles_where_asked(profiles, root):
    told = config.node_settings(Spec(profiles=profiles), Places(Path("/tmp/box")))
    assert (told.journal_directory, told.profile_root) == ("/tmp/box/journals", root)


def test_gres_conf_gives_each_node_its_device_files():
    assert config.gres_conf(Spec(nodes=2, gpus=2), Places(Path("/tmp/box"))) == (
        "NodeName=n1 Name=gpu Type=sim File=/tmp/box/nvidia0,/tmp/box/nvidia1\n"
        "NodeName=n2 Name=gpu Type=sim File=/tmp/box/nvidia0,/tmp/box/nvidia1\n"
    )


def test_the_longest_directory_holds_the_longest_socket():
    spec = Spec(nodes=10)
    socket_path = f"/slurmd/n10/n10_{2**32 - 1}.{2**32 - 1}"
    longest = "/tmp/" + "x" * (107 - len("/tmp/") - len(socket_path))
    Places(Path(longest)).check(spec)
    with pytest.raises(SandboxError, match=r"1 bytes too long .* choose a shorter one with --dir"):
        Places(Path(longest + "x")).check(spec)


@pytest.mark.parametrize("name", ["two words", "a,b", "a#b", "n[1-2]"])
def test_a_directory_that_slurm_conf_cannot_spell_is_refused(name):
    with pytest.raises(SandboxError, match="choose another with --dir"):
        Places(Path("/tmp", name)).check(Spec())


def test_a_gpu_type_is_one_word():
    with pytest.raises(SandboxError, match="--gpu-type 'a:b'"):
        Spec(gpu_type="a:b")


# --- processes ---


@pytest.fixture
def sleeper():
    """Start processes that sleep; all are ended."""
    started = []

    def start(script="exec sleep 60", **environment):
        child = subprocess.Popen(
            ["sh", "-c", f"echo ready; {script}"], env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True
        )
        started.append(child)
        assert child.stdout.readline() == "ready\n"
        return child, processes.identify("sleeper", child.pid)

    yield start
    for child in started:
        child.kill()
        child.wait()
        child.stdout.close()


def test_a_process_is_alive_until_it_is_stopped(sleeper):
    child, process = sleeper()
    assert processes.alive(process)
    processes.stop([process], grace_seconds=10)
    assert not processes.alive(process)
    assert processes.identify("sleeper", child.pid) is None


def test_stopping_is_not_disturbed_by_what_has_ended(sleeper):
    (_, first), (_, second) = sleeper(), sleeper()
    processes.stop([first], grace_seconds=10)
    processes.stop([first, second], grace_seconds=10)
    assert not processes.alive(second)


@pytest.mark.parametrize("change", [{"start_ticks": 1}, {"boot_id": "another"}])
def test_a_process_that_got_a_recorded_ones_id_is_never_stopped(sleeper, change):
    _, process = sleeper()
    processes.stop([replace(process, **change)], grace_seconds=1)
    assert processes.alive(process)


def test_a_process_that_ignores_sigterm_is_killed(sleeper):
    child, process = sleeper("trap '' TERM; while :; do sleep 0.1; done")
    processes.stop([process], grace_seconds=0.2)
    assert not processes.alive(process)
    assert child.pid == process.pid


def test_only_what_runs_on_a_node_of_this_cluster_is_found(sleeper):
    places = Places(Path("/tmp/some-box"))
    _, on_node = sleeper(SLURM_CONF=str(places.slurm_conf), SLURMD_NODENAME="n1")
    sleeper(SLURM_CONF=str(places.slurm_conf))  # a user's shell
    sleeper(SLURM_CONF="/etc/slurm/slurm.conf", SLURMD_NODENAME="n1")  # another cluster's job
    _, on_another = sleeper(SLURM_CONF=str(places.slurm_conf), SLURMD_NODENAME="n11")
    assert {process.pid for process in processes.on_nodes(places)} == {on_node.pid, on_another.pid}
    assert [process.pid for process in processes.on_nodes(places, "n1")] == [on_node.pid]


# --- what is refused before anything starts ---


def test_missing_programs_are_named_with_the_packages_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "find_binary", lambda name: None if name in ("munged", "slurmd") else name)
    listed = (Path(__file__).parents[2] / "apt-packages.txt").read_text().split("[sandbox]\n")[1].split("\n[")[0]
    packages = [line for line in listed.splitlines() if re.match("[a-z]", line)]
    with pytest.raises(SandboxError, match=r"munged, slurmd cannot be found.*submit --dry-run") as refusal:
        boxes.up(tmp_path / "box", Spec())
    assert set(packages) <= set(re.split(r"[ .]+", str(refusal.value)))
    assert not (tmp_path / "box").exists()


def test_a_user_who_is_not_root_is_told_so(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "find_binary", lambda name: name)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SandboxError, match="needs root; this is user id 1000"):
        boxes.up(tmp_path / "box", Spec())


def test_what_is_not_a_sandbox_is_neither_used_nor_removed(slurm_installed, box_directory):
    (box_directory / "thesis.txt").write_text("mine")
    with pytest.raises(SandboxError, match="is not empty and holds no sandbox"):
        boxes.up(box_directory, Spec())
    assert boxes.down(box_directory) is False
    assert (box_directory / "thesis.txt").read_text() == "mine"


def test_a_directory_that_others_can_change_is_refused(slurm_installed, box_directory):
    box_directory.chmod(0o777)
    with pytest.raises(SandboxError, match="others may write to it"):
        boxes.up(box_directory, Spec())


def test_a_link_is_refused(slurm_installed, box_directory, tmp_path):
    (box_directory / "link").symlink_to(tmp_path)
    with pytest.raises(SandboxError, match="is no directory of ours"):
        boxes.up(box_directory / "link", Spec())


def test_a_record_that_cannot_be_read_is_named(box_directory):
    (box_directory / "sandbox.json").write_text('{"spec": {}}')
    with pytest.raises(SandboxError, match="is no record of a sandbox"):
        boxes.find(box_directory)
    (box_directory / "sandbox.json").unlink()


def test_the_environment_of_another_slurms_job_is_left_out(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SBATCH_PARTITION", "gpu")
    environment = boxes.Sandbox(Path("/tmp/box"), Spec(), ()).environment
    assert {name: value for name, value in environment.items() if name.startswith(("SLURM", "SBATCH"))} == {
        "SLURM_CONF": "/tmp/box/slurm.conf"
    }
    assert environment["TRIMTAB_NODE_CONFIG"] == "/tmp/box/node.toml"


# --- a real Slurm ---


@pytest.mark.slurm
def test_up_status_and_down(slurm_installed, box_directory):
    assert _trimtab("status", "--dir", box_directory) == (1, f"down: nothing in {box_directory}\n")
    code, text = _trimtab("up", "--dir", box_directory)
    assert code == 0
    assert text.startswith(f"up: 4 nodes of 4 CPUs and 2 GPUs (sim), in {box_directory}\n")
    assert f"export SLURM_CONF={box_directory}/slurm.conf\n" in text
    code, text = _trimtab("status", "--dir", box_directory)
    assert code == 0
    assert re.findall(r"(n\d) (\w+)", text) == [("n1", "IDLE"), ("n2", "IDLE"), ("n3", "IDLE"), ("n4", "IDLE")]
    daemons = boxes.find(box_directory).daemons
    assert [daemon.name for daemon in daemons] == ["munged", "slurmctld", "n1", "n2", "n3", "n4"]
    assert _trimtab("down", "--dir", box_directory) == (0, f"down: {box_directory}\n")
    _assert_nothing_left(box_directory, daemons)
    assert _trimtab("down", "--dir", box_directory) == (0, f"down already: nothing in {box_directory}\n")


@pytest.mark.slurm
def test_every_node_has_its_gpus_and_all_of_them_run_tasks(sandbox):
    assert sandbox.run("sinfo", "-h", "-o", "%D %G %c").stdout == "4 gpu:sim:2 4\n"
    tasks = sandbox.run(
        *("srun", "-N4", "--ntasks-per-node=4", "--gpus-per-node=2"),
        *("sh", "-c", "echo $SLURMD_NODENAME $SLURM_LOCALID $CUDA_VISIBLE_DEVICES"),
    )
    assert tasks.returncode == 0, tasks.stderr
    assert sorted(tasks.stdout.splitlines()) == [f"n{n} {local} 0,1" for n in range(1, 5) for local in range(4)]


@pytest.mark.slurm
def test_a_directory_may_be_named_relatively_and_through_links(slurm_installed, box_directory, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(box_directory.parent)
    box, _ = boxes.up(tmp_path / "link" / box_directory.name, Spec(nodes=1))
    assert box.directory == box_directory
    monkeypatch.chdir(box_directory.parent)
    assert boxes.find(Path(box_directory.name)) == box
    code, text = _trimtab("status", "--dir", box_directory.name)
    assert (code, text.splitlines()[1:]) == (0, ["  n1 IDLE"])
    assert boxes.down(Path(box_directory.name))
    _assert_nothing_left(box_directory, box.daemons)


@pytest.mark.slurm
def test_up_twice_leaves_it_as_it_is(slurm_installed, box_directory):
    first, started = boxes.up(box_directory, Spec(nodes=1))
    assert started
    assert boxes.up(box_directory, Spec(nodes=1)) == (first, False)
    code, text = _trimtab("up", "--dir", box_directory, "--nodes", "1")
    assert code == 0
    assert text.startswith("up already: 1 nodes")
    code, text = _trimtab("up", "--dir", box_directory, "--nodes", "2")
    assert code == 2
    assert "is up with other options; `trimtab sandbox down` it first" in text
    assert boxes.find(box_directory) == first
    assert first.lost == ()


@pytest.mark.slurm
def test_two_sandboxes_run_side_by_side(sandbox, box_directory):
    other, _ = boxes.up(box_directory, Spec(nodes=1, gpus=1, gpu_type="other"))
    for environment, nodes in ((sandbox.environment, 4), (other.environment, 1)):
        names = subprocess.run(
            ["srun", f"-N{nodes}", "printenv", "SLURM_CONF"], env=environment, capture_output=True, text=True
        )
        assert names.stdout == nodes * f"{environment['SLURM_CONF']}\n", names.stderr
    boxes.down(box_directory)
    assert sandbox.run("srun", "-N4", "true").returncode == 0


@pytest.mark.slurm
def test_up_recovers_from_daemons_that_were_killed(slurm_installed, box_directory):
    before, _ = boxes.up(box_directory, Spec(nodes=2))
    for daemon in before.daemons[1:3]:  # slurmctld and n1
        os.kill(daemon.pid, signal.SIGKILL)
    _wait_until(lambda: before.lost == ("slurmctld", "n1"))
    code, text = _trimtab("status", "--dir", box_directory)
    assert code == 1
    assert text.startswith("broken: slurmctld, n1 does not run")
    after, started = boxes.up(box_directory, Spec(nodes=2))
    assert started
    assert after.lost == ()
    assert not any(processes.alive(daemon) for daemon in before.daemons)


@pytest.mark.slurm
def test_down_ends_jobs_and_what_escaped_from_them(slurm_installed, box_directory, tmp_path):
    box, _ = boxes.up(box_directory, Spec(nodes=2))
    script = f"#!/bin/sh\nsetsid sleep 1000 & echo $! >{tmp_path}/escaped\nsrun -N2 sleep 1000\n"
    subprocess.run(["sbatch", "-N2", "-o", "/dev/null"], input=script, text=True, env=box.environment, check=True)
    places = Places(box_directory)
    # The batch script, its keeper, srun (two processes), what escaped, and on each node a keeper and a task.
    _wait_until(lambda: len(processes.on_nodes(places)) >= 9)
    on_nodes = processes.on_nodes(places)
    assert int((tmp_path / "escaped").read_text()) in [process.pid for process in on_nodes]
    boxes.down(box_directory)
    _assert_nothing_left(box_directory, (*box.daemons, *on_nodes))


@pytest.mark.slurm
def test_a_failed_up_shows_the_log_and_leaves_nothing(slurm_installed, box_directory, tmp_path, monkeypatch):
    script = f"#!/bin/sh\ncp sandbox.json {tmp_path}\necho fatal: out of rudders >&2\nexit 1\n"
    (tmp_path / "slurmctld").write_text(script)
    (tmp_path / "slurmctld").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SandboxError, match=r"slurmctld (has )?ended(.|\n)*fatal: out of rudders"):
        boxes.up(box_directory, Spec())
    started = boxes.find(tmp_path).daemons  # as recorded when slurmctld began
    assert started[0].name == "munged"
    _assert_nothing_left(box_directory, started)


def test_a_machine_without_device_nodes_is_told_of_gpus_0(slurm_installed, box_directory, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "mknod", refuse)
    with pytest.raises(SandboxError, match="`--gpus 0` works without"):
        boxes.up(box_directory, Spec())
    assert not box_directory.exists()


# --- outages and preemption ---

TWO_TASKS = ["--nodes=2", "--ntasks-per-node=1", "--exclusive"]


@pytest.fixture
def broken(slurm_installed, box_directory):
    """A sandbox of two nodes to break."""
    boxes.up(box_directory, Spec(nodes=2, gpus=0))
    return box_directory


def _submit(directory, script, *options):
    """Submit a batch script; returns its job id."""
    command = ["sbatch", "--parsable", "--output=/dev/null", *options]
    environment = boxes.find(directory).environment
    return subprocess.run(command, input=script, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.slurm
def test_a_killed_node_takes_all_that_ran_on_it_along_and_no_more(broken, tmp_path):
    _submit(broken, f"#!/bin/sh\nsrun sh -c 'echo $$ >{tmp_path}/$SLURMD_NODENAME; exec sleep 1000'\n", *TWO_TASKS)
    _wait_until(lambda: {"n1", "n2"} <= {path.name for path in tmp_path.iterdir()})
    places = Places(broken)
    before = processes.on_nodes(places)
    _wait_until(lambda: processes.RECORDER in {process.name for process in processes.on_nodes(places, "n2")})
    dead = processes.on_nodes(places, "n2")
    assert int((tmp_path / "n2").read_text()) in [process.pid for process in dead]
    boxes.kill(broken, "n2")
    assert boxes.find(broken).lost == ("n2",)
    assert [process for process in dead if processes.alive(process)] == []
    assert [process for process in before if process not in dead and not processes.alive(process)] == []
    boxes.restart(broken, "n2")
    assert boxes.find(broken).lost == ()
    assert "DOWN" not in boxes.node_states(boxes.find(broken))["n2"]


@pytest.mark.slurm
def test_jobs_outlive_a_controller_that_was_killed(broken, tmp_path):
    script = f"#!/bin/sh\necho $SLURM_JOB_ID >{tmp_path}/job\nuntil [ -e {tmp_path}/go ]; do sleep 0.1; done\n"
    job = _submit(broken, script)
    _wait_until((tmp_path / "job").exists)
    # What a controller that is killed has not written to its disk, it has forgotten: it takes up to 5 s for that.
    state, began = broken / "slurmctld/job_state", time.time()
    command = ["scontrol", "update", f"JobId={job.strip()}", "Comment=written"]
    subprocess.run(command, env=boxes.find(broken).environment, check=True)
    _wait_until(lambda: state.exists() and state.stat().st_mtime > began)
    boxes.kill(broken, "slurmctld")
    assert boxes.find(broken).lost == ("slurmctld",)
    boxes.restart(broken, "slurmctld")
    assert _state(broken, job) == "RUNNING"
    (tmp_path / "go").touch()
    _wait_until(lambda: _state(broken, job) == "COMPLETED")


@pytest.mark.slurm
def test_a_job_in_the_partition_urgent_takes_the_nodes_from_another_that_is_told_to_end(broken, tmp_path):
    task = f'trap "touch {tmp_path}/told; exit" TERM; touch {tmp_path}/$SLURMD_NODENAME; while :; do sleep 0.1; done'
    early = _submit(broken, f"#!/bin/sh\nsrun sh -c '{task}'\n", *TWO_TASKS)
    _wait_until(lambda: {"n1", "n2"} <= {path.name for path in tmp_path.iterdir()})
    late = _submit(broken, "#!/bin/sh\n", "--partition=urgent", "--nodes=2", "--exclusive")
    _wait_until(lambda: _state(broken, late) == "COMPLETED")
    assert (tmp_path / "told").exists()
    # It ended within its grace time, and by itself; Slurm 24.11 requeues it all the same.
    assert _state(broken, early) in ("FAILED", "COMPLETED", "PENDING")


def test_only_what_a_sandbox_has_can_be_killed(box_directory):
    with pytest.raises(SandboxError, match="there is no sandbox in"):
        boxes.kill(box_directory, "n1")
    boxes.Sandbox(box_directory, Spec(nodes=2), ()).write()
    with pytest.raises(SandboxError, match="'n3' is not in this sandbox; choose from slurmctld, n1, n2"):
        boxes.kill(box_directory, "n3")
    (box_directory / "sandbox.json").unlink()


def _state(directory, job):
    shown = subprocess.run(
        ["scontrol", "show", "job", job.strip()],
        env=boxes.find(directory).environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return re.search(r"JobState=(\w+)", shown.stdout)[1]


# --- run ---


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["sh", "-c", "exit 7"], 7),
        (["sh", "-c", "kill -9 $$"], 137),
        (["srun", "-N2", "true"], 0),
        (["/no/such/command"], 127),
    ],
)
def test_run_passes_the_exit_code_and_takes_its_sandbox_down(slurm_installed, box_directory, command, code):
    assert _run(box_directory, *command).returncode == code
    assert not box_directory.exists()


@pytest.mark.slurm
def test_profiles_outlive_a_run_that_was_told_where_to_keep_them(slurm_installed, box_directory, tmp_path):
    command = _command(box_directory, "srun", "-N2", "sleep", "1", profiles=tmp_path / "profiles")
    assert subprocess.run(command, timeout=120).returncode == 0
    assert not box_directory.exists()
    (profile,) = (tmp_path / "profiles").glob("sandbox/*/*.h5")
    assert set(read(profile).expected_nodes) == {"n1", "n2"}
    assert read(profile).missing_nodes == ()


@pytest.mark.slurm
def test_run_uses_a_sandbox_that_is_up_and_leaves_it_up(sandbox):
    done = _run(sandbox.directory, "sinfo", "-h", "-o", "%D")
    assert (done.returncode, done.stdout) == (0, "4\n")
    assert boxes.find(sandbox.directory).lost == ()


@pytest.mark.slurm
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("whole_group", [True, False], ids=["as a terminal does", "to trimtab alone"])
def test_a_signal_during_run_leaves_nothing_behind(slurm_installed, box_directory, number, whole_group):
    submit = "sbatch --quiet -N2 -o /dev/null --wrap 'srun sleep 1000' && exec sleep 1000"
    running = subprocess.Popen(
        _command(box_directory, "sh", "-c", submit),
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )
    places = Places(box_directory)
    # The batch script, its keeper, srun (two processes), and on each node a keeper and a task.
    _wait_until(lambda: len(processes.on_nodes(places)) >= 8)
    started = (*boxes.find(box_directory).daemons, *processes.on_nodes(places))
    if whole_group:
        os.killpg(running.pid, number)
    else:
        os.kill(running.pid, number)
    assert running.wait(timeout=60) == 128 + number
    _assert_nothing_left(box_directory, started)


@pytest.mark.slurm
def test_a_signal_while_it_comes_up_leaves_nothing_behind(slurm_installed, box_directory):
    running = subprocess.Popen(_command(box_directory, "true"), start_new_session=True)
    _wait_until(lambda: (box_directory / "munge").exists() and boxes.find(box_directory).daemons)
    started = boxes.find(box_directory).daemons
    os.kill(running.pid, signal.SIGTERM)
    assert running.wait(timeout=60) in (0, 128 + signal.SIGTERM)  # 0: it was up, and `true` had ended, before
    _assert_nothing_left(box_directory, started)


def _trimtab(*arguments):
    result = CliRunner().invoke(main, ["sandbox", *map(str, arguments)])
    return result.exit_code, result.output


def _command(directory, *command, profiles=None):
    options = ["--dir", directory, "--nodes", "2"] + (["--profiles", profiles] if profiles else [])
    return [sys.executable, "-m", "trimtab", "sandbox", "run", *options, "--", *command]


def _run(directory, *command):
    return subprocess.run(_command(directory, *command), capture_output=True, text=True, timeout=120)


def _assert_nothing_left(directory, started):
    """No process that was started, no socket, no device node: both are below the directory."""
    assert started
    assert [process.name for process in started if processes.alive(process)] == []
    assert processes.on_nodes(Places(directory)) == []
    assert not directory.exists()
    assert str(directory) not in Path("/proc/net/unix").read_text()


def _wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
