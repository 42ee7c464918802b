"""The client that asks through pyslurm, without starting a process for it.

What pyslurm cannot do, or not as we need it, is the command line's: `Job.cancel` sends SIGKILL at once, which leaves
the ranks no time to save; `Job.modify` ignores a number of nodes and cannot empty the list of excluded ones; requests
name a job by its number, which for an array's last task means the whole array.
"""

import importlib.util
import re
import sys
from typing import Any

from trimtab_slurm.cluster.command_line import UNKNOWN_JOB, WAITING_JOB, CommandLineClient, run
from trimtab_slurm.cluster.protocol import JobState, Node, SlurmError, SlurmSilent, ending
from trimtab_slurm.nodelist import expand_nodes

_SILENT = re.compile(
    "contact slurm controller|timed out|zero bytes|standby mode|connection re(set|fused)", re.IGNORECASE
)


class PyslurmClient(CommandLineClient):
    """Asks for jobs and nodes, and requeues, through pyslurm; the rest is the command line's."""

    def __init__(self) -> None:
        super().__init__()
        import pyslurm  # late: without a usable slurm.conf the import ends the process

        self._pyslurm = pyslurm

    def job(self, job_id: int) -> JobState | None:
        try:
            return _job(self._pyslurm.Job.load(job_id))
        except self._pyslurm.RPCError as error:
            if UNKNOWN_JOB in str(error):
                return None
            raise _error(f"pyslurm cannot load job {job_id}", error) from error

    def requeue(self, job: JobState) -> None:
        if job.array_task_id is not None:
            return super().requeue(job)
        try:
            self._pyslurm.Job(job.job_id).requeue()
        except self._pyslurm.RPCError as error:
            if WAITING_JOB not in str(error):
                raise _error(f"pyslurm cannot requeue job {job.job_id}", error) from error

    def nodes(self, partition: str = "") -> tuple[Node, ...]:
        try:
            loaded = self._pyslurm.Nodes.load()
        except self._pyslurm.RPCError as error:
            raise _error("pyslurm cannot load the nodes", error) from error
        found = tuple(_node(node) for node in loaded.values())
        return tuple(node for node in found if not partition or partition in node.partitions)


def pyslurm_version() -> str:
    """The version of pyslurm here, asked in a process of its own; empty when there is none that can be imported."""
    if importlib.util.find_spec("pyslurm") is None:
        return ""
    try:
        return run([sys.executable, "-P", "-c", "import pyslurm; print(pyslurm.__version__)"]).stdout.strip()
    except SlurmError:
        return ""


def _job(job: Any) -> JobState:
    nodes = expand_nodes(job.allocated_nodes or "")
    exit_code, signal = ending(job.state, job.exit_code or 0, job.exit_code_signal or 0)
    return JobState(
        job_id=int(job.id),
        state=job.state,
        reason=job.state_reason or "None",
        exit_code=exit_code,
        signal=signal,
        nodes=nodes,
        batch_node=job.batch_host or "",
        start_seconds=job.start_time if nodes else None,
        end_seconds=job.end_time if nodes else None,
        restart_count=job.requeue_count,
        stdout=job.standard_output or "",
        working_directory=job.working_directory or "",
        user=job.user_name or "",
        partition=job.partition or "",
        required_nodes=expand_nodes(job.required_nodes or ""),
        excluded_nodes=expand_nodes(job.excluded_nodes or ""),
        constraint=",".join(job.constraints),
        least_nodes=job.num_nodes or 0,
        most_nodes=job.max_nodes or job.num_nodes or 0,
        tasks=job.ntasks,
        tasks_per_node=job.ntasks_per_node or 0,
        requeueable=bool(job.is_requeueable),
        array_job_id=job.array_id,
        array_task_id=job.array_task_id,
        heterogeneous=bool(job.heterogeneous_id),
    )


def _node(node: Any) -> Node:
    return Node(
        name=node.name,
        state=node.state,
        partitions=tuple(node.partitions),
        features=tuple(node.active_features),
        cpus=node.total_cpus,
        memory_megabytes=node.real_memory,
        gpus=sum(count for name, count in node.configured_gres.items() if name.partition(":")[0] == "gpu"),
    )


def _error(what: str, error: Exception) -> SlurmError:
    kind = SlurmSilent if _SILENT.search(str(error)) else SlurmError
    return kind(f"{what}: {error}")
