"""All attempts of a job as one run."""

import dataclasses
import io
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.report.chain import Run, linked
from trimtab.report.figures import key_figures
from trimtab.report.find import load
from trimtab.report.orders import earlier_orders
from trimtab.report.series import MOST_POINTS
from trimtab.report.summary import Attempt, to_json
from trimtab.report.terminal import show
from trimtab_slurm import profile as profile_file


def run(first, last, *, start=0.0, seconds=2.0, offset=0.0, saves=()):
    """Steps of so many seconds each, the first begun 5 s after `start`; the loss of a step is its number."""
    step = np.arange(first, last + 1)
    ended = start + 5 + seconds * np.arange(1, len(step) + 1)
    return Run(step, step + offset, ended, np.full(len(step), seconds), np.reshape(saves, (-1, 2)).astype(float))


def attempt(number, start, seconds, state="stopped"):
    return Attempt(number, start, seconds, state, "", f"{number}.h5")


@pytest.fixture
def chain():
    """Steps 1-10, 8-15, 16-20; 10 s lie between the first two attempts, 3 s between the second and the third."""
    attempts = [attempt(1, 0.0, 30.0), attempt(2, 40.0, 25.0, "failed"), attempt(3, 68.0, 20.0, "finished")]
    runs = [
        run(1, 10, saves=[(19.5, 0.5)]),
        run(8, 15, start=40.0, offset=0.015, saves=[(62.5, 1.5)]),
        run(16, 20, start=68.0),
    ]
    return linked(attempts, runs)


def test_attempts_say_what_they_took_waited_for_repeated_and_lost(chain):
    attempts, _ = chain
    assert [(each.first_step, each.last_step) for each in attempts] == [(1, 10), (8, 15), (16, 20)]
    assert [each.waited_seconds for each in attempts] == [None, 10.0, 3.0]
    assert [each.repeated_steps for each in attempts] == [0, 3, 0]
    assert [each.lost_steps for each in attempts] == [3, 0, 0]


def test_the_curve_has_each_step_once_with_the_later_attempts_value(chain):
    _, found = chain
    assert found.loss.step == tuple(range(1, 21))
    assert found.loss.loss[6:8] == (7.0, 8.015)
    ((repeated),) = found.repeated
    assert (repeated.attempt, repeated.step, repeated.loss) == (1, (8, 9, 10), (8.0, 9.0, 10.0))
    assert found.resumed_steps == ((2, 8), (3, 16))
    assert found.largest_loss_difference == pytest.approx(0.015 / 8.015)
    assert found.notes == ()


def test_the_wall_time_of_a_chain_is_accounted_for(chain):
    goodput = chain[1].goodput
    assert goodput.wall_seconds == 88.0
    assert goodput.useful_seconds == 40.0  # 20 steps of 2 s
    assert goodput.repeated_seconds == 6.0  # 3 steps
    assert goodput.saving_seconds == 2.0
    assert goodput.waiting_seconds == 13.0
    # 5 s before each first step; after the last ones 5 s, 4 s of which 1.5 s went into a save, and 5 s.
    assert goodput.starting_seconds == 15.0 + 5.0 + 2.5 + 5.0
    assert goodput.other_seconds == 0.0  # the first save began and ended within a step's time here
    assert goodput.ratio == pytest.approx(40 / 88)


def test_steps_that_no_attempt_has_are_a_gap_and_are_said():
    _, found = linked([attempt(1, 0.0, 30.0), attempt(2, 40.0, 30.0)], [run(3, 5), run(9, 10, start=40.0)])
    assert found.notes == ("5 steps recorded in no attempt of this job: 1-2,6-8",)
    assert found.loss.step == (3, 4, 5, 8, 9, 10)
    assert found.loss.loss == (3.0, 4.0, 5.0, None, 9.0, 10.0)
    assert found.largest_loss_difference is None


def test_an_attempt_that_cannot_be_read_and_one_without_training_are_said():
    attempts = [attempt(1, 0.0, 30.0), Attempt(2, None, None, "damaged", "cut", "2.h5"), attempt(3, 60.0, 10.0)]
    found_attempts, found = linked(attempts, [run(1, 5), None, None])
    assert found.notes == (
        "attempt 2 cannot be read: its steps are missing here, and its time counts as waiting",
        "attempt 3 has no training recorded: its time counts as starting",
    )
    assert found_attempts[1].waited_seconds is None
    assert (found.goodput.waiting_seconds, found.goodput.starting_seconds) == (30.0, 5.0 + 15.0 + 10.0)


def test_one_attempt_is_no_chain():
    (alone,), found = linked([attempt(1, 0.0, 30.0)], [run(1, 10)])
    assert found is None
    assert (alone.first_step, alone.last_step) == (1, 10)


def test_a_chain_without_any_step_has_no_goodput():
    _, found = linked([attempt(1, 0.0, 30.0), attempt(2, 40.0, 30.0)], [None, None])
    assert found.goodput.ratio == 0.0
    assert found.loss.step == ()


