"""What a sandbox is asked to be, and the files of Slurm that say so. Pure: text from values."""

import re
from dataclasses import dataclass
from pathlib import Path

from trimtab_slurm.settings import NodeSettings

LONGEST_SOCKET_PATH_BYTES = 107
"""What sockaddr_un holds, its closing zero aside."""
PARTITIONS = ("main", "urgent")
"""A job in the second takes nodes from those in the first, which are requeued."""
MEMORY_MEGABYTES = 16384
"""What a node claims to have. Nothing enforces it: the job's processes share the machine."""


class SandboxError(RuntimeError):
    """The sandbox cannot do what was asked: says why, and what to do."""


@dataclass(frozen=True)
class Spec:
    """What a sandbox has."""

    nodes: int = 4
    gpus: int = 2
    """GPUs of each node, in name only."""
    gpu_type: str = "sim"
    cpus: int = 4
    """CPUs that each node claims to have, whatever the machine has."""
    profiles: str = ""
    """Where the hooks leave profiles; empty: below the sandbox, removed with it."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w+", self.gpu_type):
            raise SandboxError(f"--gpu-type {self.gpu_type!r}: a type is a word of letters, digits and _")

    @property
    def node_names(self) -> tuple[str, ...]:
        """n1, n2, ..."""
        return tuple(f"n{number}" for number in range(1, self.nodes + 1))

    def __str__(self) -> str:
        gpus = f"{self.gpus} GPUs ({self.gpu_type})" if self.gpus else "no GPUs"
        profiles = f", profiles in {self.profiles}" if self.profiles else ""
        return f"{self.nodes} nodes of {self.cpus} CPUs and {gpus}{profiles}"


@dataclass(frozen=True)
class Places:
    """Where a sandbox keeps what: everything is in one directory."""

    directory: Path

    @property
    def state(self) -> Path:
        """The sandbox's own record of what it started."""
        return self.directory / "sandbox.json"

    @property
    def slurm_conf(self) -> Path:
        return self.directory / "slurm.conf"

    @property
    def node_config(self) -> Path:
        """The configuration of trimtab's hooks."""
        return self.directory / "node.toml"

    @property
    def munge(self) -> Path:
        return self.directory / "munge"

    @property
    def munge_socket(self) -> Path:
        return self.munge / "socket"

    @property
    def samplers(self) -> Path:
        """Which sampler belongs to which job."""
        return self.directory / "run"

    @property
    def profiles(self) -> Path:
        return self.directory / "profiles"

    @property
    def controller_state(self) -> Path:
        return self.directory / "slurmctld"

    def gpu(self, index: int) -> Path:
        """The device node that stands for a GPU. The nodes of the sandbox share them."""
        return self.directory / f"nvidia{index}"

    def hook(self, which: str) -> Path:
        """The prolog's or the epilog's script."""
        return self.directory / which

    def spool(self, node: str) -> Path:
        return self.directory / "slurmd" / node

    def log(self, daemon: str) -> Path:
        """The log, with times, of slurmctld or a node."""
        return self.directory / "log" / f"{daemon}.log"

    def output(self, daemon: str) -> Path:
        """What munged, slurmctld or a node wrote to its terminal: the log, and what came before it was opened."""
        return self.directory / "log" / f"{daemon}.out"

    def check(self, spec: Spec) -> None:
        """Refuse a directory that slurm.conf cannot spell, or whose sockets would not fit: one for each job step."""
        if not re.fullmatch(r"[\w./+-]+", str(self.directory)):
            raise SandboxError(
                f"{self.directory}: slurm.conf takes only letters, digits and ._+-/ here; choose another with --dir"
            )
        longest = self.spool(spec.node_names[-1]) / f"{spec.node_names[-1]}_4294967295.4294967295"
        excess = len(bytes(longest)) - LONGEST_SOCKET_PATH_BYTES
        if excess > 0:
            raise SandboxError(
                f"{self.directory}: the path is {excess} bytes too long for the sockets that Slurm makes below it; "
                "choose a shorter one with --dir"
            )


def slurm_conf(spec: Spec, places: Places, host: str, ports: tuple[int, ...]) -> str:
    """slurm.conf for a cluster whose nodes are all this machine. Slurm 22.05 and 24.11 both take it.

    `ports`: the controller's, then one for each node. CredType and SwitchType are left to their defaults: 24.11 no
    longer knows their old values.
    """
    controller_port, *node_ports = ports
    gres = f" Gres=gpu:{spec.gpu_type}:{spec.gpus}" if spec.gpus else ""
    nodes = [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={spec.cpus} "
        f"RealMemory={MEMORY_MEGABYTES}{gres}"
        for name, port in zip(spec.node_names, node_ports, strict=True)
    ]
    return "\n".join(
        [
            "ClusterName=sandbox",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={controller_port}",
            "SlurmUser=root",
            "AuthType=auth/munge",
            "# The delay after a requeue is the life of a credential: 120 s unless told.",
            f"AuthInfo=socket={places.munge_socket},cred_expire=5",
            f"StateSaveLocation={places.controller_state}",
            f"SlurmdSpoolDir={places.spool('%n')}",
            f"SlurmctldPidFile={places.directory}/slurmctld.pid",
            f"SlurmdPidFile={places.directory}/slurmd-%n.pid",
            f"SlurmctldLogFile={places.log('slurmctld')}",
            f"SlurmdLogFile={places.log('%n')}",
            "MailProg=/bin/true",
            "# Ranks take the port at which they meet from the job's id: those of another sandbox shall not be there.",
            f"FirstJobId={controller_port}",
            "",
            "# No cgroups, so that it runs in a container; and more CPUs than the machine has.",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SlurmdParameters=config_overrides",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core",
            "GresTypes=gpu",
            "MpiDefault=none",
            "",
            "# Jobs start at once, and nodes that were lost come back.",
            "SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0",
            "ReturnToService=2",
            "JobRequeue=1",
            "# A node that does not answer for this long is down: 300 s unless told.",
            "SlurmdTimeout=20",
            "# A busy machine is slow to answer.",
            "MessageTimeout=60",
            "BatchStartTimeout=60",
            "",
            "# A job in the partition urgent takes nodes from one in main, which is told to end, and requeued.",
            "PreemptType=preempt/partition_prio",
            "PreemptMode=REQUEUE",
            "",
            "# The prolog on all nodes when the job gets them, not when its first step reaches each.",
            "PrologFlags=Alloc",
            f"Prolog={places.hook('prolog')}",
            f"Epilog={places.hook('epilog')}",
            "",
            *nodes,
            f"PartitionName={PARTITIONS[0]} Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=30",
            f"PartitionName={PARTITIONS[1]} Nodes=ALL MaxTime=INFINITE PriorityTier=2 PreemptMode=OFF",
            "",
        ]
    )


def node_settings(spec: Spec, places: Places) -> NodeSettings:
    """What trimtab's hooks are told: everything below the sandbox, but profiles where they were asked for."""
    return NodeSettings(
        journal_directory=str(places.directory / "journals"),
        profile_root=spec.profiles or str(places.profiles),
    )


def gres_conf(spec: Spec, places: Places) -> str:
    """gres.conf: the device nodes that count as GPUs."""
    if not spec.gpus:
        return ""
    files = ",".join(str(places.gpu(index)) for index in range(spec.gpus))
    return "".join(f"NodeName={node} Name=gpu Type={spec.gpu_type} File={files}\n" for node in spec.node_names)


CGROUP_CONF = "CgroupPlugin=autodetect\n"
"""Which cgroups there are: never used here, but 24.11's slurmd does not start without knowing."""
