"""The worked example of the documentation, as it is."""

import tomllib

import pytest

from trimtab.protocol import Hello

pytestmark = pytest.mark.mcore


def test_the_example_of_an_own_model_learns_to_count(train_ranks, pytestconfig):
    directory = pytestconfig.rootpath / "examples" / "own_model"
    job = tomllib.loads((directory / "job.toml").read_text())
    job["train"]["checkpoint_directory"] = ""
    ended = train_ranks(job, 2, working_directory=directory)
    assert ended.losses[1] == pytest.approx(4.85, abs=0.1)  # ln 128, the padded vocabulary
    assert ended.losses[150] < 1.0
    # GPT-2's parameters: weights without biases (the job's config has none), LayerNorms with.
    layer, norm = 12 * 64 * 64 + 4 * 64, 2 * 64
    held = {hello.rank: hello.parameters for hello in ended.all(Hello)}
    assert held == {0: (128 + 32) * 64 + 2 * layer, 1: 2 * layer + norm + 128 * 64}
