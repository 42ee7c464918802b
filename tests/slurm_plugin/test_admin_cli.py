"""The `trimtab-node` command: what it says, and its exit code. `install` and `uninstall` have tests of their own."""

import dataclasses
import json
import os
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from trimtab_slurm import journal
from trimtab_slurm.admin.cli import main
from trimtab_slurm.settings import NodeSettings, render

TWO = [
    {"index": 0, "minor": 1, "uuid": "GPU-a", "pci": "00000000:1B:00.0", "name": "more than we ask for"},
    {"index": 1, "minor": 0, "uuid": "GPU-b", "pci": None},
]


@pytest.fixture
def run():
    """A function that runs the command with some arguments."""

    def invoke(*arguments, **options):
        return CliRunner().invoke(main, list(map(str, arguments)), **options)

    return invoke


@pytest.fixture
def ask(run, tmp_path):
    """A function that asks `resolve` about the texts of two files."""

    def asked(environment, inventory, *options):
        files = tmp_path / "environment", tmp_path / "inventory.json"
        for file, text in zip(files, (environment, inventory), strict=True):
            file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return run("resolve", "--environment", files[0], "--inventory", files[1], *options)

    return asked


@pytest.mark.parametrize(
    ("environment", "status", "devices"),
    [
        ("", "resolved", []),
        ("SLURM_JOB_GPUS=0,1\n", "resolved", ["GPU-a", "GPU-b"]),
        ("\n  \nCUDA_VISIBLE_DEVICES=GPU-b\nSLURM_JOB_COMMENT=a=b\u2028c\r\nEMPTY=", "resolved", ["GPU-b"]),
        ("SLURM_JOB_GPUS=0", "unknown", []),
        ("export SLURM_JOB_GPUS='0,1'\nexport UNSET\nexport EMPTY=\n", "resolved", ["GPU-a", "GPU-b"]),
        ('declare -x SLURM_JOB_GPUS="0,1"\r\ndeclare -ix UNSET\r\n', "resolved", ["GPU-a", "GPU-b"]),
        ("\ufeffexport SLURM_JOB_GPUS=0,1", "resolved", ["GPU-a", "GPU-b"]),
        ('CUDA_VISIBLE_DEVICES="GPU-b"\r\nSLURM_JOB_COMMENT=\'tis "fine"', "resolved", ["GPU-b"]),
    ],
)
def test_resolve_answers_in_json(ask, environment, status, devices):
    result = ask(environment, json.dumps(TWO), "--json")
    answer = json.loads(result.stdout)
    assert (result.exit_code, result.stderr) == (0, "")
    assert (answer["status"], answer["devices"], sorted(answer)) == (status, devices, ["devices", "reason", "status"])
    assert answer["reason"]


def test_resolve_answers_in_words(ask):
    result = ask("CUDA_VISIBLE_DEVICES=GPU-b,GPU-a", json.dumps(TWO))
    assert (result.exit_code, result.stdout) == (0, "resolved: Slurm names them by uuid\nGPU-a\nGPU-b\n")
    result = ask("SLURM_JOB_GPUS=0", json.dumps(TWO))
    assert result.exit_code == 0
    assert result.stdout.startswith("unknown: 0: GPU-a in the driver's order, GPU-b in ")


@pytest.mark.parametrize(
    ("text", "device"), [("AutoDetect=nvml", "GPU-a"), ("NodeName=n1 Name=gpu File=/dev/nvidia[0-1]", "GPU-b")]
)
def test_resolve_goes_by_a_gres_conf(ask, tmp_path, text, device):
    path = tmp_path / "gres.conf"
    path.write_text(text)
    result = ask("SLURM_JOB_GPUS=0\nSLURMD_NODENAME=n1", json.dumps(TWO), "--gres-conf", path, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout)["devices"] == [device]


def test_resolve_says_why_a_gres_conf_proves_nothing(ask, tmp_path):
    path = tmp_path / "gres.conf"
    path.write_text("NodeName=n1 Name=gpu File=/dev/nvidia[0-1]")
    result = ask("SLURM_JOB_GPUS=0\nSLURMD_NODENAME=n1", json.dumps(TWO), "--gres-conf", path, "--node", "n2")
    complaint = f"trimtab-node: {path} does not prove the order of slurmd's list: no GPU of this node is in it\n"
    assert (result.exit_code, result.stderr) == (0, complaint)
    assert result.stdout.startswith("unknown: 0: GPU-a in the driver's order, GPU-b in ")


