import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.balance.detect import imbalance_ratio
from trimtab.report import series
from trimtab.report.stages import imbalance_by_step, step_times
from trimtab.report.summarize import summarize
from trimtab.report.summary import Throttling, to_json
from trimtab.wording import data_size, duration, milliseconds, plain
from trimtab_slurm.contents import Event

SECONDS = st.floats(0.001, 1000)


def texts(summary):
    return [finding.text for finding in summary.findings]


def kinds(summary):
    return [finding.kind for finding in summary.findings]


def test_a_finished_run_is_summed_up(profile):
    summary = summarize(profile)
    training = summary.training
    assert (summary.outcome.state, summary.outcome.exit_code) == ("finished", 0)
    assert summary.duration_seconds == 60
    assert (training.measured_steps, training.last_step, training.planned_steps) == (30, 30, 30)
    assert training.first_loss == pytest.approx(9 * 0.98)
    assert training.last_loss == pytest.approx(9 * 0.98**30)
    assert (training.tokens, training.tokens_per_second) == (90_000, 2000)
    assert summary.warnings == ()


def test_stages_carry_their_medians_and_what_they_hold(profile):
    first, last = summarize(profile).training.stages
    assert (first.layers, first.embedding, first.head) == ("0-3", True, False)
    assert (last.layers, last.embedding, last.head) == ("4-7", False, True)
    assert first.compute_seconds == pytest.approx(0.6)  # 4 layers of 0.15 s
    assert last.compute_seconds == pytest.approx(0.85)  # and a head of 0.25 s
    assert last.forward_seconds == pytest.approx(0.85 / 3)
    assert last.not_computing_ratio == pytest.approx(1 - 0.85 / 1.5)
    assert last.peak_memory_bytes == 2 << 30


def test_imbalance_is_slowest_over_median_minus_one(profile):
    imbalance = summarize(profile).training.imbalance
    assert imbalance.ratio == pytest.approx(0.85 / 0.725 - 1)
    assert (imbalance.stage, imbalance.measured_steps, imbalance.triggered) == (1, 20, True)


def test_stage_figures_are_of_the_last_window_only(profile, profiles):
    stages = dict(profile.training.stages)
    early = (stages["step"] <= 10) & (stages["stage"] == 0)
    stages["forward_seconds"] = np.where(early, 100.0, stages["forward_seconds"])
    training = summarize(profiles.change(profile, training={"stages": stages})).training
    assert training.stages[0].compute_seconds == pytest.approx(0.6)


def test_cost_follows_the_1f1b_model(profile):
    cost = summarize(profile).training.cost
    # 8 microbatches: even, 0.725 + 0.725 / 8; as it is, 0.85 + 0.6 / 8. The difference, over 30 steps, on 4 devices.
    a_step = (0.85 + 0.6 / 8) - (0.725 + 0.725 / 8)
    assert cost.imbalance_seconds == pytest.approx(30 * a_step)
    assert cost.imbalance_device_hours == pytest.approx(4 * 30 * a_step / 3600)
    assert cost.imbalance_ratio == pytest.approx(a_step / 1.5)


def test_the_shares_of_a_step_add_up(profile):
    shares = summarize(profile).training.shares
    assert shares.compute_ratio == pytest.approx(0.725 / 1.5)
    assert shares.fill_ratio == pytest.approx(0.725 / 8 / 1.5)
    assert sum(dataclasses.astuple(shares)) == pytest.approx(1)


@settings(deadline=None)  # the machine may be busy
@given(
    st.lists(st.tuples(st.lists(SECONDS, min_size=3, max_size=3), st.integers(1, 64)), min_size=1, max_size=4),
    st.booleans(),
)
def test_an_uneven_pipeline_never_beats_an_even_one(replicas, must_be_unequal):
    places = tuple((replica, stage) for replica in range(len(replicas)) for stage in range(3))
    passes = np.array([[float(count) for _, count in replicas]])
    loads = passes / passes.mean() if must_be_unequal else np.ones_like(passes)
    times = step_times(np.array([[value for own, _ in replicas for value in own]]), places, passes, loads)
    assert min(times.imbalance_seconds[0], times.unequal_seconds[0]) >= 0
    longest = max(max(own) + (sum(own) - max(own)) / count for own, count in replicas)
    parts = (times.compute_seconds, times.fill_seconds, times.unequal_seconds, times.imbalance_seconds)
    whole = sum(part[0] for part in parts)
    assert whole == pytest.approx(longest)  # rounding of sums of floats


