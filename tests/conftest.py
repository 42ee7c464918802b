"""What tests of several components share: a real Slurm on this machine."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from trimtab import sandbox as boxes


class RunningSandbox:
    """A sandbox that is up: four nodes of two GPUs in name and four CPUs."""

    def __init__(self, box: boxes.Sandbox) -> None:
        self.directory: Path = box.directory
        self.environment: dict[str, str] = box.environment

    def run(self, *command: str | os.PathLike[str], timeout: float = 120, **options: Any) -> Any:
        """The completed process of a command that runs in the sandbox, its output as text."""
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=timeout, check=False, **options
        )


@pytest.fixture(scope="session")
def slurm_installed() -> None:
    """Skip, with the reason, where no sandbox can run."""
    try:
        boxes.check_machine()
    except boxes.SandboxError as error:
        pytest.skip(str(error))


@pytest.fixture
def box_directory() -> Iterator[Path]:
    """An empty directory for a sandbox of the test's own, which is taken down in the end."""
    with _short_directory() as directory:
        yield directory


@pytest.fixture(scope="session")
def sandbox(slurm_installed: None) -> Iterator[RunningSandbox]:
    """The Slurm that the tests of a session share: leave its nodes idle, as you found them."""
    with _short_directory() as directory:
        box, _ = boxes.up(directory, boxes.Spec())
        yield RunningSandbox(box)


@contextmanager
def _short_directory() -> Iterator[Path]:
    """Not below pytest's own: the paths of sockets must be short, and munged wants all users to reach its own."""
    directory = Path(tempfile.mkdtemp(prefix="trimtab-"))
    directory.chmod(0o755)
    try:
        yield directory
    finally:
        boxes.down(directory)
        shutil.rmtree(directory, ignore_errors=True)
