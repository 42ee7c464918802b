"""Truth is planted, and found again. Noise is that of real ranks: 5 % a microbatch, so 1.25 % a step of 16 of them and
0.3 % over 20 steps; a tolerance of 1.5 % is five errors of one stage's seconds.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.balance.measuring.measure import Samples, costs_of, measure, samples_of
from trimtab.balance.measuring.steps import assemble
from trimtab.balance.plan import Costs, Part
from trimtab.protocol import Hello, Layout, StepReport

LAYER, EMBEDDING, HEAD = 0.010, 0.002, 0.015
NEAR = 0.015


def parts(layers, embedding=EMBEDDING, head=HEAD):
    """Forward seconds [L + 2] of a number of equal layers, or of layers of these seconds."""
    layers = [LAYER] * layers if isinstance(layers, int) else layers
    return np.array([embedding, *layers, head])


def plant(
    layouts, forward, speeds, *, steps=20, seed=0, noise=0.05, outliers=0.0, slow_steps=0.0, work=None, attention=0.0
):
    """Samples of steps under each layout; backward takes twice as long as forward.

    work: tokens and squared lengths [T, R] of a microbatch; attention: its share of a layer's time for median work.
    """
    random, microbatches = np.random.default_rng(seed), 16
    speeds = np.asarray(speeds, dtype=float)
    replicas, stages = speeds.shape
    shape = (steps * len(layouts), replicas, stages)
    layout = np.arange(shape[0]) // steps
    tokens, squares = work or np.ones((2, *shape[:2])) * [[[1000.0]], [[1e6]]]
    load = tokens / np.median(tokens)
    layer_load = (1 - attention) * load + attention * squares / np.median(squares)
    seconds = []
    for cost in forward, 2 * forward:
        layers = np.array([[sum(cost[1 + i] for i in each.stage_layers(s)) for s in range(stages)] for each in layouts])
        ends = np.zeros(stages)
        ends[0] += cost[0]
        ends[-1] += cost[-1]
        clean = layers[layout][:, None] * layer_load[..., None] + ends * load[..., None]
        each = 1 + noise * random.standard_normal((*shape, microbatches))
        each *= np.where(random.random(each.shape) < outliers, 1.5, 1.0)
        seconds.append(clean / speeds * each.sum(axis=-1))
    slow = 1 + 0.4 * (random.random(shape[0]) < slow_steps)[:, None, None]
    step, replica, stage = (index.ravel() for index in np.indices(shape))

    def per_stage(values):
        return np.repeat(values[..., None] * microbatches, stages, axis=2).ravel()

    return Samples(
        step=step + 1,
        replica=replica,
        stage=stage,
        forward_seconds=(seconds[0] * slow).ravel(),
        backward_seconds=(seconds[1] * slow).ravel(),
        microbatches=np.full(step.size, float(microbatches)),
        tokens=per_stage(tokens),
        squared_lengths=per_stage(squares),
        layout=layout[step],
    )


def without(samples, rows):
    """The samples but these rows."""
    return samples.select(~rows)


def told(measured, text):
    return any(text in sentence for sentence in measured.assumptions)


def prior_of(forward):
    made = [Part(seconds, seconds * 0.8, seconds * 1.2, 1e6, 2e6, 1e5) for seconds in forward]
    return Costs(tuple(made[1:-1]), made[0], made[-1], 1e5)


def near(seconds, planted, tolerance=NEAR):
    """Layers and head within the tolerance; the embedding, a rest of its stage, within that of the stage's layers."""
    return np.abs(seconds - planted).max() < tolerance * 2 * LAYER and seconds[1:-1] == pytest.approx(
        planted[1:-1], rel=tolerance
    )


def test_without_noise_the_truth_comes_back():
    layout, speeds = Layout.uniform(8, 4), np.ones((4, 4))
    speeds[2, 1] = 0.8
    measured = measure(plant([layout], parts(8), speeds, noise=0), [layout])
    assert measured.forward_seconds == pytest.approx(parts(8), rel=1e-6)
    assert measured.backward_seconds == pytest.approx(2 * parts(8), rel=1e-6)
    assert measured.speeds == pytest.approx(speeds, rel=1e-6)
    assert (measured.tokens, measured.squared_lengths, measured.told_apart) == (1000.0, 1e6, True)


