from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab import jobfile
from trimtab.protocol import (
    Job,
    JobError,
    Shape,
    even_shares,
    job_from_dict,
    job_from_json,
    job_to_json,
    setting_of,
)

ROOT = Path(__file__).parents[2]


def test_the_demo_job_loads_and_fits_four_ranks():
    job = jobfile.load(ROOT / "examples/demo/job.toml")
    assert job.shape(4) == Shape(tensor=2, pipeline=2, data=1)


def test_a_job_survives_the_way_to_the_ranks():
    job = job_from_dict(
        {
            "model": {"layers": 7, "dropout": 0.1},
            "parallel": {"pipeline": 2, "layout": "Etttt|tttL"},
            "train": {"seed": 7},
        }
    )
    assert job_from_json(job_to_json(job)) == job


def test_a_whole_number_serves_where_a_number_is_asked_for():
    assert job_from_dict({"train": {"weight_decay": 0}}).train.weight_decay == 0.0


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"modell": {}}, "modell = {}: is not a key of a job file; did you mean model?; choose from: "),
        ({"model": {"layer": 4}}, "model.layer = 4: is not a key of a job file; did you mean layers?; choose from: "),
        ({"model": 4}, 'model = 4: is a value; write it as a table; choose from: "[model]"'),
        ({"model": {"layers": "8"}}, 'model.layers = "8": must be a whole number, not str'),
        ({"model": {"layers": 8.0}}, "model.layers = 8.0: must be a whole number, not float"),
        ({"model": {"layers": True}}, "model.layers = true: must be a whole number, not bool"),
        ({"model": {"layers": 0}}, "model.layers = 0: must be above 0"),
        ({"balance": {"window_steps": 3}}, "balance.window_steps = 3: must be at least 4: fewer steps bound nothing"),
        ({"balance": {"clear_ratio": 0.2}}, "balance.clear_ratio = 0.2: is above trigger_ratio 0.1"),
        ({"train": {"steps": 5, "warmup_steps": 5}}, "train.warmup_steps = 5: must be below steps 5"),
        (
            {"train": {"precision": "fp8"}},
            'train.precision = "fp8": is not one of the choices; choose from: "auto", "fp32", "bf16"',
        ),
        ({"train": {"learning_rate": float("nan")}}, "train.learning_rate = nan: must be a finite number"),
        (
            {"model": {"layers": 30}, "parallel": {"pipeline": 4}},
            "model.layers = 30: cannot be split equally over 4 stages (pipeline 4 x virtual 1); write the shares as "
            "parallel.layout, or take a multiple; choose from: 28, 32",
        ),
        (
            {"parallel": {"tensor": 3}},
            "parallel.tensor = 3: does not divide model.attention_heads 8; choose from: 1, 2, 4, 8",
        ),
        (
            {"parallel": {"pipeline": 2, "layout": "Ettt|ttttL"}},
            'parallel.layout = "Ettt|ttttL": has 7 layers, but model.layers is 8',
        ),
        (
            {"parallel": {"pipeline": 3, "layout": "Etttt||ttttL"}},
            'parallel.layout = "Etttt||ttttL": has an empty stage',
        ),
        ({"parallel": {"pipeline": 3, "layout": "Etttt|ttttL"}}, "has 2 parts, but pipeline x virtual is 3 x 1"),
        (
            {"parallel": {"pipeline": 2, "layout": "tttt|ttttL"}},
            "must begin with 'E' (embedding) and end with 'L' (loss)",
        ),
        ({"model": {"provider": "os.system('x')"}}, 'must be written "module:function"'),
        ({"batch": {"microbatch_size": 3}}, "batch.microbatch_size = 3: does not divide global_batch_size 16"),
        ({"parallel": {"virtual": 2}}, "parallel.virtual = 2: needs a pipeline of 2 stages or more"),
        (
            {"parallel": {"sequence_parallel": True}},
            "parallel.sequence_parallel = true: needs parallel.tensor of 2 or more",
        ),
    ],
)
def test_what_cannot_run_is_refused_with_key_value_and_choices(tables, message):
    with pytest.raises(JobError) as refusal:
        job_from_dict(tables)
    assert message in str(refusal.value)


def test_an_unknown_key_lists_every_valid_one():
    with pytest.raises(JobError) as refusal:
        job_from_dict({"batch": {"size": 4}})
    assert refusal.value.choices == ("global_batch_size", "microbatch_size")


def test_a_world_size_that_does_not_match_is_refused():
    job = job_from_dict({"parallel": {"tensor": 2, "pipeline": 2}})
    with pytest.raises(JobError, match="needs a multiple of 4 ranks, but the allocation gives 6"):
        job.shape(6)
    assert job.shape(8) == Shape(2, 2, 2)


def test_a_batch_need_not_be_a_multiple_of_the_replicas():
    assert Job().shape(3) == Shape(1, 1, 3)
    assert Job().shares(3) == (3, 3, 2)
    assert setting_of(Job(), Shape(1, 1, 3)).microbatches == (3, 3, 2)


def test_a_batch_that_leaves_a_replica_without_a_microbatch_is_refused():
    with pytest.raises(JobError) as refusal:
        Job().shape(9)
    assert str(refusal.value) == (
        "batch.global_batch_size = 16: its 8 microbatches are fewer than 1 for each of 9 replicas; "
        "take 18, or more by multiples of 2"
    )
    with pytest.raises(JobError, match=r"16 microbatches are fewer than 1 for each of 17 replicas; take 17, or more$"):
        job_from_dict({"batch": {"microbatch_size": 1}}).shape(17)


def test_the_interleaved_schedule_wants_a_multiple_of_the_stages_for_each_replica():
    parallel, batch = {"pipeline": 4, "virtual": 2}, {"global_batch_size": 24}
    assert job_from_dict({"parallel": parallel, "batch": batch}).shares(2) == (8, 4)
    with pytest.raises(JobError, match=r"12 microbatches are fewer than 4 for each of 4 replicas.* take 32, or more"):
        job_from_dict({"parallel": parallel, "batch": batch}).shape(16)
    with pytest.raises(JobError) as refusal:
        job_from_dict({"parallel": parallel, "batch": {"global_batch_size": 12}}).shape(4)
    assert str(refusal.value) == (
        "batch.global_batch_size = 12: its 6 microbatches are no multiple of 4, as the interleaved schedule of 4 "
        "stages needs; take 8, or more by multiples of 8"
    )


@given(st.integers(1, 200), st.integers(1, 40), st.integers(1, 8))
def test_shares_are_as_equal_as_multiples_can_be(microbatches, replicas, multiple):
    try:
        shares = even_shares(microbatches, replicas, multiple)
    except ValueError:
        assert microbatches % multiple or microbatches < replicas * multiple
        return
    assert (len(shares), sum(shares)) == (replicas, microbatches)
    assert not any(share % multiple for share in shares)
    assert min(shares) > 0
    assert shares[0] - shares[-1] in (0, multiple)
    assert list(shares) == sorted(shares, reverse=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "does not exist"), ("[model", "is not TOML"), ("[model]\nlayers = 8\nlayers = 9", "is not TOML")],
)
def test_a_file_that_is_no_job_file_is_named(tmp_path, content, message):
    path = tmp_path / "job.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(JobError) as refusal:
        jobfile.load(path)
    assert message in str(refusal.value)
    assert str(path) in str(refusal.value)
