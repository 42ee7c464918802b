"""Orders, and what becomes of the other ranks when one ends."""

import os
import signal
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from trimtab.protocol import Done, Failed, Hello, Order, Saved, StepReport, decode, encode, job_from_dict
from trimtab_megatron import control as connection_of_rank
from trimtab_megatron import train
from trimtab_megatron.__main__ import _is_lost_peer
from trimtab_megatron.control import Control
from trimtab_megatron.identity import RankError

ENDS_SECONDS = 30
"""How soon the others end; they notice at once, but have to be given a core of a busy machine."""


@pytest.mark.mcore
def test_an_order_to_stop_saves_at_the_same_step_on_all_ranks(start_ranks, tiny_job, tmp_path):
    train = {"checkpoint_directory": str(tmp_path), "steps": 10_000}
    ranks = start_ranks(tiny_job(train=train, parallel={"pipeline": 2}), 2)
    ranks.until(lambda messages: any(isinstance(message, StepReport) for message in messages))
    ranks.order("checkpoint")
    ranks.until(lambda messages: any(isinstance(message, Saved) for message in messages))
    ranks.order("stop")
    ended = ranks.end().succeeded()
    (step,) = {done.step for done in ended.all(Done)}
    assert 1 < step < 10_000
    assert (tmp_path / f"step-{step:08d}" / "complete.json").is_file()
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.mcore
def test_an_order_that_comes_during_the_start_is_carried_out_before_the_first_step(start_ranks, tiny_job, tmp_path):
    ranks = start_ranks(tiny_job(train={"steps": 10_000, "checkpoint_directory": str(tmp_path)}), 1)
    ranks.order("stop")
    ended = ranks.end().succeeded()
    assert ended.all(Done)[0].step < 100


@pytest.mark.mcore
def test_a_killed_rank_ends_the_others_which_name_a_lost_peer(start_ranks, tiny_job):
    ranks = start_ranks(tiny_job(train={"steps": 10_000}, parallel={"tensor": 2, "pipeline": 2}), 4)
    ranks.until(lambda messages: any(isinstance(message, StepReport) for message in messages), timeout=120)
    os.kill(ranks.processes[2].pid, signal.SIGKILL)
    killed = time.monotonic()
    ended = ranks.end()
    assert time.monotonic() - killed < ENDS_SECONDS
    assert ended.exit_codes == [1, 1, -signal.SIGKILL, 1]
    failed = {message.rank: message for message in ended.all(Failed)}
    assert sorted(failed) == [0, 1, 3]
    assert all(message.peer_lost and message.step > 0 for message in failed.values()), failed


@pytest.mark.mcore
def test_a_provider_that_is_not_there_ends_all_ranks_with_its_name(start_ranks, tiny_job):
    ended = start_ranks(tiny_job(data={"provider": "nowhere:samples"}), 2).end()
    assert ended.exit_codes == [1, 1]
    failed = ended.all(Failed)
    assert all("data.provider" in message.error and "nowhere" in message.error for message in failed)
    assert not any(message.peer_lost for message in failed)
    assert all(message.bad_input for message in failed)
    assert not any("data.provider" in text or "Traceback" in text for text in ended.stderr), "the wrapper says it, once"
    assert ended.seconds < 2 * ENDS_SECONDS


@pytest.mark.mcore
def test_a_rank_that_no_wrapper_hears_says_itself_what_input_is_bad(start_ranks, tiny_job):
    tables = tiny_job(data={"provider": "nowhere:samples"})
    ended = start_ranks(tables, 1, environment={"TRIMTAB_CONTROL": f"127.0.0.1:{_closed_port()}"}).end()
    assert ended.exit_codes == [1]
    (said,) = [line for line in ended.stderr[0].splitlines() if "data.provider" in line]
    assert said.startswith("trimtab: rank 0 (node ")
    assert "Traceback" not in ended.stderr[0]


