"""Text to tokens, once."""

import json
import threading

import numpy as np
import pytest
from tokenizers import Tokenizer

from trimtab.protocol import Data, JobError
from trimtab_megatron import tokens
from trimtab_megatron.corpus import open_corpus
from trimtab_megatron.tokens import open_tokens

POEM = "Grüße, one two three four five six seven\n" * 200


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(POEM)
    (tmp_path / "text" / "b.txt").write_text("second\r\n")
    (tmp_path / "text" / "c.bin").write_bytes(b"\xff\xfe")
    (tmp_path / "text" / ".hidden").write_text("hidden")
    return tmp_path / "text"


def data(text, **changes):
    return Data(**{"path": str(text), "tokenizer": "bytes", "cache_directory": str(text.parent / "cache"), **changes})


def test_bytes_are_the_bytes_of_each_document_and_its_end(text):
    opened = open_tokens(data(text))
    assert opened.vocabulary_size == 257
    assert opened.values.tolist() == [*POEM.encode(), 256, *b"second\r\n", 256]
    assert "2 files" in opened.built
    assert "1 files that are empty or not UTF-8 were left out" in opened.built


def test_a_trained_vocabulary_gives_the_text_back(text):
    opened = open_tokens(data(text, tokenizer="bpe", vocabulary_size=512))
    (entry,) = (path for path in (text.parent / "cache").iterdir() if path.is_dir())
    tokenizer = Tokenizer.from_file(str(entry / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == opened.vocabulary_size <= 512
    end = tokenizer.token_to_id("<|endoftext|>")
    assert np.flatnonzero(opened.values == end).size == 2
    assert tokenizer.decode(opened.values.tolist()) == POEM + "second\r\n"
    assert len(opened.values) < len(POEM) / 4


def test_a_tokenizer_of_ones_own_is_used_and_is_part_of_the_key(text):
    trained = open_tokens(data(text, tokenizer="bpe", vocabulary_size=512))
    (entry,) = (path for path in (text.parent / "cache").iterdir() if path.is_dir())
    own = text.parent / "tokenizer.json"
    own.write_bytes((entry / "tokenizer.json").read_bytes())
    opened = open_tokens(data(text, tokenizer=str(own)))
    assert opened.values.tolist() == trained.values.tolist()
    assert opened.fingerprint == trained.fingerprint
    own.write_text(own.read_text().replace("<|endoftext|>", "<|other|>"))
    assert len(open_tokens(data(text, tokenizer=str(own))).values) == len(trained.values) - 2


def test_the_cache_is_used_until_the_text_changes(text):
    first = open_tokens(data(text))
    again = open_tokens(data(text))
    assert (again.built, again.fingerprint) == ("", first.fingerprint)
    (text / "b.txt").write_text("changed")
    changed = open_tokens(data(text))
    assert changed.built
    assert changed.fingerprint != first.fingerprint


def test_many_ranks_build_once(text, monkeypatch):
    builds = []
    build = tokens._build

    def counted(*arguments):
        builds.append(arguments)
        build(*arguments)

    monkeypatch.setattr(tokens, "_build", counted)
    fingerprints = []
    threads = [
        threading.Thread(target=lambda: fingerprints.append(open_tokens(data(text)).fingerprint)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1
    assert len(fingerprints) == 8
    assert len(set(fingerprints)) == 1


def test_a_build_that_fails_leaves_nothing_and_the_next_one_succeeds(text, monkeypatch):
    def fail(*arguments):
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(tokens, "_build", fail)
        with pytest.raises(JobError, match=r"data.cache_directory = .*disk full"):
            open_tokens(data(text))
    assert [path.suffix for path in (text.parent / "cache").iterdir()] == [".lock"]
    assert open_tokens(data(text)).built


def test_long_documents_are_cut_at_line_ends_and_lose_nothing(text, monkeypatch):
    monkeypatch.setattr("trimtab_megatron.corpus.PIECE_CHARACTERS", 500)
    documents = list(open_corpus(str(text)).documents())
    assert [len(pieces) for pieces in documents] == [16, 1]
    assert ["".join(pieces) for pieces in documents] == [POEM, "second\r\n"]
    assert open_tokens(data(text)).values.tolist() == [*POEM.encode(), 256, *b"second\r\n", 256]


def test_the_default_corpus_is_the_standard_library_without_its_tests():
    corpus = open_corpus("")
    assert len(corpus.files) > 500
    parts = {part for file in corpus.files for part in file.parts}
    assert not parts & {"site-packages", "test", "tests"}
    assert list(corpus.files) == sorted(corpus.files)
    assert corpus.digest == open_corpus("").digest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": "/nowhere"}, "neither a text file, nor a directory, nor the prefix"),
        ({"path": "/" + "n" * 300}, "cannot be read: .*File name too long"),
        ({"tokenizer": "/nowhere.json"}, 'data.tokenizer = "/nowhere.json": cannot be read'),
    ],
)
def test_what_is_not_there_is_named(text, changes, message):
    with pytest.raises(JobError, match=message):
        open_tokens(data(text, **changes))


def test_a_file_that_is_no_tokenizer_is_named(text):
    (text.parent / "tokenizer.json").write_text(json.dumps({"no": "tokenizer"}))
    with pytest.raises(JobError, match=r"is not a tokenizer\.json"):
        open_tokens(data(text, tokenizer=str(text.parent / "tokenizer.json")))


@pytest.fixture
def indexed(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")  # what Megatron-core logs once for all ranks, it logs by this
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from torch import tensor

    builder = IndexedDatasetBuilder(str(tmp_path / "text.bin"), dtype=np.uint16)
    for document in ([1, 2, 3], [4, 5]):
        builder.add_item(tensor(document))
        builder.end_document()
    builder.finalize(str(tmp_path / "text.idx"))
    return tmp_path / "text"


def test_megatron_files_are_read_in_place(indexed):
    opened = open_tokens(data(indexed))
    assert opened.values.tolist() == [1, 2, 3, 4, 5]
    assert (opened.vocabulary_size, opened.built) == (257, "")
    assert not (indexed.parent / "cache").exists()


def test_megatron_files_need_the_tokenizer_that_made_them(indexed):
    with pytest.raises(JobError, match="holds tokens already"):
        open_tokens(data(indexed, tokenizer="bpe"))


def test_a_megatron_index_without_its_tokens_is_refused(indexed):
    (indexed.parent / "text.bin").unlink()
    with pytest.raises(JobError, match=r"its \.idx is there, but its \.bin is not"):
        open_tokens(data(indexed))


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # Megatron-core's, of what it half opened
def test_megatron_files_that_are_none_are_refused(indexed):
    (indexed.parent / "text.idx").write_bytes(b"no index" * 8)
    with pytest.raises(JobError, match=r"its \.idx and \.bin cannot be read: bad header"):
        open_tokens(data(indexed))


def test_megatron_files_that_do_not_belong_together_are_refused(indexed):
    with (indexed.parent / "text.bin").open("ab") as file:
        file.write(b"\0\0")
    with pytest.raises(JobError, match=r"does not describe its \.bin"):
        open_tokens(data(indexed))
