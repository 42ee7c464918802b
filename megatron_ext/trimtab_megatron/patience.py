"""Says which rank takes long for what, so that a start that may take hours is never silent.

Ranks wait for one another while one of them opens data, builds, or reads a checkpoint. The one that is waited for says
what it is at, the others what they wait for, until the timeout of the agreement group ends them.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trimtab_megatron.identity import Identity

PATIENCE_SECONDS = 300.0
"""First told after so long, and then each time that twice as long has passed."""


@contextmanager
def told(who: Identity, doing: str, tell: Callable[[str], None]) -> Iterator[None]:
    """Where the body takes long, say on stderr, and call `tell`, with what this rank is doing."""
    ended = threading.Event()
    threading.Thread(target=_watch, args=(who, doing, tell, ended), daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _watch(who: Identity, doing: str, tell: Callable[[str], None], ended: threading.Event) -> None:
    began, next_seconds = time.monotonic(), PATIENCE_SECONDS
    while not ended.wait(max(0.0, began + next_seconds - time.monotonic())):
        text = f"rank {who.rank} (node {who.node}) has been {doing} for {next_seconds / 60:.0f} min"
        print(f"trimtab: {text}", file=sys.stderr, flush=True)
        tell(text)
        next_seconds *= 2
