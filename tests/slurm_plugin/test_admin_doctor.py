"""`trimtab doctor` on nodes that are really broken: it says what is wrong, and what it tells to do mends it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trimtab_slurm import journal
from trimtab_slurm.admin import answers, doctor, install, running, trust
from trimtab_slurm.admin.answers import Answer, ask, probe
from trimtab_slurm.admin.nodefiles import CONFIG, HOOKS, STATE, node_settings
from trimtab_slurm.admin.slurmconf import SlurmConf
from trimtab_slurm.settings import load_or_default

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="what is installed belongs to root, who runs the hooks")


class Node:
    """A node with everything in order, below one directory."""

    def __init__(self, directory):
        self.prefix = directory / "node"
        list(install.install(self.prefix, sys.executable))
        self.settings = node_settings(self.prefix)
        self.state = self.prefix / STATE
        self.config = self.prefix / CONFIG
        self.hooks = {which: self.prefix / path for which, path in HOOKS.items()}
        self.slurm_conf = directory / "slurm.conf"
        lines = [f"{which}={path}" for which, path in self.hooks.items()]
        self.slurm_conf.write_text("\n".join(["PrologFlags=Alloc", *lines, ""]))
        self.install = f"trimtab-node install --prefix {self.prefix}"

    def run(self, *arguments):
        """The completed process of `trimtab doctor`."""
        options = ["--config", self.config, "--slurm-conf", self.slurm_conf, *arguments]
        command = [sys.executable, "-m", "trimtab", "doctor", *map(str, options)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    def prolog(self):
        return list(doctor.check_hook("Prolog", self.hooks["Prolog"], self.config, self.install))

    def node_toml(self):
        return list(doctor.check_config(self.config, *load_or_default(self.config)))

    def place(self, key):
        return self.state if key == "state directory" else Path(getattr(self.settings, key))

    def directory(self, key):
        path = self.place(key)
        gives = "gives" if key == "profile_root" else ""
        return doctor.check_directory(key, path, ask(probe(sys.executable, "directory", path, gives)))


@pytest.fixture
def node(open_path):
    made = Node(open_path)
    yield made
    for pid in running.recorders(made.config):
        os.kill(pid, signal.SIGKILL)


def mended(finding):
    """Do what a finding tells to do."""
    subprocess.run(["sh", "-c", finding.mend], check=True, capture_output=True)


def levels(findings):
    return [finding.level for finding in findings]


def test_a_node_in_order_has_no_problem(node):
    done = node.run()
    assert (done.returncode, done.stderr) == (0, "")
    assert "problems: 0, warnings: " in done.stdout
    assert f"ok       slurm.conf: Prolog={node.hooks['Prolog']} runs {node.hooks['Prolog']}\n" in done.stdout
    assert "ok       samplers: 0 running\n" in done.stdout
    answer = json.loads(node.run("--json").stdout)
    assert answer["problems"] == 0
    assert {finding["level"] for finding in answer["findings"]} <= {"ok", "warning"}
    assert [finding["check"] for finding in answer["findings"]][:5] == [
        "python",
        "node.toml",
        "prolog",
        "epilog",
        "sampler",
    ]


def test_a_problem_is_an_exit_code_and_a_command(node):
    node.hooks["Epilog"].chmod(0o644)
    done = node.run()
    assert done.returncode == 1
    assert (
        f"problem  epilog: {node.hooks['Epilog']} has no run bit: slurmd drains the node at its next job\n"
        in done.stdout
    )
    assert f"         mend: chmod 755 {node.hooks['Epilog']}\n" in done.stdout


def test_a_slurm_conf_that_is_named_and_missing_is_refused(node):
    node.slurm_conf.unlink()
    done = node.run()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"trimtab: --slurm-conf {node.slurm_conf}: No such file or directory; give slurmd's")


def test_nothing_installed_is_a_problem_with_the_command_that_installs(node):
    shutil.rmtree(node.prefix)
    done = node.run()
    assert done.returncode == 1
    assert f"problem  prolog: {node.hooks['Prolog']} does not exist\n         mend: {node.install}\n" in done.stdout
    assert f"slurm.conf: Prolog={node.hooks['Prolog']}: there is no such file: slurmd drains the node" in done.stdout
    assert "does not run" not in done.stdout


@pytest.mark.parametrize(
    ("breaks", "text"),
    [
        (lambda hook: hook.chmod(0o600), "has no run bit: slurmd drains the node at its next job"),
        (lambda hook: hook.chmod(0o757), "another user can change what root runs: {hook} (owner 0, mode 0757)"),
        (
            lambda hook: os.chown(hook, 4711, 0),
            "another user can change what root runs: {hook} (owner 4711, mode 0755)",
        ),
        (lambda hook: hook.parent.chmod(0o777), "another user can change what root runs: {hook.parent} (owner 0, mode"),
        (lambda hook: hook.unlink(), "{hook} does not exist"),
        (lambda hook: hook.write_text("#!/bin/sh\n"), "{hook} is not what trimtab installs"),
    ],
)
def test_a_hook_that_is_broken_is_mended_by_what_is_said(node, breaks, text):
    hook = node.hooks["Prolog"]
    assert levels(node.prolog()) == ["ok"]
    breaks(hook)
    problem = node.prolog()[0]
    assert problem.level == "problem"
    assert text.format(hook=hook) in problem.text
    if problem.mend == node.install:
        list(install.install(node.prefix, sys.executable))
    else:
        mended(problem)
    assert levels(node.prolog()) == ["ok"]


def test_a_hook_of_another_version_is_told_to_be_installed_again(node):
    hook = node.hooks["Prolog"]
    hook.write_text(hook.read_text().replace("exit 0", "exit 0 # as ever"))
    warning, ok = node.prolog()
    assert (warning.level, warning.mend, ok.level) == ("warning", node.install, "ok")
    assert "is not as this version installs it" in warning.text


def test_a_hook_that_starts_slowly_is_told_to_be_put_on_a_local_disk(node, open_path):
    slow = open_path / "python"
    slow.write_text(f'#!/bin/sh\nsleep 0.7\nexec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    hook = node.hooks["Prolog"]
    hook.write_text(hook.read_text().replace(sys.executable, str(slow)))
    (warning,) = node.prolog()
    assert (warning.level, warning.mend.split(",")[0]) == ("warning", "put Python and trimtab on a local disk")


@pytest.mark.parametrize(
    ("waited", "level", "text"),
    [
        ("", "warning", "/prolog starts in 700 ms, of 1200 ms that it may take"),  # the kernel does not count it
        ("welcome\n", "warning", "/prolog starts in 700 ms, of 1200 ms that it may take"),
        ("welcome\n0.05\n", "warning", "/prolog starts in 650 ms, of 1200 ms that it may take"),
        (
            "0.6\n",
            "ok",
            "/prolog starts in 100 ms, of 1200 ms that it may take; now it waits 600 ms more for the processors, "
            "which are busy",
        ),
    ],
)
def test_a_hook_that_waits_for_busy_processors_is_not_slow_itself(waited, level, text):
    found = doctor.check_start("Prolog", Path("/prolog"), Answer(0, waited, "", 0.7), "install it")
    assert (found.check, found.level, found.text) == ("prolog", level, text)


@pytest.mark.parametrize(
    ("python", "reason"),
    [
        (None, "No such file or directory"),
        ("#!/bin/sh\necho 'error while loading shared libraries: libpython3.so' >&2; exit 127\n", "libpython3.so"),
        ("#!/bin/sh\nexit 1\n", "exit code 1"),
    ],
)
def test_a_python_that_cannot_start_is_said_with_its_reason(node, open_path, python, reason):
    broken = open_path / "python"
    if python:
        broken.write_text(python)
        broken.chmod(0o755)
    for hook in node.hooks.values():
        hook.write_text(hook.read_text().replace(sys.executable, str(broken)))
    (problem,) = node.prolog()
    assert problem.level == "problem"
    assert problem.text.startswith(f"{broken} cannot run it: ")
    assert reason in problem.text
    (sampler,) = doctor.check_sampler_python(str(broken), ask(probe(str(broken), "modules")), "take another")
    assert (sampler.level, sampler.mend) == ("problem", "take another")
    assert reason in sampler.text


def test_a_module_that_is_missing_is_named_by_what_installs_it():
    answer = Answer(0, json.dumps({"numpy": "", "pynvml": "ModuleNotFoundError: No module named 'pynvml'"}), "", 0.1)
    (problem,) = doctor.check_sampler_python("/opt/python", answer, "take another")
    assert problem.level == "problem"
    assert "cannot import pynvml: ModuleNotFoundError" in problem.text
    assert problem.mend == "/opt/python -m pip install --force-reinstall nvidia-ml-py"
    (found,) = doctor.check_sampler_python(sys.executable, ask(probe(sys.executable, "modules")), "take another")
    assert found == doctor.Finding("sampler", "ok", f"{sys.executable} has numpy, h5py, pynvml")


@pytest.mark.parametrize(
    ("breaks", "level", "text"),
    [
        (lambda config: config.unlink(), "warning", "does not exist: the defaults apply"),
        (lambda config: config.chmod(0o664), "problem", "could have been written by another user (owner 0, mode 0664)"),
        (lambda config: os.chown(config, 4711, 0), "problem", "could have been written by another user (owner 4711"),
        (lambda config: config.write_text("profile_rot = '/p'"), "problem", "did you mean profile_root?"),
        (lambda config: config.write_text("staff_group = 'no-such-group'"), "problem", "this node has no such group"),
        (
            lambda config: config.write_text("fault = 'disk@5'"),
            "warning",
            "samplers make up a fault, as a test: disk@5",
        ),
        (
            lambda config: config.write_text("fault = 'lost'"),
            "problem",
            "fault 'lost' is not known; choose from lost:INDEX@SECONDS, ",
        ),
        (lambda config: config.write_text("fault = 'unsupported:power_wats'"), "problem", "did you mean power_watts?"),
    ],
)
def test_a_node_toml_that_does_not_count_or_makes_no_sense_is_said(node, breaks, level, text):
    assert levels(node.node_toml()) == ["ok"]
    breaks(node.config)
    (finding,) = (finding for finding in node.node_toml() if finding.level != "ok")
    assert finding.level == level
    assert text in finding.text
    assert finding.mend
    if "another user" in text:
        mended(finding)
        assert levels(node.node_toml()) == ["ok"]


def test_each_fault_of_several_is_judged_by_itself(node):
    node.config.write_text("fault = 'lost:0@5, lots:0@5 ,driver'")
    assert levels(node.node_toml()) == ["ok", "warning", "problem", "warning"]


@pytest.mark.parametrize("kind", ["link", "dangling", "directory", "fifo"])
def test_a_node_toml_that_is_no_file_is_said_and_put_right(node, kind):
    node.config.rename(real := node.config.with_name("real.toml"))
    if kind == "directory":
        node.config.mkdir()
    elif kind == "fifo":
        os.mkfifo(node.config)
    else:
        node.config.symlink_to(real.name if kind == "link" else "nowhere")
    (problem,) = node.node_toml()
    assert problem.level == "problem"
    linked = "is a symbolic link, which root does not follow; put a copy there"
    reasons = {"directory": "cannot be read: Is a directory", "fifo": "is no file; move it away"}
    assert problem.text == f"the defaults apply: {node.config} {reasons.get(kind, linked)}"
    mended(problem)
    if kind != "link":
        (warning,) = node.node_toml()
        assert (warning.level, warning.mend) == ("warning", node.install)
        list(install.install(node.prefix, sys.executable))
    assert levels(node.node_toml()) == ["ok"]


def test_a_python_of_node_toml_that_is_none_is_one_problem_and_its_key_is_named(node, nvml_stub):
    lines = f'python = "/nonexistent/python"\nnvml_library = "{nvml_stub.library}"\n'
    node.config.write_text(node.config.read_text() + lines)
    findings = doctor.examine(node.config, node.slurm_conf)
    (problem,) = (finding for finding in findings if finding.level == "problem")
    assert problem.text == "/nonexistent/python cannot run it: /nonexistent/python: No such file or directory"
    assert problem.mend == f"in {node.config}, take python out, or set it to one that has trimtab"


def test_a_python_without_trimtab_is_told_to_be_given_it_from_a_clone():
    answer = Answer(1, "", "python: Error while finding module (No module named 'trimtab_slurm')", 0.1)
    (problem,) = doctor.check_sampler_python("/opt/python", answer, "take another")
    assert problem.mend == "in a clone of trimtab: /opt/python -m pip install .; or take another"


def test_what_an_ordinary_user_cannot_see_is_no_problem(node, open_path):
    """Its own interpreter may be out of its reach, where it was started before it gave up its rights."""
    (open_path / "private").mkdir(mode=0o700)
    code = (
        "import os, sys; from pathlib import Path; from trimtab_slurm.admin import doctor; os.setuid(4711)\n"
        "sys.executable = sys.argv[1]\n"
        "for finding in doctor.examine(Path(sys.argv[2]), Path(sys.argv[3])): print(finding.level, finding.text)\n"
    )
    arguments = map(str, (open_path / "private/python", node.config, node.slurm_conf))
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "warning run by user 4711: what only root can see is not checked\n" in done.stdout
    assert done.stdout.count(f"only root can run {open_path}/private/python\n") == 3
    assert "problem" not in done.stdout


@pytest.mark.parametrize("key", ["state directory", "journal_directory", "profile_root"])
@pytest.mark.parametrize("fault", ["owner", "mode", "link", "file"])
def test_a_directory_that_root_cannot_use_is_mended_by_what_is_said(node, key, fault):
    path = node.place(key)
    assert node.directory(key).level == "ok"
    if fault == "owner":
        os.chown(path, 4711, 4711)
    elif fault == "mode":
        path.chmod(0o777)
    else:
        path.rename(path.with_name("elsewhere"))
        path.write_text("") if fault == "file" else path.symlink_to("elsewhere")
    problem = node.directory(key)
    assert problem.level == "problem"
    if fault == "link":
        assert problem.text == f"{path} is a symbolic link, which root does not follow"
        other = f'{key} = "{path.with_name("elsewhere")}" in node.toml'
        assert problem.mend == (f"rm {path}" if path == node.state else other)
    else:
        expected = {"owner": "(owner 4711, mode", "mode": "(owner 0, mode 0777)", "file": "is no directory"}
        assert expected[fault] in problem.text
        mended(problem)
        assert node.directory(key).level == "ok"


def test_directories_that_the_first_job_makes_need_not_be_there(node):
    shutil.rmtree(node.prefix / "var")
    found = node.directory("profile_root")
    assert (found.level, found.text) == ("ok", f"{node.settings.profile_root} is made by the first job")


@pytest.mark.parametrize(
    ("options", "level", "text"),
    [
        ("ro,mode=0700", "problem", "journals is on a read-only file system"),
        ("size=64k,mode=0755", "warning", " MB and "),
        ("nr_inodes=20,mode=0755", "warning", "inodes are left: samples are lost when it is full"),
    ],
)
def test_a_disk_that_is_full_or_read_only_is_said(node, options, level, text):
    path = node.settings.journal_directory
    script = f'mount -t tmpfs -o {options} none {path} && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh", *probe(sys.executable, "directory", path, "")]
    found = doctor.check_directory("journal_directory", Path(path), ask(command, dict(os.environ)))
    assert found.level == level
    assert text in found.text


def test_a_profile_root_that_squashes_root_is_said(node):
    """Without the capability to give files away, as root has it not on such a file system."""
    path = node.settings.profile_root
    command = [
        "setpriv",
        "--bounding-set=-chown",
        "--inh-caps=-chown",
        *probe(sys.executable, "directory", path, "gives"),
    ]
    found = doctor.check_directory("profile_root", Path(path), ask(command, dict(os.environ)))
    assert found.level == "problem"
    assert f"root cannot make a directory in {path} and give it to a user (Operation not permitted)" in found.text
    assert "no_root_squash" in found.mend
    assert list(Path(path).iterdir()) == []


def test_what_hangs_is_not_waited_for(node, monkeypatch):
    monkeypatch.setattr(answers, "ANSWER_SECONDS", 0.2)
    begin = time.monotonic()
    answer = ask(["/bin/sleep", "1000"])
    assert time.monotonic() - begin < 20  # far from 1000 on a busy machine
    assert answer.code is None
    found = doctor.check_directory("profile_root", Path("/shared"), answer)
    assert (found.level, found.text) == ("problem", "/shared: no answer within 0.2 s")
    (driver,) = doctor.check_driver("NVML", False, answer)
    assert driver.level == "problem"
    assert "the driver hangs, and no GPU can be measured" in driver.text


def test_slurm_conf_that_does_not_run_a_hook_is_a_problem_with_the_line(node, tmp_path):
    def checked(**values):
        lower = {key.lower(): (value,) for key, value in values.items()}
        return list(
            doctor.check_slurm_conf(SlurmConf(tmp_path / "slurm.conf", lower), {"Prolog": node.hooks["Prolog"]})
        )

    problem, warning = checked()
    assert (problem.level, problem.text) == ("problem", f"Prolog= does not run {node.hooks['Prolog']}")
    assert problem.mend == f"Prolog={node.hooks['Prolog']}  # in slurm.conf, once the hooks are on every node"
    assert (warning.level, warning.mend.split()[0]) == ("warning", "PrologFlags=Alloc")
    (tmp_path / "site").write_text("#!/bin/sh\n")
    problem, drains = checked(Prolog=str(tmp_path / "site"), PrologFlags="Alloc")
    assert problem.mend.startswith(f"{node.hooks['Prolog']} || :  # in {tmp_path}/site")
    assert drains.text.endswith("site cannot be executed: slurmd drains the node at its next job")
    mended(drains)
    assert levels(checked(Prolog=str(tmp_path / "site"), PrologFlags="Alloc")) == ["problem"]
    assert levels(checked(Prolog=str(node.hooks["Prolog"]), PrologFlags="Alloc")) == ["ok"]
    (warning,) = doctor.check_slurm_conf(None, node.hooks)
    assert warning.level == "warning"


def begun(node):
    """The job of a real prolog, once the node's prolog has run for it."""
    lines = (Path(__file__).parent / "data/prolog-22.05.8.env").read_text().splitlines()
    subprocess.run([node.hooks["Prolog"]], env=dict(line.split("=", 1) for line in lines), check=True)
    (job,) = running.jobs(node.state)
    return job


