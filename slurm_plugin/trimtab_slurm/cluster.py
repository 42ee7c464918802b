"""The Slurm client: the one place with Slurm's commands and the shapes of what they print.

`scontrol show -o` is read, not `--json`, whose shape changed from release to release. Commands are argument lists with
a timeout, never a shell; whatever goes wrong becomes a SlurmError with Slurm's own words.
"""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trimtab_slurm.nodelist import expand_nodes

TIMEOUT_SECONDS = 60.0
"""A busy controller answers within its MessageTimeout, 10 s by default; Slurm's commands try a few times."""

_UNKNOWN_JOB = "Invalid job id"
_ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "RECONFIG_FAIL", "REVOKED", "TIMEOUT"),
)


class SlurmError(RuntimeError):
    """Slurm refused, or could not be asked: says which command, and what it answered."""


@dataclass(frozen=True)
class JobState:
    """What Slurm knows of a job."""

    job_id: int
    state: str
    """As Slurm spells it: PENDING, RUNNING, COMPLETING, COMPLETED, FAILED, ..."""
    reason: str
    """Why it waits, or why it ended; "None" when there is nothing to say."""
    exit_code: int
    """Of the batch script; 128 + n when signal n ended it, as shells count; 1 where Slurm knows no more than that it
    did not complete (cancelled before it began, out of time, its node lost)."""
    signal: int
    """The signal that ended the batch script, or 0."""
    nodes: tuple[str, ...]
    """Empty before the job has started."""
    batch_node: str
    """Where the batch script runs; empty before the job has started."""
    start_seconds: float | None
    """UTC, seconds since 1970, of the current attempt; None before it has started."""
    restart_count: int
    stdout: str
    """Path of the job's output; empty when it has none (srun)."""
    working_directory: str
    user: str

    @property
    def ended(self) -> bool:
        """Whether nothing of this attempt runs any more."""
        return self.state in _ENDED


class SlurmClient(Protocol):
    """What the wrapper asks of Slurm. Every method raises SlurmError when Slurm refuses or does not answer."""

    def submit(self, script: str, arguments: Sequence[str] = (), *, test_only: bool = False) -> int:
        """Submit the text of a batch script, and return its job id.

        `arguments` are sbatch's and override the script's. With `test_only` Slurm merely checks the request; the id
        is then the one that the job would have got.
        """

    def job(self, job_id: int) -> JobState | None:
        """The state of a job; None when Slurm does not know it (any more)."""

    def cancel(self, job_id: int) -> None:
        """End a job as scancel does: SIGTERM, then SIGKILL after the site's KillWait. One that is gone is no error."""

    def node_address(self, node: str) -> str:
        """The address at which other nodes reach this one."""

    def node_states(self) -> dict[str, str]:
        """Node -> state as Slurm spells it: IDLE, MIXED, IDLE+DRAIN, DOWN*, ... (*: it does not respond)."""

    def version(self) -> str:
        """The version of Slurm, such as "22.05.8"."""


class CommandLineClient:
    """The client that runs sbatch, scontrol and scancel, in this process's environment or another."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = environment

    def submit(self, script: str, arguments: Sequence[str] = (), *, test_only: bool = False) -> int:
        if test_only:
            answer = self._run(["sbatch", "--test-only", *arguments], script)
            return _number(r"Job (\d+) to start", answer.stderr, "sbatch --test-only")
        answer = self._run(["sbatch", "--parsable", *arguments], script)
        return _number(r"\s*(\d+)", answer.stdout, "sbatch")

    def job(self, job_id: int) -> JobState | None:
        try:
            return parse_job(self._run(["scontrol", "show", "job", "-o", str(job_id)]).stdout, job_id)
        except SlurmError as error:
            if _UNKNOWN_JOB in str(error):
                return None
            raise

    def cancel(self, job_id: int) -> None:
        try:
            self._run(["scancel", "--quiet", str(job_id)])
        except SlurmError as error:  # for a job that is gone, some releases answer 0, and some do not
            if _UNKNOWN_JOB not in str(error):
                raise

    def node_address(self, node: str) -> str:
        answer = self._run(["scontrol", "show", "node", "-o", node]).stdout
        return _field("NodeAddr", answer) or node

    def node_states(self) -> dict[str, str]:
        return parse_node_states(self._run(["scontrol", "show", "node", "-o"]).stdout)

    def version(self) -> str:
        answer = self._run(["scontrol", "--version"]).stdout.split()
        return answer[-1] if answer else ""

    def _run(self, command: Sequence[str], script: str | None = None) -> subprocess.CompletedProcess[str]:
        environment = os.environ if self._environment is None else self._environment
        # Times as seconds: local ones are ambiguous.
        return _run(command, script, {**environment, "SLURM_TIME_FORMAT": "%s"})


class PyslurmClient(CommandLineClient):
    """Asks for a job's state through pyslurm, without starting a process; the rest is the command line's.

    Cancelling is: `pyslurm.Job.cancel` sends SIGKILL at once, which leaves the ranks no time to save.
    """

    def __init__(self) -> None:
        super().__init__()
        import pyslurm  # late: without a usable slurm.conf the import ends the process

        self._pyslurm = pyslurm

    def job(self, job_id: int) -> JobState | None:
        try:
            found = self._pyslurm.Job.load(job_id)
        except self._pyslurm.RPCError as error:
            if _UNKNOWN_JOB in str(error):
                return None
            raise SlurmError(f"pyslurm cannot load job {job_id}: {error}") from error
        return _from_pyslurm(found)


def client() -> SlurmClient:
    """The client that fits this machine: pyslurm's when it is built for the site's Slurm, else the command line's."""
    command_line = CommandLineClient()
    probed = _pyslurm_version()
    if probed and _major_minor(probed) == _major_minor(command_line.version()):
        return PyslurmClient()
    return command_line