@settings(deadline=None)
@given(st.lists(SECONDS, min_size=2, max_size=9))
def test_the_imbalance_by_step_is_that_of_the_progress_line(seconds):
    assert imbalance_by_step(np.array([seconds]))[0] == pytest.approx(imbalance_ratio(seconds), abs=1e-12)


def test_the_slowest_stage_is_named_with_what_it_holds(profile):
    (found,) = summarize(profile).findings
    assert found.kind == "imbalance"
    assert found.text == "Stage 1 takes 17.2% longer than the mean of both; it holds layers 4-7 and the LM head."


def test_a_level_pipeline_has_nothing_to_change(profiles):
    summary = summarize(profiles.make(head_seconds=0.0))
    assert kinds(summary) == ["none"]
    assert texts(summary)[0].startswith("Nothing to balance: the slowest stage takes 0.0% longer")
    assert summary.training.cost.imbalance_seconds == 0


def test_of_a_short_window_as_much_is_said_as_of_a_long_one(profile, profiles):
    summary = summarize(profiles.change(profile, attributes={"window_steps": 4}))
    assert summary.training.imbalance.measured_steps == 4
    assert kinds(summary) == ["imbalance"]


def test_what_counts_are_the_steps_of_the_latest_setting(profile, profiles):
    (found,) = texts(summarize(profiles.trimmed(profile, step=23)))
    assert found == "Nothing can be said of the stages: 8 steps measured, 10 are needed."


STOPPED = {"head_seconds": 0.0, "exit_code": 75, "outcome": "stopped by SIGUSR1 at step 30 of 60"}
SAVED = {name: np.array([value]) for name, value in (("step", 30), ("time_seconds", 0.0), ("duration_seconds", 0.2))}


def in_directory(profiles, profile, directory):
    """The profile as of a job whose checkpoints were to go there."""
    job = json.loads(profile.training.attributes["job"])
    job["train"]["checkpoint_directory"] = directory
    return profiles.change(profile, attributes={"job": json.dumps(job)})


def test_a_stop_names_what_was_saved_and_both_ways_to_go_on_from_it(profiles):
    stopped = in_directory(profiles, profiles.make(**STOPPED), "/home/ada/checkpoints/42")
    told = (
        "Progress was saved in /home/ada/checkpoints/42. To go on from there: scontrol requeue 42, as long as Slurm "
        'knows the job, or a new submission with train.checkpoint_directory = "/home/ada/checkpoints/42".'
    )
    assert texts(summarize(profiles.change(stopped, training={"checkpoints": SAVED}))) == [told]
    resumed = profiles.resumed(stopped, first_step=21, start=100.0, restart_count=1)  # what it began from is there
    assert texts(summarize(resumed)) == [told]


def test_a_stop_that_saved_nothing_is_not_said_to_go_on(profiles):
    stopped = profiles.make(**STOPPED)
    assert texts(summarize(in_directory(profiles, stopped, "/home/ada/checkpoints/42"))) == [
        "No checkpoint is recorded: the job begins anew when it is run."
    ]
    assert texts(summarize(in_directory(profiles, stopped, ""))) == [
        "Nothing was saved: train.checkpoint_directory is empty. The job begins anew when it is run."
    ]


def test_a_stage_that_is_slow_in_one_replica_is_named_with_it(profiles):
    profile = profiles.make(tensor=1, pipeline=4, data=3, head_seconds=0.0, slow=(2, 1, 1.4))
    (found,) = texts(summarize(profile))
    assert found.startswith("Stage 1 of replica 2 takes 40.0% longer")


