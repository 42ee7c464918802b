"""Where ranks are in their program, told while they hang."""

import signal
import socket
import threading

import pytest

from trimtab.protocol import Hello, Order, Stack, StepReport, decode, encode
from trimtab_megatron.control import Control
from trimtab_megatron.stacks import LONGEST_LINE, MOST_FRAMES, main_thread


def deep(depth, ask):
    if depth:
        return deep(depth - 1, ask)
    return ask()


def test_the_frames_of_the_main_thread_are_told_from_any_thread_the_innermost_last():
    told = []

    def look():
        while not told or "in join" not in told[-1]:  # the main thread may still be starting this one
            told.append(main_thread())

    def ask():
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()  # here the main thread is

    deep(3, ask)
    lines = told[-1].splitlines()
    where = next(number for number, line in enumerate(lines) if line.endswith("in ask"))
    assert __file__ in lines[where]
    assert lines[where + 1] == "  thread.join()  # here the main thread is"
    assert lines[where - 2].endswith("in deep")
    assert lines[where + 2].endswith("in join")


def test_a_deep_stack_keeps_its_innermost_frames_and_is_bounded():
    text = deep(300, main_thread)
    lines = text.splitlines()
    assert lines[0].startswith("... ")
    assert lines[0].endswith(" more")
    assert len(lines) == 1 + 2 * MOST_FRAMES
    assert lines[-2].endswith("in main_thread")
    assert max(map(len, lines)) <= LONGEST_LINE


def test_an_order_to_tell_stacks_is_answered_though_the_main_thread_is_busy():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        control = Control(f"127.0.0.1:{listener.getsockname()[1]}")
        control.hello(Hello("token", 5, "n1", 0, 1, 0, 0, 0, (0,), 1, ""))
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as lines:
            assert isinstance(decode(next(lines)), Hello)
            connection.sendall(encode(Order("stacks", "test")))
            stack = decode(next(lines))  # the main thread is here, and takes no orders
            assert isinstance(stack, Stack)
            assert (stack.rank, stack.step) == (5, 0)
            assert "in test_an_order_to_tell_stacks" in stack.text
            assert control.take_order() is None
        control.close()


@pytest.mark.mcore
def test_a_hanging_rank_and_its_peers_in_a_collective_tell_where_they_are(start_ranks, tiny_job):
    ranks = start_ranks(tiny_job(parallel={"pipeline": 2}), 2, environment={"TRIMTAB_INJECT": "hang:rank=1,step=3"})
    ranks.until(lambda messages: sum(isinstance(message, StepReport) for message in messages) == 4, timeout=180)
    told = 0
    stacks = {}
    waits = "in forward_backward_pipelining"
    while "in _hang" not in stacks.get(1, "") or waits not in stacks.get(0, ""):  # they may be on their way
        ranks.order("stacks")
        told += 2
        ranks.until(
            lambda messages, told=told: sum(isinstance(message, Stack) for message in messages) == told, timeout=180
        )
        stacks = {message.rank: message.text for message in ranks.messages if isinstance(message, Stack)}
    assert all(message.step == 2 for message in ranks.messages if isinstance(message, Stack))

    ranks.processes[1].send_signal(signal.SIGUSR2)  # what is told of it goes to stderr, and it hangs on
    ranks.processes[1].terminate()
    stderr = ranks.directory / "1.stderr"
    deadline = threading.Event()
    for _ in range(100):
        if "in _hang" in stderr.read_text():
            break
        deadline.wait(0.1)
    assert "in _hang" in stderr.read_text()
    assert ranks.processes[1].poll() is None  # a hang has no ear for SIGTERM
    for process in ranks.processes:
        process.kill()
