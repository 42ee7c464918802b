import dataclasses
import io
import json
import math
import re

import numpy as np
import pytest

from trimtab.balance.deciding.decide import Verdict
from trimtab.balance.deciding.situation import NO_TOLL, Kind, Toll
from trimtab.balance.plan import Schedule
from trimtab.planning import terminal
from trimtab.planning.answer import Answer, answer, job_lines, to_json
from trimtab.planning.observed import PlanError
from trimtab.planning.situation import from_job
from trimtab.planning.sources import of_job_file, of_recorded
from trimtab.protocol import Batch, Data, Job, JobError, Layout, Model, Parallel, job_to_json
from trimtab.terminal import PLAIN_WIDTH
from trimtab_slurm import profile as profiles_of


@pytest.fixture
def case(tmp_path):
    """`case(profile)` is the case of a profile in a file."""

    def of(profile):
        path = tmp_path / "profile.h5"
        profiles_of.write(path, profile)
        return of_recorded(str(path), None, None)

    return of


PROBES = {"step": np.full(4, 6), "rank": np.arange(4), "seconds": np.full(4, 0.01)}
"""All devices are equally fast."""


def considered(found, kind):
    return next(one for one in found.decision.considered if one.kind is kind)


def noisy(profile, seed=1, ratio=0.01):
    """The profile with stages that vary by 1 % from step to step."""
    rng = np.random.default_rng(seed)
    stages = dict(profile.training.stages)
    factors = rng.normal(1, ratio, len(stages["step"]))
    for name in ("forward_seconds", "backward_seconds"):
        stages[name] = stages[name] * factors
    return dataclasses.replace(profile, training=dataclasses.replace(profile.training, stages=stages))


def with_job(profiles, profile, **sections):
    job = dataclasses.replace(
        Job(model=Model(layers=8), parallel=Parallel(tensor=2, pipeline=2), batch=Batch(2, 16)), **sections
    )
    return profiles.change(profile, attributes={"job": job_to_json(job)})


def test_a_heavy_head_asks_for_a_layer_less_on_its_stage(case, profile):
    """0.15 s a layer and 0.25 s for the head, of 8 microbatches: 0.6 and 0.85 s, after the move 0.75 and 0.7 s."""
    found = answer(case(profile))
    order = found.decision.order
    assert order.kind is Kind.LAYERS
    assert order.change == "layers 4|4 -> 5|3"
    assert found.job_lines == ("[parallel]", 'layout = "Ettttt|tttL"')
    # 1F1B: (7 x 0.85 + 0.6 + 0.85) / 8 s before, (7 x 0.75 + 0.75 + 0.7) / 8 s after; the rest of the step stays. What
    # the head costs is shared out by proportions that are assumed, so the prediction is near, not exact.
    saved = (7.4 - 6.7) / 8
    assert order.predicted_step_seconds == pytest.approx(1.5 - saved, abs=0.04)
    assert found.decision.considered[0].predicted_step_seconds == pytest.approx(1.5)


def test_a_step_is_as_long_as_it_was_measured(case, profile):
    situation = case(profile).situation
    assert situation.step_seconds == 1.5
    assert situation.plan.layout == Layout((4, 4), 2)
    assert situation.plan.microbatches == (8,)
    # All of it but the simulated pipeline is borne by every plan.
    assert situation.hardware.overhead_seconds == pytest.approx(1.5 - 7.4 / 8)


def test_a_slow_node_is_left_out_of_the_next_run(case, profiles):
    slow = noisy(profiles.make(data=3, head_seconds=0.0, slow=(1, 1, 1.5), steps=80, ranks_per_node=2))
    found = answer(case(slow))
    assert found.case.diagnosis.cause == "hardware"
    assert found.case.diagnosis.places == ((1, 1),)
    assert found.decision.order.kind is Kind.EXCLUDE
    assert found.decision.order.exclude == ("n5",)
    assert found.to_do == "Submit it again with: trimtab submit ... -- --exclude=n5"
    assert found.job_lines == ()
    # Its work could also be spread: microbatches to the other replicas.
    assert considered(found, Kind.MICROBATCHES).verdict is Verdict.WORTH


