"""Slurm's short form of node names, `n[1-4,07],gpu01`, taken apart. Standard library only: the hooks use it too."""

import itertools
import math
import re

MOST_NODES = 1 << 16
"""More names than Slurm itself allows in a cluster: a longer list is a faulty one."""


def expand_nodes(nodelist: str) -> tuple[str, ...]:
    """The names that a node list stands for, in its order, zero padding kept: `n[08-10]` -> n08, n09, n10.

    A name may have several brackets (`r[1-2]n[1-2]`: the last one runs fastest). An empty list, and Slurm's
    "(null)", hold no node. Raises ValueError for what is no node list.
    """
    if nodelist in ("", "(null)"):
        return ()
    names: list[str] = []
    for item in _split(nodelist, nodelist):
        pieces = re.findall(r"\[[^\[\]]*\]|[^\[\],\s]+", item)
        if not pieces or "".join(pieces) != item:
            raise _faulty(nodelist)
        choices = [_numbers(piece[1:-1], nodelist) if piece[0] == "[" else [piece] for piece in pieces]
        if len(names) + math.prod(len(choice) for choice in choices) > MOST_NODES:
            raise _faulty(nodelist)
        names += ["".join(parts) for parts in itertools.product(*choices)]
    return tuple(names)


def _split(text: str, nodelist: str) -> list[str]:
    """Parts between the commas outside brackets."""
    parts, depth, begin = [], 0, 0
    for position, character in enumerate(text):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth not in (0, 1):
            raise _faulty(nodelist)
        if character == "," and not depth:
            parts.append(text[begin:position])
            begin = position + 1
    return [*parts, text[begin:]]


def _numbers(ranges: str, nodelist: str) -> list[str]:
    """`1-3,07` -> 1, 2, 3, 07."""
    numbers: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part)
        if not match:
            raise _faulty(nodelist)
        first, last = match[1], match[2] or match[1]
        if not 0 <= int(last) - int(first) < MOST_NODES:
            raise _faulty(nodelist)
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def _faulty(nodelist: str) -> ValueError:
    return ValueError(f"{nodelist[:200]!r} is no node list of Slurm's; one reads like n[1-4,07],gpu01")
