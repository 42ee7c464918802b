import dataclasses
import json
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab import stacks
from trimtab.account import MOST_BEHIND_STEPS, Account
from trimtab.protocol import (
    Batch,
    Done,
    Failed,
    Hello,
    Job,
    Layout,
    Notice,
    Parallel,
    Probe,
    Reshaped,
    Saved,
    Setting,
    Stack,
    StepReport,
    job_to_json,
)
from trimtab.recorder import OrderRecord, Recorder, RunIdentity, recover
from trimtab_slurm import profile
from trimtab_slurm.contents import Event


def identity():
    return RunIdentity("c", 7, "u", 1, 1000.0, ("n1", "n2"), job_to_json(Job()), 1, 2, 1)


def feed(recorder):
    for rank in (0, 1):
        recorder.message(Hello("secret", rank, f"n{rank + 1}", 0, 9, 0, rank, 0, (2 * rank, 2 * rank + 1), 5, ""))
    for step in (1, 2):
        for rank in (0, 1):
            loss = 9.0 / step if rank else None
            recorder.message(StepReport(rank, step, 1000.0 + step, 2.0, 0.25, 0.5 + rank, 4, 64, 512, 10, loss=loss))
    recorder.message(Notice(0, 2, "checkpoint", "saved here"))
    recorder.event("signal", "SIGUSR1")


def test_a_run_becomes_the_training_part(tmp_path):
    recorder = Recorder(tmp_path, identity())
    feed(recorder)
    recorder.message(Done(0, 2))
    part = profile.read(recorder.finish(0, "trained to step 2"))
    assert (part.cluster, part.job_id, part.restart_count, part.expected_nodes) == ("c", 7, 1, ("n1", "n2"))
    training = part.training
    assert training.attributes["outcome"] == "trained to step 2"
    assert training.attributes["exit_code"] == 0
    np.testing.assert_array_equal(training.steps["loss"], [9.0, 4.5])
    np.testing.assert_array_equal(training.steps["tokens"], [64, 64])
    assert np.isnan(training.steps["gradient_norm"]).all()  # nobody measured it
    np.testing.assert_array_equal(training.stages["stage"], [0, 1, 0, 1])
    np.testing.assert_array_equal(training.stages["backward_seconds"], [0.5, 1.5, 0.5, 1.5])
    np.testing.assert_array_equal(training.stages["microbatches"], [4] * 4)
    np.testing.assert_array_equal(training.stages["squared_lengths"], [512] * 4)
    assert training.probes == {}  # nobody asked for one
    assert training.ranks["device"].tolist() == ["cpu-n1-task0", "cpu-n2-task1"]
    assert training.ranks["layers"].tolist() == ["0-1", "2-3"]
    assert [(event.kind, event.text) for event in training.events] == [
        ("checkpoint", "saved here"),
        ("signal", "SIGUSR1"),
    ]
    assert [path.suffix for path in (tmp_path / "parts").iterdir()] == [".h5"]


def test_the_token_is_not_kept(tmp_path):
    recorder = Recorder(tmp_path, identity())
    feed(recorder)
    assert "secret" not in recorder.path.read_text()
    assert recorder.path.stat().st_mode & 0o777 == 0o600
    recorder.finish(0, "")


def test_trainings_that_begin_within_one_second_have_parts_of_their_own(tmp_path):
    trainings = [dataclasses.replace(identity(), start_seconds=seconds) for seconds in (1000.25, 1000.75)]
    parts = [Recorder(tmp_path, each).finish(75, "stopped at step 0 of 2") for each in trainings]
    assert [profile.read(part).training.start_seconds for part in parts] == [1000.25, 1000.75]
    assert profile.read(parts[0]).training.attributes["nodes"] == "n1,n2"


def test_what_a_killed_wrapper_knew_is_recovered(tmp_path):
    recorder = Recorder(tmp_path, identity())
    feed(recorder)
    left = tmp_path / "parts" / "training-left.jsonl"
    left.write_text(recorder.path.read_text() + '{"time_seconds": 1, "ki')  # torn by the kill
    recorder.finish(0, "")
    (part,) = recover(tmp_path)
    training = profile.read(part).training
    assert len(training.steps["step"]) == 2
    assert training.attributes["exit_code"] == -1
    assert "killed" in training.attributes["outcome"]