def test_resolve_refuses_a_gres_conf_of_nobody_or_of_nowhere(ask, tmp_path):
    path = tmp_path / "gres.conf"
    result = ask("SLURM_JOB_GPUS=0", "[]", "--gres-conf", path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.endswith("of which node is not known; name it with --node, or SLURMD_NODENAME\n")
    result = ask("SLURM_JOB_GPUS=0", "[]", "--gres-conf", path, "--node", "n1")
    assert (result.exit_code, result.stderr) == (
        2,
        f"trimtab-node: {path}: cannot be read: No such file or directory\n",
    )


@pytest.mark.parametrize(
    ("environment", "inventory", "complaint"),
    [
        ("A=1\nSLURM_JOB_GPUS 0\n", "[]", "environment: line 2: 'SLURM_JOB_GPUS 0' is no KEY=VALUE; write one"),
        ("=1", "[]", "environment: line 1: '=1' is no KEY=VALUE"),
        ("export SLURM_JOB_GPUS 0", "[]", "environment: line 1: 'export SLURM_JOB_GPUS 0' is no KEY=VALUE"),
        ("exported SLURM_JOB_GPUS=0", "[]", "has 'exported SLURM_JOB_GPUS' for a variable's name; write KEY=VALUE"),
        ("declare -r SLURM_JOB_GPUS=0", "[]", "has 'declare -r SLURM_JOB_GPUS' for a variable's name"),
        ("BASH_FUNC_module%%=() {", "[]", "has 'BASH_FUNC_module%%' for a variable's name; write KEY=VALUE, or take"),
        ('\ndeclare -x A="1\n2"', "[]", "environment: line 2: 'declare -x A=\"1' has a quotation that does not end"),
        ("export A=1 SLURM_JOB_GPUS=0", "[]", "has more after the value; quote the value, or write one as `env`"),
        (b"A=1\0SLURM_JOB_GPUS=0\0", "[]", "has NUL characters, as in /proc/PID/environ; make lines of it: tr "),
        (b"A=\xff", "[]", "environment: is no text in UTF-8"),
        ("", "", "inventory.json: is not JSON"),
        ("", "[" * 100_000, "inventory.json: is not JSON"),
        ("", "{}", "inventory.json: is a JSON dict; write a list of devices"),
        ("", "[1]", "inventory.json: device 0: 1 is no object; write one with a uuid"),
        ("", '[{"index": 0}]', "inventory.json: device 0: has no uuid; `nvidia-smi -L` shows it"),
        ("", '[{"uuid": 7}]', "inventory.json: device 0: uuid = 7: must be a text, or null"),
        ("", '[{"uuid": "GPU-a", "index": "0"}]', 'index = "0": must be a whole number, 0 or more, or null'),
        ("", '[{"uuid": "GPU-a", "minor": true}]', "minor = true: must be a whole number"),
        ("", '[{"uuid": "GPU-a", "minor": -1}]', "minor = -1: must be a whole number"),
        (
            "",
            '[{"uuid": "GPU-a"}, {"uuid": "GPU-b"}, {"uuid": "gpu-A"}]',
            "inventory.json: devices 0 and 2 are both gpu-A; remove one of them",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_the_entry_and_the_way_out(ask, environment, inventory, complaint):
    result = ask(environment, inventory, "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("trimtab-node: ")
    assert complaint in result.stderr


def test_an_inventory_may_begin_with_a_byte_order_mark_and_have_line_ends_of_another_system(ask):
    result = ask("CUDA_VISIBLE_DEVICES=GPU-b", "\ufeff" + json.dumps(TWO, indent=1).replace("\n", "\r\n"))
    assert (result.exit_code, result.stdout) == (0, "resolved: Slurm names them by uuid\nGPU-b\n")


@pytest.mark.parametrize("missing", ["environment", "inventory.json"])
def test_a_file_that_is_not_there_is_named(ask, run, tmp_path, missing):
    ask("", "[]")
    (tmp_path / missing).unlink()
    result = run("resolve", "--environment", tmp_path / "environment", "--inventory", tmp_path / "inventory.json")
    complaint = f"trimtab-node: {tmp_path / missing}: cannot be read: No such file or directory\n"
    assert (result.exit_code, result.stderr) == (2, complaint)


def test_the_inventory_of_a_driver_is_what_resolve_reads(run, ask, nvml_stub, tmp_path):
    nvml_stub.script(nvml_stub.gpus(2))
    config = tmp_path / "node.toml"
    config.write_text(f'nvml_library = "{nvml_stub.library}"\n')
    # In a process of its own: a library of that name stays loaded.
    command = [sys.executable, "-m", "trimtab_slurm.admin.cli", "inventory", "--config", config]
    listed, words = (subprocess.run([*command, *more], capture_output=True, text=True) for more in (["--json"], []))
    assert (listed.returncode, listed.stderr) == (0, "")
    assert ask("SLURM_JOB_GPUS=1", listed.stdout).stdout.splitlines()[1:] == ["GPU-1"]
    assert words.stdout.splitlines()[1] == "GPU-1  GPU 1, 00000000:11:00.0, minor number 1"


def test_a_node_without_a_driver_has_no_inventory(nvml_stub, tmp_path):
    config = tmp_path / "node.toml"
    config.write_text(f'nvml_library = "{nvml_stub.library}"\n')
    command = [sys.executable, "-m", "trimtab_slurm.admin.cli", "inventory", "--config", config]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no GPU on this node" in done.stderr


class Node:
    """Settings of a node below one directory, and journals that samplers left behind."""

    def __init__(self, directory, attempt):
        self.config = directory / "node.toml"
        self.settings = NodeSettings(str(directory / "journals"), str(directory / "profiles"))
        self.config.write_text(render(self.settings))
        self._attempt = dataclasses.replace(attempt, uid=os.getuid(), gid=os.getgid(), expected_nodes=("n1",))

    def leave_journal(self, job_id):
        journals = Path(self.settings.journal_directory)
        attempt = dataclasses.replace(self._attempt, job_id=job_id)
        path, writer = journal.create(journals, attempt, self.settings.sampler_period_seconds)
        os.close(writer.descriptor)
        return path


@pytest.fixture
def node(open_path, attempt):
    return Node(open_path, attempt)


def test_recover_makes_profiles_of_what_was_left_behind(run, node):
    for job_id in (7, 8):
        node.leave_journal(job_id)
    result = run("recover", "--config", node.config)
    assert (result.exit_code, result.output) == (0, "recovered: 2 of 2 journals\n")
    assert len(list(Path(node.settings.profile_root).glob("lab/[78]/*.h5"))) == 2
    result = run("recover", env={"TRIMTAB_NODE_CONFIG": str(node.config)})
    assert (result.exit_code, result.output) == (0, "recovered: 0 of 0 journals\n")


def test_recover_names_what_could_not_be_recovered(run, node):
    damaged = node.leave_journal(7)
    damaged.write_bytes(b"garbage")
    node.leave_journal(8)
    result = run("recover", "--config", node.config)
    assert (result.exit_code, result.stdout) == (1, "recovered: 1 of 2 journals\n")
    why = f"{damaged} cannot be used, and is kept as .damaged: cut off"
    assert result.stderr.startswith(f"trimtab-node: {damaged} could not be: {why}")


@pytest.mark.skipif(os.geteuid() != 0, reason="journals are root's")
def test_recover_tells_an_ordinary_user_to_be_root(node):
    node.leave_journal(7)
    code = (
        "import os, sys; from trimtab_slurm import collect; from trimtab_slurm.admin.cli import main\n"
        "os.setuid(4711); main(['recover', '--config', sys.argv[1]])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, node.config], capture_output=True, text=True, timeout=60)
    complaint = f"trimtab-node: {node.settings.journal_directory} is root's: run as root\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", complaint)


def test_recover_lets_others_come_to_their_profiles_whatever_the_umask(node, open_path):
    """Where the profile root and what is above it are still to be made."""
    root = open_path / "a/b/profiles"
    node.config.write_text(render(dataclasses.replace(node.settings, profile_root=str(root))))
    node.leave_journal(7)
    command = [sys.executable, "-m", "trimtab_slurm.admin.cli", "recover", "--config", node.config]
    done = subprocess.run(command, capture_output=True, text=True, umask=0o077, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "recovered: 1 of 1 journals\n", "")
    for path in (root, root.parent, root.parent.parent, root / "lab"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o755


@pytest.mark.parametrize(
    ("mode", "text", "complaint"),
    [
        (0o666, "", "could have been written by another user"),
        (0o644, "no toml", "is not TOML"),
        (None, "", "cannot be read"),
    ],
)
def test_recover_believes_no_doubtful_configuration(run, node, mode, text, complaint):
    left = node.leave_journal(7)
    if mode is None:
        node.config.unlink()
    else:
        node.config.write_text(text or node.config.read_text())
        node.config.chmod(mode)
    result = run("recover", "--config", node.config)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{node.config} {complaint}" in result.stderr
    assert left.exists()


def test_the_command_is_installed_by_its_name():
    root = Path(__file__).parents[2]
    scripts = tomllib.loads((root / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["trimtab-node"] == f"{main.callback.__module__}:main"
