"""Which samples each step takes, keyed by the global sample index alone.

Sample i of a run is the same whatever the shape: epoch i // length, place i % length in a permutation drawn from the
seed and the epoch, so that each sample comes exactly once an epoch. A step takes the next `global_batch_size`
indices, cut into microbatches that are dealt to the replicas; a resumed run goes on at the index where it stopped.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from trimtab.protocol import Job, JobError
from trimtab_megatron.identity import InputError
from trimtab_megatron.provider import load_provider
from trimtab_megatron.tokens import Tokens, open_tokens

_CHECKED_TOKENS = 1 << 20
"""How many tokens are held against the vocabulary before training; the others as they come."""


@runtime_checkable
class Samples(Protocol):
    """What a `data.provider` returns: samples of sequence_length + 1 tokens, each label being the next token.

    One that has `variable_lengths = True` may return shorter ones, of 2 tokens or more: each microbatch is then as long
    as its longest sample.
    """

    vocabulary_size: int

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...


class TokenSamples:
    """Consecutive, non-overlapping stretches of one flat array of tokens; labels overlap by one token."""

    def __init__(self, tokens: Tokens, sequence_length: int) -> None:
        self.vocabulary_size = tokens.vocabulary_size
        self._values = tokens.values
        self._sequence_length = sequence_length

    def __len__(self) -> int:
        return max(0, (len(self._values) - 1) // self._sequence_length)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        start = index * self._sequence_length
        return self._values[start : start + self._sequence_length + 1].astype(np.int64)


class SampleOrder:
    """Maps the global sample index of a run to a sample."""

    def __init__(self, length: int, seed: int) -> None:
        self._length = length
        self._seed = seed
        self._epoch = -1
        self._permutation: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def __getitem__(self, index: int) -> int:
        epoch, place = divmod(index, self._length)
        if epoch != self._epoch:
            self._permutation = np.random.default_rng([self._seed, epoch]).permutation(self._length)
            self._epoch = epoch
        return int(self._permutation[place])


def microbatch_indices(
    counts: Sequence[int], microbatch_size: int, consumed_samples: int, data_rank: int
) -> list[range]:
    """Global sample indices of each microbatch that one replica takes in the next step.

    Microbatches are dealt to the replicas in turn, passing over those that have their count: a step takes the same
    microbatches at every data-parallel size, and however many of them each replica takes.
    """
    turns = sorted((turn, replica) for replica, count in enumerate(counts) for turn in range(count))
    numbers = [number for number, (_, replica) in enumerate(turns) if replica == data_rank]
    firsts = [consumed_samples + number * microbatch_size for number in numbers]
    return [range(first, first + microbatch_size) for first in firsts]


@dataclass(frozen=True)
class Microbatch:
    """What passes the pipeline at once."""

    sample: int
    """Global index of its first sample."""
    lengths: tuple[int, ...]
    """[b] tokens of each sample that have a label."""
    length: int
    """Tokens of each row: those of the longest sample, and padding."""
    tokens: torch.Tensor | None
    """[b, length + 1], zeros beyond the end of a sample; None on stages that need none."""

    def mask(self, device: torch.device) -> torch.Tensor | None:
        """[b, length] where there is a label; None where there is one everywhere."""
        if min(self.lengths) == self.length:
            return None
        places = torch.arange(self.length, device=device)
        return places < torch.tensor(self.lengths, device=device)[:, None]


@dataclass(frozen=True)
class Dataset:
    """The samples of a run, in its order."""

    samples: Samples
    order: SampleOrder
    sequence_length: int
    fingerprint: str
    """The same on two ranks only if they hold the same samples."""
    built: str
    """What had to be built for it; empty when nothing was."""
    variable_lengths: bool
    multiple: int
    """Rows are padded to a multiple of it."""

    def microbatch(self, indices: range, with_tokens: bool = True) -> Microbatch:
        """The samples of one microbatch. Raises InputError for one that does not fit the model.

        Without tokens it is what a stage in the middle has to know; where lengths vary, that takes the samples too.
        """
        if not (with_tokens or self.variable_lengths):
            return Microbatch(indices.start, (self.sequence_length,) * len(indices), self.sequence_length, None)
        rows = [self._row(self.order[index]) for index in indices]
        lengths = tuple(len(row) - 1 for row in rows)
        length = -(-max(lengths) // self.multiple) * self.multiple
        tokens = torch.zeros(len(rows), length + 1, dtype=torch.int64)
        for place, row in zip(tokens, rows, strict=True):
            place[: len(row)] = row
        return Microbatch(indices.start, lengths, length, tokens if with_tokens else None)

    def _row(self, sample: int) -> torch.Tensor:
        row = torch.as_tensor(self.samples[sample])
        most = self.sequence_length + 1
        least = 2 if self.variable_lengths else most
        if row.dtype != torch.int64 or row.dim() != 1 or not least <= len(row) <= most:
            span = f"{least} to {most}" if self.variable_lengths else f"{most}"
            raise InputError(
                f"sample {sample} is {row.dtype} {list(row.shape)}, not torch.int64 [{span}]: "
                f"a sample holds {'at most ' * self.variable_lengths}sequence_length + 1 tokens"
            )
        _check_range(row, self.samples.vocabulary_size, f"sample {sample}")
        return row


def open_dataset(job: Job) -> Dataset:
    """The job's data. Raises JobError when it cannot be read or is too short, InputError for tokens that its
    vocabulary lacks."""
    length = job.model.sequence_length
    if job.data.provider:
        samples, fingerprint, built = _provided(job)
    else:
        tokens = open_tokens(job.data)
        samples, fingerprint, built = TokenSamples(tokens, length), tokens.fingerprint, tokens.built
        head = torch.from_numpy(tokens.values[:_CHECKED_TOKENS].astype(np.int64))
        _check_range(head, tokens.vocabulary_size, job.data.path or "the corpus")
    if not len(samples):
        raise JobError("data.path", job.data.path, f"is too short for one sample of {length} tokens")
    return Dataset(
        samples,
        SampleOrder(len(samples), job.train.seed),
        length,
        fingerprint,
        built,
        variable_lengths=bool(getattr(samples, "variable_lengths", False)),
        multiple=job.parallel.tensor if job.parallel.sequence_parallel else 1,
    )


def _provided(job: Job) -> tuple[Samples, str, str]:
    name = job.data.provider
    samples = load_provider("data.provider", name)(job)
    if not isinstance(samples, Samples):
        missing = [part for part in ("__len__", "__getitem__", "vocabulary_size") if not hasattr(samples, part)]
        raise JobError("data.provider", name, f"returned {type(samples).__name__}, which has no {', '.join(missing)}")
    if not len(samples):
        raise JobError("data.provider", name, "returned no samples")
    ends = [np.asarray(samples[index]).tobytes() for index in (0, len(samples) - 1)]
    digest = hashlib.sha256(f"{len(samples)}:{samples.vocabulary_size}:".encode() + b"".join(ends))
    return samples, digest.hexdigest(), ""


def _check_range(tokens: torch.Tensor, vocabulary_size: int, what: str) -> None:
    low, high = (int(value) for value in torch.aminmax(tokens))
    if low < 0 or high >= vocabulary_size:
        raise InputError(
            f"{what} holds token {high if low >= 0 else low}, but the vocabulary has {vocabulary_size}: "
            "it was made with another tokenizer"
        )