def test_a_slow_node_can_be_done_without(case, profiles):
    """Four replicas of nine microbatches on four nodes: three of twelve."""
    slow = profiles.make(data=4, microbatches=9, head_seconds=0.0, slow=(1, 1, 1.5), steps=80, ranks_per_node=4)
    found = answer(case(noisy(slow)))
    fewer = considered(found, Kind.FEWER)
    (node,) = found.decision.order.exclude  # whether one is to spare is not known: with another in its place
    assert fewer.change == f"without {node}, on 3 nodes: TP2 x PP2 x DP3"
    assert fewer.gain_ratio < found.decision.order.gain_ratio
    chosen = dataclasses.replace(found, decision=dataclasses.replace(found.decision, order=fewer))
    assert chosen.to_do == f"Submit it again with: trimtab submit ... --nodes 3 -- --exclude={node}"


def test_a_node_s_name_cannot_become_a_command(case, profiles):
    slow = profiles.make(data=3, head_seconds=0.0, slow=(1, 1, 1.5), ranks_per_node=2)
    names = np.where(slow.training.ranks["node"] == "n5", "n5; reboot \x1b[31m", slow.training.ranks["node"])
    ranks = slow.training.ranks | {"node": names}
    found = answer(case(dataclasses.replace(slow, training=dataclasses.replace(slow.training, ranks=ranks))))
    assert "--exclude='n5; reboot '" in shown(found)


def test_level_stages_stay_as_they_are(case, profiles):
    found = answer(case(noisy(profiles.make(head_seconds=0.0, steps=80))))
    assert found.decision.order is None
    assert considered(found, Kind.NOTHING).verdict is Verdict.CHOSEN
    assert found.job_lines == ()
    assert found.to_do == ""


def test_an_attempt_that_has_ended_changes_for_free_and_counts_as_a_whole_run(case, profile):
    ended = case(profile)
    assert ended.ended
    assert ended.situation.toll == NO_TOLL
    assert ended.situation.seconds_left == 30 * 1.5
    assert answer(ended).decision.order.cost_seconds == 0.0


def test_an_attempt_that_runs_pays_for_changes_and_counts_to_its_last_step(case, profiles):
    running = profiles.change(profiles.make(exit_code=-1), training={"probes": PROBES})
    running = dataclasses.replace(running, nodes=running.nodes[:1])
    job = json.loads(running.training.attributes["job"])
    job["train"]["steps"] = 1030
    found = case(profiles.change(running, attributes={"job": json.dumps(job)}))
    assert not found.ended
    assert found.situation.toll == Toll()
    assert found.situation.seconds_left == 1000 * 1.5
    order = answer(found).decision.order
    assert order.kind is Kind.LAYERS
    assert order.cost_seconds > 0.65
    assert any("it is taken to run" in assumption for assumption in found.assumptions)


def test_a_failed_attempt_is_planned_all_the_same(case, profiles):
    assert answer(case(profiles.make(exit_code=3, outcome="rank 1 failed"))).decision.order.kind is Kind.LAYERS


def test_devices_count_over_the_steps_that_count(case, profile):
    """Half used, going up and down evenly: see `profile`."""
    assert case(profile).situation.utilization_ratio == pytest.approx(0.5, abs=0.05)


def test_a_provider_s_own_model_keeps_its_layers(case, profiles):
    own = with_job(profiles, noisy(profiles.make(steps=80)), model=Model(layers=8, provider="my.model:build"))
    found = answer(case(own))
    assert found.decision.considered[0].predicted_step_seconds == pytest.approx(1.5)
    assert considered(found, Kind.LAYERS).reason.startswith("the model is the provider's own")
    assert considered(found, Kind.REQUEUE).reason == "what another shape would cost is not known"
    assert found.decision.order is None
    assert found.decision.reason.startswith("the layers cannot be moved: the model is the provider's own")