def test_samplers_and_journals_that_wait_are_said_and_recovered(node):
    job = begun(node)
    (found,) = doctor.check_samplers(node.state)
    assert (found.level, found.text) == ("ok", "1 running: job 2 on n1")
    os.kill(job.sampler.pid, signal.SIGKILL)
    until(lambda: not job.is_sampled)
    warning, none = doctor.check_samplers(node.state)
    assert warning.text.startswith("job 2 on n1 has none: it has died")
    os.utime(job.state, (0, 0))  # as if before the node was last started
    warning, none = doctor.check_samplers(node.state)
    assert warning.text == "job 2 on n1 ended with the node, when that went down; what its prolog noted is left"
    mended(warning)
    assert levels(doctor.check_samplers(node.state)) == ["ok"]
    assert (none.level, none.text) == ("ok", "0 running")
    journals = Path(node.settings.journal_directory)
    until(lambda: journal.orphans(journals))
    (journals / "lab.9.n1.1.damaged").write_text("garbage")
    waiting, damaged = doctor.check_journals(journals, node.config)
    assert waiting.text.startswith(f"1 in {journals} wait for being made profiles, the oldest since 20")
    assert waiting.mend == f"trimtab-node recover --config {node.config}"
    recover = [sys.executable, "-m", "trimtab_slurm.admin.cli", *waiting.mend.split()[1:]]
    subprocess.run(recover, check=True, capture_output=True, timeout=60)
    assert damaged.mend == f"rm {journals}/lab.9.n1.1.damaged"
    mended(damaged)
    (ok,) = doctor.check_journals(journals, node.config)
    assert ok.level == "ok"


