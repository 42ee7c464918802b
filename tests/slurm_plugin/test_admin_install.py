"""Installing on a node and removing it again: below a prefix, by the command that admins use, with real hooks."""

import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trimtab import sandbox as boxes
from trimtab_slurm.admin import install as installation
from trimtab_slurm.admin import running, slurmconf
from trimtab_slurm.admin.nodefiles import CONFIG, HOOKS, UNIT, config_text, directories, node_settings
from trimtab_slurm.profile import read
from trimtab_slurm.settings import NodeSettings, load

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="what is installed belongs to root, who runs the hooks")

RECORDED = Path(__file__).parent / "data" / "prolog-22.05.8.env"
"""What a real prolog saw."""
PROLOG, EPILOG = HOOKS["Prolog"], HOOKS["Epilog"]


def command(*arguments, **options):
    """The completed process of `trimtab-node`, without an environment but for what is given."""
    environment = {"LANG": "C.UTF-8", **options.pop("environment", {})}
    return subprocess.run(
        [sys.executable, "-m", "trimtab_slurm.admin.cli", *map(str, arguments)],
        env=environment, capture_output=True, text=True, timeout=60, **options,
    )  # fmt: skip


def install(prefix, *arguments, **options):
    done = command("install", "--prefix", prefix, *arguments, **options)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def uninstall(prefix, *arguments):
    done = command("uninstall", "--prefix", prefix, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def tree(directory):
    """Path -> mode and content of everything below a directory."""
    return {
        str(path.relative_to(directory)): (oct(path.lstat().st_mode), path.read_bytes() if path.is_file() else b"")
        for path in sorted(directory.rglob("*"))
    }


def run_hook(path, **changes):
    """Run a hook as slurmd does: it says nothing, and exits 0."""
    environment = dict(line.split("=", 1) for line in RECORDED.read_text().splitlines())
    done = subprocess.run([path], env=environment | changes, capture_output=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def part(prefix, job_id=2):
    """The node's part of a job, once it is there."""
    parts = prefix / f"var/lib/trimtab/profiles/sandbox/{job_id}/parts"
    until(lambda: list(parts.glob("[!.]*.h5")))
    until(lambda: not list((prefix / "var/lib/trimtab/journals").glob("*")))
    (path,) = parts.glob("[!.]*.h5")
    return read(path)


@pytest.fixture
def prefix(open_path):
    """Where a node is installed; its samplers are ended with the test."""
    yield open_path / "node"
    for job in running.jobs(open_path / "node/run/trimtab"):
        if job.is_sampled:
            os.kill(job.sampler.pid, signal.SIGKILL)


def test_what_is_written_runs_and_keeps_everything_below_the_prefix(prefix):
    elsewhere = [Path("/etc/trimtab"), Path("/run/trimtab"), Path("/var/lib/trimtab")]
    before = [path.exists() for path in elsewhere]
    install(prefix)
    run_hook(prefix / PROLOG)
    (job,) = running.jobs(prefix / "run/trimtab")
    assert (job.node, job.job_id, job.is_sampled) == ("n1", 2, True)
    run_hook(prefix / EPILOG)
    kinds = sorted(event.kind for event in part(prefix).nodes[0].events if event.kind != "fault")
    assert kinds == ["epilog", "prolog", "sampler", "sampler"]
    assert [path.exists() for path in elsewhere] == before


def test_hooks_are_roots_and_can_be_executed_and_journals_are_for_root_alone(prefix):
    install(prefix)
    modes = {path: stat.S_IMODE((prefix / path).stat().st_mode) for path in (PROLOG, EPILOG, CONFIG, UNIT)}
    assert modes == {PROLOG: 0o755, EPILOG: 0o755, CONFIG: 0o644, UNIT: 0o644}
    node = load(prefix / CONFIG)
    assert node == node_settings(prefix)
    for directory, mode in directories(prefix).items():
        assert directory.is_relative_to(prefix)
        assert stat.S_IMODE(directory.stat().st_mode) == mode
    assert {path.lstat().st_uid for path in prefix.rglob("*")} == {0}


@pytest.mark.parametrize("umask", [0o077, 0o000])
def test_modes_do_not_depend_on_the_umask(prefix, umask):
    install(prefix)
    expected = tree(prefix)
    shutil.rmtree(prefix)
    install(prefix, umask=umask)
    assert tree(prefix) == expected


def test_node_toml_explains_every_key_and_says_its_default(tmp_path):
    text = config_text(node_settings(Path("/")))
    assert [line for line in text.splitlines() if line and not line.startswith("#")] == []
    (tmp_path / "node.toml").write_text(re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE))
    assert load(tmp_path / "node.toml") == NodeSettings()
    assert "# Samples of running jobs. Local to the node, and must survive a reboot.\n# journal_directory = " in text
    for key in vars(NodeSettings()):
        assert re.search(rf"^# [A-Z].*\n(# .*\n)*# {key} = ", text, re.MULTILINE)


def test_to_install_again_changes_nothing(prefix):
    install(prefix)
    before = {path: path.stat().st_mtime_ns for path in prefix.rglob("*") if path.is_file()}
    content = tree(prefix)
    lines = install(prefix)
    assert [line for line in lines if str(prefix) in line][:5] == [
        f"unchanged {prefix / path}" for path in installation.files(prefix, sys.executable)
    ]
    assert tree(prefix) == content
    before.pop(prefix / installation.MANIFEST)
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_an_upgrade_rewrites_hooks_and_an_unchanged_node_toml(prefix):
    install(prefix)
    manifest = json.loads((prefix / installation.MANIFEST).read_text())
    for path in (PROLOG, CONFIG):  # as an older version wrote them
        (prefix / path).write_text("# older\n")
        manifest["files"][str(path)] = installation.digest(b"# older\n")
    (prefix / installation.MANIFEST).write_text(json.dumps(manifest))
    (prefix / EPILOG).chmod(0o600)
    lines = install(prefix)
    for path in (PROLOG, EPILOG, CONFIG):
        assert f"wrote {prefix / path}" in lines
    run_hook(prefix / PROLOG)
    uninstall(prefix)
    assert part(prefix).job_id == 2
    assert sorted(prefix.iterdir()) == [prefix / "var"]


def test_what_is_removed_is_what_was_written(open_path):
    prefix = open_path / "node"
    foreign = {"etc/trimtab/prolog.d/site": "#!/bin/sh\n", "usr/lib/tmpfiles.d/other.conf": "", "var/lib/other/x": ""}
    for name, text in foreign.items():
        (prefix / name).parent.mkdir(parents=True, exist_ok=True)
        (prefix / name).write_text(text)
    before = tree(prefix)
    install(prefix)
    install(prefix)
    assert {line.split()[0] for line in uninstall(prefix)} == {"removed"}
    assert tree(prefix) == before
    assert uninstall(prefix) == [f"nothing is installed below {prefix}: there is no {prefix / installation.MANIFEST}"]
    install(open_path / "fresh")
    uninstall(open_path / "fresh")
    assert not (open_path / "fresh").exists()


def test_a_node_toml_that_was_changed_is_kept_and_named(prefix):
    install(prefix)
    changed = (prefix / CONFIG).read_text() + "sampler_period_seconds = 0.5\n"
    (prefix / CONFIG).write_text(changed)
    assert f"kept {prefix / CONFIG}, which is not as it was installed" in install(prefix)
    assert f"kept {prefix / CONFIG}, which was changed since it was installed" in uninstall(prefix)
    assert [path for path in prefix.rglob("*") if path.is_file()] == [prefix / CONFIG]
    assert f"kept {prefix / CONFIG}, which is not as it was installed" in install(prefix)
    uninstall(prefix)
    assert (prefix / CONFIG).read_text() == changed


def test_directories_are_an_admins_where_node_toml_is(prefix):
    (prefix / CONFIG).parent.mkdir(parents=True)
    (prefix / CONFIG).write_text(f'profile_root = "{prefix}/shared"\n')
    install(prefix)
    assert sorted(path.name for path in prefix.iterdir()) == ["etc", "usr"]


def test_profiles_and_journals_stay_and_samplers_write_theirs(prefix):
    install(prefix)
    run_hook(prefix / PROLOG)
    run_hook(prefix / PROLOG, SLURM_JOB_ID="3")
    kept = prefix / "var/lib/trimtab/journals/x.damaged"
    kept.write_text("garbage")
    lines = uninstall(prefix)
    assert [line for line in lines if line.startswith("ended")] == [
        "ended the sampler of job 2 on n1",
        "ended the sampler of job 3 on n1",
    ]
    assert f"kept {prefix}/var/lib/trimtab/journals, which is not empty" in lines
    assert f"kept {prefix}/var/lib/trimtab/profiles, which is not empty" in lines
    kept.unlink()
    for job_id in (2, 3):
        assert part(prefix, job_id).nodes[0].events[-1].kind == "sampler"
    assert sorted(prefix.iterdir()) == [prefix / "var"]


def test_a_node_toml_that_cannot_be_believed_ends_nobody_elses_samplers(prefix, open_path):
    """Its hooks take the defaults then, and the defaults' state directory may be another installation's."""
    install(prefix)
    (prefix / CONFIG).chmod(0o666)
    (open_path / "run").mkdir()
    state = open_path / "run/trimtab/n1/7"
    bind = f'mount --bind {open_path}/run /run && mkdir -p {state} && exec "$@"'
    uninstalling = [sys.executable, "-m", "trimtab_slurm.admin.cli", "uninstall", "--prefix", prefix]
    subprocess.run(["unshare", "--mount", "sh", "-c", bind, "sh", *uninstalling], check=True, timeout=60)
    assert state.exists()
    assert not prefix.exists()


@pytest.mark.parametrize("how", ["line", "pattern", "script"])
def test_hooks_that_slurm_conf_runs_are_not_removed(prefix, open_path, how):
    install(prefix)
    conf, scripts = open_path / "slurm.conf", open_path / "prolog.d"
    scripts.mkdir()
    if how == "line":
        conf.write_text(f"Prolog={prefix / PROLOG}\n")
    elif how == "pattern":
        (scripts / "90-trimtab").symlink_to(prefix / PROLOG)
        conf.write_text(f"Prolog={scripts}/*\n")
    else:
        (scripts / "site").write_text(f"#!/bin/sh\n{prefix / PROLOG} || :\n")
        conf.write_text(f"Prolog={scripts}/site\n")
    before = tree(prefix)
    done = command("uninstall", "--prefix", prefix, "--slurm-conf", conf)
    assert done.returncode == 2
    assert f"{conf} still runs {prefix / PROLOG} (Prolog=" in done.stderr
    assert tree(prefix) == before
    uninstall(prefix, "--slurm-conf", "/dev/null")
    assert not prefix.exists()


@pytest.mark.parametrize("how", ["given", "environment"])
@pytest.mark.parametrize("what", ["install", "uninstall"])
def test_a_slurm_conf_that_is_named_and_missing_changes_nothing(prefix, open_path, what, how):
    """Else a slip of the pen would remove hooks that slurm.conf still runs."""
    if what == "uninstall":
        install(prefix)
    before = tree(open_path)
    missing = open_path / "slurm.conf"
    options = ["--slurm-conf", missing] if how == "given" else []
    done = command(what, "--prefix", prefix, *options, environment={"SLURM_CONF": str(missing)})
    assert (done.returncode, done.stdout) == (2, "")
    source = "--slurm-conf" if how == "given" else "SLURM_CONF"
    assert (
        f"{source} {missing}: No such file or directory; give slurmd's with --slurm-conf, or /dev/null" in done.stderr
    )
    assert tree(open_path) == before


@pytest.mark.parametrize("umask", [0o077, 0o000])
def test_directories_on_the_way_to_the_prefix_are_made_and_removed_again(open_path, umask):
    prefix = open_path / "a/b/node"
    install(prefix, umask=umask)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (open_path / "a", open_path / "a/b", prefix)] == [0o755] * 3
    install(prefix)
    (open_path / "a/other").write_text("")
    assert f"kept {open_path}/a, which is not empty" in uninstall(prefix)
    assert tree(open_path).keys() == {"a", "a/other"}
    (open_path / "a/other").unlink()
    install(prefix)
    uninstall(prefix)
    assert tree(open_path).keys() == {"a"}  # it was there before


