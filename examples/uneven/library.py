"""Samples as long as they are: one function of the Python standard library each, neither joined nor cut to one size.

Most functions are short and a few are long, so that in some steps one replica gets much more to do than another; which
one, changes from step to step.
"""

import re
import sysconfig
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trimtab.protocol import Job

_DEFINITION = re.compile(r"^(?=[ \t]*(?:async )?def )", re.MULTILINE)
_WORD = re.compile(r"\w+|\n[ \t]*|[^\w\s]")


class Functions:
    """The functions of the library's modules, word by word; longer ones end at the longest sample."""

    variable_lengths = True

    def __init__(self, job: Job) -> None:
        self.vocabulary_size = job.data.vocabulary_size
        self._most = job.model.sequence_length + 1
        modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        texts = (module.read_text(errors="replace") for module in modules)
        pieces = (piece.strip() for text in texts for piece in _DEFINITION.split(text))
        self._pieces = [piece for piece in pieces if len(piece.split()) > 4]

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        words = _WORD.findall(self._pieces[index])[: self._most]
        return np.array([zlib.crc32(word.encode()) % self.vocabulary_size for word in words])


def build_samples(job: Job) -> Functions:
    """The samples of the run."""
    return Functions(job)