def test_a_sampler_that_is_not_noted_any_more_is_no_dead_one(node):
    job = begun(node)
    (job.state / "sampler.json").unlink()
    until(lambda: running.recorders(job.state) == [job.sampler.pid])
    os.utime(job.state, (0, 0))
    warning, found = doctor.check_samplers(node.state)
    assert (warning.level, warning.mend) == ("warning", "")
    assert warning.text.startswith(f"job 2 on n1: {job.state}/sampler.json is gone: the epilog cannot tell its sampler")
    assert (found.level, found.text) == ("ok", "1 running: job 2 on n1")
    os.kill(job.sampler.pid, signal.SIGKILL)
    until(lambda: not running.recorders(job.state))
    os.utime(job.state)
    warning, _ = doctor.check_samplers(node.state)
    assert warning.text == "job 2 on n1 has none: its prolog noted none"


@pytest.mark.parametrize(
    ("script", "level", "text"),
    [
        ("GPUS", "ok", "2 GPUs, 1 MIG instances"),
        ("fail * Init 18", "problem", "the library is of another version than the kernel's NVIDIA driver"),
        ("fail * Init 9", "problem", "driver is not loaded"),
    ],
)
def test_what_nvml_says_is_said(nvml_stub, script, level, text):
    gpus = nvml_stub.gpus(2) + "set 0 MigMode 1\nmig 0 0 MIG-a 7 0\n"
    nvml_stub.script(script.replace("GPUS", gpus))
    library = str(nvml_stub.library)
    (found,) = doctor.check_driver("NVML", True, ask(probe(sys.executable, "driver", "nvml", library)))
    assert (found.level, found.check) == (level, "NVML")
    assert text in found.text