@pytest.mark.parametrize("kind", ["directory", "fifo"])
def test_a_node_toml_that_is_no_file_is_refused_without_waiting_for_it(prefix, kind):
    (prefix / CONFIG).parent.mkdir(parents=True)
    (prefix / CONFIG).mkdir() if kind == "directory" else os.mkfifo(prefix / CONFIG)
    done = command("install", "--prefix", prefix)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{prefix / CONFIG} is no file; mv {prefix / CONFIG} {prefix / CONFIG}.old, and install again" in done.stderr


@pytest.mark.parametrize(
    ("poison", "message"),
    [
        ("above", "names /usr, which is not above"),
        ("outside", "names ../x, which is not below"),
        ("absolute", "names /etc/passwd, which is not below"),
        ("owner", "says what to remove, and another user could have written it"),
        ("garbage", "cannot be read"),
    ],
)
def test_a_manifest_that_cannot_be_believed_removes_nothing(prefix, open_path, poison, message):
    install(prefix)
    (open_path / "x").write_text("")
    path = prefix / installation.MANIFEST
    if poison == "owner":
        os.chown(path, 4711, 4711)
    elif poison == "garbage":
        path.write_text("{")
    elif poison == "above":
        path.write_text(json.dumps(json.loads(path.read_text()) | {"above": ["/usr"]}))
    else:
        manifest = json.loads(path.read_text())
        name = "../x" if poison == "outside" else "/etc/passwd"
        manifest["files"][name] = installation.digest((prefix / name).read_bytes())
        path.write_text(json.dumps(manifest))
    before = tree(open_path)
    done = command("uninstall", "--prefix", prefix)
    assert done.returncode == 2
    assert message in done.stderr
    assert tree(open_path) == before


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("with blank", "slurm.conf takes an absolute path of letters, digits and ._+-/ here"),
        ("open/node", "would be where another user can write: "),
        ("anothers/node", "would be where another user can write: "),
    ],
)
def test_a_prefix_that_others_can_write_to_or_slurm_cannot_spell_is_refused(open_path, place, message):
    (open_path / "open").mkdir()
    (open_path / "open").chmod(0o777)
    (open_path / "anothers").mkdir()
    os.chown(open_path / "anothers", 4711, 4711)
    before = tree(open_path)
    done = command("install", "--prefix", open_path / place)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert tree(open_path) == before


