"""Starts real ranks on this machine, and listens to them as the wrapper does."""

import contextlib
import importlib.util
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from trimtab.protocol import (
    Done,
    Hello,
    Message,
    Notice,
    Order,
    StepReport,
    decode,
    encode,
    job_from_dict,
    job_to_json,
)

REPOSITORY = Path(__file__).parents[2]
MISSING = [name for name in ("torch", "megatron", "tokenizers") if importlib.util.find_spec(name) is None]


@pytest.hookimpl(tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector) -> pytest.CollectReport | None:
    """Without the training libraries nothing here can even be imported: say so, and skip."""
    if not isinstance(collector, pytest.Module):
        return None
    if not MISSING:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron-core's own, which are errors here
            import megatron.core.datasets.indexed_dataset  # noqa: F401

            import trimtab_megatron.train  # noqa: F401
        return None
    reason = f"Skipped: not installed: {', '.join(MISSING)}"
    return pytest.CollectReport(collector.nodeid, "skipped", (str(collector.path), 1, reason), [])


@dataclass
class Ended:
    """What ranks said and how they ended."""

    messages: list[Message]
    exit_codes: list[int]
    stdout: list[str]
    stderr: list[str]
    seconds: float

    def all(self, kind: type[Any]) -> list[Any]:
        """The messages of one kind, in the order in which they came."""
        return [message for message in self.messages if isinstance(message, kind)]

    @property
    def losses(self) -> dict[int, float]:
        """Loss of each step."""
        return {report.step: report.loss for report in self.all(StepReport) if report.loss is not None}

    @property
    def gradient_norms(self) -> dict[int, float]:
        """Global gradient norm of each step."""
        return {report.step: report.gradient_norm for report in self.all(StepReport) if report.loss is not None}

    @property
    def notices(self) -> list[str]:
        """Texts of the notices."""
        return [notice.text for notice in self.all(Notice)]

    def succeeded(self) -> "Ended":
        """Itself, once checked that every rank came to its end."""
        assert self.exit_codes == [0] * len(self.exit_codes), "\n".join(self.stderr)
        assert sorted(done.rank for done in self.all(Done)) == list(range(len(self.exit_codes)))
        return self


