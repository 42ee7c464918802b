"""Numbers and texts as people read them, the same in terminal and page. Pure."""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

ABSENT = "-"
"""Shown where there is no value: a missing figure is never shown as 0."""

_ESCAPE_SEQUENCES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|\x1b[PX\]^_].*?(?:\x1b\\|\x07|$)"  # strings: window title, links
    r"|\x1b[ -/]*[0-~]",
    re.DOTALL,
)


def plain(text: str, limit: int = 2000) -> str:
    """Text of a job on one line: no escape sequences, no control or direction characters, at most `limit` long."""
    visible = _ESCAPE_SEQUENCES.sub("", text)
    spaced = "".join(" " if unicodedata.category(letter)[0] in "CZ" else letter for letter in visible)
    line = " ".join(spaced.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def plain_lines(text: str) -> str:
    """As `plain`, but with its lines, and what each is indented by."""
    lines = _ESCAPE_SEQUENCES.sub("", text).expandtabs(4).splitlines()
    return "\n".join(" " * (len(line) - len(line.lstrip(" "))) + plain(line) for line in lines)


def percent(ratio: float | None) -> str:
    """0.314 -> "31.4%"."""
    return ABSENT if ratio is None else f"{ratio:.1%}"


def milliseconds(seconds: float | None) -> str:
    """0.7351 -> "735"; below 10 ms with two decimals."""
    if seconds is None:
        return ABSENT
    return f"{seconds * 1000:,.0f}" if seconds >= 0.01 else f"{seconds * 1000:.2f}"


def duration(seconds: float | None) -> str:
    """Two units at most: "8.2 s", "2 min 14 s", "3 h 05 min", "2 d 04 h"."""
    if seconds is None:
        return ABSENT
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def data_size(size_bytes: float | None) -> str:
    """In binary units: "1.4 GiB"."""
    if size_bytes is None:
        return ABSENT
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit != "GiB" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.2f} TiB"


def watts(power_watts: float | None) -> str:
    """612.4 -> "612 W"."""
    return ABSENT if power_watts is None else f"{power_watts:.0f} W"


def count(number: float | None) -> str:
    """12345.6 -> "12,346"."""
    return ABSENT if number is None else f"{number:,.0f}"


def real(number: float | None) -> str:
    """Four significant digits: a loss."""
    return ABSENT if number is None else f"{number:.4g}"


def moment(seconds: float | None) -> str:
    """UTC, to the second."""
    if seconds is None:
        return ABSENT
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def clock(seconds: float) -> str:
    """UTC, the time of day alone."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%H:%M:%S")


def plural(number: int, noun: str) -> str:
    """(1, "step") -> "1 step"; (2, "step") -> "2 steps"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def number_spans(numbers: Iterable[int]) -> str:
    """(0, 1, 2, 5) -> "0-2,5"."""
    spans: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if spans and number <= spans[-1][1] + 1:
            spans[-1] = spans[-1][0], number
        else:
            spans.append((number, number))
    return span_list(spans, len(spans))


def span_list(spans: Sequence[tuple[int, int]], limit: int = 8) -> str:
    """((0, 2), (5, 5)) -> "0-2,5"; the first `limit`, and how many more there are."""
    shown = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans[:limit])
    return shown if len(spans) <= limit else f"{shown} and {len(spans) - limit:,} more"


def listed(names: Sequence[str], limit: int = 8) -> str:
    """The first `limit` names, and how many more there are."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit:,} more"
