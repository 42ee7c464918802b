from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.balance.deciding.ledger import Given
from trimtab.balance.deciding.situation import Fault, Kind
from trimtab.protocol import Batch, Job, JobError, Layout, Model, Parallel, Setting, Shape, setting_of
from trimtab.requeue.chain import Attempt, Chain, Exclusion, Wanted, fingerprint
from trimtab.requeue.shapes import beginning, restarted

JOB = Job(
    model=Model(layers=12, attention_heads=8, hidden_size=64),
    parallel=Parallel(pipeline=4),
    batch=Batch(microbatch_size=2, global_batch_size=16),
)


def _wanted(parallel, setting, job=JOB, batch=JOB.batch, nodes=2):
    return Chain(wanted=Wanted(fingerprint(job), nodes, parallel, batch, setting, "n2 is slow"))


def test_without_a_wish_the_job_file_is_run_as_it_is():
    begin = beginning(Chain(), JOB, 8)
    assert (begin.job, begin.told) == (JOB, "")
    assert begin.setting == setting_of(JOB, JOB.shape(8))


def test_the_wanted_shape_is_run_where_the_allocation_has_its_size():
    setting = Setting(Layout((7, 5), 2), (5, 3), (2, 0))
    begin = beginning(_wanted(Parallel(pipeline=2), setting), JOB, 4)
    assert begin.job.parallel == Parallel(pipeline=2, layout="Ettttttt|tttttL", recomputed_layers=(2, 0))
    assert begin.setting == setting
    assert begin.told == (
        "TP1 x PP2 x DP2, layers 7|5, microbatches 5|3, recomputed 2|0: n2 is slow"
    )  # microbatches differ between replicas, which a job cannot say: the setting does
    assert setting_of(begin.job, begin.job.shape(4)).layout == setting.layout


@pytest.mark.parametrize(
    ("kind", "nodes", "edited", "took_place"),
    [
        (Kind.EXCLUDE, ("n1", "n3"), False, True),
        (Kind.EXCLUDE, ("n1", "n2"), False, False),  # submitted again, or it could not be left out
        (Kind.EXCLUDE, ("n2", "n3"), False, False),
        (Kind.FEWER, ("n1", "n3", "n4", "n5"), False, False),
        (Kind.REQUEUE, ("n1", "n3"), True, False),
    ],
)
def test_a_restart_took_place_on_the_nodes_and_in_the_shape_that_were_asked_for(kind, nodes, edited, took_place):
    setting = Setting(Layout((7, 5), 2), (5, 3), (0, 0))
    order = Given(0.0, kind, Fault("hardware", ((0, 1),)), 2.0, 0.3)
    before = Attempt(7, 0, 0.0, ("n1", "n2"), Shape(1, 2, 2), setting)
    asked = replace(_wanted(Parallel(pipeline=2), setting), attempts=(before,), orders=(order,))
    chain = replace(asked, exclusions=(Exclusion("n2", "slow", 0.0),))
    job = replace(JOB, batch=Batch(1, 16)) if edited else JOB
    begin = beginning(chain, job, 4)
    assert restarted(chain, begin, nodes) is took_place
    if kind is Kind.EXCLUDE:  # and where n2 found no place among those that are left out
        assert restarted(asked, begin, nodes) is (set(nodes) != {"n1", "n2"})


def test_where_no_restart_was_asked_for_none_took_place():
    assert not restarted(Chain(), beginning(Chain(), JOB, 4), ("n1",))


def test_on_ranks_of_another_number_the_wish_is_void_and_the_job_file_runs():
    chain = _wanted(Parallel(pipeline=2), Setting(Layout((7, 5), 2), (4, 4), (0, 0)))
    begin = beginning(chain, JOB, 8)
    assert begin.job == JOB
    assert begin.told == "not run as wanted (n2 is slow): 4 replicas each need a microbatch, and get [4, 4]"


def test_an_edited_job_file_voids_the_wish():
    edited = replace(JOB, parallel=Parallel(pipeline=2))
    chain = _wanted(Parallel(pipeline=2), Setting(Layout((7, 5), 2), (4, 4), (0, 0)))
    begin = beginning(chain, edited, 4)
    assert (begin.job, begin.told) == (edited, "not run as wanted (n2 is slow): the job file has changed since")


@pytest.mark.parametrize(
    ("world_size", "shape", "microbatch_size"),
    [
        (3, "TP1 x PP3 x DP1", 2),  # fewer ranks than stages: as many stages as there are ranks
        (6, "TP1 x PP6 x DP1", 2),  # no fewer ranks for the model than the user thought it needs
        (5, "TP1 x PP5 x DP1", 2),
        (12, "TP1 x PP4 x DP3", 2),  # of unequal shares
        (32, "TP1 x PP4 x DP8", 2),
        (64, "TP1 x PP4 x DP16", 1),  # too many replicas for microbatches of 2
    ],
)
def test_the_nearest_shape_is_taken_where_the_job_file_does_not_fit(world_size, shape, microbatch_size):
    begin = beginning(Chain(), JOB, world_size)
    assert str(begin.job.shape(world_size)) == shape
    assert begin.job.batch == Batch(microbatch_size, 16)
    assert begin.told.startswith("microbatches") == (world_size == 12)
    assert bool(begin.told) == (world_size != 32)


def test_why_the_nearest_shape_is_run_is_told():
    assert beginning(Chain(), JOB, 3).told == (
        "TP1 x PP3 x DP1: the job file's TP1 x PP4 does not fit 3 ranks, this is the nearest"
    )
    assert beginning(Chain(), JOB, 64).told == (
        "TP1 x PP4 x DP16 with microbatches of 1: the job file's TP1 x PP4 does not fit 64 ranks, this is the nearest"
    )