@dataclass
class Ranks:
    """Ranks that run, and a server that they talk to."""

    processes: list[subprocess.Popen[bytes]]
    directory: Path
    token: str
    began: float = field(default_factory=time.monotonic)
    messages: list[Message] = field(default_factory=list)
    _connections: list[socket.socket] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)
    _heard: threading.Condition = field(default_factory=threading.Condition)
    _order: Order | None = None

    def order(self, kind: str, **fields: Any) -> None:
        """Give an order to all ranks, those that are still starting included."""
        with self._heard:
            self._order = Order(kind, "test", **fields)
            for connection in self._connections:
                connection.sendall(encode(self._order))

    def until(self, condition: Callable[[list[Message]], bool], timeout: float = 60.0) -> None:
        """Wait until what was heard meets a condition."""
        with self._heard:
            assert self._heard.wait_for(lambda: condition(self.messages), timeout), self.messages[-5:]

    def end(self, timeout: float = 120.0) -> Ended:
        """Wait for all ranks."""
        exit_codes = [process.wait(self.began + timeout - time.monotonic()) for process in self.processes]
        seconds = time.monotonic() - self.began
        print(f"\n{len(exit_codes)} ranks took {seconds:.1f} s")
        self._listeners_done()
        return Ended(list(self.messages), exit_codes, self._output("stdout"), self._output("stderr"), seconds)

    def _output(self, name: str) -> list[str]:
        return [(self.directory / f"{rank}.{name}").read_text() for rank in range(len(self.processes))]

    def _listeners_done(self) -> None:
        for thread in self._threads:
            thread.join(5)

    def serve(self, listener: socket.socket) -> None:
        """Accept ranks until the listener is closed."""
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                self._threads.append(threading.Thread(target=self._listen, args=(connection,), daemon=True))
                self._threads[-1].start()

    def _listen(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines, contextlib.suppress(OSError):
            for number, line in enumerate(lines):
                message = decode(line)
                with self._heard:
                    if number == 0:
                        assert isinstance(message, Hello)
                        assert message.token == self.token
                        self._connections.append(connection)
                        if self._order is not None:
                            connection.sendall(encode(self._order))
                    self.messages.append(message)
                    self._heard.notify_all()


Start = Callable[..., Ranks]
Train = Callable[..., Ended]


@pytest.fixture(scope="module")
def start_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """A function that starts ranks of a job given as tables; whatever still runs is killed at the end."""
    running: list[subprocess.Popen[bytes]] = []
    listeners: list[socket.socket] = []

    def start(
        tables: dict[str, Any],
        ranks: int,
        *,
        of_rank: dict[int, dict[str, Any]] | None = None,
        working_directory: Path | None = None,
        script: str | None = None,
        environment: dict[str, str] | None = None,
    ) -> Ranks:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)
        directory = tmp_path_factory.mktemp("ranks")
        program = [str(Path(__file__).with_name(script))] if script else ["-m", "trimtab_megatron"]
        started = Ranks([], directory, secrets.token_hex(8))
        threading.Thread(target=started.serve, args=(listener,), daemon=True).start()
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(REPOSITORY / name) for name in ("megatron_ext", "wrapper", "kernels")),
            "TRIMTAB_CONTROL": f"127.0.0.1:{listener.getsockname()[1]}",
            "TRIMTAB_TOKEN": started.token,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "WORLD_SIZE": str(ranks),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            **(environment or {}),
        }
        for rank in range(ranks):
            job = job_to_json(job_from_dict((of_rank or {}).get(rank, tables)))
            with (
                (directory / f"{rank}.stdout").open("wb") as stdout,
                (directory / f"{rank}.stderr").open("wb") as stderr,
            ):
                process = subprocess.Popen(
                    [sys.executable, *program],
                    env={**variables, "TRIMTAB_JOB": job, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    cwd=working_directory or directory,
                    stdout=stdout,
                    stderr=stderr,
                )
            started.processes.append(process)
            running.append(process)
        return started

    yield start
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
    for process in running:
        if process.poll() is None:
            process.kill()
        process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


@pytest.fixture(scope="module")
def train_ranks(start_ranks: Start) -> Train:
    """A function that runs ranks to their end, and checks that it is a good one."""

    def train(tables: dict[str, Any], ranks: int, **options: Any) -> Ended:
        return start_ranks(tables, ranks, **options).end().succeeded()

    return train


@pytest.fixture(scope="session")
def token_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache of tokens for all tests of a session."""
    return tmp_path_factory.mktemp("tokens")


@pytest.fixture(scope="session")
def tiny_job(token_cache: Path) -> Callable[..., dict[str, Any]]:
    """A function that returns the tables of a tiny job, with sections changed as given."""

    def job(**sections: dict[str, Any]) -> dict[str, Any]:
        tables: dict[str, Any] = {
            "model": {"layers": 4, "hidden_size": 64, "attention_heads": 4, "sequence_length": 32},
            "batch": {"microbatch_size": 2, "global_batch_size": 8},
            "train": {"steps": 6, "warmup_steps": 1, "learning_rate": 3e-3, "checkpoint_directory": ""},
            "data": {"tokenizer": "bytes", "cache_directory": str(token_cache)},
        }
        for name, values in sections.items():
            tables[name] = tables.get(name, {}) | values
        return tables

    return job


Series = Callable[..., list[Ended]]


@pytest.fixture(scope="module")
def train_series(start_ranks: Start, tmp_path_factory: pytest.TempPathFactory) -> Series:
    """A function that runs several jobs in the same ranks, one after the other; starting ranks takes the longest.

    By the place of a job: `orders` that come after so many steps, and `microbatches` of each replica.
    """

    def train(
        jobs: list[dict[str, Any]],
        ranks: int,
        orders: dict[int, dict[int, Order]] | None = None,
        microbatches: dict[int, tuple[int, ...]] | None = None,
        **options: Any,
    ) -> list[Ended]:
        directory = tmp_path_factory.mktemp("series")
        entries = [
            {
                "job": job_to_json(job_from_dict(job)),
                "orders": {step: encode(order).decode() for step, order in (orders or {}).get(number, {}).items()},
                "microbatches": (microbatches or {}).get(number, ()),
            }
            for number, job in enumerate(jobs)
        ]
        (directory / "series.json").write_text(json.dumps(entries))
        environment = {"SERIES_DIRECTORY": str(directory)}
        whole = start_ranks(jobs[0], ranks, script="series.py", environment=environment, **options).end(timeout=600)
        assert whole.exit_codes == [0] * ranks, "\n".join(whole.stderr)
        lines = [
            [line for rank in range(ranks) for line in (directory / f"{number}.{rank}").read_bytes().splitlines()]
            for number in range(len(jobs))
        ]
        return [
            Ended([decode(line) for line in said], whole.exit_codes, whole.stdout, whole.stderr, whole.seconds)
            for said in lines
        ]

    return train
