"""Answers of processes that may never give one: each is asked for with a time limit. Standard library only."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

ANSWER_SECONDS = 20.0
"""How long a driver, a file system or an interpreter may take."""
SAMPLER_ENVIRONMENT = {"LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"}
"""All that hooks give to the sampler."""


@dataclass(frozen=True)
class Answer:
    """What a process said that was asked for something."""

    code: int | None
    """Exit code; None where it did not answer in time."""
    output: str
    error: str
    seconds: float

    @property
    def values(self) -> dict[str, Any]:
        """The JSON object on the last line that it printed: libraries have been seen to print, too."""
        values = json.loads(self.output.splitlines()[-1])
        assert isinstance(values, dict)
        return values

    @property
    def reason(self) -> str:
        """Why there is no answer, in one line."""
        if self.code is None:
            return f"no answer within {ANSWER_SECONDS:g} s"
        return (self.error.strip().splitlines() or [f"exit code {self.code}"])[-1]


def ask(command: Sequence[str], environment: Mapping[str, str] = SAMPLER_ENVIRONMENT) -> Answer:
    """Run a command that may never answer: it is killed then, and not waited for if not even that ends it."""
    begin = time.monotonic()
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
            start_new_session=True,
        )
    except OSError as error:
        return Answer(127, "", f"{error.filename}: {error.strerror}", 0.0)
    try:
        output, text = process.communicate(timeout=ANSWER_SECONDS)
        return Answer(process.returncode, output, text, time.monotonic() - begin)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        for end in (process.stdout, process.stderr):
            assert end is not None
            end.close()
        if process.returncode is None:
            process.returncode = -signal.SIGKILL  # it hangs in the kernel: init will see to it
        return Answer(None, "", "", time.monotonic() - begin)


def probe(python: str, name: str, *arguments: object) -> list[str]:
    """The command that has an interpreter run one of `probes`."""
    return [python, "-I", "-m", "trimtab_slurm.admin.probes", name, *map(str, arguments)]
