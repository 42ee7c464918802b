import json
import re

import pytest
from click.testing import CliRunner

from trimtab.balance.model.transformer import OptimizerState
from trimtab.balance.plan import Schedule
from trimtab.cli.simulate import OPTIMIZERS, SCHEDULES, simulate

PLAN_KEYS = {
    "stage_efficiency_ratio",
    "bubble_ratio",
    "balance_ratio",
    "step_seconds",
    "peak_memory_bytes",
    "layout",
    "schedule",
    "microbatches",
    "utilization_ratio",
    "tokens_per_second",
}
SMALL = ["--layers", "8", "--hidden-size", "1024", "--attention-heads", "8", "--vocabulary-size", "8192"]
SMALL += ["--sequence-length", "512", "--gpus", "4"]


def run(*arguments):
    return CliRunner().invoke(simulate, [*map(str, arguments)], catch_exceptions=False)


def figures(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def claim():
    return figures("--preset", "70b", "--gpus", 8)


def test_the_claim_has_its_figures(claim):
    for name in ("static", "chosen"):
        assert set(claim[name]) >= PLAN_KEYS
    assert claim["assumptions"]
    assert claim["fails_where"]
    assert claim["needed"]["shapes"]


def test_the_claim_static_stages_are_a_quarter_idle(claim):
    static = claim["static"]
    assert static["layout"] == "E" + "|".join(["t" * 10] * 8) + "L"
    assert (static["schedule"], static["pipeline"], static["microbatches"]) == ("1f1b", 8, 32)
    # Eight stages and 32 microbatches: 7 of 39 turns are fill and drain, and the head makes the last stage the slowest.
    assert static["bubble_ratio"] < 7 / 39
    assert static["balance_ratio"] < 1
    assert static["stage_efficiency_ratio"] < 32 / 39
    # "about 75 %": what the assumed shares of the peaks leave open is more than what this tolerates.
    assert static["stage_efficiency_ratio"] == pytest.approx(0.75, abs=0.03)


def test_the_claim_chosen_plan_is_balanced(claim):
    chosen = claim["chosen"]
    assert chosen["stage_efficiency_ratio"] >= 0.96
    assert chosen["bubble_ratio"] < 0.05
    assert chosen["pipeline"] > 1
    assert chosen["fits"]
    assert chosen["step_seconds"] < claim["static"]["step_seconds"]
    assert claim["speedup_ratio"] == claim["static"]["step_seconds"] / chosen["step_seconds"]
    # A plan without a pipeline has no bubble, and is slower all the same: its ranks exchange more.
    assert claim["other"]["pipeline"] == 1
    assert claim["other"]["step_seconds"] > chosen["step_seconds"]


def test_efficiency_is_balance_without_the_bubble(claim):
    for plan in (claim["static"], claim["chosen"], claim["other"]):
        product = plan["balance_ratio"] * (1 - plan["bubble_ratio"])
        assert plan["stage_efficiency_ratio"] == pytest.approx(product, rel=1e-12)
        busy = plan["stage_seconds"]
        pipeline = plan["step_seconds"] - plan["overhead_seconds"]
        assert plan["stage_efficiency_ratio"] == pytest.approx(sum(busy) / len(busy) / pipeline, rel=1e-9)


def test_the_claim_fails_with_eight_stages_of_whole_layers(claim):
    eight = [need for need in claim["needed"]["shapes"] if need["pipeline"] == 8]
    assert {need["schedule"] for need in eight} == {"1f1b", "interleaved", "zb-h1"}
    for need in eight:
        assert need["balance_ratio"] < 0.96
        assert need["reached"] is None
        assert need["obstacle"]


def test_the_claim_holds_with_two_stages_and_enough_microbatches(claim):
    two = {need["schedule"]: need for need in claim["needed"]["shapes"] if need["pipeline"] == 2}
    for need in two.values():
        reached = need["reached"]
        assert reached["stage_efficiency_ratio"] >= 0.96
        assert reached["bubble_ratio"] < 0.05
        assert reached["fits"]
    # Interleaved and zero-bubble schedules need fewer.
    assert two["interleaved"]["reached"]["microbatches"] < two["1f1b"]["reached"]["microbatches"]
    assert two["zb-h1"]["reached"]["microbatches"] < two["1f1b"]["reached"]["microbatches"]


def test_the_fewest_microbatches_are_the_fewest(claim):
    need = next(need for need in claim["needed"]["shapes"] if (need["pipeline"], need["schedule"]) == (2, "1f1b"))
    reached = need["reached"]
    fewer = figures(
        *("--preset", "70b", "--gpus", 8, "--optimizer", "host", "--pipeline", 2, "--schedule", "1f1b"),
        *("--tensor", 4, "--microbatch-size", 1, "--global-batch-size", reached["microbatches"] - 2),
    )["chosen"]
    assert fewer["stage_efficiency_ratio"] < 0.96 or fewer["bubble_ratio"] >= 0.05


def test_the_claim_needs_optimizer_state_elsewhere(claim):
    states = {state["optimizer"]: state for state in claim["needed"]["optimizer_states"]}
    assert claim["optimizer"] == "host"
    assert states["device"]["bytes_per_parameter"] == 18
    assert states["device"]["device_bytes"] == 18 * 70_553_706_496 / 8 > 80e9
    assert states["device"]["fits"] is False
    assert states["host"]["fits"] is True
    assert states["host"]["host_bytes"] == 12 * 70_553_706_496
    assert any("--optimizer device" in sentence for sentence in claim["fails_where"])


def test_static_efficiency_follows_the_batch(claim):
    shown = claim["needed"]["static_by_microbatches"]
    ratios = [one["stage_efficiency_ratio"] for one in shown]
    assert ratios == sorted(ratios)
    same = next(one for one in shown if one["microbatches"] == claim["static"]["microbatches"])
    assert same["stage_efficiency_ratio"] == claim["static"]["stage_efficiency_ratio"]
    # At most the balance, however large the batch.
    assert ratios[-1] < claim["static"]["balance_ratio"]


def test_layouts_can_be_written_into_a_job_file(claim):
    from trimtab.protocol import Layout

    for plan in (claim["static"], claim["chosen"]):
        layout = Layout.parse(plan["layout"], plan["pipeline"])
        assert list(layout.layers) == plan["chunk_layers"]
        assert sum(layout.layers) == 80


def test_considered_configurations_have_verdicts(claim):
    assert len(claim["considered"]) > 100
    assert all(one["verdict"] for one in claim["considered"])
    best = min(one["step_seconds"] for one in claim["considered"] if one["step_seconds"])
    assert best == claim["chosen"]["step_seconds"]


def test_pins_hold_for_both_plans():
    found = figures(*SMALL, "--tensor", 2, "--pipeline", 2, "--microbatch-size", 2, "--global-batch-size", 16)
    for name in ("static", "chosen"):
        plan = found[name]
        assert (plan["tensor"], plan["pipeline"], plan["data"], plan["microbatch_size"]) == (2, 2, 1, 2)
        assert plan["microbatches"] == 8


def test_shares_of_a_batch_that_replicas_cannot_share_equally_are_told():
    pins = ("--tensor", 1, "--pipeline", 2, "--microbatch-size", 1, "--schedule", "1f1b")
    asked = ("--gpus", 6, *pins, "--global-batch-size", 16)
    static = figures(*SMALL, *asked)["static"]
    assert (static["data"], static["microbatches"], static["fewest_microbatches"]) == (3, 6, 5)
    (row,) = (line for line in run(*SMALL, *asked).stdout.splitlines() if line.split()[:1] == ["microbatches"])
    assert "5 to 6 of 1" in row


def test_the_usual_plan_has_equal_shares_where_it_can():
    """Eight stages, as many as policy begins with, would leave 16 sequences to three replicas."""
    asked = ("--gpus", 24, "--tensor", 1, "--global-batch-size", 16)
    static = figures(*SMALL, *asked)["static"]
    assert (static["pipeline"], static["microbatches"], static["fewest_microbatches"]) == (6, 4, 4)


def test_a_plan_without_a_pipeline_has_no_schedule():
    lines = run(*SMALL, "--pipeline", 1).stdout.splitlines()
    (schedule,) = (line for line in lines if line.split()[:1] == ["schedule"])
    assert set(schedule.split()[1:]) == {"-"}


def test_on_cpus_only_proportions_are_told():
    result = run(*SMALL, "--gpu", "cpu")
    assert "only proportions of figures mean anything" in result.stdout
    assert not re.search(r"MFU\)? +\d|\binf\b", result.stdout)
    assert figures(*SMALL, "--gpu", "cpu")["chosen"]["utilization_ratio"] is None


def test_one_token_is_one():
    assert "of 1 token," in run(*SMALL, "--sequence-length", 1).stdout


def test_a_timeline_that_cannot_be_written_is_named(tmp_path):
    pytest.importorskip("plotly")
    path = tmp_path / "absent" / "x.html"
    result = run(*SMALL, "--timeline", path)
    assert result.exit_code == 2
    assert f"'{path}'" in result.stderr


def test_options_override_a_preset():
    found = figures("--preset", "7b", "--gpus", 4, "--layers", 4, "--sequence-length", 512)["model"]
    assert (found["layers"], found["sequence_length"], found["hidden_size"]) == (4, 512, 4096)


def test_a_slow_stage_holds_fewer_layers():
    found = figures(*SMALL, "--pipeline", 4, "--schedule", "1f1b", "--speed", "2=0.5")["chosen"]
    assert found["stage_layers"][2] == min(found["stage_layers"])


def test_a_slow_link_is_avoided():
    found = figures(*SMALL[:-1], 24, "--query-groups", 8, "--pipeline", 3, "--schedule", "1f1b", "--link", "0-1=60")
    order = found["chosen"]["node_order"]
    assert abs(order.index(0) - order.index(1)) == 2


@pytest.mark.parametrize("width", [80, 120])
def test_tables_name_the_figures(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    result = run(*SMALL)
    assert result.exit_code == 0
    for text in ("static", "chosen", "stage efficiency", "bubble", "memory", "Where it fails", "Assumptions"):
        assert text in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100  # no terminal: plain text of a fixed width


def test_a_timeline_is_one_file(tmp_path):
    pytest.importorskip("plotly")
    path = tmp_path / "timeline.html"
    result = run(*SMALL, "--json", "--timeline", path)
    assert result.exit_code == 0
    json.loads(result.stdout)
    assert str(path) in result.stderr
    text = path.read_text(encoding="utf-8")
    assert "Static plan" in text
    assert "Chosen plan" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--preset", "7b", "--gpus", "8", "--layers", "100000000"], "model.layers = 100000000: at most 2,000"),
        (["--gpus", "8"], "--layers, --hidden-size.*choose from: 7b, 13b"),
        (["--preset", "70b", "--gpus", "8", "--tensor", "3"], "tensor 3.*choose from: 1, 2, 4, 8"),
        (["--preset", "70b", "--gpus", "8", "--pipeline", "16"], "pipeline 16.*choose from: 1, 2, 4, 8"),
        (["--preset", "70b", "--gpus", "8", "--microbatch-size", "5"], "microbatch_size 5.*choose from: 1, 2, 4"),
        (["--preset", "70b", "--gpus", "8", "--tensor", "8", "--virtual", "2"], "virtual 2.*choose from: 1"),
        (["--preset", "70b", "--gpus", "8", "--optimizer", "device"], "nothing fits.*device 147.8 GiB, host 49.3 GiB"),
        (["--preset", "70b", "--gpus", "8", "--attention-heads", "60"], "attention_heads = 60.*choose from: 1, 2, 4"),
        (["--preset", "70b", "--gpus", "8", "--speed", "2=0.8"], "--speed '2=0.8'.*--pipeline"),
        (["--preset", "70b", "--gpus", "8", "--pipeline", "4", "--speed", "4=1"], "choose from: 0 to 3"),
        (["--preset", "70b", "--gpus", "8", "--pipeline", "4", "--speed", "1=0"], "STAGE=RATIO"),
        (["--preset", "70b", "--gpus", "8", "--link", "0-1=60"], "nodes are 0 to 0"),
        (["--preset", "70b", "--gpus", "16", "--link", "1-1=60"], "NODE-NODE=MILLISECONDS"),
        (["--preset", "70b", "--gpus", "1", "--schedule", "interleaved"], "two stages or more"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(arguments, words):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("trimtab: ")
    assert re.search(words, result.stderr, re.DOTALL)


def test_the_choices_are_those_of_the_planner():
    assert tuple(Schedule) == SCHEDULES
    assert tuple(OptimizerState) == OPTIMIZERS