def test_a_failure_comes_first(profiles):
    outcome = "rank 3 (node n2, stage 1, pid 7) vanished after step 2: it was killed, or its node failed"
    summary = summarize(profiles.make(steps=2, exit_code=3, outcome=outcome))
    assert (summary.outcome.state, summary.outcome.exit_code) == ("failed", 3)
    assert kinds(summary) == ["failure"]  # two steps say nothing of the stages
    assert outcome in texts(summary)[0]


def test_input_that_ranks_find_at_fault_is_what_to_mend(profiles):
    outcome = 'bad input, found by rank 2 on node n3: data.path = "x": holds no UTF-8 text'
    assert texts(summarize(profiles.make(steps=0, exit_code=2, outcome=outcome))) == [
        f"Mend this, and submit again: {outcome}."
    ]


@pytest.mark.parametrize(
    ("told", "state", "exit_code", "kind"),
    [
        ("job exit code 2:0", "failed", 2, "failure"),
        ("job exit code 0:0", "recorded", 0, "none"),
        ("job exit code 0:9", "recorded", None, "none"),
        ("job exit code not known", "recorded", None, "none"),
    ],
)
def test_without_a_training_the_epilog_says_how_a_job_ended(profile, told, state, exit_code, kind):
    nodes = tuple(dataclasses.replace(node, events=(Event(1.0, "epilog", told),)) for node in profile.nodes)
    summary = summarize(dataclasses.replace(profile, nodes=nodes, training=None))
    assert (summary.outcome.state, summary.outcome.exit_code, kinds(summary)) == (state, exit_code, [kind])
    assert ("ended with exit code 2, and no training is recorded" in texts(summary)[0]) == (state == "failed")


@pytest.mark.parametrize(
    ("exit_code", "state"),
    [(0, "finished"), (75, "stopped"), (2, "failed"), (4, "failed"), (143, "failed"), (-1, "unknown")],
)
def test_the_state_follows_the_exit_code(profiles, exit_code, state):
    assert summarize(profiles.make(exit_code=exit_code)).outcome.state == state


def test_a_step_that_some_stages_never_reported_is_left_out(profile, profiles):
    stages = {name: column[:-1] for name, column in profile.training.stages.items()}
    training = summarize(profiles.change(profile, training={"stages": stages})).training
    assert training.measured_steps == 30
    assert training.cost.measured_steps == 29
    assert training.imbalance.ratio == pytest.approx(0.85 / 0.725 - 1)


def test_no_step_at_all_is_said_and_not_shown_as_zero(profiles):
    summary = summarize(profiles.make(steps=0, exit_code=3, outcome="rank 0 failed: no"))
    training = summary.training
    assert (training.measured_steps, training.tokens) == (0, 0)
    assert training.first_loss is training.tokens_per_second is training.imbalance is training.cost is None
    assert training.shares is None
    assert "no step was completed" in summary.warnings


def test_one_stage_has_no_imbalance(profiles):
    summary = summarize(profiles.make(pipeline=1))
    assert summary.training.imbalance is None
    assert summary.training.cost is None
    assert texts(summary) == ["Nothing to change: with one stage, there is no imbalance."]


def test_a_loss_that_is_no_number_is_told(profile, profiles):
    loss = profile.training.steps["loss"].copy()
    loss[20:] = np.nan
    summary = summarize(profiles.change(profile, steps={"loss": loss}))
    assert summary.training.last_loss_step == 20
    assert summary.warnings == ("the loss is NaN, infinite or missing in 10 steps, the first of them step 21",)


def test_a_job_without_training_still_has_its_devices(profile):
    summary = summarize(dataclasses.replace(profile, training=None))
    assert (summary.outcome.state, summary.outcome.exit_code, summary.training) == ("recorded", None, None)
    assert [device.ranks for device in summary.devices] == [(), (), (), ()]
    assert summary.devices[0].utilization_mean_ratio == pytest.approx(0.5, abs=0.02)  # a sine, not whole periods


