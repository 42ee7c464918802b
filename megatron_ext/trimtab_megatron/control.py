"""The rank's end of the control connection: reports out, orders in.

Training never waits for it. Two threads of the background talk to the wrapper; if it is gone, or was never named,
training goes on, and what would have been reported is dropped after one line on stderr. An order to tell stacks is
answered by the thread that receives it, whatever the main thread does or waits for.
"""

import contextlib
import queue
import socket
import sys
import threading

from trimtab.protocol import Hello, Message, Order, Stack, StepReport, decode, encode
from trimtab_megatron import stacks

CONNECT_SECONDS = 20.0
CLOSE_SECONDS = 5.0
"""How long the last messages may take to leave before the rank ends."""
LONGEST_QUEUE = 10_000
"""Messages that may wait for a wrapper that does not read."""


class Control:
    """Sends messages in the order in which they are given; Hello goes first, whenever it is given."""

    def __init__(self, address: str | None) -> None:
        self._address = address
        self._waiting: list[Message] = []
        self._queue: queue.Queue[Message | None] = queue.Queue(LONGEST_QUEUE)
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._sender: threading.Thread | None = None
        self.greeted = False
        self._rank = self._step = 0

    def hello(self, hello: Hello) -> None:
        """Connect in the background, and send Hello and then what has waited for it."""
        self.greeted = True
        self._rank = hello.rank
        for message in (hello, *self._waiting):
            self._put(message)
        self._waiting.clear()
        if self._address is not None:
            self._sender = threading.Thread(target=self._send_all, args=(self._address,), daemon=True)
            self._sender.start()

    def send(self, message: Message) -> None:
        """Send a message; returns at once."""
        if isinstance(message, StepReport):
            self._step = message.step
        if self.greeted:
            self._put(message)
        else:
            self._waiting.append(message)

    def take_order(self) -> Order | None:
        """The next order that has arrived, if any: each is given once."""
        try:
            return self._orders.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        """Wait, not for long, until everything has been sent."""
        self._put(None)
        if self._sender is not None:
            self._sender.join(CLOSE_SECONDS)

    def _put(self, message: Message | None) -> None:
        # Full: a wrapper that has read nothing for thousands of steps. The reports are lost, training is not.
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(message)

    def _send_all(self, address: str) -> None:
        try:
            host, _, port = address.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS) as connection:
                connection.settimeout(None)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._receive_all, args=(connection,), daemon=True).start()
                while (message := self._queue.get()) is not None:
                    connection.sendall(encode(message))
                # The receiver's file keeps the socket open beyond this block: the wrapper shall see the end now.
                connection.shutdown(socket.SHUT_RDWR)
        except (OSError, ValueError) as error:
            print(f"trimtab: no control connection to {address} ({error}): training goes on", file=sys.stderr)

    def _receive_all(self, connection: socket.socket) -> None:
        try:
            with connection.makefile("rb") as lines:
                for line in lines:
                    order = decode(line)
                    if not isinstance(order, Order):
                        continue
                    if order.kind == "stacks":
                        self._put(Stack(self._rank, self._step, stacks.main_thread()))
                    else:
                        self._orders.put(order)
        except (OSError, ValueError):
            pass  # the sender says so at its next message