def test_a_gpu_that_is_lost_is_a_problem_beside_those_that_are_not(nvml_stub):
    nvml_stub.script(nvml_stub.gpus(2) + "fail 1 * 15\n")
    answer = ask(probe(sys.executable, "driver", "nvml", str(nvml_stub.library)))
    problem, ok = doctor.check_driver("NVML", True, answer)
    assert problem.level == "problem"
    assert problem.text.startswith("GPU 1 of 2: ")
    assert (ok.level, ok.text) == ("ok", "1 GPUs, 0 MIG instances")


def test_a_library_that_is_not_where_node_toml_says_is_a_problem():
    answer = ask(probe(sys.executable, "driver", "nvml", "/nowhere/libnvidia-ml.so.1"))
    (found,) = doctor.check_driver("NVML", True, answer)
    assert found.level == "problem"
    assert "/nowhere/libnvidia-ml.so.1" in found.text
    assert "in node.toml cannot be loaded" in found.text


def test_no_driver_is_no_problem_where_the_kernel_has_none_either(tmp_path, monkeypatch):
    answer = Answer(0, json.dumps({"missing": "NVML: no libnvidia-ml.so.1"}), "", 0.1)
    for present, level in ((tmp_path / "nowhere", "ok"), (tmp_path, "problem")):
        monkeypatch.setitem(doctor.DRIVERS, "NVML", (present, "install it"))
        (found,) = doctor.check_driver("NVML", False, answer)
        assert found.level == level