def test_a_job_without_node_records_says_so(profile):
    summary = summarize(dataclasses.replace(profile, nodes=()))
    assert summary.warnings[0].startswith("no node left a record")
    assert {device.no_data for device in summary.devices} == {"the node left no record"}
    assert {device.utilization_mean_ratio for device in summary.devices} == {None}


def test_a_missing_node_is_named(profile):
    summary = summarize(dataclasses.replace(profile, nodes=profile.nodes[:1]))
    assert summary.missing_nodes == ("n2",)
    assert "no record of 1 node: n2" in summary.warnings
    assert [(device.ranks, device.no_data) for device in summary.devices if device.no_data] == [
        ((2,), "the node left no record"),
        ((3,), "the node left no record"),
    ]


def with_samples(profile, samples, **fields):
    """The profile of the first node alone, its first device with these samples."""
    node = profile.nodes[0]
    device = dataclasses.replace(node.devices[0], samples=samples, **fields)
    return dataclasses.replace(
        profile, nodes=(dataclasses.replace(node, devices=(device,)),), expected_nodes=("n1",), training=None
    )


def test_no_sample_is_no_data_and_not_zero(profile):
    empty = {name: column[:0] for name, column in profile.nodes[0].devices[0].samples.items()}
    (device,) = summarize(with_samples(profile, empty)).devices
    assert (device.utilization_mean_ratio, device.memory_max_bytes, device.samples) == (None, None, 0)
    assert device.no_data == "no sample; the sampling period is 1 s"


def test_a_figure_that_the_hardware_does_not_give_has_its_reason(profile):
    samples = profile.nodes[0].devices[0].samples
    none = samples | {"utilization_ratio": np.full(60, np.nan)}
    reason = {"utilization_ratio": "not supported on a MIG instance"}
    (device,) = summarize(with_samples(profile, none, absent=reason, kind="mig")).devices
    assert device.utilization_mean_ratio is None
    assert device.no_data == "not supported on a MIG instance"
    assert device.memory_max_bytes == 400 * 2**20


def test_a_device_whose_samples_stop_early_has_low_coverage(profile):
    half = {name: column[:30] for name, column in profile.nodes[0].devices[0].samples.items()}
    summary = summarize(with_samples(profile, half, kind="gpu"))
    assert summary.devices[0].coverage_ratio == 0.5
    assert summary.warnings == (
        "1 device with less than 90% of the expected samples, the least gpu 0, cpu-0 on n1 with 50.0%",
    )


def test_a_gpu_without_any_sample_has_no_coverage_and_a_warning(profile):
    empty = {name: column[:0] for name, column in profile.nodes[0].devices[0].samples.items()}
    summary = summarize(with_samples(profile, empty, kind="gpu"))
    assert summary.devices[0].coverage_ratio == 0
    assert summary.warnings[0].endswith("the least gpu 0, cpu-0 on n1 with 0.0%")


def test_a_mig_instance_without_a_utilization_is_covered_by_its_samples(profile):
    samples = profile.nodes[0].devices[0].samples
    figures = {"utilization_ratio": np.full(60, np.nan), "sm_active_ratio": np.full(60, 0.25, dtype=np.float32)}
    (device,) = summarize(with_samples(profile, samples | figures, kind="mig")).devices
    assert (device.no_data, device.sm_active_mean_ratio) == ("no value in any sample", 0.25)
    assert (device.coverage_ratio, device.throttled_ratio, device.throttling) == (1.0, None, ())
    assert device.absent == {"power_watts": "a processor's tasks have no power of their own"}


