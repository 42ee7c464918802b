from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.diagnose import CAUSES, Shape, planted
from trimtab.balance.diagnosing.diagnose import diagnose
from trimtab.balance.diagnosing.durations import Durations
from trimtab.balance.diagnosing.whatif import coalition_values, shapley
from trimtab.balance.pipeline.replay import Replay
from trimtab.balance.pipeline.simulate import simulate
from trimtab.balance.plan import Link, Schedule
from trimtab.protocol import Balance

ROOT = Path(__file__).parents[2]


SHAPES = (Shape(4, 2), Shape(1, 4), Shape(2, 4), Shape(8, 4, 8), Shape(4, 4, virtual=2), Shape(2, 16, 8))


def kinds(found):
    return [each.kind for each in found.evidence]


def level(random, shape, noise=0.05):
    return planted(random, shape, {}, noise=noise).durations


def changed(durations, change):
    """The same durations, the forwards and backwards each put through `change`."""
    return Durations(
        change(durations.forward_seconds),
        change(durations.backward_seconds),
        durations.stages,
        overhead_seconds=durations.overhead_seconds,
    )


def slowed(durations, factor):
    """The same, stage 1 of the last replica taking `factor` [T] times as long."""

    def slower(seconds):
        other = seconds.copy()
        other[:, -1, 1] *= factor[:, None]
        return other

    return changed(durations, slower)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_level_job_has_no_cause(shape):
    found = diagnose(level(np.random.default_rng(1), shape))
    assert (found.cause, found.places, found.stages, found.secondary, found.causes) == ("none", (), (), None, ())
    assert found.slow_places == ()
    assert kinds(found)[0] == "level"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("slowness", [0.08, 0.25, 1.0])
def test_a_long_stage_is_intrinsic(shape, slowness):
    job = planted(np.random.default_rng(2), shape, {"intrinsic": slowness})
    found = diagnose(job.durations)
    assert found.cause == "intrinsic"
    assert found.stages == (job.stage,)
    assert set(found.places) == {(replica, job.stage) for replica in range(shape.replicas)}
    assert kinds(found)[0] == "stage"


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.replicas > 1], ids=str)
@pytest.mark.parametrize("slowness", [0.08, 0.25, 1.0])
def test_a_slow_place_is_hardware(shape, slowness):
    job = planted(np.random.default_rng(3), shape, {"hardware": slowness})
    found = diagnose(job.durations)
    assert (found.cause, found.places, found.stages) == ("hardware", (job.place,), (job.place[1],))
    (slow,) = found.slow_places
    # 16 or 8 microbatches, 2 kinds, 20 steps, 5 % of noise: below 0.5 %, and outliers of its own and of its peers.
    assert slow.slower_ratio == pytest.approx(slowness, abs=0.03)
    assert slow.since_step == 0
    assert kinds(found)[0] == "place"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("slowness", [0.08, 0.25, 1.0])
def test_uneven_microbatches_are_data(shape, slowness):
    found = diagnose(planted(np.random.default_rng(4), shape, {"data": slowness}).durations)
    assert (found.cause, found.places, found.stages) == ("data", (), ())
    assert found.slow_places == ()
    assert kinds(found)[0] == "data"
    assert (found.across_replicas_ratio > 0.02) == (shape.replicas > 1)


@pytest.mark.parametrize(("larger", "smaller"), list(permutations(CAUSES, 2)))
@pytest.mark.parametrize("shape", [Shape(4, 4), Shape(8, 8, 32)], ids=str)
def test_of_two_causes_the_more_costly_comes_first(shape, larger, smaller):
    job = planted(np.random.default_rng(5), shape, {larger: 1.0, smaller: 0.15})
    first, second = sorted(job.costs, key=lambda cause: -job.costs[cause])
    assert job.costs[first] > 1.5 * job.costs[second]  # else either could come first
    found = diagnose(job.durations)
    assert (found.cause, found.secondary) == (first, second)
    assert found.causes[0].saving_ratio > found.causes[1].saving_ratio
    assert sum(found.shares.values()) == pytest.approx(1)


def test_a_replica_that_is_slow_all_over_and_always_is_hardware_and_one_that_varies_is_data():
    random = np.random.default_rng(6)
    even = level(random, Shape(4, 4))
    lasting = np.ones((1, 4, 1, 1))
    lasting[0, 2] = 1.2
    found = diagnose(changed(even, lambda seconds: seconds * lasting))
    assert (found.cause, set(found.places)) == ("hardware", {(2, stage) for stage in range(4)})
    varying = random.lognormal(0, 0.2, (20, 4, 1, 1))
    assert diagnose(changed(even, lambda seconds: seconds * varying)).cause == "data"


