import dataclasses
import io
import re

import numpy as np
import pytest
from rich.console import Console

from trimtab.protocol import Stack
from trimtab.report import terminal
from trimtab.report.chain import linked, run_of
from trimtab.report.figures import key_figures
from trimtab.report.orders import became, changes, stood_still, why
from trimtab.report.summarize import summarize
from trimtab.report.summary import Attempt
from trimtab.stacks import stack_text
from trimtab_slurm.contents import Event

HOSTILE = "\x1b[31m<script>alert(1)</script>\x1b]0;owned\x07\r\n[bold]x[/bold] :smile: \u202ez"


def shown(summary):
    output = io.StringIO()
    terminal.show(summary, output)
    return output.getvalue()


def hostile(profile, trimmed):
    """The profile with hostile text wherever a job or its user can put text."""
    training = trimmed(profile, step=11).training
    orders = {
        name: np.array([HOSTILE] * 2) if column.dtype.kind == "U" else column
        for name, column in training.orders.items()
    }
    stack = Event(profile.start_seconds, "stack", stack_text(Stack(0, 1, HOSTILE)))
    training = dataclasses.replace(
        training,
        attributes=profile.training.attributes | {"outcome": HOSTILE, "exit_code": 3},
        events=(Event(profile.start_seconds + 1, HOSTILE, HOSTILE), stack),
        orders=orders,
    )
    device = dataclasses.replace(profile.nodes[0].devices[0], model=HOSTILE, kind="gpu")
    node = dataclasses.replace(profile.nodes[0], node=HOSTILE, devices=(device,))
    return dataclasses.replace(profile, user=HOSTILE, cluster=HOSTILE, training=training, nodes=(node,))


def with_gpus(profile):
    """The profile with GPUs for devices, in the ranks' table too."""

    def uuid(name):
        return f"GPU-{int(name.removeprefix('cpu-')):08x}-7b8f-41f2-9c7e-0a1b2c3d4e5f"

    def gpu(device):
        bits = np.repeat([0.0, 4.0], 30)
        figures = {
            "sm_active_ratio": np.full(60, 0.42),
            "power_watts": np.full(60, 612.4),
            "throttle_reasons_bits": bits,
        }
        samples = {**device.samples, **figures}
        return dataclasses.replace(device, uuid=uuid(device.uuid), kind="gpu", model="NVIDIA H100", samples=samples)

    nodes = [dataclasses.replace(node, devices=tuple(map(gpu, node.devices))) for node in profile.nodes]
    ranks = profile.training.ranks | {"device": np.array([uuid(name) for name in profile.training.ranks["device"]])}
    training = dataclasses.replace(profile.training, ranks=ranks)
    return dataclasses.replace(profile, nodes=tuple(nodes), training=training)


def test_it_says_what_happened_what_it_cost_and_what_to_change(profile):
    text = shown(summarize(profile))
    assert text.startswith("Job 42 finished: trained to step 30\n")
    order = ["Imbalance", "17.2%", "Cost of imbalance", "3.3 s", "What to change", "Stages", "Devices", "Events"]
    positions = [text.index(part) for part in order]
    assert positions == sorted(positions)
    assert re.search(r"0 +200 +400 +600 +60\.0% +1\.0 GiB +0-3 \+ embedding", text)
    assert re.search(r"n2 +3 +processes of task 1 +48\.6% +74\.7% +400 MiB +100\.0%", text)


def test_no_escape_sequence_where_the_output_is_no_terminal(profile):
    assert "\x1b" not in shown(summarize(profile))


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("kind", ["few", "many", "GPUs", "trimmed"])
def test_no_line_is_wider_than_the_terminal_and_no_word_is_cut(profile, profiles, monkeypatch, width, kind):
    if kind == "many":
        profile = profiles.make(tensor=4, pipeline=4, data=4, layers=32, ranks_per_node=8)
    if kind == "GPUs":
        profile = with_gpus(profile)
    if kind == "trimmed":
        profile = profiles.trimmed(profile, step=11)
    monkeypatch.setattr("trimtab.terminal.PLAIN_WIDTH", width)
    text = shown(summarize(profile))
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    used = ("used", "SM", "power", "slowed") if kind == "GPUs" else ("mean", "max")
    for word in ("forward", "backward", "compute", "memory", "layers", "LM head", "covered", *used):
        assert word in text


def test_of_many_devices_the_least_used_are_shown_and_the_rest_is_told(profiles):
    text = shown(summarize(profiles.make(tensor=4, pipeline=4, data=4, layers=32, ranks_per_node=8)))
    assert text.count("processes of task") == terminal.MOST_ROWS
    assert "32 devices that were used more are in --html and --json" in text


