"""Long waits at the start are told, with who is at what."""

import time
from types import SimpleNamespace

import pytest

from trimtab.protocol import JobError, job_from_dict
from trimtab_megatron import patience, run
from trimtab_megatron.identity import Identity

WHO = Identity(3, 8, 1, "n2")


def test_what_takes_long_is_told_ever_more_seldom_until_it_ends(monkeypatch, capsys):
    monkeypatch.setattr(patience, "PATIENCE_SECONDS", 0.1)
    heard = []
    with patience.told(WHO, "opening the data", heard.append):
        while len(heard) < 3:  # after 0.1, 0.2 and 0.4 s
            time.sleep(0.01)
    time.sleep(0.5)  # the next would come after 0.8 s
    assert heard == ["rank 3 (node n2) has been opening the data for 0 min"] * 3
    assert capsys.readouterr().err.splitlines() == [f"trimtab: {text}" for text in heard]


def test_what_is_quick_is_not_mentioned(monkeypatch, capsys):
    monkeypatch.setattr(patience, "PATIENCE_SECONDS", 0.2)
    with patience.told(WHO, "opening the data", pytest.fail):
        pass
    time.sleep(0.4)
    assert capsys.readouterr().err == ""


def test_a_rank_that_opens_its_data_slowly_and_one_that_waits_for_it_say_so(monkeypatch):
    monkeypatch.setattr(patience, "PATIENCE_SECONDS", 0.05)
    heard = []
    control = SimpleNamespace(send=heard.append)

    def fail_late(*_):
        time.sleep(0.1)
        while len(heard) < expected:
            time.sleep(0.01)
        raise JobError("data.path", "x", "cannot be read")

    world = SimpleNamespace(identity=WHO, same_as_rank_0=fail_late)
    for expected, opens, doing in (
        (1, fail_late, "opening the data"),
        (2, lambda job: SimpleNamespace(fingerprint=""), "waiting for other ranks to open the data"),
    ):
        heard[:] = heard[: expected - 1]
        monkeypatch.setattr(run, "open_dataset", opens)
        with pytest.raises(JobError):
            run.prepare(job_from_dict({}), world, control)
        assert (heard[-1].rank, heard[-1].kind) == (3, "slow")
        assert heard[-1].text.startswith(f"rank 3 (node n2) has been {doing} for ")
