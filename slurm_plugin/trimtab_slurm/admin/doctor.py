"""What is wrong with trimtab's part on this node, and how to mend it.

Everything that may never answer is asked in a process of its own, with a time limit. Nothing is changed, but for a
directory that root makes below the profile root, and removes again.
"""

import ctypes
import grp
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from trimtab_slurm import gresconf, injection, journal, sampler_record
from trimtab_slurm.admin import registration, running, slurmconf, trust
from trimtab_slurm.admin.answers import Answer, ask, probe
from trimtab_slurm.admin.hookfile import find_hook, read_hook
from trimtab_slurm.admin.nodefiles import CONFIG, HOOKS, STATE
from trimtab_slurm.admin.slurmconf import SlurmConf
from trimtab_slurm.hooks import DEADLINE_SECONDS, hook_script
from trimtab_slurm.settings import NodeSettings, load_or_default

OK, WARNING, PROBLEM = "ok", "warning", "problem"
STATE_CHECK = "state directory"
LOW_BYTES, LOW_INODES = 100 << 20, 1000
_TELL_WAITING = """\
with __import__("contextlib").suppress(OSError), open("/proc/self/schedstat") as file:
    print(int(file.read().split()[1]) / 1e9)
"""
"""Has Python print for how many seconds it was ready, and other processes had the processors; nothing where the kernel
does not count that."""
TIME_ERROR = 5
"""adjtimex(2): the clock is not synchronized."""
DRIVERS = {
    "NVML": (
        Path("/proc/driver/nvidia/version"),
        "install the driver's libnvidia-ml.so.1, or set nvml_library in node.toml to where it is",
    ),
    "AMD SMI": (Path("/sys/module/amdgpu"), "install amdsmi, which comes with ROCm, for the sampler's Python"),
}
"""Of each library: what is there where the kernel has its driver, and what to do where the library is missing."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str
    level: str
    """ok; warning: works, and not as well as it could; problem: profiles are lost, or nodes are drained."""
    text: str
    mend: str = ""
    """A command, or what to do; empty where there is nothing to do."""


def examine(config: Path, slurm_conf: Path | None) -> list[Finding]:
    """Look at everything, in the order in which to mend it. `slurm_conf`: as `slurmconf.find` returns it."""
    return list(_examine(config, slurm_conf))


def _examine(config: Path, slurm_conf: Path | None) -> Iterator[Finding]:
    yield Finding("python", OK, f"{platform.python_version()}, {sys.executable}")
    if os.geteuid() != 0:
        text = f"run by user {os.geteuid()}: what only root can see is not checked"
        yield Finding("user", WARNING, text, "run as root")
    settings, doubt = load_or_default(config)
    yield from check_config(config, settings, doubt)
    conf = None
    try:
        conf = slurmconf.read(slurm_conf) if slurm_conf else None
    except slurmconf.SlurmConfError as error:
        yield Finding("slurm.conf", PROBLEM, str(error))
    install = install_command(config)
    hooks = {which: find_hook(which, config, conf) for which in HOOKS}
    for which, path in hooks.items():
        yield from check_hook(which, path, config, install)
    prolog = read_hook(hooks["Prolog"])
    python = settings.python or (prolog.python if prolog else sys.executable)
    if _only_root_runs(python):
        sampler = [_for_root("sampler", f"run {python}")]
    else:
        otherwise = f"in {config}, take python out, or set it to one that has trimtab" if settings.python else install
        sampler = list(check_sampler_python(python, ask(probe(python, "modules")), otherwise))
    yield from sampler
    state_directory = prolog.state_directory if prolog else Path("/") / STATE
    for key, path in (
        (STATE_CHECK, state_directory),
        ("journal_directory", Path(settings.journal_directory)),
        ("profile_root", Path(settings.profile_root)),
    ):
        if _only_root_runs(sys.executable):  # it may have been started before it gave up its rights
            yield _for_root(key, f"run {sys.executable}")
            continue
        answer = ask(probe(sys.executable, "directory", path, "gives" if key == "profile_root" else ""))
        yield check_directory(key, path, answer)
    yield from check_slurm_conf(conf, hooks)
    yield from check_samplers(state_directory)
    yield from check_journals(Path(settings.journal_directory), config)
    for name, label, *arguments in (("nvml", "NVML", settings.nvml_library), ("amd", "AMD SMI")):
        if all(finding.level == OK for finding in sampler):  # else the drivers would have the same trouble once more
            answer = ask(probe(python, "driver", name, *arguments))
            yield from check_driver(label, any(arguments), answer)
            yield from check_gres_conf(conf, answer)
    written = [path.stat().st_mtime for path in (config, *hooks.values()) if path.exists()]
    yield check_clock(time.time(), max(written, default=0.0), _synchronized())


def install_command(config: Path) -> str:
    """The command that installs what belongs to a node.toml."""
    prefix = config.parents[len(CONFIG.parts) - 1] if Path(*config.parts[-len(CONFIG.parts) :]) == CONFIG else Path("/")
    return "trimtab-node install" + (f" --prefix {prefix}" if prefix != Path("/") else "")


def check_config(config: Path, settings: NodeSettings, doubt: str) -> Iterator[Finding]:
    """Whether node.toml is what the hooks go by, and makes sense here."""
    if not os.path.lexists(config):
        yield Finding("node.toml", WARNING, f"{config} does not exist: the defaults apply", install_command(config))
    elif doubt:
        name = shlex.quote(str(config))
        if config.is_symlink() and config.is_file():
            mend = f"cp --remove-destination {shlex.quote(os.path.realpath(config))} {name}"
        elif not config.is_file():
            mend = f"mv {name} {name}.old"
        elif trust.opening(config):
            mend = f"chown root:root {name} && chmod 644 {name}"
        else:
            mend = f"edit {name}"
        yield Finding("node.toml", PROBLEM, doubt, mend)
    else:
        yield Finding("node.toml", OK, str(config))
    for fault in filter(None, map(str.strip, settings.fault.split(","))):
        try:
            text = f"samplers make up a fault, as a test: {injection.parse(fault).announcement}"
            yield Finding("node.toml", WARNING, text, f"take it out of {config}")
        except injection.InjectionError as error:
            yield Finding("node.toml", PROBLEM, str(error), f"edit {config}")
    if settings.staff_group:
        try:
            grp.getgrnam(settings.staff_group)
        except KeyError:
            text = f"staff_group = {json.dumps(settings.staff_group)}: this node has no such group"
            yield Finding("node.toml", PROBLEM, text, f"groupadd {shlex.quote(settings.staff_group)}, or edit {config}")


def check_hook(which: str, path: Path, config: Path, install: str) -> Iterator[Finding]:
    """Whether slurmd can run a hook, only root can change it, and it does what this version's would."""
    name = which.lower()
    if not path.exists():
        yield Finding(name, PROBLEM, f"{path} does not exist", install)
        return
    hook, troubles = read_hook(path), []
    if not path.stat().st_mode & 0o111:
        troubles.append((f"{path} has no run bit: slurmd drains the node at its next job", f"chmod 755 {path}"))
    if found := trust.opening(path):
        troubles.append((f"another user can change what root runs: {found}", found.mend))
    if not hook:
        troubles.append((f"{path} is not what trimtab installs", install))
    for text, mend in troubles:
        yield Finding(name, PROBLEM, text, mend)
    if not hook:
        return
    if path.read_text(encoding="utf-8") != hook_script(name, hook.python, config, hook.state_directory):
        yield Finding(name, WARNING, f"{path} is not as this version installs it", install)
    if _only_root_runs(hook.python):
        yield _for_root(name, f"run {hook.python}")
        return
    answer = ask([hook.python, "-I", "-S", "-c", f"{hook.imports}\n{_TELL_WAITING}"], {})
    if answer.code != 0:
        yield Finding(name, PROBLEM, f"{hook.python} cannot run it: {answer.reason}", install)
        return
    if found := _opening(Path(hook.python)):
        yield Finding(name, PROBLEM, f"another user can change what root runs: {found}", found.mend)
    start = check_start(which, path, answer, install)
    if start.level != OK or not troubles:
        yield start


