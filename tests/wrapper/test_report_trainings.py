"""Several trainings in one file: ranks that were started anew in the same allocation, on fewer nodes."""

import dataclasses

import numpy as np
import pytest
from click.testing import CliRunner

from trimtab.cli import main
from trimtab.planning.sources import of_attempt
from trimtab.report.find import load
from trimtab.report.summarize import summarize
from trimtab.report.trainings import number_of_trainings, only
from trimtab_slurm import profile as profile_file
from trimtab_slurm.contents import Event


@pytest.fixture
def shrunk(profiles):
    """Steps 1-20 on two nodes, stopped after 41 s; from 51 s on steps 16-30 on n1. n2 ends at 45 s."""
    whole = profiles.make(steps=30, seconds=100.0)
    first = profiles.until(whole, 20, 75, "stopped to go on with fewer nodes at step 20 of 30").training
    second = profiles.resumed(whole, first_step=16, start=50.0, restart_count=0).training
    on_one = second.ranks["node"] == "n1"
    second = dataclasses.replace(
        second,
        attributes=second.attributes | {"tensor": 1, "nodes": "n1"},
        ranks={name: column[on_one] for name, column in second.ranks.items()},
    )
    n1, n2 = whole.nodes

    def faults(*moments):
        return tuple(Event(whole.start_seconds + moment, "fault", str(moment)) for moment in moments)

    n1 = dataclasses.replace(n1, events=(*n1.events, *faults(44, 60)))
    n2 = dataclasses.replace(n2, events=(*n2.events, *faults(44, 52)))
    samples = {name: column[:45] for name, column in n2.devices[0].samples.items()}
    devices = tuple(dataclasses.replace(device, samples=samples) for device in n2.devices)
    return dataclasses.replace(
        whole,
        nodes=(n1, dataclasses.replace(n2, end_seconds=whole.start_seconds + 45, devices=devices)),
        earlier_trainings=(dataclasses.replace(first, attributes=first.attributes | {"nodes": "n1,n2"}),),
        training=second,
    )


def seconds(profile, shrunk):
    """Of each node, [first, last] sample of its devices, from the start of the attempt."""
    return {
        node.node: [
            (device.samples["time_seconds"][[0, -1]] - shrunk.start_seconds).tolist() for device in node.devices
        ]
        for node in profile.nodes
    }


def test_a_profile_of_one_training_or_none_is_as_it_is(profile):
    assert number_of_trainings(profile) == 1
    assert only(profile, 0) is profile
    bare = dataclasses.replace(profile, training=None)
    assert only(bare, 0) is bare


def test_each_training_has_its_own_time_nodes_and_samples(shrunk):
    first, second = (only(shrunk, place) for place in range(number_of_trainings(shrunk)))
    start = shrunk.start_seconds
    assert (first.training, second.training) == (shrunk.earlier_trainings[0], shrunk.training)
    assert first.earlier_trainings == second.earlier_trainings == ()
    assert [(each.start_seconds - start, each.end_seconds - start) for each in (first, second)] == [(0, 41), (51, 100)]
    assert (first.expected_nodes, second.expected_nodes) == (("n1", "n2"), ("n1",))
    assert (first.missing_nodes, second.missing_nodes) == ((), ())
    assert seconds(first, shrunk) == {"n1": [[1, 41]] * 2, "n2": [[1, 41]] * 2}
    assert seconds(second, shrunk) == {"n1": [[52, 100]] * 2}
    assert [node.end_seconds - start for node in first.nodes] == [41, 41]


def test_what_happens_on_a_node_is_told_with_the_last_training_that_had_begun_there(shrunk):
    first, second = (only(shrunk, place) for place in (0, 1))
    assert [[event.text for event in node.events] for node in first.nodes] == [
        ["started", "44"],
        ["started", "44", "52"],
    ]
    assert [[event.text for event in node.events] for node in second.nodes] == [["60"]]


def test_a_node_that_ends_while_the_ranks_start_anew_is_not_theirs(shrunk):
    n1, n2 = shrunk.nodes
    late = dataclasses.replace(n2, end_seconds=shrunk.start_seconds + 60)
    assert [node.node for node in only(dataclasses.replace(shrunk, nodes=(n1, late)), 1).nodes] == ["n1"]


def test_a_node_of_a_training_that_left_no_record_is_missing_there_alone(shrunk):
    found = dataclasses.replace(shrunk, nodes=shrunk.nodes[:1])
    assert [only(found, place).missing_nodes for place in (0, 1)] == [("n2",), ()]


def test_a_training_that_does_not_say_its_nodes_has_those_of_the_allocation(shrunk):
    training = shrunk.training
    attributes = {name: value for name, value in training.attributes.items() if name != "nodes"}
    found = dataclasses.replace(shrunk, training=dataclasses.replace(training, attributes=attributes))
    assert only(found, 1).expected_nodes == ("n1", "n2")


def test_a_task_of_another_training_is_not_shown_and_one_of_its_own_without_a_sample_is(shrunk):
    n1, n2 = shrunk.nodes

    def task(uuid, times):
        device = n1.devices[0]
        count = len(times)
        samples = {name: column[:count] for name, column in device.samples.items()}
        return dataclasses.replace(device, uuid=uuid, samples=samples | {"time_seconds": shrunk.start_seconds + times})

    devices = (task("cpu-0", np.array([10.0])), task("cpu-9", np.array([20.0])), task("cpu-8", np.array([70.0])))
    gpu = dataclasses.replace(n1.devices[0], kind="gpu", uuid="GPU-1", samples={"time_seconds": np.empty(0)})
    found = dataclasses.replace(shrunk, nodes=(dataclasses.replace(n1, devices=(*devices, gpu)), n2))
    first, second = ([device.uuid for device in only(found, place).nodes[0].devices] for place in (0, 1))
    assert first == ["cpu-0", "cpu-9", "GPU-1"]
    assert second == ["cpu-0", "cpu-8", "GPU-1"]
    rank = next(device for device in summarize(only(found, 1)).devices if device.uuid == "cpu-0")
    assert (rank.samples, rank.no_data) == (0, "no sample; the sampling period is 1 s")


