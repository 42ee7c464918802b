from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wrapper.slurm_states import RUNNING_JOB
from trimtab.protocol import Requeue
from trimtab.requeue.chain import Chain, Exclusion
from trimtab.requeue.exclusions import exclude, infeasible, most_excluded, spare, suitable
from trimtab_slurm.cluster import Node

HOUR = 3600.0
NOW = 1e9
NODE = Node("n1", "IDLE", ("main",), ("a100",), 64, 512_000, 8)
JOB = replace(RUNNING_JOB, start_seconds=NOW - HOUR)
POLICY = Requeue(exclusion_hours=24.0, most_excluded_ratio=0.05)


def _partition(count, **states):
    nodes = [replace(NODE, name=f"n{number}") for number in range(1, count + 1)]
    return tuple(replace(node, state=states.get(node.name, "IDLE")) for node in nodes)


def _slow(node, hours_ago=0.0):
    return Exclusion(node, "slow", NOW - hours_ago * HOUR)


def _exclude(faulty=(), chain=None, job=JOB, partition=None, policy=POLICY, nodes=2, now=NOW):
    partition = _partition(40) if partition is None else partition
    return exclude(chain or Chain(), faulty, job, partition, policy, nodes=nodes, now_seconds=now)


def test_a_slow_node_is_left_out_and_remembered():
    out = _exclude([_slow("n2")])
    assert out.nodes == ("n2",)
    assert out.chain == Chain(exclusions=(_slow("n2"),), asked=("n2",))
    assert out.told == "without n2 (slow)"


def test_an_exclusion_expires():
    chain = Chain(exclusions=(_slow("n3", 24.0), _slow("n4", 23.9)), asked=("n3", "n4"))
    out = _exclude(chain=chain, job=replace(JOB, excluded_nodes=("n3", "n4")))
    assert out.nodes == ("n4",)
    assert out.told == "without n4 (slow); no longer left out: n3"


def test_where_the_partition_is_not_known_the_list_stays_as_it_is():
    chain = Chain(exclusions=(_slow("n3", 3.0), _slow("n4", 2.0)), asked=("n3", "n4"))
    out = _exclude([_slow("n2")], chain, job=replace(JOB, excluded_nodes=("n9", "n3", "n4")), partition=())
    assert out.nodes == ("n9", "n3", "n4")
    assert out.chain == replace(chain, exclusions=(*chain.exclusions, _slow("n2")))
    assert out.told == "the nodes left out stay as they are"


def test_a_node_that_is_found_slow_again_counts_from_then():
    out = _exclude([_slow("n3")], Chain(exclusions=(_slow("n3", 23.0),)))
    assert out.chain.exclusions == (_slow("n3"),)


@pytest.mark.parametrize(("nodes", "most"), [(1, 1), (4, 1), (39, 1), (40, 2), (1000, 50)])
def test_a_share_of_the_partition_is_left_out_at_most_and_one_node_always_may_be(nodes, most):
    assert most_excluded(nodes, POLICY) == most


def test_the_oldest_exclusion_is_given_back_first():
    chain = Chain(exclusions=(_slow("n3", 3.0), _slow("n4", 2.0)), asked=("n3", "n4"))
    out = _exclude([_slow("n2")], chain)
    assert out.nodes == ("n4", "n2")
    assert out.told == "without n4 (slow), n2 (slow); no longer left out: n3"


def test_what_the_user_leaves_out_stays_left_out_and_is_never_ours():
    job = replace(JOB, excluded_nodes=("n9", "n3"))
    out = _exclude([_slow("n2"), _slow("n9")], job=job)
    assert out.nodes == ("n9", "n3", "n2")
    assert out.chain.asked == ("n2",)
    later = _exclude(chain=out.chain, job=replace(job, excluded_nodes=out.nodes), now=NOW + 25 * HOUR)
    assert later.nodes == ("n9", "n3")
    assert later.chain.asked == ()


def test_a_node_that_the_user_asked_for_by_name_is_not_left_out():
    out = _exclude([_slow("n2")], job=replace(JOB, required_nodes=("n2",)))
    assert (out.nodes, out.told) == ((), "no longer left out: n2")


