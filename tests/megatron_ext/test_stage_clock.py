"""The stage clock against a measurement of the model's parts."""

import json
from collections import defaultdict
from statistics import median

import pytest

from trimtab.protocol import Hello, StepReport

pytestmark = pytest.mark.mcore

DEMO = {
    "model": {"layers": 8, "hidden_size": 256, "attention_heads": 8, "sequence_length": 128},
    "batch": {"microbatch_size": 2, "global_batch_size": 16},
    "train": {"steps": 15, "warmup_steps": 5, "learning_rate": 1e-3, "checkpoint_directory": ""},
}
WARM_UP_STEPS = 3
"""The first steps pay for memory that later ones reuse."""
APART = 0.05
"""The clock is right when stages look as far apart as their parts say, to 5 points."""


def imbalance(stages):
    return max(stages) / median(stages) - 1


def test_the_imbalance_of_the_demonstration_is_that_of_its_parts(train_ranks, start_ranks, token_cache):
    tables = {**DEMO, "data": {"cache_directory": str(token_cache)}}
    parts_of = start_ranks(
        {**tables, "parallel": {"tensor": 2}, "model": {**DEMO["model"], "layers": 4}}, 4, script="time_parts.py"
    ).end()
    assert parts_of.exit_codes == [0] * 4, parts_of.stderr
    parts = [json.loads(text.splitlines()[-1]) for text in parts_of.stdout]
    slowest = {part: max(rank[part] for rank in parts) for part in parts[0]}
    predicted = imbalance([slowest["embedding"] + slowest["layers"], slowest["layers"] + slowest["head"]])

    ended = train_ranks({**tables, "parallel": {"tensor": 2, "pipeline": 2}}, 4)
    stage_of = {hello.rank: hello.pipeline_rank for hello in ended.all(Hello)}
    seconds = defaultdict(lambda: defaultdict(list))
    for report in ended.all(StepReport):
        if report.step > WARM_UP_STEPS:
            compute = report.forward_seconds + report.backward_seconds
            seconds[report.step][stage_of[report.rank]].append(compute)
    measured = median(imbalance([max(step[stage]) for stage in (0, 1)]) for step in seconds.values())
    print(f"parts {slowest}, predicted imbalance {predicted:.3f}, measured {measured:.3f}")
    assert predicted > 0.1  # the LM head has to show, or the comparison says nothing
    assert measured == pytest.approx(predicted, abs=APART)
    assert any("the Python standard library" in text for text in ended.notices)
    assert ended.losses[15] < ended.losses[1] - 0.5
