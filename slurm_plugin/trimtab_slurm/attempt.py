"""Attempt: the identity of one run of a job on one node, from the environment that slurmd gives to its hooks. Pure."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trimtab_slurm import resolve
from trimtab_slurm.nodelist import expand_nodes

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""What may become part of a path: no slash, no leading dot."""


class AttemptError(ValueError):
    """An environment that names no attempt: says which variable, and what it holds."""


@dataclass(frozen=True)
class Attempt:
    """One run of a job on one node. Cluster, job, start and node are its identity, the rest are attributes.

    A restart count is no identity: the epilog of a requeued run sees another one than its own prolog did.
    """

    cluster: str
    job_id: int
    start_seconds: float
    """UTC, seconds since 1970: the job's start where Slurm says it (24.11), else when the prolog ran."""
    node: str
    """The NodeName: several slurmd may share a machine."""
    user: str
    uid: int
    gid: int
    restart_count: int
    """As the prolog saw it: 0 in the first run."""
    expected_nodes: tuple[str, ...]
    """All nodes of the allocation; empty where Slurm did not say."""
    gpu_variables: Mapping[str, str]
    """What Slurm says of the GPUs held on this node, by variable, as it says it: `resolve` knows what it means."""
    sluid: str = ""
    """Slurm's own unique id of the job, from 25.11 on."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` is the inverse."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Attempt":
        """The inverse of `to_dict`, a list taken for a tuple. Raises TypeError or KeyError for anything else."""
        return cls(**{**values, "expected_nodes": tuple(values["expected_nodes"])})


def from_hook(environment: Mapping[str, str], now_seconds: float) -> Attempt:
    """The attempt that a prolog's environment names. Raises AttemptError where it names none."""
    start = environment.get("SLURM_JOB_START_TIME", "")
    return Attempt(
        cluster=_name(environment, "SLURM_CLUSTER_NAME", "cluster"),
        job_id=job_id(environment),
        start_seconds=float(start) if start.isdecimal() and int(start) else now_seconds,
        node=node_name(environment),
        user=environment.get("SLURM_JOB_USER", ""),
        uid=_number(environment, "SLURM_JOB_UID"),
        gid=_number(environment, "SLURM_JOB_GID"),
        restart_count=_number(environment, "SLURM_JOB_RESTART_COUNT", "0"),
        expected_nodes=_nodes(environment),
        gpu_variables={name: environment[name] for name in resolve.VARIABLES if name in environment},
        sluid=environment.get("SLURM_JOB_SLUID", ""),
    )


def job_id(environment: Mapping[str, str]) -> int:
    """The job of a hook; an array's task and a heterogeneous job's component have ids of their own."""
    return _number(environment, "SLURM_JOB_ID")


def node_name(environment: Mapping[str, str]) -> str:
    """The node of a hook. The host's name may be another."""
    return _name(environment, "SLURMD_NODENAME")


def _nodes(environment: Mapping[str, str]) -> tuple[str, ...]:
    listed = environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST", "")
    try:
        return expand_nodes(listed)
    except ValueError:
        return ()  # not knowing the other nodes is no reason to have no profile of this one


def _name(environment: Mapping[str, str], variable: str, default: str = "") -> str:
    value = environment.get(variable) or default
    if not _NAME.fullmatch(value):
        raise AttemptError(f"{variable}={value[:200]!r} is no name; slurmd sets it for its hooks")
    return value


def _number(environment: Mapping[str, str], variable: str, default: str = "") -> int:
    value = environment.get(variable) or default
    if not re.fullmatch(r"\d{1,10}", value, re.ASCII):
        raise AttemptError(f"{variable}={value[:200]!r} is no number; slurmd sets it for its hooks")
    return int(value)