def test_of_gpus_power_throttling_and_what_events_call_them_are_shown(profile):
    devices = shown(summarize(with_gpus(profile))).partition("Devices (NVIDIA H100)")[2]
    assert re.search(r"node +rank +device +used +SM +memory +power +slowed +covered", devices)
    row = r"n2 +3 +gpu 1, GPU-00000003 +48\.6% +42\.0% +400 MiB +612 W +50\.0% +100\.0%"
    assert re.search(row, devices)


def test_of_many_events_those_that_matter_are_shown(profile):
    start = profile.start_seconds
    routine = [Event(start + second, "sampler", "started, one sample in 1 s") for second in range(40)]
    grave = [Event(start, "xid", "XID 79"), Event(start + 10, "fault", "lost"), Event(start + 20, "throttle", "capped")]
    silent = [Event(start + 50, "sampler", "ended without a word: killed, or the node went down")]
    node = dataclasses.replace(profile.nodes[0], events=tuple(routine + grave + silent))
    text = shown(summarize(dataclasses.replace(profile, nodes=(node,)))).partition("Events")[2]
    places = [text.index(part) for part in ("XID 79", "lost", "capped", "ended without")]
    assert places == sorted(places)
    assert text.count("started") == terminal.MOST_ROWS - 5  # and a checkpoint
    assert "13 more events are in --html and --json" in text


def test_text_of_a_job_cannot_drive_the_terminal(profile, profiles):
    output = io.StringIO()
    terminal.show(summarize(hostile(profile, profiles.trimmed)), output)
    text = output.getvalue()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    assert "[bold]x[/bold] :smile:" in text  # neither markup nor emoji: just text
    assert "owned" not in text


def test_text_of_a_job_cannot_drive_a_terminal_with_colors(profile, profiles, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    output = io.StringIO()
    terminal.show(summarize(hostile(profile, profiles.trimmed)), output)
    left = re.sub(r"\x1b\[[0-9;]*m", "", output.getvalue())  # rich's own colors
    assert Console(file=output).is_terminal
    assert "\x1b" not in left
    assert "\x07" not in left
    assert "\x1b[31m<" not in output.getvalue()


def test_no_data_is_shown_with_its_reason(profile):
    text = shown(summarize(dataclasses.replace(profile, nodes=())))
    assert "no data" in text
    assert "the node left no record" in text
    assert "0.0%" not in text.partition("Devices")[2]


def test_orders_say_what_why_and_what_they_brought(profile, profiles):
    text = shown(summarize(profiles.trimmed(profile, step=21)))
    told = text.partition("What trimtab did")[2]
    assert re.search(r"1  step 21  move layers: 4\|4 -> 5\|3 \(carried out\)\n", told)
    assert "A step took 1,500 ms before, 1,180 ms expected, 1,200 ms measured after; training" in told
    assert re.search(r"stood still for 0\.25 s, 3 MiB moved\.", told)
    assert re.search(
        r"2  step 26  move microbatches: 8 \(refused: 8 microbatches do not fit\)\n +there is one replica\n", told
    )


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("layers 5|1, microbatches 8", "layers 3|3, microbatches 8", "layers 5|1 -> layers 3|3"),
        ("layers 4|4, microbatches 8|8", "layers 4|4, microbatches 9|7", "microbatches 8|8 -> microbatches 9|7"),
        ("layers 4|4, microbatches 8", "layers 4|4, microbatches 8, recomputed 0|2", "recomputed 0|2"),
        ("", "layers 3|3, microbatches 8", "layers 3|3, microbatches 8"),
        (
            "layers 4|4, microbatches 8",
            "without n2, on 3 nodes",
            "layers 4|4, microbatches 8 -> without n2, on 3 nodes",
        ),
        ("n1, n2", "n1", "n1, n2 -> n1"),
        ("", "", ""),
    ],
)
def test_of_an_order_what_stays_is_left_out(profile, profiles, before, after, told):
    order = summarize(profiles.trimmed(profile, step=21)).training.orders[0]
    assert changes(dataclasses.replace(order, before=before, after=after)) == told


def test_the_kind_of_an_order_is_not_said_twice_and_a_short_pause_is_not_nothing(profile, profiles):
    order = summarize(profiles.trimmed(profile, step=21)).training.orders[0]
    order = dataclasses.replace(order, reason="move layers: saves 4.9 s of 33.2 s", cost_seconds=0.046)
    assert why(order) == "saves 4.9 s of 33.2 s"
    assert stood_still(order) == "0.05 s"
    assert stood_still(dataclasses.replace(order, cost_seconds=61.0)) == "1 min 01 s"
    assert stood_still(dataclasses.replace(order, cost_seconds=None)) == "-"


