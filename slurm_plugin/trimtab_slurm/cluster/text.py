"""What `scontrol show -o` and `squeue` print, read. Pure.

Of jobs and nodes the one-line form is read, not `--json`, whose shape changed from release to release.
"""

import re

from trimtab_slurm.cluster.protocol import JobState, Node, SlurmError, ending
from trimtab_slurm.nodelist import expand_nodes


def parse_job(text: str, job_id: int) -> JobState | None:
    """A job from the output of `scontrol show job -o`, times as SLURM_TIME_FORMAT=%s gives them.

    Of an array's or a heterogeneous job's several lines the one that bears the id itself, else the first.
    """
    lines = [line for line in text.splitlines() if line.startswith("JobId=")]
    if not lines:
        return None
    line = next((line for line in lines if line.startswith(f"JobId={job_id} ")), lines[0])
    # The job's name is the one free text before what is read here; without it, the first match is the right one.
    line = re.sub(r" JobName=.*? UserId=", " UserId=", line, count=1)
    state = _field("JobState", line)
    code, _, number = _field("ExitCode", line).partition(":")
    least, _, most = _field("NumNodes", line).partition("-")
    nodes = expand_nodes(_field("NodeList", line))
    exit_code, signal = ending(state, int(code or 0), int(number or 0))
    return JobState(
        job_id=job_id_in(r"JobId=(\d+)", line, "scontrol show job"),
        state=state,
        reason=_field("Reason", line),
        exit_code=exit_code,
        signal=signal,
        nodes=nodes,
        batch_node=_field("BatchHost", line),
        start_seconds=_number("StartTime", line) if nodes else None,  # before, Slurm gives an estimate
        end_seconds=_number("EndTime", line) if nodes else None,
        restart_count=_number("Restarts", line) or 0,
        stdout=_path("StdOut", line),
        working_directory=_path("WorkDir", line),
        user=re.sub(r"\(\d+\)$", "", _field("UserId", line)),
        partition=_field("Partition", line),
        required_nodes=expand_nodes(_field("ReqNodeList", line)),
        excluded_nodes=expand_nodes(_field("ExcNodeList", line)),
        constraint=_field("Features", line),
        least_nodes=int(least or 0),
        most_nodes=int(most or least or 0),
        tasks=_number("NumTasks", line) or 0,
        tasks_per_node=int(_field("NtasksPerN:B:S:C", line).partition(":")[0] or 0),
        requeueable=_field("Requeue", line) == "1",
        array_job_id=_number("ArrayJobId", line),
        array_task_id=_number("ArrayTaskId", line),
        heterogeneous=bool(_field("HetJobId", line)),
    )


def parse_nodes(text: str) -> tuple[Node, ...]:
    """Nodes from the output of `scontrol show node -o`."""
    return tuple(
        Node(
            name=_field("NodeName", line),
            state=_field("State", line),
            partitions=_names("Partitions", line),
            features=_names("ActiveFeatures", line),
            cpus=_number("CPUTot", line) or 0,
            memory_megabytes=_number("RealMemory", line) or 0,
            gpus=gpus_in(_field("Gres", line)),
        )
        for line in text.splitlines()
        if line.startswith("NodeName=")
    )


def steps_named(name: str, text: str) -> tuple[str, ...]:
    """The steps of a name, as scancel takes them, in what `squeue --steps --format="%i %j"` prints."""
    listed = (line.strip().partition(" ") for line in text.splitlines())
    return tuple(step for step, _, called in listed if called == name)


def gpus_in(gres: str) -> int:
    """How many GPUs a node's Gres holds: gpu:2, gpu:a100:4(S:0-1),gpu:h100:4, mps:100, ..."""
    return sum(int(count) for count in re.findall(r"(?:^|,)gpu(?::[^:,(]*)?:(\d+)(?=[,(]|$)", gres))


def address_in(text: str) -> str:
    """The address of the node in the output of `scontrol show node -o`; empty when it has none."""
    return _field("NodeAddr", text)


def job_id_in(pattern: str, text: str, command: str) -> int:
    """The job id in a command's answer. Raises SlurmError where there is none."""
    match = re.search(pattern, text)
    if match is None:
        raise SlurmError(f"{command} answered {text.strip()[:200]!r}, which holds no job id")
    return int(match[1])


def _field(key: str, line: str) -> str:
    """The value of a key whose values hold no space; empty when there is none."""
    match = re.search(rf"(?:^| ){key}=(\S*)", line)
    return "" if match is None or match[1] == "(null)" else match[1]


def _names(key: str, line: str) -> tuple[str, ...]:
    return tuple(filter(None, _field(key, line).split(",")))


def _number(key: str, line: str) -> int | None:
    """The value of a key, where it is a plain number."""
    value = _field(key, line)
    return int(value) if value.isdecimal() else None


def _path(key: str, line: str) -> str:
    """The value of a key whose values may hold spaces: up to one of the keys that can come next, or the end."""
    match = re.search(rf" {key}=(.*?)(?= +(?:\w*Comment|Std\w+|Power|Mail\w+|\w+PerTres|Tres\w+)=|\s*$)", line)
    return "" if match is None or match[1] == "(null)" else match[1]