def test_a_lasting_excess_of_known_work_is_data():
    even = level(np.random.default_rng(7), Shape(4, 4))
    tokens = np.full((20, 4, 1), 1000.0) * np.random.default_rng(8).lognormal(0, 0.02, (20, 4, 1))
    tokens[:, 2] *= 1.3
    more = changed(even, lambda seconds: seconds * (tokens / 1000)[..., None])
    told = Durations(more.forward_seconds, more.backward_seconds, 4, workload=tokens)
    assert diagnose(more).cause == "hardware"  # the same, of whose work nothing is known
    assert (diagnose(told).cause, diagnose(told).slow_places) == ("data", ())


@pytest.mark.parametrize("replicas", [1, 4])
def test_what_became_slow_is_hardware_since_then(replicas):
    def slower(seconds):
        later = seconds.copy()
        later[12:, -1, 1] *= 1.3
        return later

    durations = changed(level(np.random.default_rng(9), Shape(replicas, 4)), slower)
    found = diagnose(durations)
    assert (found.cause, found.places) == ("hardware", ((replicas - 1, 1),))
    assert found.slow_places[0].since_step == 12
    assert "since step 12" in found.evidence[0].text


@pytest.mark.parametrize("since", [3, 8, 15])
def test_of_one_replica_what_became_slow_is_hardware_however_long_ago(since):
    for seed in range(5):
        later = np.where(np.arange(20) >= since, 1.3, 1.0)
        found = diagnose(slowed(level(np.random.default_rng(seed), Shape(1, 4)), later))
        assert (found.cause, found.places) == ("hardware", ((0, 1),))
        assert found.slow_places[0].since_step == since


@pytest.mark.parametrize(
    ("replicas", "steps", "slow"), [(4, 20, 10), (4, 20, 18), (4, 200, 20), (1, 20, 10), (1, 200, 20)]
)
def test_a_fault_that_is_over_is_not_called_hardware(replicas, steps, slow):
    for seed in range(5):
        durations = level(np.random.default_rng(seed), Shape(replicas, 4, steps=steps))
        found = diagnose(slowed(durations, np.where(np.arange(steps) < slow, 1.3, 1.0)))
        assert found.cause != "hardware"
        assert found.slow_places == ()


@pytest.mark.parametrize("replicas", [1, 4])
def test_noise_that_lasts_into_the_next_steps_is_not_called_hardware(replicas):
    for seed in range(10):
        random = np.random.default_rng(seed)
        noise = random.standard_normal((60, replicas, 4))
        for step in range(1, 60):  # a correlation of 0.8 with the step before, a deviation of 1
            noise[step] = 0.8 * noise[step - 1] + 0.6 * noise[step]
        lasting = np.exp(0.02 * noise)[..., None]
        found = diagnose(changed(level(random, Shape(replicas, 4, steps=60)), lambda seconds, by=lasting: seconds * by))
        assert found.cause != "hardware"
        assert found.slow_places == ()


def test_with_one_replica_only_a_measure_of_the_devices_tells_hardware_from_layers():
    durations = planted(np.random.default_rng(2), Shape(1, 4), {"intrinsic": 0.25})
    stage, durations = durations.stage, durations.durations
    alone = diagnose(durations)
    assert (alone.cause, alone.stages) == ("intrinsic", (stage,))
    assert alone.confidence <= 0.5
    assert "limit" in kinds(alone)
    probed = {(0, each): 1.25 if each == stage else 1.0 for each in range(4)}
    slow = diagnose(durations, known_slowness=probed)
    assert (slow.cause, slow.places) == ("hardware", ((0, stage),))
    sound = diagnose(durations, known_slowness=dict.fromkeys(probed, 1.0))
    assert (sound.cause, sound.stages) == ("intrinsic", (stage,))
    for told in (slow, sound):
        assert told.confidence > 0.6
        assert "limit" not in kinds(told)


@pytest.mark.parametrize("replicas", [1, 4])
def test_a_slow_link_is_hardware_at_both_its_ends(replicas):
    even = level(np.random.default_rng(10), Shape(replicas, 4))
    transfers = np.random.default_rng(11).lognormal(np.log(0.002), 0.1, (20, replicas, 4))
    transfers[..., 3] = np.nan  # without interleaving, the way back to the first stage is not used
    transfers[:, -1, 1] *= 100
    found = diagnose(Durations(even.forward_seconds, even.backward_seconds, 4, transfer_seconds=transfers))
    assert (found.cause, found.places) == ("hardware", ((replicas - 1, 1), (replicas - 1, 2)))
    (link,) = found.slow_links
    assert link.place == (replicas - 1, 1)
    assert link.seconds == pytest.approx(0.2, rel=0.1)
    assert link.peers_seconds == pytest.approx(0.002, rel=0.1)
    assert kinds(found)[0] == "link"