def check_start(which: str, path: Path, answer: Answer, install: str) -> Finding:
    """Whether a hook starts fast enough. `answer`: of what it runs first, and of `_TELL_WAITING`."""
    waited = 0.0
    with suppress(IndexError, ValueError):  # not counted, or an interpreter that says something of its own
        waited = 1000 * float(answer.output.split()[-1])
    milliseconds, limit = 1000 * answer.seconds - waited, 1000 * DEADLINE_SECONDS
    text = f"{path} starts in {milliseconds:.0f} ms, of {limit:.0f} ms that it may take"
    if milliseconds > limit / 2:
        return Finding(which.lower(), WARNING, text, "put Python and trimtab on a local disk, then: " + install)
    busy = f"; now it waits {waited:.0f} ms more for the processors, which are busy"
    return Finding(which.lower(), OK, text + (busy if milliseconds + waited > limit / 2 else ""))


def check_sampler_python(python: str, answer: Answer, otherwise: str) -> Iterator[Finding]:
    """Whether sampler and collector find what they need. `answer`: of the probe `modules`.

    `otherwise`: how to have another interpreter run them.
    """
    pip = f"{shlex.quote(python)} -m pip install"
    if answer.code != 0:
        lacks = "No module named 'trimtab_slurm'" in answer.reason
        mend = f"in a clone of trimtab: {pip} .; or {otherwise}" if lacks else otherwise
        yield Finding("sampler", PROBLEM, f"{python} cannot run it: {answer.reason}", mend)
        return
    broken = {name: reason for name, reason in answer.values.items() if reason}
    for name, reason in broken.items():
        package = {"pynvml": "nvidia-ml-py"}.get(name, name)
        yield Finding(
            "sampler", PROBLEM, f"{python} cannot import {name}: {reason}", f"{pip} --force-reinstall {package}"
        )
    if not broken:
        yield Finding("sampler", OK, f"{python} has {', '.join(answer.values)}")