@pytest.mark.parametrize(
    ("text", "gpus", "level", "says"),
    [
        ("AutoDetect=nvml", 4, "ok", "slurmd lists the 4 GPUs of n1 in the order of the driver"),
        ("Name=gpu File=/dev/nvidia[3,0-2]", 4, "ok", "4 GPUs of n1 in the order of their device files in gres.conf"),
        ("Name=gpu File=/dev/nvidia[1-3]", 4, "warning", "slurmd lists 3 GPUs of n1, and the driver has 4"),
        ("AutoDetect=rsmi", 4, "warning", "gres.conf: AutoDetect=rsmi: its order is not known"),
    ],
)
def test_the_order_of_slurmds_list_is_said(tmp_path, monkeypatch, text, gpus, level, says):
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    (tmp_path / "gres.conf").write_text(text)
    conf, answer = (
        SlurmConf(tmp_path / "slurm.conf", {}),
        Answer(0, json.dumps({"gpus": gpus, "instances": 0}), "", 0.1),
    )
    (found,) = doctor.check_gres_conf(conf, answer)
    assert (found.check, found.level) == ("gres.conf", level)
    assert found.text.endswith(says)
    assert (f"SLURM_CONF={conf.path} slurmd -G -N n1" in found.mend) == (level == "warning")