def _closed_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.mark.mcore
def test_a_corpus_that_one_rank_cannot_read_ends_all_ranks(start_ranks, tiny_job):
    of_rank = {1: tiny_job(data={"path": "/nowhere/text"})}
    ended = start_ranks(tiny_job(), 2, of_rank=of_rank).end()
    assert ended.exit_codes == [1, 1]
    failed = {message.rank: message for message in ended.all(Failed)}
    assert "/nowhere/text" in failed[1].error
    assert [failed[rank].peer_lost for rank in (0, 1)] == [True, False]
    assert [failed[rank].bad_input for rank in (0, 1)] == [False, True]
    assert not any("Traceback" in text for text in ended.stderr)
    assert ended.seconds < 2 * ENDS_SECONDS


@pytest.mark.mcore
def test_ranks_that_hold_different_text_say_which(start_ranks, tiny_job, tmp_path):
    (tmp_path / "other.txt").write_text("Another text.\n" * 1000)
    of_rank = {1: tiny_job(data={"path": str(tmp_path / "other.txt")})}
    ended = start_ranks(tiny_job(), 2, of_rank=of_rank).end()
    assert ended.exit_codes == [1, 1]
    for message in ended.all(Failed):
        assert message.error.startswith("the data is not that of rank 0")
        assert "on rank 1 (node " in message.error
        assert message.bad_input


def test_an_error_that_was_raised_for_a_lost_peer_counts_as_one():
    own = RankError("the reshape could not be carried out")
    assert not _is_lost_peer(own)
    own.__cause__ = RuntimeError("Connection closed by peer [10.0.0.1]:4242")
    assert _is_lost_peer(own)


HELLO = Hello("token", 0, "n1", 0, 1, 0, 0, 0, (0,), 1, "")


def test_messages_wait_for_hello_which_goes_first():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        control = Control(f"127.0.0.1:{listener.getsockname()[1]}")
        control.send(Done(0, 3))
        control.hello(HELLO)
        control.close()
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as lines:
            assert lines.readlines() == [encode(HELLO), encode(Done(0, 3))]


def test_without_a_wrapper_nothing_is_sent_and_nothing_waits():
    control = Control(None)
    control.hello(HELLO)
    control.send(Done(0, 3))
    assert control.take_order() is None
    control.close()


