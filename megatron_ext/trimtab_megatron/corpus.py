"""The text to train on: which documents there are, in which order.

Text is a file, a directory of files, or, where none is named, the source code of the Python standard library on this
machine: real text that every machine has.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trimtab.protocol import JobError

PIECE_CHARACTERS = 1 << 20
"""Longer documents are tokenized in pieces, cut at the ends of lines."""

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}


@dataclass(frozen=True)
class Corpus:
    """Files of UTF-8 text, each a document."""

    name: str
    files: tuple[Path, ...]
    digest: str
    """Hash of the content, in order."""
    skipped: int
    """Files that were left out: empty, or not UTF-8."""

    def documents(self) -> Iterator[list[str]]:
        """Each document, as one or more pieces."""
        for file in self.files:
            yield list(_pieces(file))


def open_corpus(path: str) -> Corpus:
    """The text at `path` (empty: the standard library). Raises JobError when there is none to read."""
    digest = hashlib.sha256()
    files = []
    try:
        name, candidates = (path, _files(path)) if path else ("the Python standard library", _standard_library())
        for file in candidates:
            content = file.read_bytes()
            if content and _is_text(content):
                digest.update(len(content).to_bytes(8) + content)
                files.append(file)
    except OSError as error:
        raise JobError("data.path", path, f"cannot be read: {error}") from error
    if not files:
        raise JobError("data.path", path, "holds no UTF-8 text")
    return Corpus(name, tuple(files), digest.hexdigest(), len(candidates) - len(files))


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _files(path: str) -> list[Path]:
    root = Path(path)
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise JobError("data.path", path, "is neither a text file, nor a directory, nor the prefix of a .bin/.idx pair")
    return _walk(root, ignored=set(), suffix="")


def _standard_library() -> list[Path]:
    return _walk(Path(sysconfig.get_path("stdlib")), ignored=_NOT_LIBRARY, suffix=".py")


def _walk(root: Path, ignored: set[str], suffix: str) -> list[Path]:
    found = []
    for directory, directories, names in os.walk(root):
        directories[:] = [name for name in directories if name not in ignored and not name.startswith(".")]
        found += [Path(directory, name) for name in names if name.endswith(suffix) and not name.startswith(".")]
    return sorted(file for file in found if file.is_file())


def _pieces(file: Path) -> Iterator[str]:
    # Without newline="" the text would differ from the bytes that were hashed.
    with file.open(encoding="utf-8", newline="") as lines:
        while piece := lines.readlines(PIECE_CHARACTERS):
            yield "".join(piece)
