"""Faults made up on purpose: what the variable may say, whom it concerns, and that real ranks show it."""

import errno
import signal
import time
from statistics import median

import pytest

from trimtab.protocol import Failed, Notice, StepReport
from trimtab_megatron.identity import Identity, InputError
from trimtab_megatron.inject import VARIABLE, Fault, Faults, parse
from trimtab_megatron.stage_clock import FORWARD, StageClock

WHO = Identity(rank=3, world_size=8, local_rank=1, node="n2")


def test_a_list_of_faults_is_read():
    assert parse(
        "slow:node=n2,from_step=30,factor=1.6; outlier:probability=0.02,factor=5,seed=1;hang:rank=3,step=12;"
        "kill:rank=1,during=save;fail:rank=1,during=reshape,step=7;"
    ) == (
        Fault("slow", node="n2", from_step=30, factor=1.6),
        Fault("outlier", probability=0.02, factor=5.0, seed=1),
        Fault("hang", rank=3, step=12),
        Fault("kill", rank=1, during="save"),
        Fault("fail", rank=1, during="reshape", step=7),
    )
    assert parse("") == ()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("slwo:factor=2", "'slwo:factor=2': 'slwo' is no fault; did you mean slow?; choose from: slow, outlier, hang"),
        ("kill:rank=1,step=2;slow:factro=2", "'slow:factro=2': 'factro' is no key of slow; did you mean factor?"),
        ("slow:rank=1", "slow needs factor="),
        ("outlier:factor=2", "outlier needs probability="),
        ("slow:factor=2,factor=3", "factor is given twice"),
        ("slow:factor=0.5", "factor=0.5 is not from 1 to 1000"),
        ("slow:factor=nan", "factor=nan is not from 1 to 1000"),
        ("outlier:factor=2,probability=2", "probability=2 is not from 0 to 1"),
        ("slow:factor=fast", "factor=fast is not a number"),
        ("hang:rank=1.5,step=2", "rank=1.5 is not a whole number"),
        ("hang:rank=-1,step=2", "rank=-1 is negative"),
        ("hang:node=,step=2", "node is empty"),
        ("kill:rank=1", "kill needs step= or during="),
        ("kill:during=sav", "during=sav is no place; did you mean save?; choose from: save, load, reshape, move"),
        ("kill:during=load,step=3", "a load comes before the first step: leave step out"),
    ],
)
def test_what_is_no_fault_is_refused_with_the_entry_and_the_choices(text, reason):
    with pytest.raises(InputError) as refused:
        parse(text)
    assert reason in str(refused.value)
    assert str(refused.value).startswith("TRIMTAB_INJECT: ")


@pytest.mark.parametrize(
    ("selectors", "concerned"),
    [
        ("", True),
        ("node=n2,", True),
        ("node=n2,rank=3,stage=1,attempt=2,", True),
        ("node=n1,", False),
        ("rank=2,", False),
        ("stage=0,", False),
        ("attempt=0,", False),
    ],
)
def test_keys_select_ranks(selectors, concerned, monkeypatch):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    faults = Faults.of_rank(parse(f"slow:{selectors}factor=2"), WHO, stage=1)
    faults.before_step(1)
    assert faults.factor() == (2.0 if concerned else 1.0)


def test_steps_are_slowed_from_the_first_to_the_last_one_by_all_that_concerns_them():
    faults = Faults(parse("slow:from_step=3,to_step=5,factor=2;slow:from_step=5,factor=3"))
    factors = []
    for step in range(1, 8):
        faults.before_step(step)
        factors.append(faults.factor())
    assert factors == [1, 1, 2, 2, 6, 3, 3]


def test_outliers_are_the_same_steps_in_every_run_and_others_on_other_ranks():
    def outliers(rank):
        faults = Faults(parse("outlier:probability=0.1,factor=5,seed=1"), rank)
        found = []
        for step in range(1, 1001):
            faults.before_step(step)
            assert faults.lasting_factor() == 1.0
            if faults.factor() == 5.0:
                found.append(step)
        return found

    assert outliers(0) == outliers(0)
    assert outliers(0) != outliers(1)
    assert 60 < len(outliers(0)) < 140  # 100, give or take four deviations


