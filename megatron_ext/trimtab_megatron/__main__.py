"""One rank of a run: `python -m trimtab_megatron`, started by srun or torchrun.

The environment tells it all: TRIMTAB_JOB (the job, JSON), TRIMTAB_CONTROL (host:port of the wrapper; without it
nothing is reported) and TRIMTAB_TOKEN, MASTER_ADDR and MASTER_PORT, its rank by torchrun's names or Slurm's, and
TRIMTAB_INJECT (faults to make up; see `inject`).

Exit codes: 0 when the last step was taken, or the run was told to stop and has saved; 1 after an error, of which the
wrapper is told in one line. Its trace is on stderr, unless the line says it all: that the input is at fault, or that a
peer is gone.
"""

import os
import sys
import traceback
import warnings

from trimtab.protocol import Done, Failed, Job, JobError, Notice, job_from_json
from trimtab_megatron import hearing, inject, stacks
from trimtab_megatron.control import Control
from trimtab_megatron.identity import Identity, InputError, RankError, identity, introduction

_PEER_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "remote process exited",
    "NCCL communicator was aborted",
)

_LASTING = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
"""What a file system says that it will say again; its other errors may pass."""


def main() -> int:
    """Train as this rank. Returns the exit code."""
    try:
        who, job = identity(), _job()
        hello = introduction(who, job)
    except (RankError, JobError) as error:
        print(f"trimtab: {error}", file=sys.stderr)
        return 1
    stacks.answer_signals()
    control = Control(os.environ.get("TRIMTAB_CONTROL"))
    if "TRIMTAB_CONTROL" in os.environ:
        hearing.on_sigterm(lambda: control.send(Notice(who.rank, 0, "signal", "SIGTERM")))
    step = [0]
    try:
        _train(who, job, control, step)
    except Exception as error:  # noqa: BLE001 - whatever a rank dies of, the wrapper has to hear it from here
        failed = Failed(who.rank, step[0], _in_one_line(error), _is_lost_peer(error), _is_bad_input(error))
        says_it_all = failed.bad_input or failed.peer_lost
        if not says_it_all:
            traceback.print_exc()
        if not control.greeted:
            # It failed before it held anything, and the wrapper listens to no one who has not said Hello.
            control.hello(hello)
        control.send(failed)
        if not control.close() and says_it_all:  # else the wrapper says it, once for all ranks
            print(f"trimtab: rank {who.rank} (node {who.node}): {failed.error}", file=sys.stderr)
        return 1
    control.send(Done(who.rank, step[0]))
    control.close()
    return 0


def _job() -> Job:
    if "TRIMTAB_JOB" not in os.environ:
        raise RankError("TRIMTAB_JOB is not set: start the ranks with `trimtab run`")
    return job_from_json(os.environ["TRIMTAB_JOB"])


def _train(who: Identity, job: Job, control: Control, step: list[int]) -> None:
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    faults = inject.parse(os.environ.get(inject.VARIABLE, ""))
    if faults and who.rank == 0:
        control.send(Notice(0, 0, "inject", f"faults are injected: {os.environ[inject.VARIABLE]}"))
    from trimtab_megatron import cpu

    cuda = cpu.prepare()  # before Megatron-core is imported
    import torch.distributed as dist

    from trimtab_megatron import run as runs
    from trimtab_megatron import train, world

    agreement = world.join(who, cuda)
    run = runs.prepare(job, world.arrange(job, who, cuda, agreement, faults), control)
    try:
        train.train(run)
    finally:
        step[0] = run.progress.step
    dist.destroy_process_group()


def _in_one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no message"
    return text if isinstance(error, (JobError, RankError)) else f"{type(error).__name__}: {text}"


def _is_bad_input(error: Exception) -> bool:
    """Whether what the run was given is at fault, so that another attempt would meet the same."""
    cause = error.__cause__
    may_pass = isinstance(cause, OSError) and not isinstance(cause, _LASTING)
    return isinstance(error, (JobError, InputError)) and not may_pass


def _is_lost_peer(error: BaseException | None) -> bool:
    """Whether it is, or was raised for, a broken connection."""
    import torch.distributed as dist

    while error is not None:
        if isinstance(error, (dist.DistBackendError, dist.DistNetworkError)):
            return True
        if any(sign in str(error) for sign in _PEER_LOST):
            return True
        error = error.__cause__
    return False


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # threads of a broken process group could keep the interpreter from ending
