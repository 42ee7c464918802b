"""The prolog and the epilog: what slurmd runs as root when a job comes to a node, and when it has left.

Standard library only. They return in milliseconds and exit 0 whatever happens, since slurmd drains the node otherwise:
a fault goes to syslog, and into the attempt's journal where there is one. They call no Slurm command, which could wait
for the very daemon that waits for them. What takes time is done by processes that slurmd does not know of.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from trimtab_slurm import attempt as attempts
from trimtab_slurm import directories, faults, journal, resolve, sampler_record
from trimtab_slurm.attempt import Attempt
from trimtab_slurm.detach import KEPT_DESCRIPTOR, detach
from trimtab_slurm.sampler_record import SamplerRecord
from trimtab_slurm.settings import NodeSettings, load_or_default

DEADLINE_SECONDS = 1.2
"""After which the hook gives up by itself."""
KILL_SECONDS = 1.5
"""After which its script kills it."""
AFTER_SECONDS = 0.15
"""How long the script then waits for each of logger, rm and rmdir: for a log that nobody reads, a disk that hangs."""
DIRECTORY_SECONDS = 0.3
"""How long the job's profile directory is waited for: its file system may be another machine's, and hang."""
RETRY_SECONDS = 600.0
"""A journal that was written to less long ago than this is left to whoever is at it, or just failed at it."""
NICENESS = 10
"""Of sampler and collector."""

_SCRIPT = """\
#!/bin/sh
# trimtab's {which}. slurmd drains the node when it fails or hangs, so it does neither.
within() {{  # SECONDS COMMAND...
    if [ -x /usr/bin/timeout ]; then /usr/bin/timeout -s KILL "$@"; else shift; "$@"; fi
}}
say() {{
    set -- "{which} of job $SLURM_JOB_ID on $SLURMD_NODENAME: $1"
    if [ -x /usr/bin/logger ]; then
        within {after_seconds} /usr/bin/logger -t trimtab -p daemon.warning -- "$1"
    else
        echo "<28>trimtab: $1" >/dev/kmsg
    fi
}}
{{
    within {kill_seconds} {python} -I -S -c {code}
    code=$?
    [ "$code" = 0 ] || say "exit code $code from "{python}
{forget}    [ -x /usr/bin/timeout ] || say "/usr/bin/timeout cannot be run: nothing would end a Python that hangs"
}} </dev/null >/dev/null 2>&1
exit 0
"""
_FORGET = """\
    if [ "$code" != 0 ]; then  # without its state directory, the job's sampler ends by itself
        case "$SLURM_JOB_ID/$SLURMD_NODENAME" in
        /* | *[!0-9]*/* | */ | */.* | */*[!A-Za-z0-9_.-]*) ;;
        *)
            set -- {state}/"$SLURMD_NODENAME/$SLURM_JOB_ID"
            within {after_seconds} /bin/rm -f "$1/{record}"
            within {after_seconds} /bin/rmdir "$1"
            ;;
        esac
    fi
"""


def hook_script(which: str, python: str, config: Path, state_directory: Path) -> str:
    """The sh script for slurm.conf's Prolog or Epilog. It needs no PATH, no HOME, and no site-packages.

    `which`: prolog or epilog; `python`: an absolute path of Python 3.11 or newer; `config`: the node.toml;
    `state_directory`: where it is kept which sampler belongs to which job, which need not survive a reboot. It is no
    setting: the epilog must find what the prolog left, whatever has become of node.toml meanwhile.
    """
    import shlex  # not in every hook: each import adds to what jobs wait for

    package = Path(__file__).parent.parent
    code = (
        # Garbage is not worth collecting in a process of milliseconds.
        f"import gc, sys; gc.disable(); sys.path.insert(0, {str(package)!r}); "
        f"from trimtab_slurm.hooks import main; main{which, str(config), str(state_directory)}"
    )
    state = shlex.quote(str(state_directory))
    forget = _FORGET.format(state=state, record=sampler_record.NAME, after_seconds=AFTER_SECONDS)
    return _SCRIPT.format(
        which=which,
        python=shlex.quote(python),
        code=shlex.quote(code),
        forget=forget if which == "epilog" else "",
        kill_seconds=KILL_SECONDS,
        after_seconds=AFTER_SECONDS,
    )


def main(which: str, config: str, state_directory: str) -> None:
    """Run a hook in this process's environment, and end this process: exit code 0, whatever happens."""
    faults.introduce(f"{which} of job {os.environ.get('SLURM_JOB_ID')} on {os.environ.get('SLURMD_NODENAME')}")
    try:
        os.umask(0o022)
        signal.signal(signal.SIGALRM, _give_up)
        signal.setitimer(signal.ITIMER_REAL, DEADLINE_SECONDS)
        settings, doubt = load_or_default(Path(config))
        if doubt:
            faults.warn(doubt)
        run = {"prolog": _prolog, "epilog": _epilog}[which]
        run(os.environ, _Node(Path(config), Path(state_directory), settings, doubt))
    except Exception as error:  # noqa: BLE001  the hook's boundary: slurmd drains the node if anything gets out
        faults.warn(faults.describe(error))
    os._exit(0)  # Python's own farewell takes as long as all that the hook does


@dataclass(frozen=True)
class _Node:
    """What the hook goes by."""

    config: Path
    state_directory: Path
    settings: NodeSettings
    doubt: str
    """Why the settings are the defaults; empty where they are the file's."""

    def start(self, module: str, arguments: Sequence[str | Path], keep: journal.Writer | None = None) -> int:
        """Start sampler or collector as a process that slurmd does not know of, which keeps a journal; its id."""

        def become() -> None:
            os.nice(NICENESS)  # from the very start: the job is starting as well
            # It may be told to stop before Python has started: the signal waits until it is asked for.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            python = self.settings.python or sys.executable
            kept = ("SLURM_CONF", "SLURMD_NODENAME")
            environment = {name: os.environ[name] for name in kept if name in os.environ}
            # One thread: more of numpy's would take memory for nothing.
            environment |= {"LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"}
            try:
                os.execve(python, [python, "-I", "-m", f"trimtab_slurm.{module}", *map(str, arguments)], environment)
            except OSError as error:
                _say(f"{module}: {python}: {error.strerror}", journal.Writer(KEPT_DESCRIPTOR) if keep else None)

        return detach(become, keep.descriptor if keep else None)

    def collect(self, journals: Sequence[Path]) -> None:
        """Start a collector for journals whose samplers are gone."""
        if journals:
            self.start("collect", [self.config, *journals])


class _OutOfTime(Exception):
    """The hook's own deadline has passed."""


def _give_up(_number: int, _frame: FrameType | None) -> None:
    raise _OutOfTime(f"not done within {DEADLINE_SECONDS:g} s")


def _prolog(environment: Mapping[str, str], node: _Node) -> None:
    attempt, settings = attempts.from_hook(environment, time.time()), node.settings
    ids = resolve.held(attempt.gpu_variables)
    comment = environment.get("SLURM_JOB_COMMENT", "")
    partition = environment.get("SLURM_JOB_PARTITION", "")
    if reason := settings.reason_to_skip(partition, None if ids is None else len(ids), comment):
        faults.tell(f"the job is not profiled: {reason}")
        return
    state_path = node.state_directory / attempt.node / str(attempt.job_id)
    above = _node_directory(node.state_directory, attempt.node)
    state = directories.open_own_below(above, str(attempt.job_id), 0o700)
    earlier = SamplerRecord.read(state)
    process = earlier.open() if earlier else None
    if earlier and process is not None:
        if (earlier.restart_count, earlier.uid) == (attempt.restart_count, attempt.uid):
            _note(earlier.journal, "prolog", "ran again; the sampler of this attempt goes on")
            return
        sampler_record.stop(process)  # an earlier attempt's, whose epilog never ran
    if earlier:
        earlier.remove(state)
    path, writer = journal.create(
        Path(settings.journal_directory),
        attempt,
        settings.sampler_period_seconds,
        settings.profile_root,
        settings.staff_group,
    )
    try:
        writer.event("prolog", f"job {attempt.job_id} of {attempt.user or attempt.uid} on {attempt.node}")
        if node.doubt:
            writer.event("fault", node.doubt)
        pid = node.start("sampler", [path, state_path, node.config], writer)
        SamplerRecord.of(pid, path, attempt).write(state)
        if trouble := _prepare_directory(settings, attempt):
            _say(trouble, writer)
    except (OSError, _OutOfTime) as error:
        writer.event("fault", f"prolog: {error}")
        raise
    os.close(writer.descriptor)
    old = time.time() - RETRY_SECONDS
    node.collect([orphan for orphan in journal.orphans(path.parent) if orphan.stat().st_mtime < old])


def _epilog(environment: Mapping[str, str], node: _Node) -> None:
    job_id, name = attempts.job_id(environment), attempts.node_name(environment)
    above = _node_directory(node.state_directory, name)
    try:
        state = os.open(str(job_id), directories.DIRECTORY, dir_fd=above)
    except FileNotFoundError:
        return  # it ran before, or no prolog did
    sampler = SamplerRecord.read(state)
    process = sampler.open() if sampler else None
    if sampler:
        sampler.remove(state)
    os.rmdir(str(job_id), dir_fd=above)  # from now on its sampler ends, even if this hook comes no further
    if sampler:
        if node.doubt:
            _note(sampler.journal, "fault", node.doubt)
        if process is None:
            _note(sampler.journal, "fault", gone := f"the sampler, process {sampler.pid}, has died")
            faults.warn(gone)
        _note(sampler.journal, "epilog", f"job exit code {environment.get('SLURM_JOB_EXIT_CODE2', 'not known')}")
    if process is not None:
        sampler_record.stop(process)
    else:  # it has died, or the prolog did not come to its end
        node.collect(journal.orphans(Path(node.settings.journal_directory), job_id, name))


def _node_directory(state_directory: Path, node: str) -> int:
    root = directories.open_own(state_directory, 0o755)
    return directories.open_own_below(root, node, 0o755)


def _say(fault: str, writer: journal.Writer | None) -> None:
    """Say what went wrong in syslog, and in the attempt's events where there is a journal."""
    faults.warn(fault)
    if writer:
        writer.event("fault", fault)


def _note(path: Path, kind: str, text: str) -> None:
    """Append an event to the journal that a sampler is writing, or has left behind. Failing at it stops no hook."""
    try:
        descriptor = journal.open_existing(path)
    except FileNotFoundError:
        return  # it is a part already
    try:
        journal.Writer(descriptor).event(kind, text)
    except OSError as error:  # the disk is full: the sampler must be stopped all the same
        faults.warn(f"{path.name}: {kind}: {text}: {error}")
    finally:
        os.close(descriptor)


def _prepare_directory(settings: NodeSettings, attempt: Attempt) -> str:
    """Have the job's profile directory made; returns what went wrong. A file system that hangs is not waited for."""

    def make() -> None:
        staff, trouble = directories.staff_gid(settings.staff_group)
        try:
            directories.make_job_directory(
                Path(settings.profile_root), attempt.cluster, attempt.job_id, attempt.uid, attempt.gid, staff
            )
        except OSError as error:
            trouble = f"profile directory: {error}"
        os.write(KEPT_DESCRIPTOR, trouble.encode())

    reader, writer = os.pipe()
    detach(make, writer)
    os.close(writer)
    if not select.select([reader], [], [], DIRECTORY_SECONDS)[0]:
        return f"profile directory: {settings.profile_root} did not answer within {DIRECTORY_SECONDS:g} s"
    return os.read(reader, 4096).decode(errors="replace")
