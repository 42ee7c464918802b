"""From an allocation to the srun line: which ranks, where they meet, what they are told.

Pure but for `free_port`.
"""

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trimtab.protocol import JobError
from trimtab_slurm.nodelist import expand_nodes

STEP = "ranks"
"""The name of the ranks' step."""
FIRST_PORT, PORTS = 20000, 12000
"""Below the range from which Linux takes the ports of outgoing connections (32768 and up)."""


class LaunchError(RuntimeError):
    """The ranks cannot be started: says what is missing and what to do."""


@dataclass(frozen=True)
class Allocation:
    """What Slurm gave to the job, from the environment of the batch script."""

    cluster: str
    job_id: int
    restart_count: int
    nodes: tuple[str, ...]
    ranks_per_node: int
    cpus_per_node: int
    submit_directory: str
    user: str

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.nodes) * self.ranks_per_node


def allocation(environment: Mapping[str, str], ranks_per_node: int | None = None) -> Allocation:
    """The allocation that this process is the batch script of: one rank for each GPU of a node, unless told.

    Raises LaunchError outside a job, and JobError where the number of ranks of a node cannot be known.
    """
    if "SLURM_JOB_ID" not in environment or "SLURM_JOB_NODELIST" not in environment:
        raise LaunchError(
            "`trimtab run` works inside a Slurm job (SLURM_JOB_ID is not set). Submit the job file with "
            "`trimtab submit`, or call `trimtab run` in your sbatch script."
        )
    ranks = ranks_per_node or int(environment.get("SLURM_GPUS_ON_NODE", "0"))
    if ranks < 1:
        raise JobError("--ranks-per-node", 0, "must be given, since the allocation has no GPUs to count")
    return Allocation(
        cluster=environment.get("SLURM_CLUSTER_NAME", "cluster"),
        job_id=int(environment["SLURM_JOB_ID"]),
        restart_count=int(environment.get("SLURM_RESTART_COUNT", "0")),
        nodes=expand_nodes(environment["SLURM_JOB_NODELIST"]),
        ranks_per_node=ranks,
        cpus_per_node=int(environment.get("SLURM_CPUS_ON_NODE", "1")),
        submit_directory=environment.get("SLURM_SUBMIT_DIR", os.fspath(".")),
        user=environment.get("SLURM_JOB_USER", environment.get("USER", "")),
    )


def srun_command(allocated: Allocation, python: str = sys.executable) -> list[str]:
    """The srun line that starts every rank.

    All GPUs of a node are visible to all its ranks (`--gpu-bind=none`), each takes its local id: per-task binding
    hides the peers, and breaks NCCL's peer-to-peer transport. CPUs are spelled out, since srun no longer inherits
    them from sbatch.
    """
    cpus = max(1, allocated.cpus_per_node // allocated.ranks_per_node)
    return [
        "srun",
        f"--nodes={len(allocated.nodes)}",
        f"--ntasks={allocated.world_size}",
        f"--ntasks-per-node={allocated.ranks_per_node}",
        f"--cpus-per-task={cpus}",
        "--distribution=block",
        "--gpu-bind=none",
        "--kill-on-bad-exit=1",
        "--mpi=none",
        "--label",
        "--input=none",
        f"--job-name={STEP}",
        python,
        "-m",
        "trimtab_megatron",
    ]


def rank_environment(
    environment: Mapping[str, str], *, job: str, address: str, port: int, control: str, token: str
) -> dict[str, str]:
    """The environment of srun and so of the ranks: the batch script's, the rendezvous, and the control connection."""
    ranks = dict(environment)
    ranks |= {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TRIMTAB_JOB": job,
        "TRIMTAB_CONTROL": control,
        "TRIMTAB_TOKEN": token,
        "PYTHONUNBUFFERED": "1",
    }
    ranks.setdefault("OMP_NUM_THREADS", "1")
    if address.startswith("127."):
        ranks.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return ranks


def port_candidates(job_id: int, restart_count: int) -> Sequence[int]:
    """Ports for the rendezvous of an attempt, in the order to try: jobs on one node begin apart."""
    first = (job_id * 37 + restart_count * 7) % PORTS
    return [FIRST_PORT + (first + step) % PORTS for step in range(100)]


def free_port(address: str, candidates: Sequence[int]) -> int:
    """The first candidate that nothing listens on. Raises LaunchError when all are taken."""
    for port in candidates:
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return port
    raise LaunchError(f"no free port between {min(candidates)} and {max(candidates)} on {address} for the rendezvous")