def test_a_fault_comes_true_once_where_it_was_put():
    faults = Faults(parse("fail:step=3;fail:during=save,step=2;fail:during=move"))
    faults.before_step(1)
    faults.during("save")
    faults.before_step(2)
    with pytest.raises(OSError, match="injected") as full:
        faults.during("save")
    assert full.value.errno == errno.ENOSPC
    faults.during("save")
    faults.during("reshape")
    with pytest.raises(MemoryError, match="injected at move"):
        faults.during("move")
    with pytest.raises(MemoryError, match="injected at step"):
        faults.before_step(3)
    faults.before_step(3)


def test_what_is_timed_takes_the_factor_of_its_own_cpu_time():
    def timed(slow):
        clock = StageClock(False, slow)
        clock(FORWARD).start()
        began = time.process_time()
        while time.process_time() - began < 0.05:
            pass
        clock(FORWARD).stop()
        return clock.read().forward_seconds

    faults = Faults(parse("slow:factor=2;outlier:probability=1,factor=2"))
    faults.before_step(1)
    # CPU time counts in ticks of at most 4 ms where the kernel gives no better.
    assert timed(None) == pytest.approx(0.05, abs=0.01)
    assert timed(faults.slow) == pytest.approx(0.2, abs=0.04)
    assert timed(faults.slow_probe) == pytest.approx(0.1, abs=0.02)


def test_without_faults_timers_are_what_they_were():
    timer = object()
    assert Faults().slow(timer, False) is timer
    assert Faults().slow_probe(timer, False) is timer


@pytest.mark.mcore
def test_a_slowed_stage_is_seen_in_its_reports_by_the_factor_and_told(train_ranks, tiny_job):
    value = "outlier:stage=1,probability=0.5,factor=3"  # every other step: whatever else runs here slows both halves
    ended = train_ranks(tiny_job(parallel={"pipeline": 2}, train={"steps": 24}), 2, environment={VARIABLE: value})
    assert [notice.text for notice in ended.all(Notice) if notice.kind == "inject"] == [f"faults are injected: {value}"]
    (fault,) = parse(value)

    def compute(rank, slowed):
        return median(
            report.forward_seconds + report.backward_seconds
            for report in ended.all(StepReport)
            if report.rank == rank and report.step > 2 and fault.slows(report.step, 1) == slowed
        )

    # Ten steps or so each, of some 30 ms.
    assert compute(1, True) / compute(1, False) == pytest.approx(3, rel=0.3)
    assert compute(0, True) / compute(0, False) == pytest.approx(1, rel=0.3)


@pytest.mark.mcore
def test_a_killed_rank_and_one_that_fails_end_where_they_were_told_to(start_ranks, tiny_job):
    tables = tiny_job(parallel={"pipeline": 2})
    killed = start_ranks(tables, 2, environment={VARIABLE: "kill:rank=1,step=3"}).end()
    assert killed.exit_codes == [1, -signal.SIGKILL]
    assert max(report.step for report in killed.all(StepReport)) == 2

    failed = start_ranks(tables, 2, environment={VARIABLE: "fail:rank=1,step=3"}).end()
    assert failed.exit_codes == [1, 1]
    told = {message.rank: message for message in failed.all(Failed)}
    assert told[1].error == "MemoryError: out of memory (injected at step)"
    assert [told[rank].peer_lost for rank in (0, 1)] == [True, False]


@pytest.mark.mcore
def test_a_value_that_cannot_be_read_ends_all_ranks_before_anything_starts(start_ranks, tiny_job):
    ended = start_ranks(tiny_job(), 2, environment={VARIABLE: "slow:factor=0"}).end()
    assert ended.exit_codes == [1, 1]
    assert {message.error for message in ended.all(Failed)} == {
        "TRIMTAB_INJECT: 'slow:factor=0': factor=0 is not from 1 to 1000"
    }
    assert all(message.bad_input for message in ended.all(Failed))