@pytest.mark.parametrize(
    ("code", "values"),
    [(0, {"gpus": 0, "instances": 0}), (0, {"gpus": 2, "instances": 3}), (0, {"missing": "no library"}), (None, {})],
)
def test_no_order_is_asked_for_where_there_are_no_whole_gpus(tmp_path, code, values):
    assert (
        list(doctor.check_gres_conf(SlurmConf(tmp_path / "slurm.conf", {}), Answer(code, json.dumps(values), "", 0.1)))
        == []
    )


@pytest.mark.parametrize(
    ("now", "synchronized", "level"), [(2e9, True, "ok"), (2e9, False, "warning"), (1e9, True, "problem")]
)
def test_a_clock_that_was_set_back_or_that_nobody_keeps_is_said(now, synchronized, level):
    assert doctor.check_clock(now, 1.9e9, synchronized).level == level


def test_a_path_is_as_safe_as_every_directory_and_link_on_the_way(open_path):
    (open_path / "a/b").mkdir(parents=True)
    (open_path / "a/b/file").write_text("")
    (open_path / "link").symlink_to("a/../a/b")
    (open_path / "loop").symlink_to("loop")
    through = open_path / "link/file"
    assert trust.opening(through) is None
    os.chown(open_path / "link", 4711, 4711, follow_symlinks=False)
    assert trust.opening(through).path == open_path / "link"
    mended(trust.opening(through))
    (open_path / "a").chmod(0o777)
    assert trust.opening(through).path == open_path / "a"
    (open_path / "a").chmod(0o1777)  # sticky, as /tmp
    assert trust.opening(through) is None
    assert trust.opening_below(open_path / "a") is None
    (open_path / "a/b/file").chmod(0o666)
    assert str(trust.opening_below(open_path / "a")) == f"{open_path}/a/b/file (owner 0, mode 0666)"
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        trust.opening(open_path / "loop")


def until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
