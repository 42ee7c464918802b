"""Prolog and epilog: start a sampler, stop it. Standard library only; never a Slurm command; exit 0 whatever happens.

A prolog that fails drains its node, and one that waits holds the job: so each hook has a deadline, keeps no descriptor
of slurmd's open in what it starts, and tells its troubles to syslog alone.
"""

import os
import shlex
import signal
import sys
import syslog
import time
from pathlib import Path

from trimtab_slurm import attempt, settings
from trimtab_slurm.attempt import Attempt

DEADLINE_SECONDS = 2
_STOP = signal.SIGTERM


def hook_script(which: str, python: str, config: Path) -> str:
    """The shell script that slurmd runs as Prolog or Epilog (`which`: "prolog" or "epilog").

    It needs no PATH and no HOME. Python runs isolated and without site packages, from this very installation.
    """
    code = "import sys; sys.path.insert(0, sys.argv[1]); from trimtab_slurm.hooks import main; main(*sys.argv[2:])"
    package_root = Path(__file__).parents[1]
    command = shlex.join([python, "-I", "-S", "-c", code, str(package_root), which, str(config), python])
    return (
        "#!/bin/sh\n"
        f"# trimtab's {which}: starts or stops the sampler of a job on this node. Never fails, never waits.\n"
        "deadline=/usr/bin/timeout\n"
        f'[ -x "$deadline" ] && deadline="$deadline -k 1 {DEADLINE_SECONDS}" || deadline=\n'
        f"$deadline {command} </dev/null >/dev/null 2>&1\n"
        "exit 0\n"
    )


def main(which: str, config: str, python: str) -> None:
    """The hook itself; every trouble ends in syslog."""
    syslog.openlog(f"trimtab-{which}", syslog.LOG_PID, syslog.LOG_DAEMON)
    try:
        node_settings = _settings(Path(config))
        if which == "prolog":
            _prolog(node_settings, Path(config), python)
        else:
            _epilog(node_settings, Path(config), python)
    except Exception as error:  # noqa: BLE001 - outermost: a hook that fails would drain the node
        syslog.syslog(syslog.LOG_ERR, f"job {os.environ.get('SLURM_JOB_ID')}: {type(error).__name__}: {error}")


def _settings(config: Path) -> settings.NodeSettings:
    """The settings, or the defaults where the file is missing, faulty, or somebody else's."""
    try:
        status = config.stat()
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
            raise settings.SettingsError(f"{config} is not root's alone; the defaults apply")
        return settings.load(config)
    except (OSError, settings.SettingsError) as error:
        syslog.syslog(syslog.LOG_WARNING, str(error))
        return settings.NodeSettings()


def _prolog(node_settings: settings.NodeSettings, config: Path, python: str) -> None:
    started = attempt.from_environment(os.environ, time.time())
    _make_job_directory(Path(node_settings.profile_root), started)
    directory = _private_directory(Path(node_settings.state_directory), started.node)
    state_file = directory / f"{started.name}.json"
    with os.fdopen(os.open(state_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
        file.write(attempt.to_json(started))
    pid = _detach([python, "-I", "-m", "trimtab_slurm.sampler", str(state_file), str(config)])
    state_file.with_suffix(".pid").write_text(f"{pid} {_start_ticks(pid)}")


def _epilog(node_settings: settings.NodeSettings, config: Path, python: str) -> None:
    """Stop the samplers of this job on this node; a dead one leaves a journal, which is collected without it."""
    job_id, node = int(os.environ["SLURM_JOB_ID"]), os.environ["SLURMD_NODENAME"]
    for state_file in sorted(Path(node_settings.state_directory, node).glob(f"{job_id}-*.json")):
        pid, ticks = _recorded(state_file.with_suffix(".pid"))
        if pid and _start_ticks(pid) == ticks:
            os.kill(pid, _STOP)
        else:
            syslog.syslog(syslog.LOG_WARNING, f"job {job_id}: its sampler is gone; collecting what it left")
            _detach([python, "-I", "-m", "trimtab_slurm.collect", str(state_file), str(config)])


def _private_directory(root: Path, node: str) -> Path:
    """`root`/`node`, ours alone. Raises OSError where somebody else could have put it there."""
    for directory in (root, root / node):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.lstat()
        if directory.is_symlink() or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise PermissionError(f"{directory} is a link, another user's, or open to others")
    return root / node


def _make_job_directory(root: Path, started: Attempt) -> None:
    """`root`/<cluster>/<job id>, the user's own. A trouble here costs the profile, not the job: it goes to syslog."""
    try:
        root.mkdir(mode=0o711, parents=True, exist_ok=True)
        cluster = root / started.cluster
        cluster.mkdir(mode=0o711, exist_ok=True)
        handle = os.open(cluster, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            os.mkdir(str(started.job_id), 0o700, dir_fd=handle)
            os.chown(str(started.job_id), started.uid, started.gid, dir_fd=handle, follow_symlinks=False)
        except FileExistsError:
            pass  # another node's prolog was first, or it is a requeued attempt
        finally:
            os.close(handle)
    except OSError as error:
        syslog.syslog(syslog.LOG_WARNING, f"job {started.job_id}: no directory for its profile: {error}")


def _detach(command: list[str]) -> int:
    """Start a command that outlives the hook: its parent is init, its session its own, no descriptor is inherited.

    Returns its process id. slurmd waits for whoever holds its pipes, and kills the hook's process group.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        os.waitpid(child, 0)
        with os.fdopen(reader) as answer:
            return int(answer.read())
    try:
        os.setsid()
        grandchild = os.fork()
        if grandchild:
            os.write(writer, str(grandchild).encode())
            os._exit(0)
        signal.pthread_sigmask(signal.SIG_BLOCK, {_STOP})
        os.chdir("/")
        os.closerange(0, 1 + max(int(entry.name) for entry in Path("/proc/self/fd").iterdir()))
        os.open(os.devnull, os.O_RDWR)
        os.dup(0)
        os.dup(0)
        os.execve(command[0], command, {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
    finally:
        os._exit(127)  # never back into the hook's own code, which the parent runs


def _recorded(pid_file: Path) -> tuple[int, int]:
    try:
        pid, ticks = pid_file.read_text(encoding="ascii").split()
        return int(pid), int(ticks)
    except (OSError, ValueError):
        return 0, 0


def _start_ticks(pid: int) -> int:
    """When a process began, in clock ticks since boot: with its id, its identity. 0: there is none that still runs."""
    try:
        state, *fields = (
            Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        )
        return 0 if state == "Z" else int(fields[18])
    except (OSError, ValueError, IndexError):
        return 0


__all__ = ["hook_script", "main"]

if __name__ == "__main__":
    main(*sys.argv[1:])