def test_columns_of_an_opened_profile_are_cut_when_they_are_asked_for(tmp_path, shrunk):
    profile_file.write(tmp_path / "x.h5", shrunk)
    with profile_file.opened(tmp_path / "x.h5") as found:
        second = only(found, 1)
        samples = second.nodes[0].devices[0].samples
        assert list(samples) == list(found.nodes[0].devices[0].samples)
        assert len(samples) == 4
        assert len(samples["power_watts"]) == 49
        assert samples.get("fan_ratio") is None


def test_no_sample_counts_twice_and_those_between_trainings_count_nowhere(shrunk):
    whole = shrunk.nodes[0].devices[0].samples["utilization_ratio"]
    parts = [only(shrunk, place).nodes[0].devices[0].samples["utilization_ratio"] for place in (0, 1)]
    np.testing.assert_array_equal(np.concatenate(parts), np.delete(whole, range(41, 51)))


@pytest.fixture
def root(tmp_path, shrunk, profiles):
    """The parts of a job that was shrunk, then requeued: three trainings in two runs of Slurm's."""
    directory = tmp_path / "lab" / "42" / "parts"
    directory.mkdir(parents=True)
    last = profiles.resumed(profiles.make(), first_step=28, start=200.0, restart_count=1)
    stopped = dataclasses.replace(
        shrunk.training, attributes=shrunk.training.attributes | {"exit_code": 75, "outcome": "stopped by SIGUSR1"}
    )
    for number, part in enumerate(
        [
            dataclasses.replace(shrunk, nodes=(), earlier_trainings=(), training=shrunk.earlier_trainings[0]),
            dataclasses.replace(shrunk, nodes=(), earlier_trainings=(), training=stopped, expected_nodes=("n1",)),
            *(dataclasses.replace(shrunk, nodes=(n,), training=None, earlier_trainings=()) for n in shrunk.nodes),
            last,
        ]
    ):
        training = part.training
        times = {"start_seconds": training.start_seconds, "end_seconds": training.end_seconds} if training else {}
        profile_file.write(directory / f"{number}.h5", dataclasses.replace(part, **times))
    return tmp_path


def test_the_chain_has_each_training_once(root):
    (found,) = load("42", None, root)
    assert len(list((root / "lab/42").glob("*.h5"))) == 2
    attempts, chain = found.summary.attempts, found.summary.chain
    assert [(each.number, each.state, each.first_step, each.last_step, each.lost_steps) for each in attempts] == [
        (1, "stopped", 1, 20, 5),
        (2, "stopped", 16, 30, 3),
        (3, "finished", 28, 30, 0),
    ]
    assert [each.nodes for each in attempts] == [("n1", "n2"), ("n1",), ("n1", "n2")]
    assert [each.shape for each in attempts] == ["TP2 × PP2 × DP1", "TP1 × PP2 × DP1", "TP2 × PP2 × DP1"]
    assert attempts[1].waited_seconds == 10.0
    assert chain.loss.step == tuple(range(1, 31))
    assert chain.goodput.useful_seconds == 30 * 1.5
    assert chain.goodput.repeated_seconds == 8 * 1.5
    assert chain.goodput.wall_seconds == found.summary.end_seconds - attempts[0].start_seconds


def test_attempts_are_numbered_on_over_the_trainings_of_all_files(root):
    found = load("42", "all", root)
    assert [each.summary.attempt_number for each in found] == [1, 2, 3]
    assert [each.summary.restart_count for each in found] == [0, 0, 1]
    before, after = "20260528T202640Z.h5", "20260528T203001Z-restart1.h5"
    assert [each.file.name for each in found] == [before, before, after]
    assert [each.summary.previous for each in found] == ["", before, before]
    (second,) = load("42", "2", root)
    assert second.summary.outcome.sentence == "stopped by SIGUSR1"
    assert second.summary.training.first_step == 16
    assert [device.ranks for device in second.summary.devices] == [(0,), (1,)]
    with second.profile() as profile:
        assert profile.training.steps["step"][0] == 16


def test_the_trainings_of_a_file_are_its_attempts(root):
    load("42", None, root)
    file = root / "lab/42/20260528T202640Z.h5"
    (last,) = load(str(file), None, None)
    assert (last.summary.attempt_number, len(last.summary.attempts)) == (2, 2)
    (first,) = load(str(file), "1", None)
    assert first.summary.outcome.sentence == "stopped to go on with fewer nodes at step 20 of 30"
    refused = CliRunner().invoke(main, ["report", str(file), "--attempt", "3"])
    assert refused.stderr == f"trimtab: {file} has no attempt 3; choose from 1 to 2, or all\n"


def test_a_page_and_a_plan_are_of_the_training_that_is_chosen(root, tmp_path):
    page = tmp_path / "page.html"
    shown = CliRunner().invoke(
        main, ["report", "42", "--profiles", str(root), "--attempt", "1", "--html", str(page)], catch_exceptions=False
    )
    assert shown.exit_code == 0
    assert "stopped to go on with fewer nodes at step 20 of 30" in page.read_text()
    cases = [of_attempt(found) for found in load("42", "all", root)[:2]]
    assert [case.title for case in cases] == ["Job 42, attempt 1", "Job 42, attempt 2"]
    assert [case.nodes for case in cases] == [2, 1]
