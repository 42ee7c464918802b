"""Saving and resuming by real ranks, also where a disk or a rank fails."""

import json
import resource
import shutil
import signal

import pytest

from trimtab.protocol import Failed, Notice, Saved, StepReport

pytestmark = pytest.mark.mcore

SAME = 1e-6
STARTS_SECONDS = 300
"""Longest wait for ranks on a busy machine."""


def test_interrupted_and_damaged_checkpoints_are_named_and_the_one_before_is_taken(start_ranks, tiny_job, tmp_path):
    directory = tmp_path / "checkpoints"
    train = {"checkpoint_directory": str(directory), "checkpoint_interval_steps": 2, "keep_checkpoints": 3}
    job = tiny_job(parallel={"pipeline": 2}, model={"dropout": 0.1}, train=train)

    def end(**options):
        return start_ranks(job, 2, **options).end(timeout=STARTS_SECONDS)

    killed = end(environment={"TRIMTAB_INJECT": "kill:rank=1,during=save,step=6"})
    assert killed.exit_codes == [1, -signal.SIGKILL]
    (failed,) = killed.all(Failed)
    assert failed.peer_lost
    assert [(saved.step, saved.directory) for saved in killed.all(Saved)] == [
        (step, f"{directory}/step-{step:08d}") for step in (2, 4)
    ]
    assert list(killed.losses) == [1, 2, 3, 4, 5, 6]

    shard = next((directory / "step-00000004").glob("__1_*"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    resumed = end().succeeded()
    ignored, other, source = [text for text in resumed.notices if str(directory) in text]
    assert ignored == f"ignored {directory}/step-00000006: its save was interrupted"
    assert other.startswith(f"ignored {directory}/step-00000004: {shard.name} is not what was written")
    assert source == f"resumed from {directory}/step-00000002"
    assert resumed.losses == pytest.approx({step: killed.losses[step] for step in (3, 4, 5, 6)}, rel=SAME)
    for saved in resumed.all(Saved):
        files = json.loads((directory / f"step-{saved.step:08d}" / "complete.json").read_text())["files"]
        assert saved.size_bytes == sum(file["size_bytes"] for file in files.values())
        assert saved.seconds > 0
        assert sorted(files) == [".metadata", "__0_0.distcp", "__1_0.distcp", "common.pt", "metadata.json"]
    assert sorted(save.name for save in directory.iterdir()) == [f"step-{step:08d}" for step in (2, 4, 6)]

    for save in directory.iterdir():
        (save / "metadata.json").unlink()
    refused = end()
    assert refused.exit_codes == [1, 1]
    for failed in refused.all(Failed):
        assert failed.error.startswith(f"no checkpoint in {directory} is sound, and none is started over")
        assert failed.error.count("metadata.json cannot be read") == 3
        assert (failed.peer_lost, failed.bad_input) == (False, False)


def test_a_save_that_cannot_be_written_is_told_and_training_goes_on(start_ranks, tiny_job, tmp_path):
    directory = tmp_path / "checkpoints"
    train = {"checkpoint_directory": str(directory), "steps": 100_000}
    ranks = start_ranks(tiny_job(parallel={"pipeline": 2}, train=train), 2)

    def heard(kind):
        return [message for message in ranks.messages if isinstance(message, kind)]

    def order_save(answer):
        """Order one, and wait for the answer, and for a step after it."""
        before = len(heard(answer))
        ranks.order("checkpoint")
        ranks.until(lambda _: len(heard(answer)) > before, STARTS_SECONDS)
        steps = len(heard(StepReport))
        ranks.until(lambda _: len(heard(StepReport)) > steps, STARTS_SECONDS)
        return heard(answer)[-1]

    def limit(rank, size):
        """No file of a rank can be larger: as on a full disk, writing fails in the middle."""
        resource.prlimit(ranks.processes[rank].pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    ranks.until(lambda _: bool(heard(StepReport)), STARTS_SECONDS)
    first = order_save(Saved)
    for rank in (0, 1):
        limit(rank, 50_000)
        told = order_save(Notice)
        assert told.text.startswith(f"no checkpoint of step {told.step}: rank {rank}: ")
        assert "File too large" in told.text
        assert [str(save) for save in directory.iterdir()] == [first.directory]
        limit(rank, resource.RLIM_INFINITY)
    shutil.rmtree(directory)
    second = order_save(Saved)
    assert second.step > first.step

    limit(1, 50_000)
    ranks.order("stop")
    ended = ranks.end(timeout=STARTS_SECONDS)
    assert ended.exit_codes == [1, 1]  # what cannot be saved at the end is lost: that is no good end
    for failed in ended.all(Failed):
        assert failed.error.startswith(f"the last checkpoint, of step {failed.step}, could not be written: rank 1: ")
        assert not failed.peer_lost
    assert [str(save) for save in directory.iterdir()] == [second.directory]


def test_a_checkpoint_of_another_model_is_refused(train_ranks, start_ranks, tiny_job, tmp_path):
    train = {"checkpoint_directory": str(tmp_path / "checkpoints"), "steps": 2}
    train_ranks(tiny_job(train=train), 1)
    refused = start_ranks(tiny_job(train=train, model={"hidden_size": 32, "layers": 2}), 1).end()
    assert refused.exit_codes == [1]
    (failed,) = refused.all(Failed)
    assert failed.bad_input
    assert "Traceback" not in refused.stderr[0]
    assert "model.layers is 2 now and 4 there; model.hidden_size is 32 now and 64 there" in failed.error


def test_a_checkpoint_that_has_consumed_other_samples_is_refused_with_the_key(train_series, tiny_job, tmp_path):
    (tmp_path / "other.txt").write_text("Another text.\n" * 1000)
    train = {"checkpoint_directory": str(tmp_path / "checkpoints"), "steps": 1, "warmup_steps": 0}
    on = train | {"steps": 2}
    jobs = [
        tiny_job(train=train),
        tiny_job(train=on | {"seed": 99}),
        tiny_job(train=on, model={"sequence_length": 16}),
        tiny_job(train=on, data={"path": str(tmp_path / "other.txt")}),
        tiny_job(train=on),
    ]
    first, seed, length, text, same = train_series(jobs, 1)
    assert (list(first.losses), list(same.losses)) == ([1], [2])
    errors = [ended.all(Failed)[0].error for ended in (seed, length, text)]
    source = f"the checkpoint {tmp_path}/checkpoints/step-00000001 is of another order of samples"
    assert errors[0].startswith(f"{source}: train.seed is 99 now and 1234 there.")
    assert errors[1].startswith(f"{source}: model.sequence_length is 16 now and 32 there.")
    changed = "data.path, data.tokenizer or data.provider give other samples now than there"
    assert errors[2] == f"{source}: {changed}. Name another train.checkpoint_directory, or change the job back."
    assert not any(ended.losses for ended in (seed, length, text))