def check_directory(key: str, path: Path, answer: Answer) -> Finding:
    """Whether root can keep things in a directory, and nobody else. `answer`: of the probe `directory`."""
    name = shlex.quote(str(path))
    if answer.code != 0:
        return Finding(key, PROBLEM, f"{path}: {answer.reason}", f"see what is mounted there: findmnt -T {name}")
    facts = answer.values
    trouble = facts.get("trouble", "")
    if facts.get("missing"):
        if trouble:
            return Finding(
                key, PROBLEM, f"{path} cannot be made: {trouble}", f"see how it is mounted: findmnt -T {name}"
            )
        return Finding(key, OK, f"{path} is made by the first job")
    if facts["link"]:
        text = f"{path} is a symbolic link, which root does not follow"
        mend = f"rm {name}" if key == STATE_CHECK else f"{key} = {json.dumps(facts['link'])} in node.toml"
        return Finding(key, PROBLEM, text, mend)
    if not facts["directory"]:
        return Finding(key, PROBLEM, f"{path} is no directory", f"mv {name} {name}.old && install -d {name}")
    if facts["uid"] not in (0, os.geteuid()) or facts["mode"] & 0o022:
        text = f"{path} could be written to by another user (owner {facts['uid']}, mode {facts['mode']:04o})"
        return Finding(key, PROBLEM, f"{text}: the hooks do not use it", f"chown root:root {name} && chmod go-w {name}")
    if trouble:
        mend = "export it with no_root_squash, or set a profile_root that is local" if "give" in trouble else ""
        return Finding(key, PROBLEM, trouble, mend or f"see how it is mounted: findmnt -T {name}")
    free, inodes = facts["free_bytes"], facts["free_inodes"]
    text = f"{path}, {free / 1e9:.1f} GB free"
    if free < LOW_BYTES or (inodes is not None and inodes < LOW_INODES):
        left = f"{path}: {free / 1e6:.0f} MB and {inodes if inodes is not None else 'enough'} inodes are left"
        return Finding(
            key, WARNING, f"{left}: samples are lost when it is full", f"make room: df -h {name}; df -i {name}"
        )
    return Finding(key, OK, text)