def test_throttling_is_the_share_of_the_samples_that_know_of_it(profile):
    """Of 60 samples, 20 do not know; of the others, half are idle or at clocks that somebody chose."""
    bits = np.repeat([np.nan, 0x1 | 0x2, 0x4, 0x4 | 0x40], [20, 20, 10, 10])
    samples = profile.nodes[0].devices[0].samples | {"throttle_reasons_bits": bits, "power_watts": np.full(60, 600.0)}
    summary = summarize(with_samples(profile, samples, kind="gpu"))
    (device,) = summary.devices
    assert device.power_mean_watts == 600
    assert device.throttled_ratio == 0.5
    assert device.throttling == (Throttling("power cap", 0.5), Throttling("temperature, by the hardware", 0.25))
    assert summary.warnings == (
        "1 device throttled in at least 5% of the samples, the power cap aside, the most gpu 0, cpu-0 on n1 with "
        "25.0%: temperature, by the hardware",
    )
    capped = samples | {"throttle_reasons_bits": np.full(60, 4.0)}
    assert summarize(with_samples(profile, capped, kind="gpu")).warnings == ()


def test_bits_that_are_none_are_no_reason(profile):
    samples = profile.nodes[0].devices[0].samples | {"throttle_reasons_bits": np.repeat([-1.0, 1e300, np.inf], 20)}
    (device,) = summarize(with_samples(profile, samples, kind="gpu")).devices
    assert (device.throttled_ratio, device.throttling) == (None, ())


def test_an_xid_error_and_a_node_without_a_device_are_told(profile):
    xid = Event(profile.start_seconds + 5, "xid", "XID 79 on GPU-0: the GPU has fallen off the bus")
    nodes = (dataclasses.replace(profile.nodes[0], events=(xid,)), dataclasses.replace(profile.nodes[1], devices=()))
    assert summarize(dataclasses.replace(profile, nodes=nodes)).warnings == (
        "no device was measured on n2; where a reason is known, it is among the events",
        "1 XID error on n1: see the events",
    )


def test_devices_are_in_the_order_of_the_allocation(profiles):
    profile = profiles.make(tensor=4, pipeline=3, layers=12, ranks_per_node=1)
    bare = dataclasses.replace(profile, training=None, nodes=tuple(sorted(profile.nodes, key=lambda node: node.node)))
    assert [device.node for device in summarize(bare).devices] == [f"n{number}" for number in range(1, 13)]


def test_a_task_is_expected_only_while_it_runs(profile):
    half = {name: column[30:] for name, column in profile.nodes[0].devices[0].samples.items()}
    assert summarize(with_samples(profile, half)).devices[0].coverage_ratio == 1


def test_a_job_shorter_than_the_sampling_period_says_so(profiles):
    summary = summarize(dataclasses.replace(profiles.make(seconds=0.5), training=None))
    assert summary.devices[0].coverage_ratio is None
    assert summary.warnings[0].startswith("shorter than the sampling period of 1 s on n1, n2")


def test_events_of_all_sources_are_in_the_order_of_time(profile):
    assert [(event.source, event.kind) for event in summarize(profile).events] == [
        ("n1", "sampler"),
        ("n2", "sampler"),
        ("training", "checkpoint"),
    ]


def test_json_holds_null_for_what_is_absent_and_never_nan(profiles):
    profile = profiles.make(steps=0)
    values = json.loads(to_json([summarize(profile)]), parse_constant=pytest.fail)
    assert values["schema"] == 1
    assert values["training"]["first_loss"] is None
    assert set(values) >= {"outcome", "training", "devices", "ranks", "events", "warnings", "findings", "attempts"}


def test_several_attempts_are_a_list_in_json(profile):
    assert [one["job_id"] for one in json.loads(to_json([summarize(profile)] * 2))] == [42, 42]


def test_thinned_lines_keep_their_extremes():
    values = np.zeros(100_000)
    values[[17, 55_555]] = [5.0, -3.0]
    line = series.thinned("x", np.arange(100_000), values, limit=1000)
    assert len(line.x) == len(line.y) <= 1000
    assert dict(zip(line.x, line.y, strict=True))[17] == 5.0
    assert dict(zip(line.x, line.y, strict=True))[55_555] == -3.0


def test_a_line_that_is_no_number_has_a_gap():
    assert series.thinned("x", np.arange(3), np.array([1.0, np.nan, np.inf])).y == (1.0, None, None)