def test_stalls_here_and_there_are_unknown():
    random = np.random.default_rng(12)
    even = level(random, Shape(4, 4))
    found = diagnose(changed(even, lambda seconds: seconds * np.where(random.random(seconds.shape) < 0.004, 30, 1)))
    assert (found.cause, found.places) == ("unknown", ())
    assert found.shares["unknown"] > 0.8


def test_a_place_that_was_not_recorded_is_taken_for_its_peers():
    job = planted(np.random.default_rng(13), Shape(4, 4), {"hardware": 0.5})
    lost = ((job.place[0] + 1) % 4, job.place[1])

    def without(seconds):
        gaps = seconds.copy()
        gaps[(slice(None), *lost)] = np.nan
        return gaps

    found, whole = diagnose(changed(job.durations, without)), diagnose(job.durations)
    assert (found.cause, found.places) == ("hardware", (job.place,))
    assert found.slowdown_ratio == pytest.approx(whole.slowdown_ratio, rel=0.01)  # one of 16 places


def test_a_replica_without_any_operation_does_not_count():
    job = planted(np.random.default_rng(14), Shape(3, 4), {"intrinsic": 0.5})

    def with_another(seconds):
        return np.concatenate([seconds, np.full_like(seconds[:, :1], np.nan)], axis=1)

    found, before = diagnose(changed(job.durations, with_another)), diagnose(job.durations)
    assert (found.cause, found.stages) == ("intrinsic", before.stages)
    assert found.slowdown_ratio == pytest.approx(before.slowdown_ratio, rel=1e-9)


@given(seed=st.integers(0, 2**32 - 1), cause=st.sampled_from(("intrinsic", "hardware", "data")), data=st.data())
@settings(max_examples=15, deadline=None)
def test_permuted_replicas_permute_the_answer(seed, cause, data):
    shape = Shape(data.draw(st.integers(2, 6)), data.draw(st.integers(2, 5)), 8)
    job = planted(np.random.default_rng(seed), shape, {cause: 0.3})
    order = data.draw(st.permutations(range(shape.replicas)))
    found = diagnose(job.durations)
    moved = diagnose(changed(job.durations, lambda seconds: seconds[:, order]))
    assert (moved.cause, moved.stages) == (found.cause, found.stages)
    assert {(order[replica], stage) for replica, stage in moved.places} == set(found.places)
    assert moved.slowdown_ratio == pytest.approx(found.slowdown_ratio, rel=1e-9)
    assert moved.confidence == pytest.approx(found.confidence, rel=1e-6)


@given(seed=st.integers(0, 2**32 - 1), scale=st.floats(1e-4, 1e4))
@settings(max_examples=15, deadline=None)
def test_in_another_unit_of_time_the_answer_is_the_same(seed, scale):
    job = planted(np.random.default_rng(seed), Shape(3, 4, 8), {"hardware": 0.3, "intrinsic": 0.2})
    scaled = Durations(
        job.durations.forward_seconds * scale,
        job.durations.backward_seconds * scale,
        4,
        overhead_seconds=job.durations.overhead_seconds * scale,
    )
    found, other = diagnose(job.durations), diagnose(scaled)
    assert (other.cause, other.secondary, other.places) == (found.cause, found.secondary, found.places)
    assert other.slowdown_ratio == pytest.approx(found.slowdown_ratio, rel=1e-9)
    assert other.shares == pytest.approx(found.shares, rel=1e-6, abs=1e-9)


@given(
    data=st.data(),
    replicas=st.integers(1, 4),
    stages=st.integers(1, 6),
    microbatches=st.integers(1, 12),
)
@settings(max_examples=40, deadline=None)
def test_a_step_is_longer_than_the_ideal_unless_its_last_stage_is_short(data, replicas, stages, microbatches):
    factor = np.array(data.draw(st.lists(st.floats(0.2, 5), min_size=replicas * stages, max_size=replicas * stages)))
    seconds = np.broadcast_to(factor.reshape(1, replicas, stages, 1), (3, replicas, stages, microbatches))
    found = diagnose(Durations(seconds, 2 * seconds, stages))
    # The slowest place works through all its microbatches; an even pipeline takes M + S - 1 mean ones.
    busy = microbatches * factor.max() / ((microbatches + stages - 1) * factor.mean())
    assert found.slowdown_ratio >= busy - 1e-9
    # Each replica passes all its stages once, and the rest of its microbatches its last stage.
    if factor.reshape(replicas, stages)[:, -1].mean() >= factor.mean():
        assert found.slowdown_ratio >= 1 - 1e-9
    assert all(0 <= share <= 1 for share in found.shares.values())
    assert 0 <= found.confidence <= 1


