"""Work beside the event loop."""

import asyncio
import threading
import time

import pytest

from trimtab.background import in_background


def test_what_it_returns_or_raises_comes_back():
    async def both():
        assert await in_background(lambda: 7) == 7
        with pytest.raises(ValueError, match="bad"):
            await in_background(lambda: int("bad"))

    asyncio.run(both())


def test_the_loop_ends_without_waiting_for_it():
    held, began = threading.Event(), threading.Event()

    def wait():
        began.set()
        held.wait(60)

    async def leave():
        task = asyncio.get_running_loop().create_task(in_background(wait))
        while not began.is_set():
            await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(leave())
    thread = next(thread for thread in threading.enumerate() if thread.daemon and thread.name.endswith("(run)"))
    assert thread.is_alive()
    held.set()
    thread.join(10)
    time.sleep(0)  # its result finds no loop, and nobody minds
    assert not thread.is_alive()
