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
    running = profiles.make(exit_code=-1)
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
    assert found.decision.reason == "as it is a stage needs more memory than it has, and nothing that fits is faster"
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
