"""Saving and resuming, by real ranks."""

import json
import shutil

import pytest

from trimtab.protocol import Failed, Saved

pytestmark = pytest.mark.mcore

SAME = 1e-6

CASES = {
    "plain, dropout": ({"tensor": 2}, {"dropout": 0.1}, "fp32", 2),
    "distributed, interleaved, bf16": (
        {"pipeline": 2, "virtual": 2, "distributed_optimizer": True},
        {},
        "bf16",
        4,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_continues_the_uninterrupted_one(name, train_ranks, tiny_job, tmp_path):
    parallel, model, precision, ranks = CASES[name]
    directory = tmp_path / "checkpoints"
    train = {
        "checkpoint_directory": str(directory),
        "checkpoint_interval_steps": 2,
        "keep_checkpoints": 2,
        "precision": precision,
    }
    job = tiny_job(parallel=parallel, model=model, train=train)
    whole = train_ranks(job, ranks)
    assert sorted(save.name for save in directory.iterdir()) == ["step-00000004", "step-00000006"]
    assert [(saved.step, saved.directory) for saved in whole.all(Saved)] == [
        (step, f"{directory}/step-{step:08d}") for step in (2, 4, 6)
    ]

    (directory / "step-00000006" / "complete.json").unlink()  # as if its save had been interrupted
    resumed = train_ranks(job, ranks)
    assert f"ignored {directory}/step-00000006: its save was interrupted" in resumed.notices
    assert f"resumed from {directory}/step-00000004" in resumed.notices
    assert list(resumed.losses) == [5, 6]
    assert resumed.losses == pytest.approx({step: whole.losses[step] for step in (5, 6)}, rel=SAME)
    assert resumed.gradient_norms == pytest.approx({step: whole.gradient_norms[step] for step in (5, 6)}, rel=SAME)
    meta = json.loads((directory / "step-00000006" / "complete.json").read_text())
    assert (meta["step"], meta["consumed_samples"]) == (6, 48)


def test_a_checkpoint_goes_on_at_another_shape_and_refuses_another_model(train_ranks, start_ranks, tiny_job, tmp_path):
    directory = tmp_path / "checkpoints"
    train = {"checkpoint_directory": str(directory), "checkpoint_interval_steps": 3}
    whole = train_ranks(tiny_job(train=train), 1)
    shutil.rmtree(directory / "step-00000006")

    split = train_ranks(tiny_job(train=train, parallel={"pipeline": 2, "layout": "Ettt|tL"}), 2)
    assert split.losses == pytest.approx({step: whole.losses[step] for step in (4, 5, 6)}, rel=SAME)

    other = tiny_job(train=train, model={"hidden_size": 32, "layers": 2})
    refused = start_ranks(other, 1).end()
    assert refused.exit_codes == [1]
    (failed,) = refused.all(Failed)
    assert "model.layers is 2 now and 4 there; model.hidden_size is 32 now and 64 there" in failed.error
