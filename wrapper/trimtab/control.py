"""The server that the ranks talk to: reports in, orders out.

Guarded by a token: a connection whose first line is not a Hello with it is closed. One line of JSON a message. If
this server dies, training goes on; it only goes unreported. A rank whose connection broke may come again.
"""

import asyncio
import secrets
import traceback
from collections.abc import Callable

from trimtab.protocol import Hello, Message, Order, decode, encode
from trimtab.protocol.messages import LONGEST_LINE_BYTES

HELLO_SECONDS = 30.0


class ControlServer:
    """Accepts ranks, hands their messages to `receive`, and their disconnects to `lose`."""

    def __init__(self, receive: Callable[[int, Message], None], lose: Callable[[int], None]) -> None:
        self.token = secrets.token_urlsafe(32)
        self._receive = receive
        self._lose = lose
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._greeted: set[int] = set()
        self._order: Order | None = None
        self._server: asyncio.Server | None = None

    async def start(self, host: str) -> int:
        """Listen on `host`, on a port that the system picks; returns it."""
        self._server = await asyncio.start_server(self._serve, host, 0, limit=LONGEST_LINE_BYTES)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def send(self, order: Order) -> None:
        """Give an order to every rank, those that are still starting included."""
        self._order = order
        for writer in self._writers.values():
            writer.write(encode(order))

    async def close(self) -> None:
        """Stop listening, and cut the ranks off."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers.values():
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = await self._greet(reader)
        if hello is None:
            writer.close()
            return
        if (earlier := self._writers.get(hello.rank)) is not None:
            earlier.close()  # of a connection that broke, and whose end has not been seen
        self._writers[hello.rank] = writer
        self._hand_over(hello.rank, hello)
        # To one that comes back, an order of before is no news; but it must not miss that all others stop.
        if self._order is not None and (hello.rank not in self._greeted or self._order.kind == "stop"):
            writer.write(encode(self._order))
        self._greeted.add(hello.rank)
        try:
            while message := await _next(reader):
                self._hand_over(hello.rank, message)
        finally:
            writer.close()
            if self._writers.get(hello.rank) is writer:
                del self._writers[hello.rank]
                self._lose(hello.rank)

    def _hand_over(self, rank: int, message: Message) -> None:
        try:
            self._receive(rank, message)
        except Exception:  # noqa: BLE001 - a fault in what is made of a message must not cost the rank's connection
            traceback.print_exc()

    async def _greet(self, reader: asyncio.StreamReader) -> Hello | None:
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                message = decode(await reader.readline())
        except (TimeoutError, ValueError, ConnectionError):
            return None
        if not isinstance(message, Hello):
            return None
        return message if secrets.compare_digest(message.token.encode(), self.token.encode()) else None


async def _next(reader: asyncio.StreamReader) -> Message | None:
    """The next message; None at the end. What is no message ends a connection like a broken one."""
    try:
        line = await reader.readline()
        return decode(line) if line else None
    except (ValueError, ConnectionError):
        return None
