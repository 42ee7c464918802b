"""Samples of uneven lengths: padding costs, but counts for nothing."""

import sys
import tomllib

import numpy as np
import pytest
import torch

from trimtab.protocol import Hello, StepReport, job_from_dict, layout_of
from trimtab_megatron.data import SampleOrder, open_dataset
from trimtab_megatron.identity import InputError

SAME = 1e-5
SAME_NORM = 2e-4
"""Summed in another order, over stages and over microbatches of other sizes."""

PROVIDER = '''
import numpy as np


class Uneven:
    """Most samples are short, some are long."""

    vocabulary_size = 100
    variable_lengths = True

    def __len__(self):
        return 40

    def __getitem__(self, index):
        generator = np.random.default_rng(index)
        length = min(1 + int(generator.pareto(1.0) * 4), 32)
        return np.cumsum(generator.integers(0, 3, length + 1)) % self.vocabulary_size


def build(job):
    return Uneven()
'''

CASES = {
    "without padding": ({}, 1, 0.0),
    "PP2 x DP2": ({"pipeline": 2}, 2, 0.0),
    "PP2 x DP2, one replica takes 3 of 4 microbatches": ({"pipeline": 2}, 2, 0.0),
    "PP2 x DP2, interleaved": ({"pipeline": 2, "virtual": 2}, 2, 0.0),
    "PP4, recomputed": ({"pipeline": 4, "recomputed_layers": [1, 1, 1, 1]}, 4, 0.0),
    "TP2 x PP2, sequence parallel": ({"tensor": 2, "pipeline": 2, "sequence_parallel": True}, 2, 0.0),
    "PP2 x DP2, dropout": ({"pipeline": 2}, 2, 0.1),
    "PP4, dropout": ({"pipeline": 4, "recomputed_layers": [1, 0, 1, 0]}, 2, 0.1),
}


@pytest.fixture(scope="module")
def provider(tmp_path_factory):
    directory = tmp_path_factory.mktemp("provider")
    (directory / "uneven.py").write_text(PROVIDER)
    return directory


@pytest.fixture(scope="module")
def samples(provider):
    names = {}
    exec((provider / "uneven.py").read_text(), names)
    return names["build"](None)


@pytest.fixture(scope="module")
def runs(train_series, tiny_job, provider):
    """Of each case; and the samples of the first step one after the other, at weights that do not move."""

    def job(parallel, size, dropout, **sections):
        return tiny_job(
            **{"data": {"provider": "uneven:build"}} | sections,
            parallel=parallel,
            model={"dropout": dropout},
            **{} if "train" in sections else {"train": {"steps": 3}},
            **{} if "batch" in sections else {"batch": {"microbatch_size": size}},
        )

    jobs = [job(*case) for case in CASES.values()]
    still = {"steps": 8, "learning_rate": 1e-30, "minimum_learning_rate": 0.0}
    alone = {"microbatch_size": 1, "global_batch_size": 1}
    jobs.append(job({"tensor": 2, "pipeline": 2}, 1, 0.0, train=still, batch=alone))
    ended = train_series(jobs, 4, microbatches={2: (3, 1)}, working_directory=provider)
    return dict(zip([*CASES, "one by one"], ended, strict=True))


@pytest.mark.mcore
def test_the_loss_is_the_mean_over_the_real_tokens(runs, samples):
    order = SampleOrder(len(samples), 1234)
    lengths = [len(samples[order[index]]) - 1 for index in range(8)]
    assert max(lengths) > 4 * min(lengths)
    each = list(runs["one by one"].losses.values())
    mean = np.average(each, weights=lengths)
    assert runs["without padding"].losses[1] == pytest.approx(mean, rel=SAME)
    assert abs(np.mean(each) - mean) > 100 * SAME * mean  # the mean of the samples is another one


@pytest.mark.mcore
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case[2] and name != "without padding"])
def test_padding_and_shape_change_nothing(name, runs):
    assert runs[name].losses == pytest.approx(runs["without padding"].losses, rel=SAME)
    assert runs[name].gradient_norms == pytest.approx(runs["without padding"].gradient_norms, rel=SAME_NORM)


@pytest.mark.mcore
def test_dropout_is_the_same_at_every_shape(runs):
    one, other = runs["PP2 x DP2, dropout"], runs["PP4, dropout"]
    assert one.losses == pytest.approx(other.losses, rel=SAME)
    assert one.losses[1] != pytest.approx(runs["PP2 x DP2"].losses[1], rel=SAME)