@pytest.mark.parametrize(
    ("replicas", "slow"),
    [
        (4, {(2, 1): 0.8}),
        (4, {(0, 0): 1 / 1.08, (3, 3): 0.5}),
        (2, {(1, 2): 0.8}),
        (4, {(1, 2): 0.7, (1, 3): 0.7}),  # a node that holds two stages of a replica
        (4, {(0, 1): 0.8, (1, 1): 0.8}),  # half of the replicas: the faster half is speed 1
    ],
)
def test_slow_places_are_found_and_costs_are_not_misled(replicas, slow):
    layout, speeds = Layout.uniform(8, 4), np.ones((replicas, 4))
    for place, speed in slow.items():
        speeds[place] = speed
    measured = measure(plant([layout], parts(8), speeds, outliers=0.02, slow_steps=0.05), [layout])
    assert measured.speeds == pytest.approx(speeds, rel=NEAR)
    assert near(measured.forward_seconds, parts(8))
    assert near(measured.backward_seconds / 2, parts(8))
    assert measured.told_apart
    assert told(measured, "the median speed of the replicas")


def test_a_slow_tensor_parallel_group_is_a_slow_place():
    layout, random = Layout((2, 2), 2), np.random.default_rng(0)
    ranks = {rank: Hello("", rank, "n0", 0, 1, rank % 2, rank // 2 % 2, rank // 4, (0,), 1, "") for rank in range(16)}

    def report(rank, step):
        # a slow rank holds up its peer, in the collectives of each layer
        seconds = 0.2 * (1.25 if rank in (10, 11) else 1.0) * (1 + 0.01 * random.standard_normal())
        return StepReport(rank, step, 0.0, 1.0, seconds, 2 * seconds, 8, 4096, 10**6, 0)

    assembled = [assemble([report(rank, step) for rank in ranks], ranks) for step in range(1, 21)]
    stages = [stage for step in assembled for stage in step.stages]
    table = {name: [getattr(stage, name) for stage in stages] for name in vars(stages[0])}
    measured = measure(samples_of(table), [layout])
    expected = np.ones((4, 2))
    expected[2, 1] = 0.8
    assert measured.speeds == pytest.approx(expected, rel=NEAR)


def test_one_slow_place_of_64_does_not_bias_the_others():
    layout, speeds = Layout.uniform(16, 8), np.ones((8, 8))
    speeds[5, 3] = 0.6
    slow = measure(plant([layout], parts(16), speeds), [layout])
    even = measure(plant([layout], parts(16), np.ones((8, 8))), [layout])
    others = np.arange(64).reshape(8, 8) != 5 * 8 + 3
    # the same noise: only the typical replica of its own stage is another mean
    assert slow.speeds[others] == pytest.approx(even.speeds[others], rel=1e-3)
    assert slow.forward_seconds == pytest.approx(even.forward_seconds, rel=0.02)


def test_one_replica_cannot_tell_cost_from_speed_and_says_so():
    layout = Layout.uniform(8, 4)
    measured = measure(plant([layout], parts(8), [[1, 0.8, 1, 1]]), [layout])
    assert not measured.told_apart
    assert told(measured, "Stages 0-3: measured on one replica")
    assert measured.speeds == pytest.approx(1.0, rel=1e-9)
    assert np.isnan(measured.speed_error_ratio).all()
    expected = parts([LAYER, LAYER, LAYER / 0.8, LAYER / 0.8, LAYER, LAYER, LAYER, LAYER])
    assert near(measured.forward_seconds, expected)


def test_a_probe_tells_one_replicas_speeds():
    layout, speeds = Layout.uniform(8, 4), np.array([[1, 0.8, 1, 1.0]])
    probes = {(0, stage): 0.3 / speed for stage, speed in enumerate(speeds[0])}
    measured = measure(plant([layout], parts(8), speeds), [layout], probe_seconds=probes)
    assert measured.told_apart
    assert told(measured, "Stages 0-3: the speed in training is taken to be that in the probe")
    assert measured.speeds == pytest.approx(speeds, rel=1e-3)
    assert near(measured.forward_seconds, parts(8))
    assert measured.speed_error_ratio == pytest.approx(0.02)


def test_a_probe_shows_what_slows_all_replicas_of_a_stage():
    layout, speeds = Layout.uniform(8, 4), np.ones((2, 4))
    speeds[:, 2] = 0.8
    samples = plant([layout], parts(8), speeds)
    assert measure(samples, [layout]).speeds == pytest.approx(1.0, abs=NEAR)
    probes = {(replica, stage): 1 / speeds[replica, stage] for replica in (0, 1) for stage in range(4)}
    measured = measure(samples, [layout], probe_seconds=probes)
    assert measured.speeds == pytest.approx(speeds, rel=NEAR)
    assert near(measured.forward_seconds, parts(8))


def test_a_probe_of_no_use_is_ignored():
    layout = Layout.uniform(8, 4)
    probes = {(0, 0): 0.0, (0, 1): float("nan"), (7, 1): 1.0}
    measured = measure(plant([layout], parts(8), np.ones((1, 4))), [layout], probe_seconds=probes)
    assert not measured.told_apart


def test_a_moved_layer_tells_the_speeds_of_its_two_stages():
    layouts = [Layout((2, 2, 2, 2), 4), Layout((2, 1, 3, 2), 4)]
    measured = measure(plant(layouts, parts(8), [[1, 0.8, 1, 1]]), layouts)
    # the layer is a difference of stages' seconds: 0.3 % of 2 and of 3 layers, forward and backward
    assert measured.speeds == pytest.approx(np.array([[1, 0.8, 1, 1]]), rel=4 * measured.speed_error_ratio[0, 1])
    assert measured.speed_error_ratio[0, 1] < 0.012
    assert np.isnan(measured.speed_error_ratio[0, [0, 2, 3]]).all()  # taken as 1; stage 1 is beside stage 2
    assert told(measured, "Stages 1-2: moved layers tell the speeds beside each other")
    assert told(measured, "Stages 0, 3: measured on one replica")
    assert not measured.told_apart
    further = [*layouts, Layout((3, 1, 3, 1), 4)]
    assert measure(plant(further, parts(8), [[1, 0.8, 1, 1]]), further).told_apart


def test_stages_linked_in_pairs_are_not_told_apart():
    layouts = [Layout((3, 3, 3, 3), 4), Layout((2, 4, 4, 2), 4)]
    measured = measure(plant(layouts, parts(12), np.ones((1, 4))), layouts)
    assert told(measured, "Stages 0-1: moved layers tell")
    assert told(measured, "Stages 2-3: moved layers tell")
    assert not measured.told_apart


def test_a_move_that_tells_too_little_is_left_to_the_assumption():
    layouts = [Layout((64, 64, 64), 3), Layout((64, 63, 65), 3)]
    measured = measure(plant(layouts, parts(192), np.ones((1, 3))), layouts)
    # one layer of 64 is known to 64 x sqrt(2) x 0.3 %: no ground for a speed, nor for a cost of its own
    assert measured.speeds == pytest.approx(1.0, rel=1e-9)
    assert measured.forward_seconds[1:-1] == pytest.approx(LAYER, rel=NEAR)


@pytest.mark.parametrize("share", [16, 24, 32, 40])
def test_a_move_on_the_verge_of_telling_leads_nowhere_wild(share):
    layouts = [Layout((share,) * 4, 4), Layout((share, share - 1, share + 1, share), 4)]
    for seed in range(5):
        speeds = measure(plant(layouts, parts(4 * share), [[1, 0.8, 1, 1]], seed=seed), layouts).speeds
        assert 0.6 < speeds.min() <= speeds.max() < 1.3


def test_two_stages_cannot_be_taken_apart_without_a_prior():
    layout, forward = Layout((4, 4), 2), parts(8)
    samples = plant([layout], forward, [[1, 1], [1, 0.7]])
    measured = measure(samples, [layout])
    assert np.isnan(measured.forward_seconds).all()
    assert told(measured, "without a prior they are not known")
    assert measured.speeds == pytest.approx(np.array([[1, 1], [1, 0.7]]), rel=NEAR)
    measured = measure(samples, [layout], prior_of(forward * 7))
    assert near(measured.forward_seconds, forward)
    assert told(measured, "The embedding is taken to cost the prior's proportion of the typical layer.")
    assert told(measured, "The head is taken to cost")
    assert told(measured, "Layers 0-7: only sums are measured, of the layers of a stage")


def test_what_is_open_is_not_closed_by_being_negative():
    layout = Layout((1, 7), 2)  # of all that fits, the shortest solution has less than nothing for the embedding
    measured = measure(plant([layout], parts(8, embedding=0.0, head=0.05), np.ones((2, 2))), [layout])
    assert np.isnan(measured.forward_seconds).all()


def test_one_stage_is_shared_out_as_the_prior_says():
    layout, forward = Layout((4,), 1), parts(4)
    measured = measure(plant([layout], forward, [[1.0]]), [layout], prior_of(forward * 3))
    assert measured.forward_seconds == pytest.approx(forward, rel=NEAR)


def test_a_wrong_prior_of_the_head_does_not_matter_where_other_stages_tell_the_layer():
    layout = Layout.uniform(8, 4)
    measured = measure(plant([layout], parts(8), np.ones((2, 4))), [layout], prior_of(parts(8, head=0.05)))
    assert near(measured.forward_seconds, parts(8))
    assert told(measured, "the head is what remains of stage 3")


def test_interleaved_chunks_add_up_on_their_stage():
    layout, speeds = Layout((1, 2, 1, 1, 1, 2), 3), np.ones((2, 3))
    speeds[1, 2] = 0.75
    measured = measure(plant([layout], parts(8), speeds), [layout])
    assert measured.speeds == pytest.approx(speeds, rel=NEAR)
    assert near(measured.forward_seconds, parts(8))


def test_of_unequal_layers_only_sums_are_known():
    layout, layers = Layout((2, 2, 2), 3), [0.01, 0.01, 0.02, 0.03, 0.01, 0.01]
    measured = measure(plant([layout], parts(layers, head=0.01), np.ones((4, 3))), [layout])
    assert measured.forward_seconds[3:5].sum() == pytest.approx(0.05, rel=NEAR)
    assert measured.forward_seconds[3] == pytest.approx(measured.forward_seconds[4])
    # with the prior's proportions, as wrong in scale as they may be
    prior = prior_of(parts(np.array(layers) * 9, EMBEDDING * 9, 0.09))
    measured = measure(plant([layout], parts(layers, head=0.01), np.ones((4, 3))), [layout], prior)
    assert measured.forward_seconds[3:5] == pytest.approx([0.02, 0.03], rel=NEAR)


def test_moves_tell_unequal_layers():
    layouts = [Layout(counts, 3) for counts in ((2, 2, 2), (1, 3, 2), (2, 3, 1), (3, 1, 2))]
    layers = [0.01, 0.014, 0.02, 0.012, 0.008, 0.011]
    measured = measure(plant(layouts, parts(layers), np.ones((4, 3))), layouts)
    for layer in (1, 2, 3, 4):  # all that have been on either side of a boundary
        error = measured.forward_error_ratio[1 + layer]
        assert error < 0.02
        assert measured.forward_seconds[1 + layer] == pytest.approx(layers[layer], rel=4 * error)


def test_uneven_work_is_not_read_as_speed():
    layout, random = Layout.uniform(8, 4), np.random.default_rng(1)
    tokens = random.uniform(800, 1200, (20, 4)) * [1, 1.5, 1, 0.7]
    squares = tokens * random.lognormal(6, 0.8, (20, 4)) * [1, 1, 2, 1]
    samples = plant([layout], parts(8), np.ones((4, 4)), work=(tokens, squares), attention=0.3)
    measured = measure(samples, [layout])
    assert measured.speeds == pytest.approx(1.0, abs=2 * NEAR)  # beside noise, the share of attention is uncertain
    assert near(measured.forward_seconds, parts(8), 3 * NEAR)
    assert not told(measured, "squared lengths")


def test_lengths_that_only_differ_between_replicas_are_told_of():
    layout = Layout.uniform(8, 4)
    tokens = np.full((20, 4), 1000.0)
    squares = tokens * [1000, 1500, 2000, 1200]
    measured = measure(plant([layout], parts(8), np.ones((4, 4)), work=(tokens, squares), attention=0.3), [layout])
    assert told(measured, "Stages 0-3: squared lengths vary too little apart from the replicas")
    typical = np.median(squares)
    expected = 1 / (0.7 + 0.3 * squares[0] / typical)  # what the stages without ends look like
    assert measured.speeds[:, 1] == pytest.approx(expected / np.sort(expected)[2], rel=NEAR)


def test_missing_reports_are_no_speed():
    layout = Layout.uniform(8, 4)
    samples = plant([layout], parts(8), np.ones((3, 4)))
    random = np.random.default_rng(0).random(len(samples.step)) < 0.3
    measured = measure(without(samples, random | (samples.replica == 1) & (samples.stage == 2)), [layout])
    assert np.isnan(measured.speeds[1, 2])
    assert np.isfinite(measured.speeds).sum() == 11
    assert measured.speeds[np.isfinite(measured.speeds)] == pytest.approx(1.0, abs=NEAR)
    assert told(measured, "Replica 1 sent no usable report of stage 2")


def test_a_stage_that_nobody_reports_is_taken_from_the_others():
    layout = Layout.uniform(8, 4)
    samples = plant([layout], parts(8), np.ones((2, 4)))
    measured = measure(without(samples, samples.stage == 2), [layout])
    assert told(measured, "Layers 4-5: in no usable report")
    assert np.isnan(measured.speeds[:, 2]).all()
    assert near(measured.forward_seconds, parts(8))


def test_a_replica_that_has_not_yet_reported_under_the_new_layout_is_left_out():
    layouts = [Layout((2, 2, 2), 3), Layout((2, 3, 1), 3)]
    samples = plant(layouts, parts(6), np.ones((3, 3)))
    measured = measure(without(samples, (samples.replica == 2) & (samples.layout == 1)), layouts)
    assert np.isnan(measured.speeds[2]).all()
    assert measured.speeds[:2] == pytest.approx(1.0, abs=4 * NEAR)


def test_the_embedding_may_be_alone_on_its_stage():
    layout, speeds = Layout((0, 3, 3), 3), np.ones((2, 3))
    speeds[1, 0] = 0.5
    measured = measure(plant([layout], parts(6), speeds), [layout])
    assert measured.forward_seconds == pytest.approx(parts(6), rel=2 * NEAR)
    assert measured.speeds == pytest.approx(speeds, rel=NEAR)
    assert not told(measured, "embedding")


def test_an_embedding_of_nothing_is_held_at_what_the_prior_says():
    layout = Layout.uniform(8, 4)
    samples = plant([layout], parts([0.009] * 2 + [LAYER] * 6, embedding=0.0), np.ones((2, 4)))
    prior = prior_of(parts(8, embedding=1e-4))
    measured = measure(samples, [layout], prior)
    assert measured.forward_seconds[0] == pytest.approx(1e-4, rel=0.05)  # the cheaper layers make the typical one so
    # the stage's sum stays what was measured, its layers make up for it
    assert measured.forward_seconds[:3].sum() == pytest.approx(0.018, rel=NEAR)
    assert told(measured, "Less than nothing remained of a stage's forward time for the embedding")
    assert measure(samples, [layout]).forward_seconds[0] == 0.0


def test_a_single_step_gives_figures_without_errors():
    layout = Layout.uniform(8, 4)
    measured = measure(plant([layout], parts(8), np.ones((1, 4)), steps=1), [layout], prior_of(parts(8)))
    assert measured.forward_seconds[1:-1] == pytest.approx(LAYER, rel=4 * 0.0125)
    assert np.isnan(measured.forward_error_ratio).all()
    assert told(measured, "too few steps to tell errors")


def test_noise_that_leaves_nothing_sure_still_gives_figures():
    layout = Layout.uniform(8, 4)
    measured = measure(plant([layout], parts(8), np.ones((1, 4)), steps=4, noise=1.0), [layout], prior_of(parts(8)))
    assert np.isfinite(measured.forward_seconds).all()
    assert measured.forward_error_ratio[3] > 0.05


def test_times_that_were_not_measured_do_not_count():
    layout = Layout.uniform(8, 4)
    samples = plant([layout], parts(8), np.ones((2, 4)))
    forward, backward = samples.forward_seconds.copy(), samples.backward_seconds.copy()
    forward[3], forward[77], backward[5], backward[90] = np.nan, 0.0, np.inf, -1.0
    spoilt = replace(samples, forward_seconds=forward, backward_seconds=backward)
    gone = np.isin(np.arange(len(forward)), (3, 5, 77, 90))
    assert_same(measure(spoilt, [layout]), measure(without(samples, gone), [layout]))


def test_an_older_profile_has_neither_microbatches_nor_lengths():
    layout = Layout.uniform(8, 4)
    samples = plant([layout], parts(8), np.ones((2, 4)))
    absent = np.full(len(samples.step), np.nan)
    measured = measure(replace(samples, microbatches=absent, squared_lengths=absent), [layout])
    assert told(measured, "seconds are those of a replica's whole step")
    assert told(measured, "the workload counts by tokens alone")
    assert near(measured.forward_seconds / 16, parts(8))
    assert np.isnan(measured.squared_lengths)


def test_samples_that_do_not_fit_are_refused():
    layout = Layout.uniform(8, 4)
    samples = plant([layout], parts(8), np.ones((1, 4)), steps=2)
    with pytest.raises(ValueError, match="the prior has 3 layers, the layouts have 8"):
        measure(samples, [layout], prior_of(parts(3)))
    with pytest.raises(ValueError, match="stage 3 is not one of 0 to 1"):
        measure(samples, [Layout.uniform(8, 2)])
    with pytest.raises(ValueError, match="the same number of layers and of stages"):
        measure(samples, [layout, Layout.uniform(9, 4)])
    with pytest.raises(ValueError, match="there is nothing to measure"):
        measure(replace(samples, forward_seconds=samples.forward_seconds * 0), [layout])


def assert_same(one, other, *, scale=1.0, replicas=slice(None)):
    for name in ("forward_seconds", "backward_seconds"):
        assert getattr(other, name) == pytest.approx(
            scale * getattr(one, name), rel=1e-4, abs=1e-7 * scale, nan_ok=True
        )
    assert other.speeds == pytest.approx(one.speeds[replicas], rel=1e-4, nan_ok=True)
    assert other.assumptions == one.assumptions


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), order=st.permutations(range(4)), scale=st.floats(1e-3, 1e3))
def test_neither_the_order_of_replicas_and_rows_nor_the_unit_of_time_matters(seed, order, scale):
    random = np.random.default_rng(seed)
    layouts = [Layout((2, 2, 2), 3), Layout((2, 3, 1), 3)][: 1 + seed % 2]
    samples = plant(layouts, parts(6), random.uniform(0.6, 1.2, (4, 3)), seed=seed, steps=6, outliers=0.02)
    rows = random.permutation(len(samples.step))
    other = samples.select(rows)
    other = replace(
        other,
        replica=np.argsort(order)[other.replica],
        forward_seconds=other.forward_seconds * scale,
        backward_seconds=other.backward_seconds * scale,
    )
    assert_same(measure(samples, layouts), measure(other, layouts), scale=scale, replicas=list(order))