def test_a_file_system_that_cannot_be_written_to_is_refused(open_path):
    inner = shlex.join(
        [sys.executable, "-m", "trimtab_slurm.admin.cli", "install", "--prefix", str(open_path / "node")]
    )
    script = f"mount -t tmpfs -o ro none {open_path} && {inner}"
    done = subprocess.run(["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "cannot be written, as user 0: run as root, or choose another --prefix" in done.stderr


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 3 9", "is Python 3.9; the hooks need 3.11 or newer"),
        ('[ -n "$LD_LIBRARY_PATH" ] || { echo "libpython3.so: not found" >&2; exit 127; }', "libpython3.so: not found"),
        ("exit 3", "without an environment, and slurmd gives them none: exit code 3"),
    ],
)
def test_a_python_that_cannot_run_the_hooks_is_refused(open_path, script, message):
    python = open_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    with pytest.raises(installation.InstallError, match=re.escape(message)):
        list(installation.install(open_path / "node", str(python)))
    assert not (open_path / "node").exists()


@pytest.mark.parametrize("what", ["hooks.py", "."])
def test_code_that_others_can_change_is_not_run_as_root(open_path, what):
    package = open_path / "site" / "trimtab_slurm"
    shutil.copytree(Path(installation.__file__).parent.parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {"PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    install(open_path / "fine", environment=environment)
    (package / what).chmod(0o777)
    done = command("install", "--prefix", open_path / "node", environment=environment)
    assert (done.returncode, done.stdout) == (2, "")
    place = (package / what).resolve()
    assert f"another user can change: {place} (owner 0, mode 0777); chown -h root:root {place} && chmod" in done.stderr
    assert not (open_path / "node").exists()


def test_what_was_written_before_a_failure_can_be_removed(prefix):
    (prefix / EPILOG).mkdir(parents=True)  # where a file is to be
    done = command("install", "--prefix", prefix)
    assert done.returncode == 2
    assert done.stderr.endswith("Is a directory; mend that, and install again\n")
    assert (prefix / PROLOG).exists()
    (prefix / EPILOG).rmdir()
    uninstall(prefix)
    assert tree(prefix).keys() == {"etc", "etc/trimtab", "etc/trimtab/epilog.d"}  # which were there before


def test_the_unit_recovers_what_a_crash_left(prefix):
    install(prefix)
    run_hook(prefix / PROLOG)
    (job,) = running.jobs(prefix / "run/trimtab")
    os.kill(job.sampler.pid, signal.SIGKILL)
    until(lambda: not job.is_sampled)
    if shutil.which("systemd-analyze"):
        done = subprocess.run(["systemd-analyze", "verify", prefix / UNIT], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
    unit = dict(line.split("=", 1) for line in (prefix / UNIT).read_text().splitlines() if "=" in line)
    assert unit["Type"] == "exec"  # nothing waits for its end
    assert unit["ExecStart"].startswith("-")  # nor for its success
    subprocess.run(shlex.split(unit["ExecStart"].removeprefix("-")), env={}, check=True, timeout=60)
    assert part(prefix).nodes[0].events[0].kind == "prolog"


@pytest.mark.slurm
def test_slurm_runs_the_hooks_by_what_install_says_and_no_node_is_drained(slurm_installed, box_directory):
    """By a line of their own, by a pattern, and by an admin's script: what is printed is done, to the letter."""
    box, _ = boxes.up(box_directory, boxes.Spec(nodes=1))
    conf, prefix = box_directory / "slurm.conf", box_directory / "node"
    plain = re.sub(r"^(Prolog|Epilog|PrologFlags)=.*\n", "", conf.read_text(), flags=re.MULTILINE)
    for way in ("line", "pattern", "script"):
        text = plain
        for which in ("prolog", "epilog"):
            script = box_directory / f"{way}-{which}.d" / "site"
            script.parent.mkdir()
            script.write_text(f"#!/bin/sh\necho $SLURM_JOB_ID >>{box_directory}/{way}-{which}\n")
            script.chmod(0o755)
            value = {"pattern": f"{script.parent}/*", "script": script}.get(way)
            text = (f"{which.title()}={value}\n" if value else "") + text
        conf.write_text(text)
        for line in install(prefix, "--slurm-conf", conf):
            if line.startswith(("Prolog", "Epilog")):
                conf.write_text(f"{line}\n{conf.read_text()}")
            elif line.startswith("ln -s "):
                subprocess.run(["sh", "-c", line], check=True)
            elif line.endswith(" || :"):
                site = box_directory / f"script-{'prolog' if 'prolog.d' in line else 'epilog'}.d" / "site"
                site.write_text(f"{site.read_text()}{line}\n")
        doctor = ["doctor", "--config", prefix / CONFIG, "--slurm-conf", conf]
        done = subprocess.run([sys.executable, "-m", "trimtab", *doctor], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout

        def slurm(*words):
            return subprocess.run(words, env=box.environment, capture_output=True, text=True, timeout=60)

        slurm("scontrol", "reconfigure")
        until(lambda: conf_in_use(slurm, "Prolog") == slurmconf.read(conf).last("Prolog"))
        done = slurm("srun", "-N1", "sh", "-c", "echo $SLURM_JOB_ID")
        assert done.returncode == 0, done.stderr
        recorded = part(prefix, int(done.stdout))
        assert [event.kind for event in recorded.nodes[0].events].count("sampler") == 2
        if way != "line":
            until((box_directory / f"{way}-epilog").exists)
            assert (box_directory / f"{way}-prolog").read_text() == done.stdout
        until(lambda: boxes.node_states(box) == {"n1": "IDLE"})


def conf_in_use(slurm, key):
    """What slurmctld goes by; from 24.11 on it may have several, and numbers them."""
    shown = slurm("scontrol", "show", "config").stdout
    return re.search(rf"^{key}(?:\[0\])?\s+= (.*)$", shown, re.MULTILINE)[1]


def until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
