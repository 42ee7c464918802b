import dataclasses
import io
import re

import pytest
from rich.console import Console

from trimtab.report import terminal
from trimtab.report.summarize import summarize
from trimtab.report.summary import Attempt
from trimtab_slurm.contents import Event

HOSTILE = "\x1b[31m<script>alert(1)</script>\x1b]0;owned\x07\r\n[bold]x[/bold] :smile: \u202ez"


def shown(summary):
    output = io.StringIO()
    terminal.show(summary, output)
    return output.getvalue()


def hostile(profile):
    """The profile with hostile text wherever a job or its user can put text."""
    training = dataclasses.replace(
        profile.training,
        attributes=profile.training.attributes | {"outcome": HOSTILE, "exit_code": 3},
        events=(Event(profile.start_seconds + 1, HOSTILE, HOSTILE),),
    )
    device = dataclasses.replace(profile.nodes[0].devices[0], model=HOSTILE, kind="gpu")
    node = dataclasses.replace(profile.nodes[0], node=HOSTILE, devices=(device,))
    return dataclasses.replace(profile, user=HOSTILE, cluster=HOSTILE, training=training, nodes=(node,))


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
@pytest.mark.parametrize("many", [False, True])
def test_no_line_is_wider_than_the_terminal_and_no_word_is_cut(profile, profiles, monkeypatch, width, many):
    if many:
        profile = profiles.make(tensor=4, pipeline=4, data=4, layers=32, ranks_per_node=8)
    monkeypatch.setattr(terminal, "PLAIN_WIDTH", width)
    text = shown(summarize(profile))
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for word in ("forward", "backward", "compute", "memory", "layers", "LM head", "mean", "covered"):
        assert word in text


def test_of_many_devices_the_least_used_are_shown_and_the_rest_is_told(profiles):
    text = shown(summarize(profiles.make(tensor=4, pipeline=4, data=4, layers=32, ranks_per_node=8)))
    assert text.count("processes of task") == terminal.MOST_ROWS
    assert "32 devices that were used more are in --html and --json" in text


def test_text_of_a_job_cannot_drive_the_terminal(profile):
    output = io.StringIO()
    terminal.show(summarize(hostile(profile)), output)
    text = output.getvalue()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    assert "[bold]x[/bold] :smile:" in text  # neither markup nor emoji: just text
    assert "owned" not in text


def test_text_of_a_job_cannot_drive_a_terminal_with_colors(profile, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    output = io.StringIO()
    terminal.show(summarize(hostile(profile)), output)
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


def test_the_chain_of_attempts_is_listed(profile):
    attempts = (
        Attempt(1, profile.start_seconds - 500, 90.0, "failed", "rank 1 failed: no", "a.h5"),
        Attempt(2, None, None, "damaged", "b.h5 is no profile", "b.h5"),
        Attempt(3, profile.start_seconds, 60.0, "finished", "trained to step 30", "c.h5"),
    )
    text = shown(dataclasses.replace(summarize(profile), attempts=attempts))
    listed = text.partition("Attempts")[2]
    assert "1 min 30 s" in listed
    assert "failed: rank 1 failed: no" in listed
    assert "damaged: b.h5 is no profile" in listed


def test_a_locale_that_lacks_a_letter_is_no_error(profile):
    raw = io.BytesIO()
    output = io.TextIOWrapper(raw, encoding="ascii")
    terminal.show(summarize(profile), output)
    output.flush()
    assert raw.getvalue().startswith(b"Job 42 finished")