@pytest.mark.mcore
def test_each_stage_reports_what_passed_it_padding_included(runs, samples):
    order = SampleOrder(len(samples), 1234)
    ended = runs["PP2 x DP2"]
    replica = {hello.rank: hello.data_rank for hello in ended.all(Hello)}
    for report in ended.all(StepReport):
        firsts = [8 * (report.step - 1) + 2 * (2 * turn + replica[report.rank]) for turn in range(2)]
        longest = [max(len(samples[order[index]]) - 1 for index in (first, first + 1)) for first in firsts]
        assert report.tokens == sum(2 * length for length in longest)
        assert report.squared_lengths == sum(2 * length**2 for length in longest)


def dataset(monkeypatch, samples, tensor=1):
    monkeypatch.setattr("trimtab_megatron.data.load_provider", lambda key, name: lambda job: samples)
    parallel = {"tensor": tensor, "sequence_parallel": tensor > 1}
    return open_dataset(
        job_from_dict({"model": {"sequence_length": 32}, "parallel": parallel, "data": {"provider": "a:b"}})
    )


class Counted:
    vocabulary_size = 100

    def __init__(self, *lengths, variable=True):
        self.lengths = lengths
        self.variable_lengths = variable

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return torch.arange(1, self.lengths[index] + 1)


def test_a_microbatch_is_as_long_as_its_longest_sample(monkeypatch):
    data = dataset(monkeypatch, Counted(4, 7, 4, 7))
    data = data.microbatch(range(4))
    assert sorted(data.lengths) == [3, 3, 6, 6]
    assert (data.length, data.tokens.shape) == (6, (4, 7))
    mask = data.mask(torch.device("cpu"))
    for row, length, real in zip(data.tokens.tolist(), data.lengths, mask.tolist(), strict=True):
        assert row == [*range(1, length + 2), *[0] * (6 - length)]
        assert real == [place < length for place in range(6)]


def test_sequence_parallel_ranks_get_equal_parts(monkeypatch):
    assert dataset(monkeypatch, Counted(8, 8, 8, 8), tensor=4).microbatch(range(2)).length == 8
    assert dataset(monkeypatch, Counted(4, 4, 4, 4), tensor=4).microbatch(range(2)).length == 4
    even = dataset(monkeypatch, Counted(9, 9, 9, 9), tensor=4).microbatch(range(2))
    assert (even.length, even.mask(torch.device("cpu"))) == (8, None)


def test_a_stage_in_the_middle_learns_lengths_alone(monkeypatch):
    data = dataset(monkeypatch, Counted(9, 5))
    whole, middle = data.microbatch(range(2)), data.microbatch(range(2), with_tokens=False)
    assert (middle.sample, middle.lengths, middle.length) == (whole.sample, whole.lengths, whole.length)
    assert middle.tokens is None


@pytest.mark.parametrize(
    ("length", "variable", "message"),
    [
        (34, True, r"not torch.int64 \[2 to 33\]: a sample holds at most sequence_length \+ 1 tokens"),
        (1, True, r"not torch.int64 \[2 to 33\]"),
        (32, False, r"not torch.int64 \[33\]: a sample holds sequence_length \+ 1 tokens"),
    ],
)
def test_samples_that_are_too_long_or_too_short_are_refused(monkeypatch, length, variable, message):
    with pytest.raises(InputError, match=message):
        dataset(monkeypatch, Counted(length, length, variable=variable)).microbatch(range(2))


def test_the_example_has_many_short_samples_and_few_long_ones(pytestconfig, monkeypatch):
    directory = pytestconfig.rootpath / "examples" / "uneven"
    monkeypatch.syspath_prepend(directory)
    monkeypatch.delitem(sys.modules, "library", raising=False)
    job = job_from_dict(tomllib.loads((directory / "job.toml").read_text()))
    assert layout_of(job).layers == (4, 4)
    data = open_dataset(job)
    assert data.variable_lengths
    lengths = [length for first in range(0, 2000, 2) for length in data.microbatch(range(first, first + 2)).lengths]
    median, most = np.median(lengths), max(lengths)
    assert (most, median < 120) == (384, True)
    assert np.mean(lengths) > 1.3 * median  # a long tail
    # Of two replicas with 4 microbatches each, either one gets a fifth more in some steps.
    longest = np.reshape(lengths, (-1, 4, 2, 2)).max(axis=3).sum(axis=1)
    shares = longest[:, 0] / longest.sum(axis=1)
    assert shares.min() < 0.4
    assert shares.max() > 0.6
    assert np.mean(shares) == pytest.approx(0.5, abs=0.02)
