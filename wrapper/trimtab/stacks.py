"""How the stack of a rank is kept as the text of an event, and found again in it. Pure."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from trimtab.protocol import Stack
from trimtab_slurm.contents import Event

EVENT_KIND = "stack"
MOST_CHARACTERS = 32_768
"""Of one stack: some 200 frames. Of a longer one the innermost frames are kept, since they say what it waits for."""

_HEAD = re.compile(r"rank (\d+), after step (\d+)\n")


def stack_text(stack: Stack) -> str:
    """The text of its event."""
    text = stack.text
    if len(text) > MOST_CHARACTERS:
        left_out = len(text) - MOST_CHARACTERS
        text = f"[{left_out:,} characters of outer frames left out]\n{text[left_out:]}"
    return f"rank {stack.rank}, after step {stack.step}\n{text}"


@dataclass(frozen=True)
class SharedStack:
    """Ranks that were at the same place of the program."""

    ranks: tuple[int, ...]
    """Ascending."""
    text: str


def shared_stacks(events: Iterable[Event]) -> tuple[SharedStack, ...]:
    """The stacks among the events, equal ones together: the place where the fewest ranks are comes first.

    Of a rank that was asked more than once, the last answer counts.
    """
    latest: dict[int, str] = {}
    for event in events:
        if event.kind == EVENT_KIND and (head := _HEAD.match(event.text)):
            latest[int(head[1])] = event.text[head.end() :]
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, text in sorted(latest.items()):
        ranks[text].append(rank)
    found = [SharedStack(tuple(own), text) for text, own in ranks.items()]
    return tuple(sorted(found, key=lambda each: (len(each.ranks), each.ranks)))