def with_gpus(profile, total_bytes=80 * 2**30, model="NVIDIA H100 80GB HBM3"):
    def gpu(device):
        samples = {**device.samples, "memory_total_bytes": np.full(len(device.samples["time_seconds"]), total_bytes)}
        return dataclasses.replace(device, kind="gpu", model=model, samples=samples)

    nodes = [dataclasses.replace(node, devices=tuple(map(gpu, node.devices))) for node in profile.nodes]
    return dataclasses.replace(profile, nodes=tuple(nodes))


def test_gpus_have_memory_and_links(case, profile):
    situation = case(with_gpus(profile)).situation
    assert len(situation.hardware.links) == 2
    # What was held beside the prediction (here nearly all of 1 and 2 GiB) is held by every plan.
    assert 77 * 2**30 < situation.hardware.memory_bytes[1] < situation.hardware.memory_bytes[0] < 80 * 2**30


def test_memory_that_is_apart_from_what_is_predicted_is_told(case, profile):
    assert any(
        re.match(r"Stage 1 held 2\.0 GiB, and 0\.\d GiB are predicted", text)
        for text in case(with_gpus(profile)).assumptions
    )


def test_devices_of_a_kind_that_is_not_known_are_told(case, profile):
    found = case(with_gpus(profile, model="Accelerator X"))
    assert found.situation.shapes.memory_bytes == math.inf
    assert (
        "What the devices are is not known: the model's parts are in the proportions that H100 SXM has."
        in found.assumptions
    )


