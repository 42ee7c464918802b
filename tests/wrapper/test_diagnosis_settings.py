import dataclasses

import numpy as np
import pytest

from trimtab.diagnosis import profiles
from trimtab.diagnosis.settings import settings_of
from trimtab.protocol import Layout, Setting


def with_settings(profile, *rows):
    """The training part of the profile with (first step, layout, microbatches, recomputed layers) of each setting."""
    names = ("step", "layout", "microbatches", "recomputed_layers")
    table = {name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
    return dataclasses.replace(profile.training, settings=table)


FIRST = (1, "Etttt|ttttL", "8|8", "0|0")
SECOND = (11, "Ettttt|tttL", "10|6", "2|0")


@pytest.fixture
def two_replicas(profiles):
    return profiles.make(data=2, ranks_per_node=4)


def test_the_last_setting_counts_from_its_first_step_on(two_replicas):
    found = settings_of(with_settings(two_replicas, FIRST, SECOND))
    assert found.last == Setting(Layout((5, 3), 2), (10, 6), (2, 0))
    assert found.changed
    assert found.numbers(np.array([1, 10, 11, 12])).tolist() == [1, 1, 2, 2]
    assert found.counts(np.array([1, 10, 11, 12])).tolist() == [False, False, True, True]


def test_without_a_table_all_steps_ran_what_the_job_says(two_replicas):
    found = settings_of(two_replicas.training)
    assert (found.last, found.changed) == (None, False)
    assert found.counts(np.array([1, 30])).all()


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([(1, "Etttt|ttttL", "8|x", "0|0")], "the setting of step 1 cannot be read"),
        ([(1, "Ettttttt", "8|8", "0|0")], "the setting of step 1 cannot be read: 1 chunks cannot be shared out"),
        ([(1, "Etttt|ttttL", "16", "0|0")], "the setting of step 1 is not one of 2 replicas"),
        ([(1, "Etttt|ttttL", "16|0", "0|0")], "the setting of step 1 is not one of 2 replicas"),
        ([(1, "Etttt|ttttL", "8|8", "0")], "the setting of step 1 is not one of 2 stages"),
        ([SECOND, FIRST], "the settings are not in the order of their steps"),
    ],
)
def test_a_table_that_does_not_fit_the_ranks_is_refused(two_replicas, rows, reason):
    with pytest.raises(ValueError, match=reason):
        settings_of(with_settings(two_replicas, *rows))


def test_what_is_diagnosed_are_the_steps_since_the_last_reshape_by_the_microbatch(two_replicas):
    read = profiles.read(with_settings(two_replicas, FIRST, SECOND))
    assert read.durations.steps == tuple(range(12, 31))  # the first one warms up
    assert read.durations.microbatches == (10, 6)
    # 4 layers x 0.15 s, a third of it forward, over the replica's own microbatches.
    assert read.durations.forward_seconds[0, :, 0, 0] == pytest.approx([0.2 / 10, 0.2 / 6])
    assert read.durations.workload[0, :, 0] == pytest.approx([300, 500])  # 3,000 tokens


def test_too_few_steps_since_a_reshape_are_refused(two_replicas):
    with pytest.raises(ValueError, match="2 steps were measured since layers or microbatches last moved: at least 3"):
        profiles.read(with_settings(two_replicas, FIRST, (29, *SECOND[1:])))
