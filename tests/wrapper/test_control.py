import asyncio
import contextlib
from dataclasses import replace

import pytest

from trimtab.control import ControlServer
from trimtab.protocol import Done, Failed, Hello, Notice, Order, Probe, StepReport, decode, encode

HELLO = Hello("", 1, "n1", 0, 100, 0, 1, 0, (4, 5), 10, "")


@pytest.mark.parametrize(
    "message",
    [
        HELLO,
        StepReport(1, 2, 3.0, 4.0, 5.0, 6.0, 7, 8, 64, 9, loss=float("inf")),
        Notice(0, 1, "checkpoint", "saved\nin two lines"),
        Failed(0, 1, "ValueError: ☃", peer_lost=False),
        Done(0, 10),
        Probe(1, 0, 0.25),
        Order("stop", "USR1"),
    ],
)
def test_each_message_is_one_line_and_comes_back_equal(message):
    line = encode(message)
    assert line.count(b"\n") == 1
    assert decode(line) == message


@pytest.mark.parametrize("line", [b"", b"{}", b"[]", b"null", b"\xff", b'{"message": "Hello"}', b'{"message": "Job"}'])
def test_what_is_no_message_is_refused(line):
    with pytest.raises(ValueError, match="not a message"):
        decode(line)


class Wrapper:
    def __init__(self):
        self.heard, self.lost = [], []
        self.server = ControlServer(lambda rank, message: self.heard.append((rank, message)), self.lost.append)

    async def connect(self, hello):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(encode(hello))
        return reader, writer

    async def until(self, condition):
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.01)


def serve(scenario):
    async def main():
        wrapper = Wrapper()
        wrapper.port = await wrapper.server.start("127.0.0.1")
        await scenario(wrapper)
        await wrapper.server.close()

    asyncio.run(main())


def test_reports_come_in_and_orders_go_out():
    async def scenario(wrapper):
        hello = replace(HELLO, token=wrapper.server.token)
        reader, writer = await wrapper.connect(hello)
        report = StepReport(1, 1, 0.0, 1.0, 0.5, 0.5, 1, 1, 1, 1)
        writer.write(encode(report))
        await wrapper.until(lambda: len(wrapper.heard) == 2)
        assert wrapper.heard == [(1, hello), (1, report)]
        wrapper.server.send(Order("checkpoint", "asked"))
        assert decode(await reader.readline()) == Order("checkpoint", "asked")
        writer.close()
        await wrapper.until(lambda: wrapper.lost == [1])

    serve(scenario)


def test_an_order_waits_for_a_rank_that_is_still_starting():
    async def scenario(wrapper):
        wrapper.server.send(Order("stop", "USR1"))
        reader, writer = await wrapper.connect(replace(HELLO, token=wrapper.server.token))
        assert decode(await reader.readline()) == Order("stop", "USR1")
        writer.close()

    serve(scenario)


@pytest.mark.parametrize("first_line", [encode(replace(HELLO, token="guess")), b"GET / HTTP/1.1\r\n", b"x" * (1 << 21)])
def test_whoever_has_no_token_is_cut_off_unheard(first_line):
    async def scenario(wrapper):
        reader, writer = await asyncio.open_connection("127.0.0.1", wrapper.port)
        writer.write(first_line)
        with contextlib.suppress(ConnectionError):  # cut off with unread data of ours
            assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()
        assert wrapper.heard == []
        assert wrapper.lost == []

    serve(scenario)


def test_a_rank_that_comes_back_takes_the_place_of_its_broken_connection():
    async def scenario(wrapper):
        hello = replace(HELLO, token=wrapper.server.token)
        reader, first = await wrapper.connect(hello)
        await wrapper.until(lambda: len(wrapper.heard) == 1)
        wrapper.server.send(Order("checkpoint", "before"))
        assert decode(await reader.readline()) == Order("checkpoint", "before")
        back, second = await wrapper.connect(hello)
        assert await asyncio.wait_for(reader.read(), 10) == b"", "the old one is closed"
        second.write(encode(Done(1, 10)))
        await wrapper.until(lambda: len(wrapper.heard) == 3)
        assert wrapper.lost == []
        wrapper.server.send(Order("probe", "after"))
        assert decode(await back.readline()) == Order("probe", "after"), "what was ordered before is not told again"
        second.close()
        first.close()
        await wrapper.until(lambda: wrapper.lost == [1])

    serve(scenario)


def test_a_rank_that_comes_back_hears_that_the_others_stop():
    async def scenario(wrapper):
        hello = replace(HELLO, token=wrapper.server.token)
        _, first = await wrapper.connect(hello)
        await wrapper.until(lambda: len(wrapper.heard) == 1)
        first.close()
        await wrapper.until(lambda: wrapper.lost == [1])
        wrapper.server.send(Order("stop", "USR1"))
        back, second = await wrapper.connect(hello)
        assert decode(await back.readline()) == Order("stop", "USR1")
        second.close()

    serve(scenario)


def test_a_fault_in_what_is_made_of_a_message_does_not_cost_the_connection(capsys):
    async def scenario(wrapper):
        hello = replace(HELLO, token=wrapper.server.token)
        _, writer = await wrapper.connect(hello)
        await wrapper.until(lambda: len(wrapper.heard) == 1)
        heard = wrapper.heard

        def fail_once(rank, message):
            wrapper.server._receive = lambda rank, message: heard.append((rank, message))
            raise OSError("no space left on device")

        wrapper.server._receive = fail_once
        writer.write(encode(Notice(1, 1, "a", "lost")) + encode(Notice(1, 2, "a", "heard")))
        await wrapper.until(lambda: len(heard) == 2)
        assert heard[-1] == (1, Notice(1, 2, "a", "heard"))
        assert wrapper.lost == []
        writer.close()

    serve(scenario)
    assert "no space left on device" in capsys.readouterr().err