@pytest.mark.parametrize("case", ["four replicas", "two replicas", "one replica, and a move"])
def test_errors_are_honest(case):
    layouts, replicas, draws = [Layout.uniform(8, 4)], {"four replicas": 4, "two replicas": 2}.get(case, 1), 300
    layouts += [Layout((2, 1, 3, 2), 4)] if replicas == 1 else []
    speeds = np.ones((replicas, 4))
    speeds[0, 1] = 0.8
    within = []
    for seed in range(draws):
        measured = measure(plant(layouts, parts(8), speeds, seed=seed, slow_steps=0.03), layouts)
        apart = np.abs(measured.forward_seconds - parts(8)) / (measured.forward_seconds * measured.forward_error_ratio)
        known = np.isfinite(measured.speed_error_ratio)
        speed_apart = np.abs(measured.speeds - speeds)[known] / (measured.speeds * measured.speed_error_ratio)[known]
        within.append([*(apart < 3), np.mean(speed_apart < 3)])
    # 99.7 % if noise were normal, its size known and no step slow
    assert np.mean(within, axis=0).min() > 0.97


@pytest.mark.parametrize("replicas", [1, 2])
def test_what_lengthens_a_whole_step_is_an_error_that_stages_have_in_common(replicas):
    layout, apart = Layout.uniform(16, 4), []
    for seed in range(100):
        samples = plant([layout], parts(16), np.ones((replicas, 4)), seed=seed)
        common = np.exp(0.03 * np.random.default_rng(10**6 + seed).standard_normal(21))[samples.step]
        together = replace(
            samples,
            forward_seconds=samples.forward_seconds * common,
            backward_seconds=samples.backward_seconds * common,
        )
        measured = measure(together, [layout])
        apart.append((measured.forward_seconds / parts(16) - 1) / measured.forward_error_ratio)
    # of the layers on the end stages, which cost what the other stages' do; 100 draws tell a deviation to 7 %
    assert np.std(apart, axis=0)[[1, 16]] == pytest.approx(1, abs=0.2)