@given(
    seed=st.integers(0, 2**32 - 1),
    stages=st.integers(1, 5),
    virtual=st.integers(1, 3),
    groups=st.integers(1, 3),
    latency=st.floats(0, 2),
)
@settings(max_examples=40, deadline=None)
def test_many_pipelines_at_once_take_what_each_takes_alone(seed, stages, virtual, groups, latency):
    random = np.random.default_rng(seed)
    virtual = virtual if stages > 1 else 1  # interleaving takes a pipeline
    schedule = Schedule.INTERLEAVED if virtual > 1 else Schedule.ONE_F_ONE_B
    shape = 2, 3, stages * virtual, groups * stages
    forward, backward = random.uniform(0.1, 3, shape), random.uniform(0.1, 3, shape)
    together = Replay(schedule, stages, *shape[2:]).duration_seconds(forward, backward, np.full(stages, latency))
    for place in np.ndindex(shape[:2]):
        links = [Link(latency, np.inf)] * stages
        alone = simulate(schedule, stages, forward[place], backward[place], 0.0, links=links)
        assert together[place] == pytest.approx(alone.duration_seconds, rel=1e-12)


@pytest.mark.parametrize("counts", [(6, 6), (6, 4)])
def test_means_over_microbatches_are_replayed_as_so_many_equal_ones(counts):
    random = np.random.default_rng(15)
    mean = random.uniform(1, 2, (4, 2, 3, 1))
    one_by_one = np.repeat(mean, 6, axis=-1)
    for replica, count in enumerate(counts):
        one_by_one[:, replica, :, count:] = np.nan
    found = diagnose(Durations(mean, mean, 3, microbatches=counts))
    assert found.step_seconds == pytest.approx(diagnose(Durations(one_by_one, one_by_one, 3)).step_seconds, rel=1e-12)


def test_a_slow_place_is_seen_whatever_its_share_of_the_microbatches():
    """Replica 1 takes 1.6 times as long on stage 0, and has been given fewer microbatches for it."""
    random = np.random.default_rng(16)
    mean = random.normal(1.0, 0.01, (40, 2, 2, 1))
    mean[:, 1, 0] *= 1.6
    for counts in (8, 8), (10, 6):
        found = diagnose(Durations(mean, mean, 2, microbatches=counts))
        assert (found.cause, found.places) == ("hardware", ((1, 0),))
        assert found.slow_places[0].slower_ratio == pytest.approx(0.6, abs=0.03)
        assert found.confidence > 0.9


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=4), st.floats(-5, 5))
def test_what_causes_save_apart_they_cost_and_what_they_save_together_they_share(savings, together):
    causes = len(savings)
    whole = frozenset(range(causes))

    def value(mended):
        return np.array([100 - sum(savings[cause] for cause in mended) - (together if mended == whole else 0)])

    costs = shapley(coalition_values(causes, value), causes)[:, 0]
    assert costs == pytest.approx(np.array(savings) + together / causes, abs=1e-9)


def test_the_policy_says_what_counts():
    job = planted(np.random.default_rng(16), Shape(4, 4), {"hardware": 0.1})
    assert diagnose(job.durations).cause == "hardware"
    tolerant = Balance(least_gain_ratio=0.3, trigger_ratio=0.5, clear_ratio=0.3)
    assert diagnose(job.durations, tolerant).cause == "none"


@pytest.mark.parametrize(
    ("forward", "options", "reason"),
    [
        (np.ones((3, 1, 4)), {}, "are \\[steps, replicas, chunks, microbatches\\]"),
        (np.ones((2, 1, 4, 1)), {}, "2 steps: at least 3"),
        (np.ones((3, 1, 5, 1)), {}, "5 chunks cannot be shared out equally over 4 stages"),
        (-np.ones((3, 1, 4, 1)), {}, "a forward duration is not a positive number"),
        (np.full((3, 1, 4, 1), np.inf), {}, "a forward duration is not a positive number"),
        (np.where(np.arange(4)[:, None] == 2, np.nan, np.ones((3, 1, 4, 1))), {}, "no forward duration of chunk 2"),
        (np.ones((3, 1, 4, 2)), {"microbatches": (4,)}, r"means over \[4\] microbatches, but durations of 1 rep"),
        (np.ones((3, 1, 4, 1)), {"steps": (1, 2)}, "2 numbers for 3 steps"),
    ],
)
def test_durations_that_are_none_are_refused(forward, options, reason):
    with pytest.raises(ValueError, match=reason):
        Durations(forward, np.abs(forward), 4, **options)