@pytest.mark.parametrize(
    ("partition", "nodes", "left_out"),
    [
        (_partition(2), 2, ()),
        (_partition(3), 2, ("n2",)),
        (_partition(3), 3, ()),
        (_partition(3, n3="DOWN*"), 2, ()),
        (_partition(3, n3="IDLE+DRAIN"), 2, ()),
        (_partition(3, n3="MIXED"), 2, ("n2",)),
        (_partition(3, n2="DOWN*"), 2, ("n2",)),  # it was not among those that could run the job anyway
        (_partition(2), 1, ("n2",)),
    ],
)
def test_a_job_is_never_left_without_nodes_to_run_on(partition, nodes, left_out):
    assert _exclude([_slow("n2")], partition=partition, nodes=nodes).nodes == left_out


def test_nodes_of_another_kind_are_no_replacement():
    small = replace(NODE, name="n3", gpus=4)
    assert _exclude([_slow("n2")], partition=(*_partition(2), small)).nodes == ()
    large = replace(NODE, name="n3", gpus=16, cpus=128)
    assert _exclude([_slow("n2")], partition=(*_partition(2), large)).nodes == ("n2",)


def test_nodes_without_the_features_of_the_constraint_are_no_replacement():
    partition = (*_partition(2), replace(NODE, name="n3", features=("h100", "ib")))
    assert [node.name for node in suitable(JOB, partition)] == ["n1", "n2", "n3"]
    assert [node.name for node in suitable(replace(JOB, constraint="a100&ib"), partition)] == ["n1", "n2"]


def test_spare_nodes_are_idle_now_and_neither_the_jobs_nor_left_out():
    partition = _partition(8, n1="ALLOCATED", n2="ALLOCATED", n3="MIXED", n5="IDLE+PLANNED", n6="IDLE+POWERED_DOWN")
    job = replace(JOB, excluded_nodes=("n4",))
    assert spare(job, partition) == ("n7", "n8")


def test_what_slurm_would_hold_for_ever_is_named():
    job = replace(JOB, required_nodes=("n1", "n2"))
    assert infeasible(job, _partition(4), ("n3",), 3) == ""
    assert infeasible(job, _partition(4), ("n2",), 3) == "n2 cannot be left out: the job asks for them by name"
    assert infeasible(job, _partition(4), (), 1) == ("the job asks for 2 nodes by name, which is more than 1")
    assert infeasible(JOB, _partition(4, n3="DOWN*", n4="UNKNOWN"), ("n1", "n2"), 2) == ""  # Slurm waits for them
    assert infeasible(JOB, _partition(4), ("n1", "n2", "n3"), 2) == (
        "without those that it would leave out, 1 node could run it, and it needs 2"
    )


_NAMES = st.lists(st.sampled_from([f"n{number}" for number in range(1, 9)]), unique=True, max_size=5).map(tuple)


@given(
    faulty=_NAMES,
    before=_NAMES,
    own=_NAMES,
    required=_NAMES.map(lambda names: names[:2]),
    states=st.lists(st.sampled_from(["IDLE", "ALLOCATED", "DOWN*", "IDLE+DRAIN"]), min_size=8, max_size=8),
    nodes=st.integers(1, 8),
    ratio=st.sampled_from([0.0, 0.05, 0.3, 0.9]),
    ages=st.lists(st.floats(0, 48), min_size=5, max_size=5),
)
@settings(deadline=None, max_examples=120)
def test_no_list_shortens_the_users_exceeds_the_share_or_takes_the_last_nodes(
    faulty, before, own, required, states, nodes, ratio, ages
):
    partition = _partition(8, **{f"n{number}": state for number, state in enumerate(states, 1)})
    job = replace(JOB, excluded_nodes=(*own, *(set(before) - set(own))), required_nodes=required)
    policy = Requeue(most_excluded_ratio=ratio)
    chain = Chain(
        exclusions=tuple(_slow(node, age) for node, age in zip(before, ages, strict=False)),
        asked=tuple(set(before) - set(own)),
    )
    out = _exclude([_slow(node) for node in faulty], chain, job, partition, policy, nodes)
    assert out.nodes[: len(own)] == own
    ours = set(out.chain.asked)
    assert set(out.nodes) == {*own, *ours}
    assert not ours & {*own, *required}
    assert ours <= {exclusion.node for exclusion in out.chain.exclusions}
    assert len(out.chain.exclusions) <= max(1, int(8 * ratio))
    assert all(NOW - exclusion.since_seconds < 24 * HOUR for exclusion in out.chain.exclusions)
    usable = {node.name for node in partition if node.usable} - set(own)
    could = len(usable | set(required)) >= nodes
    can = len((usable - ours) | set(required)) >= nodes
    assert can or not could or not ours & usable