def test_errors_are_not_larger_than_they_need_be():
    layout, found, errors = Layout.uniform(8, 4), [], []
    for seed in range(60):
        measured = measure(plant([layout], parts(8), np.ones((4, 4)), seed=seed), [layout])
        found.append(np.log(measured.forward_seconds / parts(8)))
        errors.append(measured.forward_error_ratio)
    # the spread of 60 draws is itself known to 9 %
    assert np.median(errors, axis=0) == pytest.approx(np.std(found, axis=0), rel=0.4)


def test_measured_seconds_join_the_priors_bytes():
    layout, forward = Layout.uniform(8, 4), parts(8)
    prior = prior_of(forward * 5)
    measured = measure(plant([layout], forward, np.ones((2, 4)), noise=0), [layout], prior)
    costs = costs_of(measured, prior)
    assert [part.forward_seconds for part in costs.layers] == pytest.approx([LAYER] * 8)
    # the prior splits the backward 2 to 3
    assert costs.head.backward_input_seconds == pytest.approx(2 * HEAD * 0.4)
    assert costs.head.backward_weight_seconds == pytest.approx(2 * HEAD * 0.6)
    assert replace(costs.embedding, forward_seconds=0, backward_input_seconds=0, backward_weight_seconds=0) == Part(
        0, 0, 0, 1e6, 2e6, 1e5
    )
    assert costs.boundary_bytes == 1e5


def test_an_embedding_without_a_prior_of_its_backward_has_weight_gradients_only():
    layout, forward = Layout.uniform(8, 4), parts(8)
    prior = replace(prior_of(forward), embedding=Part(0, 0, 0, 1e6, 0, 0))
    costs = costs_of(measure(plant([layout], forward, np.ones((2, 4)), noise=0), [layout], prior), prior)
    assert costs.embedding.backward_input_seconds == 0.0
    assert costs.embedding.backward_weight_seconds == pytest.approx(2 * EMBEDDING)


def test_what_was_not_measured_makes_no_costs():
    layout = Layout((4, 4), 2)
    measured = measure(plant([layout], parts(8), np.ones((2, 2))), [layout])
    with pytest.raises(ValueError, match="measure with the prior"):
        costs_of(measured, prior_of(parts(8)))
