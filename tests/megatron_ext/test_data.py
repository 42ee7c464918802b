"""Samples, keyed by the global index; and the errors of data that does not fit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.protocol import JobError, job_from_dict
from trimtab_megatron.data import SampleOrder, TokenSamples, microbatch_indices, open_dataset
from trimtab_megatron.identity import InputError
from trimtab_megatron.tokens import Tokens


@settings(deadline=None)
@given(st.integers(1, 50), st.integers(0, 5), st.integers(0, 3))
def test_each_epoch_takes_every_sample_once(length, seed, epoch):
    order = SampleOrder(length, seed)
    assert sorted(order[index] for index in range(epoch * length, (epoch + 1) * length)) == list(range(length))


def test_epochs_and_seeds_differ_and_a_sample_can_be_asked_for_in_any_order():
    first, second = ([SampleOrder(100, 1)[index] for index in range(start, start + 100)] for start in (0, 100))
    assert first != second
    assert first != [SampleOrder(100, 2)[index] for index in range(100)]
    order = SampleOrder(100, 1)
    assert (order[150], order[50], order[150]) == (second[50], first[50], second[50])


def dealt(counts, size=2, consumed=48):
    return [microbatch_indices(counts, size, consumed, replica) for replica in range(len(counts))]


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 4), st.integers(0, 100))
def test_however_many_microbatches_a_replica_takes_each_sample_comes_once(counts, size, consumed):
    replicas = dealt(counts, size, consumed)
    assert [len(microbatches) for microbatches in replicas] == counts
    cut = {range(first, first + size) for first in range(consumed, consumed + sum(counts) * size, size)}
    assert {indices for microbatches in replicas for indices in microbatches} == cut
    assert all(microbatches == sorted(microbatches, key=lambda indices: indices.start) for microbatches in replicas)


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 4))
def test_equal_counts_are_dealt_in_turn(count, replicas):
    for replica, microbatches in enumerate(dealt([count] * replicas, size=3, consumed=7)):
        assert [indices.start for indices in microbatches] == [
            7 + 3 * (number * replicas + replica) for number in range(count)
        ]


def test_who_has_his_share_is_passed_over():
    assert [[indices.start for indices in taken] for taken in dealt([4, 1, 2])] == [[48, 54, 58, 60], [50], [52, 56]]


def test_samples_are_consecutive_and_labels_reach_one_token_further():
    samples = TokenSamples(Tokens(np.arange(11, dtype=np.uint16), 11, "", ""), sequence_length=5)
    assert len(samples) == 2
    assert samples[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert samples[1].tolist() == [5, 6, 7, 8, 9, 10]
    assert samples[1].dtype == np.int64


def job(tmp_path, text="some text\n" * 100, **data):
    (tmp_path / "text.txt").write_text(text)
    tables = {"path": str(tmp_path / "text.txt"), "tokenizer": "bytes", "cache_directory": str(tmp_path / "cache")}
    return job_from_dict({"model": {"sequence_length": 32}, "data": tables | data})


def test_a_batch_holds_the_samples_that_the_order_names(tmp_path):
    dataset = open_dataset(job(tmp_path))
    microbatch = dataset.microbatch(range(3, 5))
    assert (microbatch.sample, microbatch.lengths, microbatch.length) == (3, (32, 32), 32)
    assert microbatch.mask(torch.device("cpu")) is None
    assert (microbatch.tokens.shape, microbatch.tokens.dtype) == ((2, 33), torch.int64)
    assert microbatch.tokens[1].tolist() == dataset.samples[dataset.order[4]].tolist()


def test_text_too_short_for_one_sample_is_refused(tmp_path):
    with pytest.raises(JobError, match="too short for one sample of 32 tokens"):
        open_dataset(job(tmp_path, text="short"))


def test_tokens_outside_the_vocabulary_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "trimtab_megatron.data.open_tokens", lambda data: Tokens(np.array([1, 2, 300], np.uint16), 257, "", "")
    )
    with pytest.raises(InputError, match="holds token 300, but the vocabulary has 257"):
        open_dataset(job(tmp_path))


class Provided:
    vocabulary_size = 10

    def __init__(self, sample):
        self.sample = sample

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.sample


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (np.zeros(32, np.int64), r"is torch.int64 \[32\], not torch.int64 \[33\]"),
        (np.zeros(33, np.int32), r"is torch.int32 \[33\]"),
        (np.full(33, 10), "holds token 10, but the vocabulary has 10"),
        (np.full(33, -1), "holds token -1"),
    ],
)
def test_samples_of_a_provider_are_checked(tmp_path, monkeypatch, sample, message):
    monkeypatch.setattr("trimtab_megatron.data.load_provider", lambda key, name: lambda job: Provided(sample))
    dataset = open_dataset(job(tmp_path, provider="my:samples"))
    with pytest.raises(InputError, match=message):
        dataset.microbatch(range(2))


def test_a_provider_that_returns_something_else_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("trimtab_megatron.data.load_provider", lambda key, name: lambda job: [1, 2])
    with pytest.raises(JobError, match="returned list, which has no vocabulary_size"):
        open_dataset(job(tmp_path, provider="my:samples"))