def check_slurm_conf(conf: SlurmConf | None, hooks: Mapping[str, Path]) -> Iterator[Finding]:
    """Whether slurm.conf runs the hooks, and drains no node."""
    if conf is None:
        text = "none was found on this node: whether Slurm runs the hooks cannot be said"
        yield Finding("slurm.conf", WARNING, text, "trimtab doctor --slurm-conf PATH")
        return
    reconfigure = f"in {conf.path}, then: scontrol reconfigure"
    for which, hook in hooks.items():
        if by := registration.runs(conf, which, hook):
            yield Finding("slurm.conf", OK, f"{by} runs {hook}")
        else:
            steps = [step for step in registration.steps(conf, which, hook) if not step.startswith("#")]
            explained = registration.steps(conf, which, hook)[0].removeprefix("# ")
            mend = f"{steps[0]}  # {explained.removesuffix(':')}"
            yield Finding("slurm.conf", PROBLEM, f"{which}= does not run {hook}", mend)
        for text, mend in registration.draining(conf, which):
            yield Finding("slurm.conf", PROBLEM, f"{text}: slurmd drains the node at its next job", mend)
    if line := registration.flags_line(conf):
        text = "PrologFlags lacks Alloc: the sampler on each node begins with the first step there, not with the job"
        yield Finding("slurm.conf", WARNING, text, f"{line} {reconfigure}")
    for text, mend in registration.warnings(conf):
        yield Finding("slurm.conf", WARNING, text, mend)


def check_samplers(state_directory: Path) -> Iterator[Finding]:
    """Which samplers run, and which should and do not."""
    try:
        found = running.jobs(state_directory)
    except PermissionError:
        yield _for_root("samplers", f"look into {state_directory}")
        return
    sampled = [job for job in found if job.is_sampled]
    for job in found:
        name, why = f"job {job.job_id} on {job.node}", "see why: journalctl -t trimtab"
        if job in sampled and not job.sampler:
            text = f"{name}: {job.state / sampler_record.NAME} is gone: the epilog cannot tell its sampler to stop"
            yield Finding("samplers", WARNING, f"{text}, which then ends by itself")
        elif job in sampled:
            continue
        elif job.is_of_earlier_boot:
            text = f"{name} ended with the node, when that went down; what its prolog noted is left"
            yield Finding("samplers", WARNING, text, f"rm -r {shlex.quote(str(job.state))}")
        elif job.sampler:
            text = f"{name} has none: it has died, and what it wrote waits for the epilog"
            yield Finding("samplers", WARNING, text, why)
        else:
            yield Finding("samplers", WARNING, f"{name} has none: its prolog noted none", why)
    names = ", ".join(f"{job.job_id} on {job.node}" for job in sampled)
    yield Finding("samplers", OK, f"{len(sampled)} running" + (f": job {names}" if names else ""))


def check_journals(directory: Path, config: Path) -> Iterator[Finding]:
    """Whether samples of jobs that are over wait for something."""
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        if directory.exists():
            yield _for_root("journals", f"look into {directory}")
        return
    waiting, damaged = journal.orphans(directory), sorted(directory.glob("*.damaged"))
    if waiting:
        oldest = datetime.fromtimestamp(min(path.stat().st_mtime for path in waiting), UTC)
        text = (
            f"{len(waiting)} in {directory} wait for being made profiles, the oldest since {oldest:%Y-%m-%d %H:%M} UTC"
        )
        yield Finding("journals", WARNING, text, f"trimtab-node recover --config {shlex.quote(str(config))}")
    if damaged:
        names = " ".join(shlex.quote(str(path)) for path in damaged)
        text = f"{len(damaged)} in {directory} could not be read, and are kept as .damaged"
        yield Finding("journals", WARNING, text, f"rm {names}")
    if not waiting and not damaged:
        yield Finding("journals", OK, f"none waits in {directory}")