def test_a_long_chain_draws_a_bounded_number_of_points():
    runs = [run(1 + 900 * place, 1000 + 900 * place, start=3000.0 * place) for place in range(30)]
    attempts = [attempt(place + 1, 3000.0 * place, 2100.0) for place in range(30)]
    _, found = linked(attempts, runs)
    assert len(found.loss.step) <= MOST_POINTS
    assert sum(len(curve.step) for curve in found.repeated) <= MOST_POINTS


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 20), st.floats(0, 50)), min_size=2, max_size=5))
def test_each_step_counts_once_and_all_time_is_somewhere(spans):
    attempts, runs, clock = [], [], 0.0
    for number, (first, more, wait) in enumerate(spans, start=1):
        clock += wait
        runs.append(run(first, first + more, start=clock, offset=number / 1000))
        attempts.append(attempt(number, clock, 5.0 + 2.0 * (more + 1) + 1.0))
        clock += attempts[-1].duration_seconds
    found_attempts, found = linked(attempts, runs)
    taken = {step for own in runs for step in own.step.tolist()}
    again = sum(len(own.step) for own in runs) - len(taken)
    assert sum(each.repeated_steps for each in found_attempts) == again
    assert sum(each.lost_steps for each in found_attempts) == again
    last = {step: number for number, own in enumerate(runs, start=1) for step in own.step.tolist()}
    drawn = {step: loss for step, loss in zip(found.loss.step, found.loss.loss, strict=True) if loss is not None}
    assert drawn == {step: round(step + last[step] / 1000, 4) for step in taken}
    goodput = found.goodput
    assert goodput.useful_seconds == 2.0 * len(taken)
    parts = [value for name, value in dataclasses.asdict(goodput).items() if name not in ("wall_seconds", "ratio")]
    assert sum(parts) == pytest.approx(goodput.wall_seconds)  # rounding of sums of floats


@pytest.fixture
def root(tmp_path, profiles):
    """The profiles of a job that was requeued twice: it hung, then a rank died; two orders in the first attempt."""
    whole = profiles.make(steps=60, seconds=200.0, outcome="trained to step 60")
    attempts = [
        profiles.until(profiles.trimmed(whole, step=11), 30, 75, "stopped by SIGUSR1 at step 30 of 60"),
        profiles.until(profiles.resumed(whole, first_step=26, start=100.0, restart_count=1), 40, 3, "rank 3 vanished"),
        profiles.resumed(whole, first_step=41, start=200.0, restart_count=2),
    ]
    directory = tmp_path / "lab" / "42" / "parts"
    directory.mkdir(parents=True)
    for number, found in enumerate(attempts):
        profile_file.write(directory / f"training-{number}.h5", dataclasses.replace(found, nodes=()))
        for node in found.nodes:
            part = dataclasses.replace(found, nodes=(node,), training=None)
            profile_file.write(directory / f"{node.node}-{number}.h5", part)
    return tmp_path


def test_the_report_of_a_requeued_job_has_the_chain_as_one_run(root):
    (found,) = load("42", None, root)
    attempts, chain = found.summary.attempts, found.summary.chain
    assert [(each.state, each.first_step, each.last_step, each.lost_steps) for each in attempts] == [
        ("stopped", 1, 30, 5),
        ("failed", 26, 40, 0),
        ("finished", 41, 60, 0),
    ]
    assert {each.shape for each in attempts} == {"TP2 × PP2 × DP1"}
    assert [each.orders for each in attempts] == [1, 0, 0]
    assert {each.nodes for each in attempts} == {("n1", "n2")}
    assert chain.loss.step == tuple(range(1, 61))
    assert chain.largest_loss_difference == 0.0
    assert chain.notes == ()
    assert found.summary.attempt_number == 3


def test_every_attempt_of_a_chain_shows_the_same_chain(root):
    first, *others = load("42", "all", root)
    assert all(other.summary.chain == first.summary.chain for other in others)
    (finding, *_) = first.summary.findings
    assert finding.text == "Attempt 2 went on from what was saved."


def test_a_later_attempt_points_to_the_orders_of_earlier_ones(root):
    first, second, third = (recorded.summary for recorded in load("42", "all", root))
    assert earlier_orders(first) == ""
    for later in (second, third):
        assert earlier_orders(later) == (
            "Before this, attempt 1 carried out 1 order: trimtab report ... --attempt 1 shows what and why."
        )
    found = io.StringIO()
    show(third, found)
    assert "What trimtab did\n  Before this, attempt 1 carried out 1 order" in found.getvalue()


def test_the_first_loss_of_a_later_attempt_is_said_to_be_its_own(root):
    (found,) = load("42", None, root)
    notes = {figure.name: figure.note for figure in key_figures(found.summary.training)}
    assert notes["Loss"] == f"last step; {9 * 0.98**41:.4g} at this attempt's first"
    assert notes["Steps"] == "of 60; this attempt began at step 41"


def test_json_holds_the_chain(root):
    (found,) = load("42", None, root)
    chain = json.loads(to_json([found.summary]))["chain"]
    assert chain["loss"]["step"] == list(range(1, 61))
    assert chain["resumed_steps"] == [[2, 26], [3, 41]]
    assert 0 < chain["goodput"]["ratio"] < 1