@pytest.mark.parametrize(
    ("job", "world_size", "told"),
    [
        (
            Job(batch=Batch(1, 16)),
            3,
            "microbatches 6, 5, 5: batch.global_batch_size 16 gives 3 replicas unequal shares, which costs about "
            "11.1% of a step; 15 or 18 would not",
        ),
        (  # filling and draining four stages is the same for all
            JOB,
            12,
            "microbatches 3, 3, 2: batch.global_batch_size 16 gives 3 replicas unequal shares, which costs about 5.6% "
            "of a step; 12 or 18 would not",
        ),
        (
            Job(batch=Batch(2, 6)),
            2,
            "microbatches 2, 1: batch.global_batch_size 6 gives 2 replicas unequal shares, which costs about 25.0% of "
            "a step; 4 or 8, or microbatches of 1, would not",
        ),
        (
            Job(parallel=Parallel(pipeline=2, virtual=2), batch=Batch(1, 6)),
            4,
            "microbatches 4, 2: batch.global_batch_size 6 gives 2 replicas unequal shares, which costs about 22.2% of "
            "a step; 4 or 8 would not",
        ),
    ],
)
def test_what_unequal_shares_cost_is_told_and_what_would_be_equal(job, world_size, told):
    begin = beginning(Chain(), job, world_size)
    assert (begin.job, begin.told) == (job, told)


def test_unequal_shares_are_told_of_a_wanted_shape_too_unless_they_are_wanted_so():
    job = replace(JOB, batch=Batch(1, 16))
    for shares, told in ((6, 5, 5), True), ((5, 5, 6), False):
        chain = _wanted(Parallel(pipeline=2), Setting(Layout((6, 6), 2), shares, (0, 0)), job, job.batch)
        begin = beginning(chain, job, 6)
        assert begin.setting.microbatches == shares
        assert ("unequal shares" in begin.told) is told


def test_tensor_parallelism_stays_where_it_can_and_goes_with_sequence_parallelism():
    job = replace(JOB, parallel=Parallel(tensor=2, pipeline=2, sequence_parallel=True))
    assert str(beginning(Chain(), job, 6).job.shape(6)) == "TP2 x PP3 x DP1"
    odd = beginning(Chain(), job, 3)
    assert str(odd.job.shape(3)) == "TP1 x PP3 x DP1"
    assert not odd.job.parallel.sequence_parallel


def test_a_stage_recomputes_no_smaller_share_than_before():
    job = replace(JOB, parallel=Parallel(pipeline=4, recomputed_layers=(2, 1, 1, 0)))
    assert beginning(Chain(), job, 3).job.parallel.recomputed_layers == (2, 2, 2)  # a third of 4 layers, rounded up


def test_uneven_layers_are_spelled_out():
    assert beginning(Chain(), JOB, 5).setting.layout.layers == (3, 3, 2, 2, 2)


def test_a_model_of_the_users_own_is_only_replicated():
    job = replace(JOB, model=replace(JOB.model, provider="mine:build"))
    assert str(beginning(Chain(), job, 64).job.shape(64)) == "TP1 x PP4 x DP16"
    with pytest.raises(JobError, match="does not fit 3 ranks"):
        beginning(Chain(), job, 3)


def test_ranks_that_no_shape_fits_are_refused():
    with pytest.raises(JobError, match=r"does not fit 17 ranks .*needs a multiple of 4 ranks.*neither does any other"):
        beginning(Chain(), JOB, 17)


@given(
    world_size=st.integers(1, 24),
    layers=st.integers(1, 12),
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.integers(1, 6),
    virtual=st.sampled_from([1, 2]),
    batch=st.sampled_from([(1, 4), (2, 16), (3, 24), (2, 30)]),
    recomputed=st.booleans(),
    wish=st.integers(1, 24),
)
@settings(deadline=None, max_examples=60)
def test_whatever_begins_fits_the_ranks_and_keeps_model_and_batch(
    world_size, layers, tensor, pipeline, virtual, batch, recomputed, wish
):
    try:
        layout = str(Layout.uniform(layers, pipeline, virtual)) if pipeline * virtual > 1 else ""
        job = Job(
            model=Model(layers=layers),
            parallel=Parallel(
                tensor=tensor,
                pipeline=pipeline,
                virtual=virtual,
                layout=layout,
                recomputed_layers=(1,) * pipeline if recomputed else (),
            ),
            batch=Batch(*batch),
        )
    except ValueError:  # no such job: an empty chunk, or an interleaved schedule without a pipeline
        return
    chain = Chain()
    try:
        wanted = beginning(Chain(), job, wish)
        chain = Chain(
            wanted=Wanted(fingerprint(job), 1, wanted.job.parallel, wanted.job.batch, wanted.setting, "so it is")
        )
    except JobError:
        pass
    begin, refusal = None, ""
    try:
        begin = beginning(chain, job, world_size)
    except JobError as error:
        refusal = str(error)
    if begin is None:
        assert "neither does any other shape" in refusal
        return
    shape = begin.job.shape(world_size)
    assert shape.world_size == world_size
    assert begin.setting.obstacle(begin.job, shape) == ""
    assert (begin.job.model, begin.job.train) == (job.model, job.train)
    assert begin.job.batch.global_batch_size == job.batch.global_batch_size
    assert begin == beginning(chain, job, world_size)
    if chain.wanted and world_size == wish:
        assert begin.setting == chain.wanted.setting
