"""Stands for pyslurm 25.11 where none can be installed: its names and types, over the Slurm that is there.

What is None, a string or a number there is so here; the figures come from `scontrol show --oneliner`.
"""

import re
import subprocess

__version__ = "25.11.2"


class RPCError(Exception):
    pass


def _scontrol(*arguments):
    answer = subprocess.run(
        ["env", "SLURM_TIME_FORMAT=%s", "scontrol", *arguments], capture_output=True, text=True, check=False
    )
    if answer.returncode:
        raise RPCError(re.sub(r"^\S+ error: | for job \d+$", "", answer.stderr.strip()))
    return answer.stdout


class _Fields:
    def __init__(self, line):
        self._values = dict(re.findall(r"(\S+?)=(\S*)", re.sub(r" JobName=.*? UserId=", " UserId=", line)))

    def text(self, key):
        value = self._values.get(key, "(null)")
        return None if value in ("(null)", "N/A", "Unknown", "None assigned") else value

    def number(self, key):
        value = self.text(key)
        return int(value) if value and value.isdigit() else None

    def listed(self, key):
        value = self.text(key)
        return value.split(",") if value else []


class Job:
    def __init__(self, job_id):
        self.id = job_id

    @staticmethod
    def load(job_id):
        lines = _scontrol("show", "job", "-o", str(job_id)).splitlines()
        fields, job = _Fields(lines[0]), Job(job_id)
        least, _, most = fields.text("NumNodes").partition("-")
        code, _, number = fields.text("ExitCode").partition(":")
        job.id = fields.number("JobId")
        job.state, job.state_reason = fields.text("JobState"), fields.text("Reason")
        job.exit_code, job.exit_code_signal = int(code), int(number)
        job.allocated_nodes, job.batch_host = fields.text("NodeList"), fields.text("BatchHost")
        job.start_time, job.end_time = fields.number("StartTime"), fields.number("EndTime")
        job.requeue_count, job.is_requeueable = fields.number("Restarts"), fields.text("Requeue") == "1"
        job.standard_output, job.working_directory = fields.text("StdOut"), fields.text("WorkDir")
        job.user_name, job.partition = fields.text("UserId").partition("(")[0], fields.text("Partition")
        job.required_nodes, job.excluded_nodes = fields.text("ReqNodeList"), fields.text("ExcNodeList")
        job.constraints = [] if fields.text("Features") is None else [fields.text("Features")]
        job.num_nodes, job.max_nodes = int(least), int(most) if most else None
        job.ntasks = fields.number("NumTasks") or 1
        job.ntasks_per_node = int(fields.text("NtasksPerN:B:S:C").partition(":")[0]) or None
        job.array_id, job.array_task_id = fields.number("ArrayJobId"), fields.number("ArrayTaskId")
        job.heterogeneous_id = fields.number("HetJobId") or 0
        return job

    def requeue(self, hold=False):
        _scontrol("requeuehold" if hold else "requeue", str(self.id))


class Node:
    def __init__(self, fields):
        self.name, self.state = fields.text("NodeName"), fields.text("State")
        self.partitions, self.active_features = fields.listed("Partitions"), fields.listed("ActiveFeatures")
        self.total_cpus, self.real_memory = fields.number("CPUTot"), fields.number("RealMemory")
        self.configured_gres = {
            name: int(count) for name, count in re.findall(r"([^,]+):(\d+)", fields.text("Gres") or "")
        }


class Nodes(dict):
    @staticmethod
    def load():
        found = [Node(_Fields(line)) for line in _scontrol("show", "node", "-o").splitlines()]
        return Nodes({node.name: node for node in found})
