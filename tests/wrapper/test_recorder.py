import numpy as np

from trimtab.protocol import Done, Failed, Hello, Job, Notice, Probe, StepReport, job_to_json
from trimtab.recorder import Recorder, RunIdentity, recover
from trimtab_slurm import profile


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