def parse_job(text: str, job_id: int) -> JobState | None:
    """A job from the output of `scontrol show job -o`, times as SLURM_TIME_FORMAT=%s gives them.

    Of an array's or a heterogeneous job's several lines the one that bears the id itself, else the first.
    """
    lines = [line for line in text.splitlines() if line.startswith("JobId=")]
    if not lines:
        return None
    line = next((line for line in lines if line.startswith(f"JobId={job_id} ")), lines[0])
    # The job's name is the one free text before what is read here; without it, the first match is the right one.
    line = re.sub(r" JobName=.*? UserId=", " UserId=", line, count=1)
    state = _field("JobState", line)
    code, _, number = _field("ExitCode", line).partition(":")
    start, nodes = _field("StartTime", line), expand_nodes(_field("NodeList", line))
    return JobState(
        job_id=_number(r"JobId=(\d+)", line, "scontrol show job"),
        state=state,
        reason=_field("Reason", line),
        **_ending(state, int(code or 0), int(number or 0)),
        nodes=nodes,
        batch_node=_field("BatchHost", line),
        start_seconds=float(start) if nodes and start.isdigit() else None,  # before, Slurm gives an estimate
        restart_count=int(_field("Restarts", line) or 0),
        stdout=_path("StdOut", line),
        working_directory=_path("WorkDir", line),
        user=re.sub(r"\(\d+\)$", "", _field("UserId", line)),
    )


def parse_node_states(text: str) -> dict[str, str]:
    """Node -> state, from the output of `scontrol show node -o`."""
    lines = [line for line in text.splitlines() if line.startswith("NodeName=")]
    return {_field("NodeName", line): _field("State", line) for line in lines}


def _ending(state: str, code: int, number: int) -> dict[str, int]:
    if number:
        code = 128 + number
    elif state in _ENDED and state != "COMPLETED":
        code = code or 1
    return {"exit_code": code, "signal": number}


def _field(key: str, line: str) -> str:
    """The value of a key whose values hold no space; empty when there is none."""
    match = re.search(rf"(?:^| ){key}=(\S*)", line)
    return "" if match is None or match[1] == "(null)" else match[1]


def _path(key: str, line: str) -> str:
    """The value of a key whose values may hold spaces: up to one of the keys that can come next, or the end."""
    match = re.search(rf" {key}=(.*?)(?= +(?:\w*Comment|Std\w+|Power|Mail\w+|\w+PerTres|Tres\w+)=|\s*$)", line)
    return "" if match is None or match[1] == "(null)" else match[1]


def _number(pattern: str, text: str, command: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise SlurmError(f"{command} answered {text.strip()[:200]!r}, which holds no job id")
    return int(match[1])


def _from_pyslurm(job: Any) -> JobState:
    nodes = expand_nodes(job.allocated_nodes or "")
    return JobState(
        job_id=int(job.id),
        state=job.state,
        reason=job.state_reason or "None",
        **_ending(job.state, job.exit_code or 0, job.exit_code_signal or 0),
        nodes=nodes,
        batch_node=job.batch_host or "",
        start_seconds=float(job.start_time) if nodes and job.start_time else None,
        restart_count=job.requeue_count,
        stdout=job.standard_output or "",
        working_directory=job.working_directory or "",
        user=job.user_name or "",
    )


def _pyslurm_version() -> str:
    """The version of pyslurm here, asked in a process of its own; empty when there is none that can be imported."""
    if importlib.util.find_spec("pyslurm") is None:
        return ""
    probe = [sys.executable, "-P", "-c", "import pyslurm; print(pyslurm.__version__)"]
    try:
        return _run(probe).stdout.strip()
    except SlurmError:
        return ""


def _major_minor(version: str) -> list[str]:
    return version.split(".")[:2]


def _run(
    command: Sequence[str], script: str | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    feed: dict[str, Any] = {"stdin": subprocess.DEVNULL} if script is None else {"input": script}
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_SECONDS, env=environment, **feed
        )
    except FileNotFoundError as error:
        raise SlurmError(
            f"{command[0]} is not on this machine's PATH: run this where Slurm's commands are installed"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError(
            f"{command[0]} did not answer within {TIMEOUT_SECONDS:g} s: the controller is down or busy; "
            "`scontrol ping` tells"
        ) from error
    if answer.returncode:
        words = answer.stderr.strip() or answer.stdout.strip() or f"exit code {answer.returncode}"
        raise SlurmError(f"{command[0]}: {words.removeprefix(f'{command[0]}: ')}")
    return answer