def check_driver(label: str, wanted: bool, answer: Answer) -> Iterator[Finding]:
    """Whether GPUs can be measured. `wanted`: node.toml says that there are some. `answer`: of the probe `driver`."""
    kernel, mend = DRIVERS[label]
    if answer.code is None:
        text = f"{answer.reason}: the driver hangs, and no GPU can be measured"
        yield Finding(label, PROBLEM, text, "drain the node; dmesg says more; reset the GPUs, or reboot")
    elif answer.code:
        yield Finding(label, PROBLEM, f"cannot be asked: {answer.reason}", mend)
    elif missing := answer.values.get("missing"):
        if wanted or kernel.exists():
            yield Finding(label, PROBLEM, missing.removeprefix(f"{label}: "), mend)
        else:
            yield Finding(label, OK, "no driver of these GPUs on this node")
    elif error := answer.values.get("error"):
        yield Finding(label, PROBLEM, error.removeprefix(f"{label}: "), "nvidia-smi, rocm-smi or dmesg say more")
    else:
        for note in answer.values["notes"]:
            yield Finding(label, PROBLEM, note, "drain the node; dmesg says more; reset the GPU, or reboot")
        yield Finding(label, OK, f"{answer.values['gpus']} GPUs, {answer.values['instances']} MIG instances")


def check_gres_conf(conf: SlurmConf | None, answer: Answer) -> Iterator[Finding]:
    """Whether the place of a GPU in slurmd's list says which one it is. `answer`: of the probe `driver`."""
    gpus = answer.values.get("gpus", 0) if answer.code == 0 else 0
    if conf is None or not gpus or answer.values["instances"]:  # instances have uuids, or are not known
        return
    node = os.environ.get("SLURMD_NODENAME") or platform.node().partition(".")[0]
    look = f"compare: SLURM_CONF={shlex.quote(str(conf.path))} slurmd -G -N {node}; nvidia-smi -q"
    try:
        minors = gresconf.read(conf.path, node).minors
    except gresconf.GresConfError as error:
        text = f"which GPUs a job holds may stay unknown where Slurm gives no uuids, on {node}: {error}"
        yield Finding("gres.conf", WARNING, text, f"docs/devices.md says which forms are plain; {look}")
        return
    if minors and len(minors) != gpus:
        text = f"slurmd lists {len(minors)} GPUs of {node}, and the driver has {gpus}"
        yield Finding("gres.conf", WARNING, text, look)
        return
    order = "their device files in gres.conf" if minors else "the driver"
    yield Finding("gres.conf", OK, f"slurmd lists the {gpus} GPUs of {node} in the order of {order}")


def check_clock(now: float, written: float, synchronized: bool) -> Finding:
    """Whether times can be believed. `written`: when the installation was; both in seconds since 1970."""
    mend = "let a time service such as chrony set it: timedatectl; chronyc tracking"
    if now < written:
        text = (
            f"it is {datetime.fromtimestamp(now, UTC):%Y-%m-%d %H:%M} UTC here, which is before trimtab was installed"
        )
        return Finding("clock", PROBLEM, text, mend)
    if not synchronized:
        text = (
            "nothing keeps it right: where nodes are more than 5 minutes apart, a job's parts do not become one profile"
        )
        return Finding("clock", WARNING, text, mend)
    return Finding("clock", OK, "is being kept right")


def _for_root(check: str, what: str) -> Finding:
    return Finding(check, WARNING, f"not checked: only root can {what}", "run as root")


def _only_root_runs(python: str) -> bool:
    return os.geteuid() != 0 and not os.access(python, os.X_OK)


def _opening(python: Path) -> trust.Opening | None:
    return trust.opening(python) or trust.opening_below(Path(__file__).parent.parent)


def _synchronized() -> bool:
    """Whether the kernel takes its clock for synchronized. Source: adjtimex(2), asked for nothing but its state."""
    timex = ctypes.create_string_buffer(512)  # all zeros: modes = 0 changes nothing; larger than any struct timex
    return bool(ctypes.CDLL(None).adjtimex(timex) not in (-1, TIME_ERROR))
