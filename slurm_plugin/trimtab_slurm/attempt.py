"""The identity of one run of a job on one node, as a hook's environment tells it. Standard library only."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from trimtab_slurm.nodelist import expand_nodes


class AttemptError(ValueError):
    """An environment that names no attempt: says which variable is at fault."""


@dataclass(frozen=True)
class Attempt:
    """Cluster, job, node and start are its key; the rest are attributes.

    The restart count is none of the key: an epilog of a requeued run already sees the next one's.
    """

    cluster: str
    job_id: int
    node: str
    start_seconds: float
    """UTC, when this node's prolog ran."""
    user: str
    uid: int
    gid: int
    restart_count: int
    expected_nodes: tuple[str, ...]
    gpus: tuple[str, ...]
    """What Slurm calls the GPUs that the job holds on this node."""

    @property
    def name(self) -> str:
        """Unique on its node, and a file name."""
        return f"{self.job_id}-{stamp(self.start_seconds)}"


def from_environment(environment: Mapping[str, str], now_seconds: float) -> Attempt:
    """The attempt that a prolog runs for. Raises AttemptError where a part of its key is missing or no number."""
    try:
        job_id = int(environment["SLURM_JOB_ID"])
        uid = int(environment["SLURM_JOB_UID"])
        node = environment["SLURMD_NODENAME"]
        gid = int(environment.get("SLURM_JOB_GID", "65534"))
        restart_count = int(environment.get("SLURM_JOB_RESTART_COUNT", "0"))
    except KeyError as error:
        raise AttemptError(f"{error.args[0]} is not in the hook's environment") from None
    except ValueError as error:
        raise AttemptError(f"the hook's environment: {error}") from None
    if not node or "/" in node or node.startswith("."):
        raise AttemptError(f"SLURMD_NODENAME={node!r} is no node name")
    try:
        nodes = expand_nodes(environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST", ""))
    except ValueError:
        nodes = ()
    return Attempt(
        cluster=_file_name(environment.get("SLURM_CLUSTER_NAME", "cluster")),
        job_id=job_id,
        node=node,
        start_seconds=now_seconds,
        user=environment.get("SLURM_JOB_USER", str(uid)),
        uid=uid,
        gid=gid,
        restart_count=restart_count,
        expected_nodes=nodes or (node,),
        gpus=tuple(dict.fromkeys(gpu for gpu in environment.get("SLURM_JOB_GPUS", "").split(",") if gpu)),
    )


def to_json(attempt: Attempt) -> str:
    """One line."""
    return json.dumps(asdict(attempt))


def from_json(text: str) -> Attempt:
    """The inverse of `to_json`. Raises AttemptError for anything else."""
    try:
        values = json.loads(text)
        return Attempt(**values | {key: tuple(values[key]) for key in ("expected_nodes", "gpus")})
    except (ValueError, TypeError, KeyError) as error:
        raise AttemptError(f"not an attempt: {text[:80]!r}") from error


def stamp(seconds: float) -> str:
    """A moment as part of a file name, UTC: 20260131T235959Z."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y%m%dT%H%M%SZ")


def _file_name(text: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in text).lstrip(".") or "cluster"
