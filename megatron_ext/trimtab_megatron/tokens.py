"""A corpus as one flat array of tokens, tokenized once and cached.

A cache entry is a directory named by a hash of the corpus's content and the tokenizer: `tokens.bin` (the array, mapped
into memory by all ranks of a node), `meta.json`, and `tokenizer.json`. One process builds it, under a file lock which
the kernel drops when that process ends, in a directory that is renamed into place when it is whole.
"""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trimtab.protocol import Data, JobError
from trimtab_megatron.corpus import Corpus, open_corpus

END_OF_DOCUMENT = "<|endoftext|>"
_KNOWN_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>")
BYTES_VOCABULARY = 257
"""256 bytes and the end of a document."""
FORMAT = 1
"""Part of the key of a cache entry: raise it when the way in which tokens are made changes."""
_BATCH = 256

Tokenize = Callable[[list[str]], list[list[int]]]


@dataclass(frozen=True)
class Tokens:
    """A corpus in tokens."""

    values: npt.NDArray[Any]
    """One dimension, mapped from a file."""
    vocabulary_size: int
    fingerprint: str
    """The same on two machines only if tokens and vocabulary are."""
    built: str
    """What had to be built for it; empty when it was there."""


def open_tokens(data: Data) -> Tokens:
    """The tokens of the job's data. Raises JobError for what cannot be read or does not fit together."""
    if data.path and _has(data.path, ".idx"):
        return _open_indexed(data)
    corpus = open_corpus(data.path)
    entry, built = _cached(_cache_directory(data), _key(corpus, data), lambda into: _build(corpus, data, into))
    meta = json.loads((entry / "meta.json").read_text())
    values = np.memmap(entry / "tokens.bin", dtype=meta["dtype"], mode="r")
    vocabulary_size = meta["vocabulary_size"]
    text = f"{len(values):,} tokens of {corpus.name} ({len(corpus.files):,} files, vocabulary {vocabulary_size:,})"
    if corpus.skipped:
        text += f"; {corpus.skipped} files that are empty or not UTF-8 were left out"
    return Tokens(values, vocabulary_size, meta["fingerprint"], text if built else "")


def _has(path: str, suffix: str) -> bool:
    try:
        return Path(path + suffix).is_file()
    except OSError as error:
        raise JobError("data.path", path, f"cannot be read: {error}") from error


def _open_indexed(data: Data) -> Tokens:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    if data.tokenizer == "bpe":
        raise JobError(
            "data.tokenizer", "bpe", f"{data.path}.bin holds tokens already: name the tokenizer.json that made them"
        )
    if not _has(data.path, ".bin"):
        raise JobError("data.path", data.path, "its .idx is there, but its .bin is not")
    try:
        index = IndexedDataset(data.path).index
        values = np.memmap(data.path + ".bin", dtype=index.dtype, mode="r")
    except (OSError, ValueError, AssertionError) as error:
        raise JobError("data.path", data.path, f"its .idx and .bin cannot be read: {error}") from error
    if int(index.sequence_lengths.sum(dtype=np.int64)) != len(values):
        raise JobError("data.path", data.path, "its .idx does not describe its .bin: the lengths differ")
    vocabulary_size = BYTES_VOCABULARY if data.tokenizer == "bytes" else _load(data.tokenizer).get_vocab_size()
    digest = hashlib.sha256(Path(data.path + ".idx").read_bytes())
    digest.update(values[:: max(1, len(values) // 10_000)].tobytes() + str(vocabulary_size).encode())
    return Tokens(values, vocabulary_size, digest.hexdigest(), "")


def _cache_directory(data: Data) -> Path:
    if data.cache_directory:
        return Path(data.cache_directory)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "trimtab")


def _key(corpus: Corpus, data: Data) -> str:
    digest = hashlib.sha256(f"{FORMAT}:{corpus.digest}:".encode())
    if data.tokenizer == "bpe":
        digest.update(f"bpe:{data.vocabulary_size}".encode())
    elif data.tokenizer == "bytes":
        digest.update(b"bytes")
    else:
        digest.update(_read_tokenizer(data.tokenizer))
    return digest.hexdigest()[:32]


def _cached(directory: Path, key: str, build: Callable[[Path], None]) -> tuple[Path, bool]:
    """The cache entry of a key, and whether this call built it."""
    entry = directory / key
    try:
        if entry.is_dir():
            return entry, False
        directory.mkdir(parents=True, exist_ok=True)
        with _lock(directory / f"{key}.lock"):
            if entry.is_dir():
                return entry, False
            unfinished = Path(tempfile.mkdtemp(prefix=f"{key}.", dir=directory))
            try:
                build(unfinished)
                unfinished.rename(entry)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise JobError("data.cache_directory", str(directory), f"the tokens cannot be cached there: {error}") from error
    return entry, True


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(corpus: Corpus, data: Data, into: Path) -> None:
    if data.tokenizer == "bytes":
        vocabulary_size, end, tokenize = BYTES_VOCABULARY, [256], _tokenize_bytes
    else:
        tokenizer = _train(corpus, data.vocabulary_size) if data.tokenizer == "bpe" else _load(data.tokenizer)
        tokenizer.save(str(into / "tokenizer.json"))
        vocabulary_size = tokenizer.get_vocab_size()
        end = _end_of_document(tokenizer)

        def tokenize(pieces: list[str]) -> list[list[int]]:
            return [encoding.ids for encoding in tokenizer.encode_batch(pieces, add_special_tokens=False)]

    dtype = np.dtype(np.uint16 if vocabulary_size <= 1 << 16 else np.int32)
    digest = hashlib.sha256(f"{vocabulary_size}:".encode())
    with (into / "tokens.bin").open("wb") as file:
        for tokens in _tokenized(corpus, tokenize, end):
            raw = np.asarray(tokens, dtype).tobytes()
            digest.update(raw)
            file.write(raw)
    meta = {"dtype": dtype.name, "vocabulary_size": vocabulary_size, "fingerprint": digest.hexdigest()}
    (into / "meta.json").write_text(json.dumps(meta))


def _tokenized(corpus: Corpus, tokenize: Tokenize, end: list[int]) -> Iterator[list[int]]:
    pieces = ((piece, last) for document in corpus.documents() for piece, last in _with_last(document))
    while batch := list(islice(pieces, _BATCH)):
        for tokens, (_, last) in zip(tokenize([piece for piece, _ in batch]), batch, strict=True):
            yield tokens + end if last else tokens


def _with_last(pieces: list[str]) -> Iterator[tuple[str, bool]]:
    for number, piece in enumerate(pieces, start=1):
        yield piece, number == len(pieces)


def _tokenize_bytes(pieces: list[str]) -> list[list[int]]:
    return [list(piece.encode()) for piece in pieces]


def _train(corpus: Corpus, vocabulary_size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for document in corpus.documents() for piece in document), trainer)
    return tokenizer


def _load(path: str) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(_read_tokenizer(path).decode())
    except Exception as error:  # the library raises nothing narrower
        raise JobError("data.tokenizer", path, f"is not a tokenizer.json of the tokenizers library: {error}") from error


def _read_tokenizer(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        reason = f"cannot be read: {error}"
        raise JobError("data.tokenizer", path, reason, ["bpe", "bytes", "a path to a tokenizer.json"]) from error


def _end_of_document(tokenizer: Any) -> list[int]:
    """The first of the usual end tokens that the vocabulary has; none: documents follow one another without."""
    ends = (tokenizer.token_to_id(name) for name in _KNOWN_ENDS)
    return [token for token in ends if token is not None][:1]
