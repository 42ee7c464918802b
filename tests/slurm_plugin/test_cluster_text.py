import json
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_slurm.cluster.text import gpus_in, parse_job, parse_nodes, steps_named
from trimtab_slurm.nodelist import expand_nodes

DATA = Path(__file__).parent / "data"
VERSIONS = ["22.05.8", "24.11.5"]


@pytest.mark.parametrize(
    ("nodelist", "nodes"),
    [
        ("", ()),
        ("(null)", ()),
        ("n1", ("n1",)),
        ("n[1-4,7],gpu01", ("n1", "n2", "n3", "n4", "n7", "gpu01")),
        ("n[08-11]", ("n08", "n09", "n10", "n11")),
        ("n[098-101]", ("n098", "n099", "n100", "n101")),
        ("r[1-2]n[1-2]-ib", ("r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib")),
        ("a,b[2,1],c-d.e", ("a", "b2", "b1", "c-d.e")),
        ("[1-2]", ("1", "2")),
    ],
)
def test_node_lists_expand(nodelist, nodes):
    assert expand_nodes(nodelist) == nodes


@pytest.mark.parametrize(
    "nodelist",
    ["n[1-", "n1]", "n[3-1]", "n[a-b]", "n[1-2", "n[[1]]", "n[]", "a,,b", "a b", "n[1-99999999999]", "n[1-999][1-999]"],
)
def test_what_is_no_node_list_is_refused(nodelist):
    with pytest.raises(ValueError, match="is no node list"):
        expand_nodes(nodelist)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=50), st.integers(1, 8))
def test_a_node_list_expands_to_the_numbers_it_was_written_with(numbers, width):
    names = tuple(f"n{number:0{width}}" for number in numbers)
    assert expand_nodes("n[" + ",".join(f"{number:0{width}}" for number in numbers) + "]") == names
    assert expand_nodes(",".join(names)) == names


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("sample", ["jobs", "ended"])
def test_recorded_jobs_parse_to_their_twins(version, sample):
    text = (DATA / f"{sample}-{version}.txt").read_text()
    for twin in json.loads((DATA / f"expected-{version}.json").read_text())[sample]:
        assert _as_json(parse_job(text, twin["job_id"])) == twin


@pytest.mark.parametrize("version", VERSIONS)
def test_recorded_nodes_parse_to_their_twins(version):
    text = (DATA / f"nodes-{version}.txt").read_text()
    twins = json.loads((DATA / f"expected-{version}.json").read_text())["nodes"]
    assert [_as_json(node) for node in parse_nodes(text)] == twins


def test_no_job_parses_to_none():
    assert parse_job("No jobs in the system\n", 1) is None


@pytest.mark.parametrize("state", ["CANCELLED", "TIMEOUT", "NODE_FAIL"])
def test_a_job_that_did_not_complete_never_has_exit_code_0(state):
    line = (DATA / "jobs-22.05.8.txt").read_text().splitlines()[0].replace("JobState=COMPLETED", f"JobState={state}")
    assert parse_job(line, 1).exit_code == 1


@pytest.mark.parametrize(
    ("state", "ended"),
    [("PENDING", False), ("RUNNING", False), ("COMPLETING", False), ("REQUEUED", False), ("SUSPENDED", False)]
    + [(state, True) for state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")],
)
def test_a_job_has_ended_in_final_states_only(state, ended):
    line = (DATA / "jobs-22.05.8.txt").read_text().splitlines()[2].replace("JobState=FAILED", f"JobState={state}")
    assert parse_job(line, 3).ended is ended


JOB = (
    "JobId=9 JobName=x NumNodes=9 UserId=ada(7) JobState=PENDING Requeue=0 Partition=a,b NumNodes=2-4 "
    "NtasksPerN:B:S:C=8:0:*:*"
)


@pytest.mark.parametrize(
    ("more", "field", "value"),
    [
        ("", "least_nodes", 2),
        ("", "most_nodes", 4),
        ("", "tasks_per_node", 8),
        ("", "requeueable", False),
        ("", "partition", "a,b"),
        ("", "name", "9"),
        (" ArrayJobId=7 ArrayTaskId=3", "name", "7_3"),
        (" ArrayJobId=7 ArrayTaskId=3-5%2", "array_task_id", None),
        (" HetJobId=9 HetJobOffset=0", "heterogeneous", True),
        (" ReqNodeList=n[1-2] ExcNodeList=n[3,5]", "required_nodes", ("n1", "n2")),
        (" ReqNodeList=n[1-2] ExcNodeList=n[3,5]", "excluded_nodes", ("n3", "n5")),
        (" Features=a100&ib", "constraint", "a100&ib"),
        (" NodeList=n1 StartTime=100 EndTime=400", "end_seconds", 400),
        (" NodeList=n1 StartTime=100 EndTime=Unknown", "end_seconds", None),
        (" StartTime=100 EndTime=400", "start_seconds", None),  # an estimate: it has no nodes yet
    ],
)
def test_what_a_job_asks_for_is_read(more, field, value):
    assert getattr(parse_job(JOB + more, 9), field) == value


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("", 0),
        ("gpu:2", 2),
        ("gpu:a100:8(S:0-1)", 8),
        ("gpu:a100:4(S:0-1),gpu:h100_80gb:2(S:0)", 6),
        ("shard:16,gpu:tesla:1,mps:200", 1),
        ("craynetwork:4", 0),
    ],
)
def test_gpus_are_counted_in_any_gres(gres, gpus):
    assert gpus_in(gres) == gpus


@pytest.mark.parametrize(
    ("state", "usable", "idle"),
    [
        ("IDLE", True, True),
        ("MIXED", True, False),
        ("ALLOCATED", True, False),
        ("IDLE+COMPLETING", True, False),
        ("MIXED+PLANNED", True, False),
        ("IDLE*", False, False),
        ("DOWN", False, False),
        ("DOWN*+DRAIN", False, False),
        ("IDLE+DRAIN", False, False),
        ("IDLE+NOT_RESPONDING", False, False),
        ("IDLE+CLOUD+POWERED_DOWN", False, False),
        ("ALLOCATED+MAINTENANCE+RESERVED", False, False),
        ("IDLE+RESERVED", False, False),
        ("ALLOCATED+FAIL", False, False),
        ("UNKNOWN", False, False),
    ],
)
def test_a_node_in_service_can_take_jobs_and_an_idle_one_at_once(state, usable, idle):
    (node,) = parse_nodes(f"NodeName=n1 CPUTot=4 State={state} Partitions=main")
    assert (node.usable, node.idle) == (usable, idle)


def _as_json(state):
    return json.loads(json.dumps(asdict(state)))


def test_steps_are_found_by_their_whole_name():
    text = "12.batch batch\n 12.0 stage data\n12.1 ranks\n12.2 ranks of mine\n3_1.4 ranks\n"
    assert steps_named("ranks", text) == ("12.1", "3_1.4")
    assert steps_named("ranks", "") == ()