def test_processors_have_neither(case, profile):
    situation = case(profile).situation
    assert situation.hardware.links == ()
    assert situation.hardware.memory_bytes == (math.inf, math.inf)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"training": None}, "no training is recorded: trimtab did not start this job; plan a job.toml instead"),
        ({"attributes": {"job": "{"}}, "its job cannot be read"),
        ({"attributes": {"job": "[]"}}, "its job cannot be read"),
        ({"attributes": {"job": '{"model": {"layers": "many"}}'}}, "its job cannot be read: model.layers"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_reason(profile, profiles, change, reason):
    from trimtab.planning.observed import observed

    part = dataclasses.replace(profile, training=None) if "training" in change else profiles.change(profile, **change)
    with pytest.raises(PlanError, match=re.escape(f"Job 42: {reason}")):
        observed("Job 42", part)


def test_too_few_steps_are_refused(case, profiles):
    with pytest.raises(PlanError, match="4 whole steps are recorded after a warm-up of 5, and 5 are needed"):
        case(profiles.make(steps=9))
    assert case(profiles.make(steps=10)).measured_steps == 5


def test_one_stage_is_refused(case, profiles):
    with pytest.raises(PlanError, match="one replica of one stage has nothing to balance"):
        case(profiles.make(pipeline=1))


def test_a_stage_that_has_not_reported_is_named(case, profile):
    stages = {name: column[profile.training.stages["stage"] == 0] for name, column in profile.training.stages.items()}
    silent = dataclasses.replace(profile, training=dataclasses.replace(profile.training, stages=stages))
    with pytest.raises(PlanError, match="stage 1 of replica 0 has reported no step"):
        case(silent)


JOB = Job(
    model=Model(layers=30, hidden_size=4096, attention_heads=32, sequence_length=4096),
    parallel=Parallel(tensor=2, pipeline=4, layout="E" + "|".join(["t" * 8, "t" * 8, "t" * 7, "t" * 7]) + "L"),
    batch=Batch(microbatch_size=1, global_batch_size=16),
    data=Data(tokenizer="bpe", vocabulary_size=128_000),
)


def test_a_job_that_has_not_run_is_worked_out(case):
    found = from_job("job.toml", JOB, nodes=1, gpus_per_node=8, gpu="h100")
    situation = found.situation
    assert situation.step_seconds is None
    assert situation.plan.schedule is Schedule.ONE_F_ONE_B
    assert situation.hardware.memory_bytes == (80e9,) * 4
    decided = answer(found)
    layers = considered(decided, Kind.LAYERS)
    # The head takes as long as some layers do: the last stage gets fewer.
    assert layers.plan.layout.layers[-1] < 7
    assert layers.gain_ratio > 0.02
    assert decided.decision.order is not None
    assert "Nothing has run: all times are worked out for H100 SXM" in found.assumptions[0]


def test_a_job_that_does_not_fit_is_told(case):
    model = dataclasses.replace(JOB.model, layers=160)
    job = dataclasses.replace(JOB, model=model, parallel=Parallel(2, 4))
    found = answer(from_job("job.toml", job, nodes=1, gpus_per_node=8, gpu="h100"))
    assert found.decision.order is None
    assert re.fullmatch(
        r"Does not fit: stage 0 needs 1\d\d\.\d of 74\.5 GiB; no shape on these GPUs fits; take more GPUs, or GPUs "
        r"with more memory\.",
        found.sentence,
    )
    assert considered(found, Kind.NOTHING).verdict is Verdict.NO_ROOM
    assert "recompute layers" not in shown(found).replace("do not recompute layers", "")
    assert re.search(r"Memory +1\d\d\.\d GiB of 74\.5 GiB +on stage \d, the fullest: too much", shown(found))


def test_the_lines_of_another_shape_make_a_job_that_runs_in_it(case):
    decided = answer(from_job("job.toml", JOB, nodes=1, gpus_per_node=8, gpu="h100"))
    order = considered(decided, Kind.REQUEUE)
    from trimtab.planning.answer import changed_job

    job = changed_job(JOB, order)
    assert job.shape(8) == order.configuration.shape
    lines = job_lines(JOB, job)
    assert lines[0] == "[parallel]"
    assert f"tensor = {order.configuration.shape.tensor}" in lines or order.configuration.shape.tensor == 2


def test_equal_shares_need_no_layout(case):
    uneven = Job(parallel=Parallel(pipeline=2, layout="Ettttt|tttL"))
    even = dataclasses.replace(uneven, parallel=dataclasses.replace(uneven.parallel, layout=""))
    assert job_lines(uneven, even) == ("[parallel]", 'layout = ""')


def test_a_provider_s_own_model_cannot_be_planned_before_it_has_run():
    job = dataclasses.replace(JOB, model=dataclasses.replace(JOB.model, provider="my.model:build"))
    with pytest.raises(PlanError, match="run some steps, and plan the job"):
        from_job("job.toml", job, nodes=1, gpus_per_node=8, gpu="h100")


def test_ranks_that_the_shape_does_not_fit_are_refused():
    with pytest.raises(JobError, match="needs a multiple of 8 ranks"):
        from_job("job.toml", JOB, nodes=1, gpus_per_node=4, gpu="h100")


def test_a_job_file_is_planned_on_one_replica_by_default(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text("[parallel]\npipeline = 4\n")
    found = of_job_file(path, None, None, None)
    assert found.title == "job.toml"
    assert (found.situation.shape.world_size, found.situation.shape.pipeline) == (4, 4)
    with pytest.raises(PlanError, match="--gpu x: not known; choose from: a100-40, "):
        of_job_file(path, None, None, "x")


def shown(found):
    output = io.StringIO()
    terminal.show(found, output)
    return output.getvalue()


def test_the_answer_explains_itself(case, profile):
    text = shown(answer(case(profile)))
    order = [
        "Job 42",
        "TP2 x PP2 x DP1",
        "Step time",
        "1,500 ms",
        "Imbalance",
        "Cause",
        "What could be done",
        "Decision",
    ]
    positions = [text.index(part) for part in order]
    assert positions == sorted(positions)
    for kind in Kind:
        assert kind in text
    assert "Move layers: layers 4|4 -> 5|3" in text
    assert '[parallel]\n      layout = "Ettttt|tttL"' in re.sub(r" +\n", "\n", text)
    assert "Assumed, not measured" in text


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_is_wider_than_the_terminal(case, profiles, monkeypatch, width):
    monkeypatch.setattr("trimtab.terminal.PLAIN_WIDTH", width)
    slow = profiles.make(data=2, slow=(1, 1, 1.5), ranks_per_node=4)
    text = shown(answer(case(slow)))
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text


def test_lines_of_the_job_file_are_never_broken(case):
    model = dataclasses.replace(JOB.model, layers=120, hidden_size=2048)
    job = dataclasses.replace(JOB, model=model, parallel=Parallel(2, 4))
    found = answer(from_job("job.toml", job, nodes=1, gpus_per_node=8, gpu="h200"))
    lines = [line.strip() for line in shown(found).splitlines()]
    assert max(map(len, found.job_lines)) > PLAIN_WIDTH
    assert set(found.job_lines) <= set(lines)


HOSTILE = "\x1b[31m<script>\x1b]0;owned\x07\r\n[bold]x[/bold] \u202ez"


def test_text_of_a_job_cannot_drive_the_terminal(case, profile):
    found = answer(case(profile))
    evidence = dataclasses.replace(found.case.diagnosis.evidence[0], text=HOSTILE)
    diagnosis = dataclasses.replace(found.case.diagnosis, evidence=(evidence,))
    hostile = dataclasses.replace(found.case, title=HOSTILE, diagnosis=diagnosis, assumptions=(HOSTILE,))
    text = shown(Answer(hostile, found.decision))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    assert "[bold]x[/bold]" in text


def test_json_has_every_figure_and_no_nan(case, profile):
    found = json.loads(to_json(answer(case(profile))))
    assert found["schema"] == 1
    assert found["order"] == "move layers"
    assert found["job_file"] == ["[parallel]", 'layout = "Ettttt|tttL"']
    assert [one["kind"] for one in found["considered"]] == list(Kind)
    assert found["imbalance"]["ratio"] == pytest.approx(0.85 / 0.725 - 1)
    assert found["layout"] == "Etttt|ttttL"


def scaled(profile, ratio):
    """The profile of a run whose steps and stages took `ratio` times as long."""
    training = profile.training
    stages = {
        name: column * ratio if name.endswith("ward_seconds") else column for name, column in training.stages.items()
    }
    steps = training.steps | {"duration_seconds": training.steps["duration_seconds"] * ratio}
    return dataclasses.replace(profile, training=dataclasses.replace(training, stages=stages, steps=steps))


def test_the_model_does_not_overrule_what_was_measured(case, profile):
    """It says microseconds where 1.5 s are measured."""
    found = answer(case(with_gpus(profile)))
    requeue = considered(found, Kind.REQUEUE)
    assert requeue.verdict is Verdict.UNSURE
    assert re.match(r"of the current shape the model says [\d.]+ ms a step, and 1,500 ms are measured", requeue.reason)


def test_a_model_of_devices_that_are_not_known_is_in_doubt(case, profile):
    unknown = with_gpus(profile, model="Accelerator X")
    model_seconds = case(unknown).situation.shapes.current.estimate.step_seconds
    agreeing = case(scaled(unknown, 1.2 * model_seconds / 1.5))
    assert agreeing.situation.shapes.doubt == "what the devices are is not known"


def test_a_model_that_agrees_with_what_was_measured_is_believed_and_told(case, profile):
    gpus = with_gpus(profile)
    model_seconds = case(gpus).situation.shapes.current.estimate.step_seconds
    found = case(scaled(gpus, 1.2 * model_seconds / 1.5))
    assert found.situation.shapes.doubt == ""
    assert "What another shape would bring is worked out by the model of H100 SXM, not measured." in found.assumptions
    assert case(scaled(gpus, 1.5 * model_seconds / 1.5)).situation.shapes.doubt != ""


def test_what_a_job_is_planned_on_is_said_with_the_plan(case):
    found = answer(from_job("job.toml", JOB, nodes=1, gpus_per_node=8, gpu="h100"))
    assert "TP2 x PP4 x DP1 on 1 node x 8 GPUs (H100 SXM), 1f1b" in shown(found)
    assert found.to_do == "In the job file, for the next run, with --nodes 1 --gpus-per-node 8:"
    told = json.loads(to_json(found))
    assert (told["nodes"], told["gpus_per_node"], told["gpu"]) == (1, 8, "h100")


def test_what_a_job_ran_on_is_said_with_the_plan(case, profile):
    found = answer(case(profile))
    assert "TP2 x PP2 x DP1 on 2 nodes x 2 ranks (CPU rank), 1f1b" in shown(found)
    told = json.loads(to_json(found))
    assert (told["nodes"], told["gpus_per_node"], told["gpu"]) == (2, 2, "cpu")
    assert json.loads(to_json(answer(case(with_gpus(profile, model="Accelerator X")))))["gpu"] is None


@pytest.mark.parametrize(
    ("parallel", "nodes", "gpus_per_node", "placed"),
    [
        ("tensor = 2\npipeline = 4", None, None, (1, 8)),
        ("tensor = 4\npipeline = 4", None, None, (2, 8)),
        ("tensor = 8\npipeline = 2", None, 4, (4, 4)),
        ("tensor = 4\npipeline = 4", 4, None, (4, 8)),
    ],
)
def test_a_replica_takes_nodes_of_eight(tmp_path, parallel, nodes, gpus_per_node, placed):
    path = tmp_path / "job.toml"
    path.write_text(f"[parallel]\n{parallel}\n")
    found = of_job_file(path, nodes, gpus_per_node, None)
    assert (found.nodes, found.gpus_per_node) == placed


def test_a_replica_that_nodes_of_eight_do_not_divide_is_refused(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text("[parallel]\ntensor = 3\npipeline = 4\n[model]\nattention_heads = 12\nhidden_size = 768\n")
    with pytest.raises(PlanError, match="a replica of 12 GPUs does not divide into nodes of 8; pass --nodes and"):
        of_job_file(path, None, None, None)


def test_steps_without_a_time_do_not_count(case, profiles, profile):
    seconds = profile.training.steps["duration_seconds"].copy()
    seconds[[20, 21, 22]] = math.nan, 0.0, math.inf
    found = answer(case(profiles.change(profile, steps={"duration_seconds": seconds})))
    assert found.case.measured_steps == 22
    assert found.case.situation.step_seconds == 1.5
    assert "nan" not in shown(found)
    assert json.loads(to_json(found))["step_seconds"] == 1.5
    with pytest.raises(PlanError, match="0 whole steps are recorded"):
        case(profiles.change(profile, steps={"duration_seconds": np.full(30, math.nan)}))


def test_json_has_null_for_what_is_no_number(case, profile):
    found = answer(case(profile))
    situation = dataclasses.replace(found.case.situation, seconds_left=math.nan, lasting_seconds=math.inf)
    assert (
        json.loads(to_json(Answer(dataclasses.replace(found.case, situation=situation), found.decision)))[
            "seconds_left"
        ]
        is None
    )


def test_what_each_plan_needs_of_the_memory_is_told(case):
    found = answer(from_job("job.toml", JOB, nodes=1, gpus_per_node=8, gpu="h100"))
    told = {one["kind"]: one for one in json.loads(to_json(found))["considered"]}
    for kind in (Kind.NOTHING, Kind.LAYERS, Kind.REQUEUE):
        assert 1e9 < told[kind]["peak_memory_bytes"] <= told[kind]["memory_bytes"] == 80e9
    outcome = found.case.situation.shapes.best
    assert told[Kind.REQUEUE]["peak_memory_bytes"] == max(outcome.memory_bytes)
    needed = told[Kind.REQUEUE]["peak_memory_bytes"] / 2**30
    assert f"needs {needed:.1f} of 74.5 GiB" in " ".join(shown(found).split())


def test_all_that_simulate_takes_for_granted_is_told_of_a_job_file(case):
    found = from_job("job.toml", JOB, nodes=1, gpus_per_node=8, gpu="h100")
    for part in ("matrix products reach 65%", "without sequence parallelism", "launches 12 kernels"):
        assert any(part in text for text in found.assumptions)


def test_a_cause_that_is_not_sure_is_said_with_what_would_make_it_sure(case, profile, profiles):
    found = answer(case(profile))
    assert found.case.situation.confidence < 0.6
    assert found.decision.reason.startswith("the cause is not sure (50%): move layers: saves ")
    assert found.sentence.startswith(
        "The cause is not sure (50%): with one replica a slow device looks like long layers; to be sure, let it run "
        "until its devices are probed, or run two replicas. Move layers: layers 4|4 -> 5|3, which "
    )
    sure = answer(case(profiles.change(profile, training={"probes": PROBES})))
    assert sure.case.situation.confidence >= 0.6
    assert sure.sentence.startswith("Move layers: ")


def test_nodes_that_have_all_handed_in_their_part_have_ended_though_nobody_said_how(case, profiles):
    assert case(profiles.make(exit_code=-1)).ended


def test_ranks_that_share_cores_gain_nothing_by_a_move(case, profile):
    """Four ranks on two cores: the stages, of two ranks each, take 1.45 s of 1.5 s, one after another."""
    found = answer(case(on_cores(profile, 2)))
    hardware = found.case.situation.hardware
    assert hardware.stages_at_once == pytest.approx(1.45 / 1.5)
    assert hardware.overhead_seconds == pytest.approx(0, abs=1e-9)
    assert considered(found, Kind.LAYERS).verdict is Verdict.TOO_LITTLE
    assert found.decision.order is None
    assert any(text.startswith("The ranks share 2 cores, on which 0.97 stages") for text in found.case.assumptions)
    assert json.loads(to_json(found))["stages_at_once"] == hardware.stages_at_once


def test_ranks_with_cores_of_their_own_bear_the_rest_of_the_step(case, profile):
    found = answer(case(on_cores(profile, 4)))
    assert found.case.situation.hardware.stages_at_once == math.inf
    assert re.search(r"Beside the pipeline +575 ms of a step", shown(found))
    assert json.loads(to_json(found))["overhead_seconds"] == pytest.approx(0.575)


def on_cores(profile, cores):
    """The profile of ranks that may each run on so many cores."""

    def one(device):
        return dataclasses.replace(
            device, samples={**device.samples, "utilization_cores": cores * device.samples["utilization_ratio"]}
        )

    nodes = tuple(dataclasses.replace(node, devices=tuple(map(one, node.devices))) for node in profile.nodes)
    return dataclasses.replace(profile, nodes=nodes)


def test_a_step_of_one_microbatch_has_one(case):
    job = dataclasses.replace(JOB, batch=Batch(microbatch_size=16, global_batch_size=16))
    found = from_job("job.toml", job, nodes=1, gpus_per_node=8, gpu="h200")
    assert ", 1 microbatch of 16, " in shown(answer(found))


def reshaped(profile, layout, microbatches="8", recomputed_layers="0|0", first_step=1):
    """The profile of a run whose ranks were reshaped after the step before `first_step`."""
    rows = [(0, "Etttt|ttttL", "8", "0|0"), (first_step, layout, microbatches, recomputed_layers)]
    names = ("step", "layout", "microbatches", "recomputed_layers")
    table = {name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
    return dataclasses.replace(profile, training=dataclasses.replace(profile.training, settings=table))


@pytest.mark.parametrize(("shares", "triggered"), [((6, 5, 5), False), ((7, 5, 4), True)])
def test_shares_that_are_unequal_because_they_must_be_set_no_replicas_apart(case, profiles, shares, triggered):
    """Three replicas of 16 microbatches, all equally fast."""
    profile = noisy(profiles.make(data=3, head_seconds=0.0, microbatches=1, steps=80))
    training = with_job(profiles, profile, batch=Batch(2, 32)).training
    of_row = np.array(shares)[training.stages["replica"]]
    scaled = {name: training.stages[name] * of_row for name in ("forward_seconds", "backward_seconds", "tokens")}
    shares_text = "|".join(map(str, shares))
    table = {"step": [0], "layout": ["Etttt|ttttL"], "microbatches": [shares_text], "recomputed_layers": ["0|0"]}
    training = dataclasses.replace(
        training,
        stages=training.stages | scaled,
        steps=training.steps | {"global_batch_size": np.full(80, 32)},
        settings={name: np.array(column) for name, column in table.items()},
    )
    found = answer(case(dataclasses.replace(profile, training=training)))
    assert found.case.detection.triggered is triggered
    assert found.case.diagnosis.cause == "none"
    back = considered(found, Kind.MICROBATCHES)
    if triggered:
        assert (back.verdict, back.plan.microbatches) == (Verdict.CHOSEN, (6, 5, 5))
    else:
        assert back.obstacle == "the replicas' shares are the best whole ones already"


def test_a_plan_begins_with_what_the_ranks_were_reshaped_to(case, profile):
    found = answer(case(reshaped(profile, "Ettttt|tttL")))
    assert found.case.situation.plan.layout == Layout((5, 3), 2)
    assert considered(found, Kind.NOTHING).plan.layout == Layout((5, 3), 2)


def test_what_it_was_reshaped_to_is_what_the_next_run_shall_begin_with(case, profile):
    level = profile.training.stages | {
        name: np.full(len(profile.training.stages["step"]), seconds)
        for name, seconds in (("forward_seconds", 0.25), ("backward_seconds", 0.5))
    }
    even = dataclasses.replace(profile, training=dataclasses.replace(profile.training, stages=level))
    found = answer(case(reshaped(even, "Ettttt|tttL")))
    assert found.decision.order is None
    assert found.job_lines == ("[parallel]", 'layout = "Ettttt|tttL"')
    assert "What it was reshaped to while it ran is, in the job file" in found.sentence


def test_only_steps_since_the_last_reshape_count(case, profile):
    assert case(reshaped(profile, "Ettttt|tttL", first_step=11)).measured_steps == 15
    with pytest.raises(
        PlanError, match="4 whole steps are recorded after the last reshape and its warm-up of 5, and 5"
    ):
        case(reshaped(profile, "Ettttt|tttL", first_step=22))


def test_what_was_recomputed_is_no_cost_of_the_layers(case, profile):
    """All of stage 0's layers are recomputed: its backward has their forward once more."""
    stages = dict(profile.training.stages)
    first = stages["stage"] == 0
    stages["backward_seconds"] = stages["backward_seconds"] + np.where(first, stages["forward_seconds"], 0.0)
    again = dataclasses.replace(profile, training=dataclasses.replace(profile.training, stages=stages))
    plain, found = case(profile), case(reshaped(again, "Etttt|ttttL", recomputed_layers="4|0"))
    assert found.situation.plan.recomputed_layers == (4, 0)
    # The embedding is a small part of the first stage's forward, and is not recomputed.
    for one, other in zip(plain.situation.costs.layers, found.situation.costs.layers, strict=True):
        assert other.backward_seconds == pytest.approx(one.backward_seconds, rel=0.01)


def test_a_setting_that_is_none_of_the_job_is_damage(case, profile):
    with pytest.raises(PlanError, match="the layout has 7 layers, the model has 8: it is damaged"):
        case(reshaped(profile, "Etttt|tttL"))
