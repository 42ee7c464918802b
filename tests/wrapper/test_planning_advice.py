"""What a report says of stages that are apart."""

import json

import numpy as np
import pytest

from trimtab.planning.advice import advised
from trimtab.report.find import load
from trimtab_slurm import profile as profiles_of


@pytest.fixture
def findings(tmp_path):
    """`findings(profile)` are those of a report on it: (kind, text)."""

    def of(profile):
        path = tmp_path / "profile.h5"
        profiles_of.write(path, profile)
        (recorded,) = load(str(path), None, None)
        return [(finding.kind, finding.text) for finding in advised(recorded).summary.findings]

    return of


def test_a_heavy_head_has_a_cause_and_a_plan_to_copy(findings, profile):
    (imbalance, _), (cause, why), (plan, what) = findings(profile)
    assert (imbalance, cause, plan) == ("imbalance", "cause", "plan")
    assert why.startswith("Cause: intrinsic (confidence ")
    assert "stage 1 takes 41.7% longer than the other one (forward +42%, backward +42%)" in why
    assert what.startswith("The cause is not sure (50%): ")
    assert "Move layers: layers 4|4 -> 5|3, which " in what
    assert what.endswith(', with --nodes 2 --gpus-per-node 2: [parallel] layout = "Ettttt|tttL"')


def test_a_slow_place_is_hardware_and_its_node_is_left_out(findings, profiles):
    slow = profiles.make(data=3, head_seconds=0.0, slow=(1, 1, 1.5), steps=80, ranks_per_node=2)
    _, (_, why), (_, what) = findings(slow)
    assert why.startswith("Cause: hardware (confidence ")
    assert what.endswith("Submit it again with: trimtab submit ... -- --exclude=n5")


def test_where_nothing_helps_it_says_so(findings, profiles):
    # One layer a stage: to move it would leave the last stage with the head alone, and the first with two layers.
    found = dict(findings(profiles.make(layers=2, head_seconds=0.1)))
    assert found["plan"].startswith("Change nothing: ")


def test_where_nothing_can_be_worked_out_it_says_why(findings, profile, profiles):
    job = json.loads(profile.training.attributes["job"])
    job["model"]["layers"] = "many"
    (imbalance, _), (plan, text) = findings(profiles.change(profile, attributes={"job": json.dumps(job)}))
    assert (imbalance, plan) == ("imbalance", "plan")
    assert text.startswith("What to change cannot be worked out: ")


def test_as_many_steps_as_the_stages_take_to_be_spoken_of_are_enough_for_a_plan(findings, profiles):
    assert findings(profiles.make(steps=9)) == [
        ("none", "Nothing can be said of the stages: 9 steps measured, 10 are needed.")
    ]
    assert [kind for kind, _ in findings(profiles.make(steps=10))] == ["imbalance", "cause", "plan"]


def test_what_a_run_was_reshaped_to_is_told_as_lines_of_the_job_file(findings, profile, profiles):
    level, (plan, what) = findings(profiles.trimmed(profile, step=11))
    assert level[0] == "none"
    assert (plan, what) == (
        "plan",
        "What it was reshaped to while it ran has made steps shorter. For the next run to begin with it, unless it was "
        'for a slow device, in the job file: [parallel] layout = "Ettttt|tttL" recomputed_layers = [0, 1]',
    )
    longer = profiles.trimmed(profile, step=11, factor=1.1)
    assert [kind for kind, _ in findings(longer)] == ["none"]


def test_equal_shares_are_written_out_in_the_place_of_other_ones(findings, profile, profiles):
    trimmed = profiles.trimmed(profile, step=11)
    job = json.loads(trimmed.training.attributes["job"])
    job["parallel"]["layout"] = "Ettttt|tttL"
    settings = trimmed.training.settings | {
        "layout": np.array(["Ettttt|tttL", "Etttt|ttttL"]),
        "recomputed_layers": np.array(["0|0", "0|0"]),
    }
    changed = profiles.change(trimmed, attributes={"job": json.dumps(job)}, training={"settings": settings})
    assert findings(changed)[-1][1].endswith('in the job file: [parallel] layout = "Etttt|ttttL"')


def test_shares_that_must_be_unequal_come_with_batch_sizes_that_would_be_equal(findings, profiles):
    found = profiles.make(data=3, head_seconds=0.0)
    job = json.loads(found.training.attributes["job"])
    job["batch"] = {"microbatch_size": 2, "global_batch_size": 16}
    settings = {"step": [1], "layout": ["Etttt|ttttL"], "microbatches": ["3|3|2"], "recomputed_layers": ["0|0"]}
    changed = profiles.change(
        found,
        attributes={"job": json.dumps(job)},
        training={"settings": {name: np.array(column) for name, column in settings.items()}},
    )
    assert findings(changed)[-1] == (
        "plan",
        "Microbatches 3, 3, 2: batch.global_batch_size 16 gives 3 replicas unequal shares, which costs about 8.3% of a "
        "step; 12 or 18 would not.",
    )


def test_level_stages_need_no_plan(findings, profiles):
    assert [kind for kind, _ in findings(profiles.make(head_seconds=0.0))] == ["none"]
