"""The server that the ranks talk to: reports in, orders out.

Guarded by a token: a connection whose first line is not a Hello with it is closed. One line of JSON a message. If
this server dies, training goes on; it only goes unreported.
"""

import asyncio
import secrets
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
        self._writers[hello.rank] = writer
        self._receive(hello.rank, hello)
        if self._order is not None:
            writer.write(encode(self._order))
        try:
            while message := await _next(reader):
                self._receive(hello.rank, message)
        finally:
            self._writers.pop(hello.rank, None)
            writer.close()
            self._lose(hello.rank)

    async def _greet(self, reader: asyncio.StreamReader) -> Hello | None:
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                message = decode(await reader.readline())
        except (TimeoutError, ValueError, ConnectionError):
            return None
        if not isinstance(message, Hello) or message.rank in self._writers:
            return None
        return message if secrets.compare_digest(message.token.encode(), self.token.encode()) else None


async def _next(reader: asyncio.StreamReader) -> Message | None:
    """The next message; None at the end. What is no message ends a connection like a broken one."""
    try:
        line = await reader.readline()
        return decode(line) if line else None
    except (ValueError, ConnectionError):
        return None