def test_a_heat_map_is_bounded_however_long_the_job_was(profiles):
    profile = profiles.make(tensor=8, pipeline=8, data=1, ranks_per_node=8, steps=3, seconds=20_000, layers=8)
    heat = series.heat_map(profile, summarize(profile))
    assert len(heat.labels) == 64
    assert len(set(heat.labels)) == 64
    assert len(heat.time_seconds) == series.MOST_BINS
    assert {len(row) for row in heat.ratios} == {series.MOST_BINS}
    # a bin is 33 samples long, and a sine's mean over it is near its middle
    assert heat.ratios[0][10] == pytest.approx(0.5, abs=0.05)


def test_of_more_devices_than_rows_the_least_used_of_each_row_is_drawn(profiles, monkeypatch):
    profile = profiles.make(tensor=2, pipeline=2, data=2, ranks_per_node=2)
    summary = summarize(profile)
    each = series.heat_map(profile, summary)
    assert (each.row_devices, len(each.labels)) == (1, 8)
    monkeypatch.setattr(series, "MOST_ROWS", 3)
    shared = series.heat_map(profile, summary)
    assert shared.row_devices == 3
    assert shared.labels == ("n1 to n2 · ranks 0-2", "n2 to n3 · ranks 3-5", "n4 · ranks 6-7")
    assert shared.ratios[2] == tuple(map(min, each.ratios[6], each.ratios[7]))


def test_a_span_without_a_sample_is_blank_in_the_heat_map(profile):
    samples = {name: np.delete(column, slice(20, 30)) for name, column in profile.nodes[0].devices[0].samples.items()}
    gap = with_samples(profile, samples)
    (row,) = series.heat_map(gap, summarize(gap)).ratios
    # samples are at the end of each second of the job; the last one before the gap is where the 20th second ends
    assert [index for index, value in enumerate(row) if value is None] == list(range(21, 30))


def test_clocks_that_drift_past_the_bins_leave_no_gap(profile):
    samples = dict(profile.nodes[0].devices[0].samples)
    samples["time_seconds"] = samples["time_seconds"][0] + 1.04 * np.arange(60)
    late = with_samples(profile, samples)
    (row,) = series.heat_map(late, summarize(late)).ratios
    assert None not in row


def test_the_window_of_the_imbalance_chart_is_that_of_the_report(profile):
    each, window = series.imbalance_lines(profile.training, 20)
    assert each.x == window.x == tuple(range(1, 31))
    assert window.y[-1] == pytest.approx(100 * summarize(profile).training.imbalance.ratio, abs=1e-4)  # rounded


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m and \x1b]0;title\x07more", "red and more"),
        ("a\nb\r\x00\x07c\td", "a b c d"),
        ("\u202eevil\u2066 \ufeffx", "evil x"),
        ("\x1b[2J\x1b[H", ""),
        ("\x9b31mred", "31mred"),
        ("\ud800", ""),
        ("Grüße, 世界", "Grüße, 世界"),
        ("x" * 3000, "x" * 1999 + "…"),
    ],
)
def test_text_of_a_job_is_made_plain(text, shown):
    assert plain(text) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "-"),
        (0.04, "0.0 s"),
        (8.25, "8.2 s"),
        (59.99, "60.0 s"),
        (134, "2 min 14 s"),
        (11100, "3 h 05 min"),
        (187200, "2 d 04 h"),
    ],
)
def test_durations_have_two_units_at_most(seconds, shown):
    assert duration(seconds) == shown


def test_figures_are_worded_with_their_unit():
    assert (milliseconds(0.7351), milliseconds(0.00123), milliseconds(None)) == ("735", "1.23", "-")
    assert (data_size(1536), data_size(400 * 2**20), data_size(1.5 * 2**30)) == ("2 KiB", "400 MiB", "1.5 GiB")
    assert (data_size(None), data_size(2**41)) == ("-", "2.00 TiB")


def test_a_stage_that_holds_everything_is_told_as_a_list(profiles):
    slow = summarize(profiles.make(pipeline=1, data=3, slow=(1, 0, 1.5), steps=80))
    (finding,) = slow.findings
    assert finding.text.endswith("; it holds layers 0-7, the embedding and the LM head.")