@pytest.mark.parametrize(
    ("kind", "outcome", "number", "told"),
    [
        ("run on fewer nodes", "given", 1, "given: see attempt 2"),
        ("run on fewer nodes", "given", 2, "given"),
        ("run on fewer nodes", "told only (dry run)", 1, "told only (dry run)"),
        ("move layers", "given", 1, "given"),
    ],
)
def test_what_a_restart_brought_is_the_next_attempts_to_say(profile, profiles, kind, outcome, number, told):
    summary = summarize(profiles.trimmed(profile, step=21))
    attempts = tuple(Attempt(each, 0.0, 1.0, "stopped", "", "") for each in (1, 2))
    order = dataclasses.replace(summary.training.orders[0], kind=kind, outcome=outcome)
    assert became(order, dataclasses.replace(summary, attempts=attempts, attempt_number=number)) == told


def test_settings_are_compared_and_the_headline_says_which_steps_it_is_of(profile, profiles):
    text = shown(summarize(profiles.trimmed(profile, step=21)))
    assert "A step takes 20.0% less time than at first: 1,200 ms instead of 1,500 ms" in text
    assert re.search(r"1 +1-20 +1,500 ms +17\.2% +2\.2 s +4\|4 +8 +0\|0\n", text)
    assert re.search(r"2 +21-30 +1,200 ms +3\.4% +0\.2 s +5\|3 +8 +0\|1\n", text)
    assert "median of steps 21-30" in text
    assert "0.9 device-seconds, 1.8% of steps 21-30; estimated" in text  # not the sum over both
    assert re.search(r"Imbalance +3\.4%  stage 0 is the slowest; the trigger is 10%; of steps 21-30", text)


def test_a_cost_is_told_in_device_hours_from_a_device_minute_on(profile):
    training = summarize(profile).training
    for hours, told in ((0.25, "0.25 device-hours, "), (4.29e-05, "0.2 device-seconds, ")):
        cost = dataclasses.replace(training.cost, imbalance_device_hours=hours)
        notes = {figure.name: figure.note for figure in key_figures(dataclasses.replace(training, cost=cost))}
        assert notes["Cost of imbalance"].startswith(told)


def test_where_ranks_hung_is_told_by_its_last_frame(profile):
    texts = ["File a\n    wait()", "File b\n    read()", "File a\n    wait()"]
    events = tuple(Event(1.0, "stack", stack_text(Stack(rank, 9, text))) for rank, text in enumerate(texts))
    told = dataclasses.replace(profile, training=dataclasses.replace(profile.training, events=events))
    text = shown(summarize(told)).partition("Where the ranks were when they hung\n")[2]
    assert text == "   1 rank  1: File b read()\n  2 ranks  0,2: File a wait()\n"


@pytest.mark.parametrize(
    ("exit_code", "sentence", "line"),
    [
        (75, "stopped by SIGUSR1 at step 9 of 30", "Job 42 stopped by SIGUSR1 at step 9 of 30 (exit code 75)"),
        (0, "trained to step 30", "Job 42 finished: trained to step 30"),
        (
            143,
            "ended by SIGTERM before all ranks had saved",
            "Job 42 failed: ended by SIGTERM before all ranks had saved",
        ),
    ],
)
def test_the_state_is_not_said_twice(profiles, exit_code, sentence, line):
    assert shown(summarize(profiles.make(exit_code=exit_code, outcome=sentence))).startswith(line)


def test_a_job_without_training_was_recorded(profile):
    text = shown(summarize(dataclasses.replace(profile, training=None)))
    assert text.startswith("Job 42 recorded on 2 nodes; the profile holds no training part\n")


def test_the_chain_of_attempts_is_listed(profile):
    attempts, chain = linked(
        [
            Attempt(
                1, profile.start_seconds - 500, 90.0, "failed", "rank 1 failed: no", "a.h5", ("n1",), "TP1 × PP2 × DP1"
            ),
            Attempt(2, None, None, "damaged", "b.h5 is no profile", "b.h5"),
            Attempt(3, profile.start_seconds, 60.0, "finished", "trained to step 30", "c.h5"),
        ],
        [run_of(profile.training), None, run_of(profile.training)],
    )
    listed = shown(dataclasses.replace(summarize(profile), attempts=attempts, chain=chain)).partition("Attempts")[2]
    assert re.search(r"1 +2026-05-28 20:18:20 +1 min 30 s +1-30 +failed: rank 1 failed: no\n", listed)
    assert "1 node: n1; TP1 × PP2 × DP1; 30 steps lost" in " ".join(listed.split())
    assert re.search(r"2 +- +- +- +damaged: b.h5 is no profile\n", listed)
    assert "Goodput 8.0%: 45.0 s of useful steps in 9 min 20 s" in listed
    assert "Attempt 2 cannot be read" in listed
    assert re.search(r"73\.2%  between attempts\n", listed)


def test_a_locale_that_lacks_a_letter_is_no_error(profile):
    raw = io.BytesIO()
    output = io.TextIOWrapper(raw, encoding="ascii")
    terminal.show(summarize(profile), output)
    output.flush()
    assert raw.getvalue().startswith(b"Job 42 finished")