def test_a_failure_is_an_event_that_names_the_rank(tmp_path):
    recorder = Recorder(tmp_path, identity())
    feed(recorder)
    recorder.message(Failed(1, 2, "ValueError: bad", peer_lost=False))
    training = profile.read(recorder.finish(3, "rank 1 failed")).training
    assert training.events[-1].text == "rank 1: ValueError: bad"


def test_input_that_all_ranks_find_at_fault_is_one_event(tmp_path):
    recorder = Recorder(tmp_path, identity())
    for rank in (1, 0):
        recorder.message(Failed(rank, 0, 'data.path = "x": is not there', peer_lost=False, bad_input=True))
    recorder.message(Failed(2, 0, "Connection closed by peer", peer_lost=True))
    events = profile.read(recorder.finish(2, "bad input")).training.events
    assert [event.text for event in events] == [
        'rank 1: data.path = "x": is not there',
        "rank 2: Connection closed by peer",
    ]


def test_probes_are_a_table_of_their_own(tmp_path):
    recorder = Recorder(tmp_path, identity())
    for rank, seconds in ((1, 0.25), (0, 0.5)):
        recorder.message(Probe(rank, 5, seconds))
    probes = profile.read(recorder.finish(0, "")).training.probes
    assert {name: column.tolist() for name, column in probes.items()} == {
        "step": [5, 5],
        "rank": [1, 0],
        "seconds": [0.25, 0.5],
    }


def test_a_run_without_a_step_is_a_part_too(tmp_path):
    part = profile.read(Recorder(tmp_path, identity()).finish(4, "srun ended"))
    assert len(part.training.steps["step"]) == 0
    assert len(part.training.ranks["rank"]) == 0


EVEN = Setting(Layout((2, 2), 2), (8, 8), (0, 0))
BETTER = Setting(Layout((3, 1), 2), (9, 7), (0, 1))


def columns(table):
    return {name: column.tolist() for name, column in table.items()}


def test_settings_and_orders_are_tables_of_their_own(tmp_path):
    recorder = Recorder(tmp_path, identity())
    feed(recorder)
    recorder.setting(1, EVEN)
    given = OrderRecord(1, 3, 1002.5, "move layers", "2|2", "3|1", "the LM head", 2.0, 1.5)
    recorder.order(given)
    recorder.order(OrderRecord(2, 3, 1003.0, "checkpoint", "", "", "it is time"))
    recorder.message(Reshaped(0, 2, BETTER, "", 0.25, 2048, 1024))
    recorder.order(
        dataclasses.replace(given, measured_seconds=1.75, cost_seconds=0.25, moved_bytes=2048, outcome="carried out")
    )
    training = profile.read(recorder.finish(0, "")).training
    assert columns(training.settings) == {
        "step": [1, 3],  # the second as the ranks have told it
        "layout": ["Ett|ttL", "Ettt|tL"],
        "microbatches": ["8|8", "9|7"],
        "recomputed_layers": ["0|0", "0|1"],
    }
    orders = columns(training.orders)
    assert orders["outcome"] == ["carried out", "given"]
    assert orders["kind"] == ["move layers", "checkpoint"]
    assert (orders["before"], orders["after"]) == (["2|2", ""], ["3|1", ""])
    np.testing.assert_array_equal(orders["predicted_seconds"], [1.5, np.nan])
    np.testing.assert_array_equal(orders["measured_seconds"], [1.75, np.nan])
    np.testing.assert_array_equal(orders["moved_bytes"], [2048.0, np.nan])
    assert orders.keys() == {field.name for field in dataclasses.fields(OrderRecord)}


