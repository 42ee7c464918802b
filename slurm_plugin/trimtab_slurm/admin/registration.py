"""Whether slurm.conf runs trimtab's hooks, and what makes it do so. Nothing is ever written there.

slurmd (22.05 to 25.11) takes every Prolog= and Epilog= for a glob(7) pattern. It drains the node when one matches
nothing, or a file that it cannot read and execute. Of several lines, older versions take the last alone. Source:
slurm.conf(5), and Slurm's src/plugins/prep/script/prep_script_slurmd.c.
"""

import fnmatch
import glob
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from trimtab_slurm.admin.slurmconf import SlurmConf
from trimtab_slurm.hooks import KILL_SECONDS

ALLOCATING_FLAGS = {"alloc", "contain", "x11", "runinjob", "forcerequeueonfail"}
"""PrologFlags that are Alloc, or imply it."""
TIMEOUTS = ("PrologEpilogTimeout", "PrologTimeout", "EpilogTimeout")
LINK_NAMES = ("trimtab", "trimtab.sh", "90-trimtab", "90-trimtab.sh")
"""For a link in a directory of scripts: the first that its pattern matches."""


def runs(conf: SlurmConf, which: str, hook: Path) -> str:
    """By what slurm.conf runs a hook: its own line, a pattern, or a script that mentions it; empty where it does not.

    `which`: Prolog or Epilog. A line that names the hook counts although there is no such file.
    """
    for value in conf.all(which):
        for path in _matches(conf, value) or [conf.path.parent / value]:
            if _same(path, hook):
                return f"{which}={value}"
            if _mentions(path, hook):
                return f"{which}={value}, by {path}"
    return ""


def scripts(conf: SlurmConf, which: str) -> list[Path]:
    """Every file that slurmd runs on this node for a hook's key."""
    return [path for value in conf.all(which) for path in _matches(conf, value)]


def draining(conf: SlurmConf, which: str) -> Iterator[tuple[str, str]]:
    """Why slurmd would drain this node at the next job, whatever the hooks do, and how to mend it."""
    for value in conf.all(which):
        if not (paths := _matches(conf, value)):
            yield f"{which}={value}: there is no such file", f"put it there, or take the line out of {conf.path}"
        for path in paths:
            if not path.exists():
                yield f"{which}={value}: {path} is a link that leads nowhere", f"rm {path}"
            elif path.is_dir() or not path.stat().st_mode & 0o111:
                mend = f"chmod 755 {path}" if _content(path).startswith("#!") else f"mv {path} {path.parent.parent}"
                yield f"{which}={value}: {path} cannot be executed", mend


def steps(conf: SlurmConf | None, which: str, hook: Path) -> list[str]:
    """What an admin does so that slurm.conf runs a hook: lines to add and commands, explained in comments."""
    values = conf.all(which) if conf else ()
    if conf is None or not values:
        return ["# in slurm.conf, once the hooks are on every node:", f"{which}={hook}"]
    if by := runs(conf, which, hook):
        return [f"# nothing to do: {by} runs {hook}"]
    pattern = next((value for value in values if _is_pattern(value)), None)
    if pattern is None:
        script = conf.path.parent / values[-1]
        return [f"# in {script}, before it exits, so that it goes on whatever happens:", f"{hook} || :"]
    directory, _, names = str(conf.path.parent / pattern).rpartition("/")
    name = next((name for name in LINK_NAMES if fnmatch.fnmatch(name, names)), None)
    if name is None or _is_pattern(directory):
        return [f"# on every node, a link by a name that {pattern} matches:", f"ln -s {hook} NAME"]
    return [f"# on every node, for {which}={pattern}:", f"ln -s {hook} {directory}/{name}"]


def flags_line(conf: SlurmConf | None) -> str:
    """The PrologFlags line that is wanted; empty where it is there."""
    if conf is None or not conf.last("PrologFlags"):
        return "PrologFlags=Alloc"
    return "" if conf.flags("PrologFlags") & ALLOCATING_FLAGS else f"PrologFlags={conf.last('PrologFlags')},Alloc"


def warnings(conf: SlurmConf) -> Iterator[tuple[str, str]]:
    """What in slurm.conf is in the hooks' way, and how to mend it."""
    if "runinjob" in conf.flags("PrologFlags"):
        yield (
            "PrologFlags has RunInJob: the sampler is in the job's own cgroup and ends with it, before its last sample",
            f"take RunInJob out of PrologFlags in {conf.path}, where nothing else needs it; scontrol reconfigure",
        )
    for key in TIMEOUTS:
        value = conf.last(key)
        if value.isdecimal() and 0 < int(value) < KILL_SECONDS:
            yield (
                f"{key}={value}: slurmd kills a hook, and drains the node, before the hook can give up by itself",
                f"{key}=10 in {conf.path}; scontrol reconfigure",
            )
    for key in ("Prolog", "Epilog"):
        if len(values := conf.all(key)) > 1:
            yield (
                f"{key} is set {len(values)} times: Slurm 22.05 takes the last alone ({values[-1]})",
                f"one {key}= with a pattern, in {conf.path}; scontrol reconfigure",
            )
    for file in conf.missing:
        yield (
            f"what is included could not be read, and may say more: {file}",
            f"look at the Include lines of {conf.path}",
        )


def advice(conf: SlurmConf | None, hooks: Mapping[str, Path]) -> list[str]:
    """What remains to be done for Slurm to run the hooks, as lines of text."""
    lines = [f"# as {conf.path} is now" if conf else "# no slurm.conf was found here: as if it had no Prolog"]
    for which, hook in hooks.items():
        lines += steps(conf, which, hook)
    if flag := flags_line(conf):
        lines.append(flag)
    if conf:
        lines += [f"# mind: {text}\n#   {mend}" for text, mend in warnings(conf)]
    return [*lines, "# then: scontrol reconfigure"]


def _matches(conf: SlurmConf, value: str) -> list[Path]:
    """The files that slurmd would run for a value; a path without a directory is beside slurm.conf."""
    return sorted(map(Path, glob.glob(str(conf.path.parent / value))))  # noqa: PTH207  a pattern may be absolute


def _is_pattern(value: str) -> bool:
    return re.search(r"[*?\[]", value) is not None


def _same(path: Path, hook: Path) -> bool:
    """Whether a file is the hook, a link to it, or a copy."""
    if os.path.realpath(path) == os.path.realpath(hook):
        return True
    content = _content(path)
    return content != "" and content == _content(hook)


def _mentions(path: Path, hook: Path) -> bool:
    code = (line.partition("#")[0] for line in _content(path).splitlines())
    return any(re.search(rf"(?<![\w./-]){re.escape(str(hook))}(?![\w./-])", line) for line in code)


def _content(path: Path) -> str:
    """The text of a script; empty where it cannot be read, or is none."""
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else ""
    except (OSError, UnicodeDecodeError):
        return ""
