"""One rank that runs several jobs one after the other: starting takes longer than a tiny job does.

What it would tell the wrapper goes into a file for each job; orders come at the steps that the test names.
"""

import os
import sys
from pathlib import Path

from trimtab_megatron import cpu

sys.path.insert(0, "")  # as with -m: providers are looked for in the working directory
cuda = cpu.prepare()

import json  # noqa: E402
import warnings  # noqa: E402
from dataclasses import replace  # noqa: E402

import groups  # noqa: E402
import torch.distributed as dist  # noqa: E402

from trimtab.protocol import (  # noqa: E402
    Done,
    Failed,
    Hello,
    Job,
    Message,
    Order,
    StepReport,
    decode,
    encode,
    job_from_json,
)
from trimtab_megatron import run as runs  # noqa: E402
from trimtab_megatron import train, world  # noqa: E402
from trimtab_megatron.identity import Identity, RankError, identity  # noqa: E402


class Recorder:
    """In place of the control connection."""

    def __init__(self, path: Path, orders: dict[str, str]) -> None:
        self._file = path.open("wb")
        self._orders = {int(step): line for step, line in orders.items()}
        self.step = 0
        self.greeted = False
        self.connected = True

    def hello(self, hello: Hello) -> None:
        self.greeted = True
        self.send(hello)

    def send(self, message: Message) -> None:
        if isinstance(message, StepReport):
            self.step = message.step
        self._file.write(encode(message))
        self._file.flush()

    def take_order(self) -> Order | None:
        """The order that is to come after so many steps."""
        line = self._orders.pop(self.step, None)
        order = decode(line.encode()) if line else None
        assert order is None or isinstance(order, Order)
        return order


def run_job(job: Job, who: Identity, agreement: dist.ProcessGroup, recorder: Recorder, counts: list[int]) -> None:
    """Train; with other counts of microbatches than a job begins with, where some are given."""
    try:
        run = runs.prepare(job, world.arrange(job, who, cuda, agreement), recorder)
        if counts:
            run.setting = replace(run.setting, microbatches=tuple(counts))
        train.train(run)
        recorder.send(Done(who.rank, run.progress.step))
    except RankError as error:  # one that all ranks raise at the same step
        recorder.send(Failed(who.rank, recorder.step, str(error), False))
    groups.leave(agreement)


def main() -> None:
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    directory = Path(os.environ["SERIES_DIRECTORY"])
    who = identity()
    agreement = world.join(who, cuda)
    for number, entry in enumerate(json.loads((directory / "series.json").read_text())):
        recorder = Recorder(directory / f"{number}.{who.rank}", entry["orders"])
        run_job(job_from_json(entry["job"]), who, agreement, recorder, entry["microbatches"])


if __name__ == "__main__":
    main()