def test_before_a_reshape_what_the_job_says_has_run(tmp_path):
    job = job_to_json(Job(parallel=Parallel(pipeline=2), batch=Batch(microbatch_size=2, global_batch_size=16)))
    recorder = Recorder(tmp_path, dataclasses.replace(identity(), job=job))
    feed(recorder)
    recorder.message(Reshaped(0, 1, BETTER, "", 0.25, 2048, 1024))
    settings = columns(profile.read(recorder.finish(0, "")).training.settings)
    assert settings["step"] == [1, 2]
    assert settings["layout"] == ["Ett|ttL".replace("tt", "t" * (Job().model.layers // 2)), "Ettt|tL"]
    assert settings["microbatches"] == ["8", "9|7"]


def test_a_refused_reshape_changes_no_setting_and_is_an_event(tmp_path):
    recorder = Recorder(tmp_path, identity())
    recorder.message(Reshaped(0, 4, EVEN, "rank 1 has no memory for it", 0.1, 0, 1024))
    training = profile.read(recorder.finish(0, "")).training
    assert training.settings == {}
    (event,) = training.events
    assert event.kind == "reshape"
    assert event.text.startswith("after step 4 refused: rank 1 has no memory for it; layers 2|2")


def test_what_an_order_did_survives_a_kill_of_the_wrapper(tmp_path):
    recorder = Recorder(tmp_path, identity())
    feed(recorder)
    recorder.order(OrderRecord(1, 3, 1002.5, "move layers", "2|2", "3|1", "", 2.0, 1.5))
    recorder.message(Reshaped(0, 2, BETTER, "", 0.25, 2048, 1024))
    with recorder.path.open("a") as journal:
        journal.write('{"time_seconds": 1, "ki')  # the kill
    training = profile.read(*recover(tmp_path)).training
    assert columns(training.orders)["outcome"] == ["given"]
    assert columns(training.settings)["step"] == [3]
    assert recorder.path.exists()  # its wrapper may still be at work
    recorder.finish(0, "")


def test_a_save_is_a_row_and_an_event(tmp_path):
    recorder = Recorder(tmp_path, identity())
    recorder.message(Saved(0, 2, "/c/step-2", 1.5, 3 << 20))
    training = profile.read(recorder.finish(0, "")).training
    saves = columns(training.checkpoints)
    assert [saves[name] for name in ("step", "duration_seconds", "size_bytes", "directory")] == [
        [2],
        [1.5],
        [3 << 20],
        ["/c/step-2"],
    ]
    assert [event.text for event in training.events] == ["saved /c/step-2: 3 MiB, training stood still for 1.5 s"]


def test_the_stacks_of_all_ranks_are_kept_whole_within_their_bound(tmp_path):
    recorder = Recorder(tmp_path, identity())
    whole, long = "x\n" * (stacks.MOST_CHARACTERS // 2), "outer" + "y" * stacks.MOST_CHARACTERS
    for rank, text in ((0, whole), (1, long), (2, whole)):
        recorder.message(Stack(rank, 7, text))
    found = stacks.shared_stacks(profile.read(recorder.finish(0, "")).training.events)
    assert [shared.ranks for shared in found] == [(1,), (0, 2)]
    assert found[1].text == whole
    assert found[0].text == "[5 characters of outer frames left out]\n" + "y" * stacks.MOST_CHARACTERS


def test_a_text_that_is_no_stack_is_none():
    assert stacks.shared_stacks([Event(1.0, "stack", "rank x\n"), Event(1.0, "hang", "rank 1\n")]) == ()


@st.composite
def lines(draw):
    """What ranks of two stages say, in an order in which it can come: each rank's steps ascend, some are lost."""
    told = [draw(st.lists(st.sampled_from(range(1, 9)), unique=True).map(sorted)) for _ in range(2)]
    turns = draw(st.permutations([rank for rank in (0, 1) for _ in told[rank]]))
    return [(rank, told[rank].pop(0)) for rank in turns]


@settings(max_examples=25, deadline=None)
@given(lines(), st.integers(0, 16))
def test_a_snapshot_is_what_the_journal_holds(tmp_path_factory, told, until):
    recorder = Recorder(tmp_path_factory.mktemp("job"), identity())
    for rank in (0, 1):
        recorder.message(Hello("secret", rank, f"n{rank + 1}", 0, 9, 0, rank, 0, (2 * rank, 2 * rank + 1), 5, ""))
    for place, (rank, step) in enumerate(told):
        recorder.message(StepReport(rank, step, 1000.0 + step, 2.0, 0.25, 0.5 + rank, 4, 64, 512, 10))
        if place == until:
            recorder.snapshot()  # that somebody has looked changes nothing
    snapshot = recorder.snapshot()
    (part,) = recover(recorder.path.parent.parent)
    for name in ("steps", "stages", "ranks"):
        np.testing.assert_equal(getattr(profile.read(part).training, name), getattr(snapshot, name))
    assert snapshot.steps["step"].tolist() == sorted({step for _, step in told})
    places = sorted({(step, 0, rank) for rank, step in told})
    assert list(zip(*(snapshot.stages[name].tolist() for name in ("step", "replica", "stage")), strict=True)) == places
    recorder.finish(0, "")


def test_a_rank_that_is_no_longer_heard_does_not_make_steps_wait_for_ever():
    account = Account(identity())
    body = dataclasses.asdict(Hello("", 0, "n1", 0, 9, 0, 0, 0, (0, 1), 5, ""))
    body.pop("token")
    account.take({"time_seconds": 1.0, "kind": "Hello", "body": body})
    steps = 3 * MOST_BEHIND_STEPS
    for step in range(1, steps + 1):
        report = dataclasses.asdict(StepReport(0, step, 1000.0, 2.0, 0.25, 0.5, 4, 64, 512, 10))
        account.take({"time_seconds": 2.0, "kind": "StepReport", "body": report})
    assert account.training().steps["step"].tolist() == list(range(1, steps + 1))
    assert len(account._pending) == MOST_BEHIND_STEPS


def test_a_snapshot_may_be_asked_for_by_another_thread(tmp_path):
    recorder = Recorder(tmp_path, identity())
    feed(recorder)
    seen, done = [], threading.Event()

    def look():
        while not done.is_set():
            snapshot = recorder.snapshot()
            seen.append(len(snapshot.steps["step"]) == len(snapshot.steps["loss"]))

    thread = threading.Thread(target=look)
    thread.start()
    for step in range(3, 400):
        for rank in (0, 1):
            recorder.message(StepReport(rank, step, 1000.0 + step, 2.0, 0.25, 0.5, 4, 64, 512, 10))
    done.set()
    thread.join()
    assert all(seen)
    assert len(recorder.snapshot().steps["step"]) == 399
    recorder.finish(0, "")


def test_every_line_of_the_journal_is_json(tmp_path):
    recorder = Recorder(tmp_path, identity())
    feed(recorder)
    recorder.message(StepReport(0, 3, 1003.0, 2.0, 0.25, 0.5, 4, 64, 512, 10, loss=float("nan")))
    recorder.setting(1, EVEN)
    kinds = [json.loads(line)["kind"] for line in recorder.path.read_text().splitlines()]
    assert kinds == ["identity", *["Hello"] * 2, *["StepReport"] * 4, "Notice", "event", "StepReport", "setting"]
    recorder.finish(0, "")


def test_a_full_disk_under_the_journal_ends_nothing(tmp_path):
    recorder = Recorder(tmp_path, identity())
    file = recorder._file

    class Full:
        def write(self, text):
            raise OSError(28, "No space left on device")

        def close(self):
            file.close()

    recorder._file = Full()
    feed(recorder)
    training = profile.read(recorder.finish(0, "trained to step 2")).training
    assert training.steps["step"].tolist() == [1, 2]
    gaps = [event.text for event in training.events if event.kind == "recording"]
    assert len(gaps) == 1
    assert "No space left on device" in gaps[0]


def test_where_the_part_cannot_be_written_the_journal_stays(tmp_path):
    recorder = Recorder(tmp_path, identity())
    feed(recorder)
    recorder.path.with_suffix(".h5").mkdir()
    with pytest.raises(OSError, match="directory"):
        recorder.finish(0, "trained to step 2")
    assert recorder.path.exists()
