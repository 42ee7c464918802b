"""What Slurm knows of a job in the tests: replace what matters."""

from trimtab_slurm.cluster import JobState

RUNNING_JOB = JobState(
    job_id=7,
    state="RUNNING",
    reason="None",
    exit_code=0,
    signal=0,
    nodes=("n1", "n2"),
    batch_node="n1",
    start_seconds=1e9,
    end_seconds=None,
    restart_count=0,
    stdout="",
    working_directory="/",
    user="ada",
    partition="main",
    required_nodes=(),
    excluded_nodes=(),
    constraint="",
    least_nodes=2,
    most_nodes=2,
    tasks=2,
    tasks_per_node=0,
    requeueable=True,
    array_job_id=None,
    array_task_id=None,
    heterogeneous=False,
)
