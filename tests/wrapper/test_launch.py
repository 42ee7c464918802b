import socket

import pytest

from trimtab import launch
from trimtab.protocol import JobError

ENVIRONMENT = {
    "SLURM_JOB_ID": "41",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_GPUS_ON_NODE": "2",
    "SLURM_CPUS_ON_NODE": "8",
    "SLURM_CLUSTER_NAME": "c",
    "SLURM_SUBMIT_DIR": "/home/u",
    "SLURM_JOB_USER": "u",
}


def test_one_rank_for_each_gpu():
    allocated = launch.allocation(ENVIRONMENT)
    assert allocated.nodes == ("n1", "n2")
    assert allocated.world_size == 4
    assert allocated.restart_count == 0


def test_ranks_per_node_can_be_told():
    assert launch.allocation(ENVIRONMENT, 3).world_size == 6


def test_no_gpus_and_no_number_is_refused():
    environment = {key: value for key, value in ENVIRONMENT.items() if key != "SLURM_GPUS_ON_NODE"}
    with pytest.raises(JobError, match="--ranks-per-node"):
        launch.allocation(environment)


def test_outside_a_job_says_how_to_get_into_one():
    with pytest.raises(launch.LaunchError, match="trimtab submit"):
        launch.allocation({})


def test_the_srun_line_binds_no_gpu_and_ends_with_the_first_bad_rank():
    line = launch.srun_command(launch.allocation(ENVIRONMENT), python="/venv/python")
    assert line[0] == "srun"
    assert line[-3:] == ["/venv/python", "-m", "trimtab_megatron"]
    assert {"--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--cpus-per-task=4"} <= set(line)
    assert {"--gpu-bind=none", "--kill-on-bad-exit=1"} <= set(line)


def test_ranks_meet_on_loopback_only_where_the_nodes_do():
    arguments = {"job": "{}", "port": 1, "control": "c:1", "token": "t"}
    here = launch.rank_environment({}, address="127.0.0.1", **arguments)
    there = launch.rank_environment({}, address="10.0.0.1", **arguments)
    assert here["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in there
    assert there["MASTER_ADDR"] == "10.0.0.1"


def test_a_users_thread_count_is_kept():
    environment = launch.rank_environment(
        {"OMP_NUM_THREADS": "8"}, job="", address="10.0.0.1", port=1, control="", token=""
    )
    assert environment["OMP_NUM_THREADS"] == "8"


def test_ports_follow_from_the_job_and_stay_below_the_ephemeral_range():
    assert launch.port_candidates(41, 0) == launch.port_candidates(41, 0)
    assert launch.port_candidates(41, 0)[0] != launch.port_candidates(42, 0)[0]
    assert launch.port_candidates(41, 0)[0] != launch.port_candidates(41, 1)[0]
    for job_id in (1, 324, 2**26):
        assert all(20000 <= port < 32768 for port in launch.port_candidates(job_id, 3))


def test_a_taken_port_is_passed_over():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        first = taken.getsockname()[1]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            second = probe.getsockname()[1]
        assert launch.free_port("127.0.0.1", [first, second]) == second
        with pytest.raises(launch.LaunchError, match="no free port"):
            launch.free_port("127.0.0.1", [first])
