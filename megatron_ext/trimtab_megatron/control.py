"""The rank's end of the control connection: reports out, orders in.

Training never waits for it. Two threads of the background talk to the wrapper; a connection that is lost is tried
again until it is there, Hello first, and one line on stderr tells of either. Meanwhile reports wait, as many as have
room. An order to tell stacks is answered by the thread that receives it, whatever the main thread does or waits for.
"""

import contextlib
import queue
import socket
import sys
import threading
import time

from trimtab.protocol import Hello, Message, Order, Stack, StepReport, decode, encode
from trimtab_megatron import stacks

CONNECT_SECONDS = 20.0
CLOSE_SECONDS = 5.0
"""How long the last messages may take to leave before the rank ends."""
LONGEST_QUEUE = 10_000
"""Messages that may wait for a wrapper that does not read."""
RETRY_SECONDS = 1.0
"""Until a lost connection is first tried again; each time twice as long, up to the longest."""
LONGEST_RETRY_SECONDS = 60.0
HOLDS_SECONDS = 10.0
"""A connection that has lasted so long counts as there again."""
SILENT_SECONDS = 120
"""Where the wrapper's node has acknowledged nothing for so long, the connection counts as lost."""
LOOK_SECONDS = 1.0
"""How soon it is noticed that the wrapper has closed the connection, while there is nothing to send."""


class Control:
    """Sends messages in the order in which they are given; Hello goes first, whenever it is given."""

    def __init__(self, address: str | None) -> None:
        self._address = address
        self._waiting: list[Message] = []
        self._queue: queue.Queue[Message | None] = queue.Queue(LONGEST_QUEUE)
        self._unsent: Message | None = None
        """Taken from the queue, but not known to have left."""
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._arrived: list[Order] = []
        self._sender: threading.Thread | None = None
        self._closing = threading.Event()
        self._lost_told = False
        self._all_sent = False
        self.greeted = False
        self.connected = False
        """Whether orders can arrive, as far as is known here."""
        self._rank = self._step = 0

    def hello(self, hello: Hello) -> None:
        """Connect in the background, and send Hello and then what has waited for it."""
        self.greeted = True
        self._rank = hello.rank
        for message in self._waiting:
            self._put(message)
        self._waiting.clear()
        if self._address is not None:
            self._sender = threading.Thread(target=self._keep_connected, args=(self._address, hello), daemon=True)
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
        """The next order that has arrived, if any: each is given once, and an order to stop before all others.

        After a stop the others are not given: who is told to stop has no time for them.
        """
        with contextlib.suppress(queue.Empty):
            while True:
                self._arrived.append(self._orders.get_nowait())
        stop = next((order for order in self._arrived if order.kind == "stop"), None)
        if stop is not None:
            self._arrived.clear()
            return stop
        return self._arrived.pop(0) if self._arrived else None

    def close(self) -> bool:
        """Wait, not for long, until everything has been sent. Returns whether it has: the wrapper knows."""
        self._put(None)
        self._closing.set()
        if self._sender is not None:
            self._sender.join(CLOSE_SECONDS)
        return self._all_sent

    def _put(self, message: Message | None) -> None:
        # Full: a wrapper that has read nothing for thousands of steps. The reports are lost, training is not.
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(message)

    def _keep_connected(self, address: str, hello: Hello) -> None:
        """Until the last message has been sent, or, once this rank closes, cannot be."""
        retry_seconds = RETRY_SECONDS
        while True:
            closing = self._closing.is_set()
            began = time.monotonic()
            try:
                with _connected(address) as connection:
                    connection.sendall(encode(hello))
                    self.connected = True
                    self._send_all(connection)
                    self._all_sent = True
                    return
            except (OSError, ValueError) as error:
                self.connected = False
                if time.monotonic() - began > HOLDS_SECONDS:
                    retry_seconds = RETRY_SECONDS
                if not self._lost_told:
                    print(f"trimtab: no control connection to {address} ({error}): training goes on", file=sys.stderr)
                    self._lost_told = True
                if closing:
                    return
            self._closing.wait(retry_seconds)
            retry_seconds = min(2 * retry_seconds, LONGEST_RETRY_SECONDS)

    def _send_all(self, connection: socket.socket) -> None:
        """Send until the last message. Raises OSError when the connection breaks."""
        receiver = threading.Thread(target=self._receive_all, args=(connection,), daemon=True)
        receiver.start()
        began = time.monotonic()
        try:
            while receiver.is_alive():
                if self._lost_told and time.monotonic() - began > HOLDS_SECONDS:
                    print("trimtab: the control connection is there again", file=sys.stderr)
                    self._lost_told = False
                if self._unsent is None:
                    try:
                        message = self._queue.get(timeout=LOOK_SECONDS)
                    except queue.Empty:
                        continue
                    if message is None:
                        return
                    self._unsent = message
                connection.sendall(encode(self._unsent))
                self._unsent = None
            raise ConnectionError("the wrapper has closed it")
        finally:
            # The receiver's file keeps the socket open beyond its block: the wrapper shall see the end now.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

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
            pass  # the sender sees that this thread has ended


def _connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A node that is gone answers nothing: without these it would be noticed after hours, or never.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_SECONDS // 4)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENT_SECONDS // 4)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENT_SECONDS)
    return connection
