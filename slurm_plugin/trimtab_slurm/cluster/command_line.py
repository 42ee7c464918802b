"""The client that runs Slurm's commands: argument lists with a timeout, never a shell."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from trimtab_slurm.cluster.protocol import JobState, Node, SlurmError, SlurmSilent
from trimtab_slurm.cluster.text import address_in, job_id_in, parse_job, parse_nodes, steps_named

TIMEOUT_SECONDS = 60.0
"""A busy controller answers within its MessageTimeout, 10 s by default; Slurm's commands try a few times."""
UNKNOWN_JOB = "Invalid job id"
WAITING_JOB = "Job is pending execution"
_GONE = (UNKNOWN_JOB, "already completing or completed")
_SILENT = (
    *("Unable to contact slurm controller", "Socket timed out", "Zero Bytes were transmitted", "standby mode"),
    *("Connection reset by peer", "Connection refused"),  # it was ended while it was asked
)
"""What Slurm's commands say when the controller is away, or was while it answered."""


class CommandLineClient:
    """The client that runs sbatch, squeue, scontrol and scancel, in this process's environment or another."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = environment

    def submit(self, script: str, arguments: Sequence[str] = (), *, test_only: bool = False) -> int:
        if test_only:
            answer = self._run(["sbatch", "--test-only", *arguments], script=script)
            return job_id_in(r"Job (\d+) to start", answer.stderr, "sbatch --test-only")
        answer = self._run(["sbatch", "--parsable", *arguments], script=script)
        return job_id_in(r"\s*(\d+)", answer.stdout, "sbatch")

    def job(self, job_id: int) -> JobState | None:
        try:
            return parse_job(self._run(["scontrol", "show", "job", "-o", str(job_id)]).stdout, job_id)
        except SlurmError as error:
            if UNKNOWN_JOB in str(error):
                return None
            raise

    def cancel(self, job_id: int) -> None:
        self._scancel(str(job_id))

    def signal_steps(self, job: JobState, name: str, number: signal.Signals) -> None:
        try:
            listed = self._run(["squeue", "--steps", "--noheader", "--format=%i %j", f"--jobs={job.name}"]).stdout
        except SlurmError as error:
            if UNKNOWN_JOB in str(error):
                return
            raise
        if steps := steps_named(name, listed):
            self._scancel(f"--signal={number.name.removeprefix('SIG')}", *steps)

    def requeue(self, job: JobState) -> None:
        try:
            self._run(["scontrol", "requeue", job.name])
        except SlurmError as error:
            if WAITING_JOB not in str(error):
                raise

    def update(self, job: JobState, *, excluded: Sequence[str] | None = None, nodes: int | None = None) -> None:
        changes = [] if excluded is None else [f"ExcNodeList={','.join(excluded)}"]
        changes += [] if nodes is None else [f"NumNodes={nodes}-{nodes}"]
        self._run(["scontrol", "update", f"JobId={job.name}", *changes])

    def shrink(self, job: JobState, nodes: Sequence[str]) -> None:
        with tempfile.TemporaryDirectory() as directory:  # takes the scripts that scontrol leaves where it runs
            self._run(["scontrol", "update", f"JobId={job.name}", f"NodeList={','.join(nodes)}"], directory=directory)

    def nodes(self, partition: str = "") -> tuple[Node, ...]:
        found = parse_nodes(self._run(["scontrol", "show", "node", "-o"]).stdout)
        return tuple(node for node in found if not partition or partition in node.partitions)

    def node_states(self) -> dict[str, str]:
        return {node.name: node.state for node in self.nodes()}

    def node_address(self, node: str) -> str:
        return address_in(self._run(["scontrol", "show", "node", "-o", node]).stdout) or node

    def version(self) -> str:
        answer = self._run(["scontrol", "--version"]).stdout.split()
        return answer[-1] if answer else ""

    def _scancel(self, *arguments: str) -> None:
        try:
            self._run(["scancel", *arguments])
        except SlurmError as error:  # for a job that is gone, some releases answer 0, and some do not
            if not any(words in str(error) for words in _GONE):
                raise

    def _run(
        self, command: Sequence[str], *, script: str | None = None, directory: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        environment = os.environ if self._environment is None else self._environment
        # Times as seconds: local ones are ambiguous.
        return run(command, script=script, environment={**environment, "SLURM_TIME_FORMAT": "%s"}, directory=directory)


def run(
    command: Sequence[str],
    *,
    script: str | None = None,
    environment: Mapping[str, str] | None = None,
    directory: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """A command's output as text, given `script` on its standard input. Raises SlurmError, and SlurmSilent when the
    command was ended, or answered that nobody answers."""
    feed: dict[str, Any] = {"stdin": subprocess.DEVNULL} if script is None else {"input": script}
    options: dict[str, Any] = {"env": environment, "cwd": directory, "timeout": TIMEOUT_SECONDS}
    try:
        answer = subprocess.run(command, capture_output=True, text=True, errors="replace", **options, **feed)
    except FileNotFoundError as error:
        raise SlurmError(
            f"{command[0]} is not on this machine's PATH: run this where Slurm's commands are installed"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise SlurmSilent(
            f"{command[0]} did not answer within {TIMEOUT_SECONDS:g} s: the controller is down or busy; "
            "`scontrol ping` tells"
        ) from error
    if answer.returncode < 0:  # as a requeue ends what the batch script has started
        number = -answer.returncode
        with suppress(ValueError):
            raise SlurmSilent(f"{command[0]} was ended by {signal.Signals(number).name} before it answered")
        raise SlurmSilent(f"{command[0]} was ended by signal {number} before it answered")
    if answer.returncode:
        words = answer.stderr.strip() or answer.stdout.strip() or f"exit code {answer.returncode}"
        kind = SlurmSilent if any(silence in words for silence in _SILENT) else SlurmError
        raise kind(f"{command[0]}: {words.removeprefix(f'{command[0]}: ')}")
    return answer