def test_a_wrapper_that_goes_away_is_mentioned_once(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        control = Control(f"127.0.0.1:{listener.getsockname()[1]}")
        control.hello(HELLO)
        connection, _ = listener.accept()
        connection.recv(10)  # the rest is unread: closing resets the connection
        connection.close()
    for step in range(100):
        control.send(Done(0, step))
        time.sleep(0.001)
    control.close()
    assert capsys.readouterr().err.count("training goes on") == 1


def test_a_wrapper_that_does_not_read_never_makes_training_wait(monkeypatch):
    monkeypatch.setattr("trimtab_megatron.control.LONGEST_QUEUE", 10)
    monkeypatch.setattr("trimtab_megatron.control.CLOSE_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        control = Control(f"127.0.0.1:{listener.getsockname()[1]}")
        control.hello(HELLO)
        sent = threading.Event()

        def send() -> None:
            for step in range(20_000):
                control.send(Done(0, step))
            control.close()
            sent.set()

        threading.Thread(target=send, daemon=True).start()
        assert sent.wait(20)


@pytest.fixture
def impatient(monkeypatch):
    """Every wait of the connection is short."""
    for name in ("RETRY_SECONDS", "LOOK_SECONDS", "HOLDS_SECONDS"):
        monkeypatch.setattr(connection_of_rank, name, 0.02)


def until(condition):
    deadline = time.monotonic() + 20
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return value


@pytest.mark.usefixtures("impatient")
def test_a_lost_connection_is_made_again_with_hello_first_and_orders_arrive(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        control = Control(f"127.0.0.1:{listener.getsockname()[1]}")
        control.hello(HELLO)
        for attempt in range(3):
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as lines:
                assert next(lines) == encode(HELLO)
                control.send(Done(0, attempt))
                assert next(lines) == encode(Done(0, attempt))
                connection.sendall(encode(Order("probe", f"of connection {attempt}")))
                assert until(control.take_order).reason == f"of connection {attempt}"
                assert control.connected
                if attempt:
                    until(lambda: "is there again" in capsys.readouterr().err)
            until(lambda: not control.connected)
        connection, _ = listener.accept()
        control.close()
        connection.close()
    assert "the wrapper has closed it): training goes on" in capsys.readouterr().err


@pytest.mark.usefixtures("impatient")
def test_what_is_said_while_there_is_no_connection_waits_for_the_next_one(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        control = Control(f"127.0.0.1:{port}")
        control.hello(HELLO)
        listener.accept()[0].close()
    until(lambda: "training goes on" in capsys.readouterr().err)
    for step in range(3):
        control.send(Done(0, step))
    with socket.create_server(("127.0.0.1", port)) as listener:
        connection, _ = listener.accept()
        control.close()
        with connection, connection.makefile("rb") as lines:
            assert [decode(line) for line in lines] == [HELLO, *(Done(0, step) for step in range(3))]


def test_an_order_to_stop_comes_before_those_that_wait_and_ends_them():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        control = Control(f"127.0.0.1:{listener.getsockname()[1]}")
        control.hello(HELLO)
        connection, _ = listener.accept()
        with connection:
            for kind in ("probe", "reshape", "checkpoint"):
                connection.sendall(encode(Order(kind, "test")))
            assert until(control.take_order).kind == "probe"
            connection.sendall(encode(Order("stop", "test")))
            until(lambda: control._orders.qsize() + len(control._arrived) == 3)
            assert control.take_order().kind == "stop"
            assert control.take_order() is None
            control.close()


class Boundary:
    """A run of which only what passes between its steps is real."""

    def __init__(self, orders, minutes=30.0, connected=True):
        self.job = job_from_dict({"train": {"steps": 100, "longest_checkpoint_minutes": minutes}})
        self.orders, self.done = list(orders), []
        self.control = SimpleNamespace(connected=connected, take_order=self.take_order)
        self.world = SimpleNamespace(
            identity=SimpleNamespace(rank=0),
            pipeline_rank=0,
            agree_on_order=lambda order: order,
            faults=SimpleNamespace(before_step=lambda step: None),
        )
        self.progress = SimpleNamespace(step=0)
        self.engine = SimpleNamespace(chunks=[])
        self.setting = SimpleNamespace(recomputed_layers=[0])
        self.checkpoints, self.save_tried_seconds = object(), time.monotonic()

    def take_order(self):
        return self.orders.pop(0) if self.orders else None


def test_all_orders_that_have_come_are_carried_out_before_the_next_step(monkeypatch):
    run = Boundary([Order("probe", ""), Order("checkpoint", ""), Order("stop", ""), Order("probe", "too late")])

    def step(run):
        run.progress.step += 1
        run.done.append("step")

    monkeypatch.setattr(train, "obey", lambda run, order: run.done.append(order.kind))
    monkeypatch.setattr(train, "save", lambda run, last=False: run.done.append("last save"))
    monkeypatch.setattr(train, "take_step", step)
    train.train(run)
    assert run.done == ["probe", "checkpoint", "stop", "last save"]


def test_a_rank_without_a_wrapper_has_a_checkpoint_saved_when_the_job_wants_one_at_the_least():
    run = Boundary([], minutes=10.0, connected=False)
    assert train.next_order(run) is None
    run.save_tried_seconds -= 601
    assert train.next_order(run).kind == "checkpoint"
    run.control.connected = True
    assert train.next_order(run) is None
    run.control.connected, run.checkpoints = False, None
    assert train.next_order(run) is None


@pytest.mark.mcore
def test_ranks_that_no_wrapper_listens_to_save_by_themselves(start_ranks, tiny_job, tmp_path):
    train = {"checkpoint_directory": str(tmp_path), "steps": 20, "longest_checkpoint_minutes": 1e-4}
    ended = start_ranks(tiny_job(train=train), 1, environment={"TRIMTAB_CONTROL": "127.0.0.1:1"}).end()
    assert ended.exit_codes == [0], ended.stderr
    assert ended.stderr[0].count("no control connection") == 1
    earlier, last = sorted(save.name for save in tmp_path.iterdir())
    assert (earlier, last) == ("step-00000019", "step-00000020")
