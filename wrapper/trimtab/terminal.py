"""What all tables for a terminal have in common: readable from 80 columns on; plain text where there is no terminal."""

import io
import re
from collections.abc import Iterable
from typing import TextIO, cast

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from trimtab.wording import plain

PLAIN_WIDTH = 100
"""Columns where the output is no terminal."""


class _Unpadded:
    """Where lines go that may be copied: what pads them to a table's width is left out."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self.encoding = output.encoding

    def write(self, text: str) -> int:
        return self._output.write(re.sub(" +$", "", text, flags=re.MULTILINE))

    def flush(self) -> None:
        self._output.flush()


def console_of(output: TextIO) -> Console:
    """A console that takes text as it is: nothing in it is markup, nothing is highlighted."""
    if isinstance(output, io.TextIOWrapper):
        output.reconfigure(errors="replace")  # in a locale that lacks a letter, the rest is still readable
    console = Console(file=output, highlight=False, emoji=False, markup=False)
    if console.is_terminal:
        return console
    unpadded = cast(TextIO, _Unpadded(output))
    return Console(file=unpadded, highlight=False, emoji=False, markup=False, width=PLAIN_WIDTH, no_color=True)


def show_parts(parts: Iterable[RenderableType], output: TextIO) -> None:
    """Print one after another, all at once."""
    with console_of(output) as console:
        for part in parts:
            console.print(part)


def ruled_table() -> Table:
    """With a line below the head, and none around."""
    return Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False, show_edge=False)


def bullet(text: str, style: str = "") -> Table:
    """A point of a list; its lines are indented alike."""
    grid = Table.grid(padding=(0, 1))
    grid.add_row("-", Text(plain(text), style=style))
    return grid
