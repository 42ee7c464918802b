"""The scenarios of the demonstration, on a real Slurm: what they promise, from what is recorded of them."""

import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from examples.demo.scenarios import EXAMPLES, SCENARIOS, Run
from trimtab import sandbox as boxes
from trimtab.protocol import job_from_json
from trimtab.requeue import store
from trimtab.sandbox import processes
from trimtab.sandbox.config import Places
from trimtab_slurm import profile

pytest.importorskip("torch", reason="training needs torch and Megatron-core: pip install 'trimtab[train]'")
pytest.importorskip("megatron.core", reason="training needs Megatron-core: pip install 'trimtab[train]'")

pytestmark = [pytest.mark.slurm, pytest.mark.mcore]

ROUNDING = 1e-5
"""Relative, of losses in fp32 within ten steps: what another order of the same sums makes of them."""
GROWN = 1e-4
"""The same after hundreds of steps, in which training multiplies it: 1.1e-5 was seen in 300."""


class Played:
    """A scenario that was played to its end, and what is recorded of it."""

    def __init__(self, run: Run, code: int):
        self.text, self.code = run.text, code
        files = sorted((run.sandbox / "profiles/sandbox" / str(run.job_id)).glob("*.h5"))
        profiles = [profile.read(file) for file in files]
        self.trainings = [one for found in profiles for one in (*found.earlier_trainings, found.training)]
        self.chain, _ = store.load(run.directory / "checkpoints" / str(run.job_id))
        self.job = job_from_json(self.trainings[0].attributes["job"])

    @property
    def orders(self) -> list[tuple[str, str]]:
        """Kind and outcome of each, over all attempts."""
        tables = [training.orders for training in self.trainings if training.orders]
        return [
            (str(kind), str(outcome))
            for table in tables
            for kind, outcome in zip(table["kind"], table["outcome"], strict=True)
        ]

    @property
    def losses(self) -> list[float]:
        """Of each step, as the last attempt that took it had it."""
        return list(self._by_step("loss").values())

    def assert_whole(self, steps: int) -> None:
        """In each step up to the last the samples that come next: none is left out, none seen twice."""
        batch = self.job.batch.global_batch_size
        assert self._by_step("consumed_samples") == {step: step * batch for step in range(1, steps + 1)}

    def compute_seconds(self, first_step: int, last_step: int) -> float:
        """CPU time a step of the slowest stage, median over some steps of the last attempt."""
        stages = self.trainings[-1].stages
        seconds = stages["forward_seconds"] + stages["backward_seconds"]
        there = (stages["step"] >= first_step) & (stages["step"] <= last_step)
        return max(np.median(seconds[there & (stages["stage"] == stage)]) for stage in np.unique(stages["stage"]))

    def undisturbed_seconds(self, first_step: int) -> float:
        """Mean of the fastest quarter of the steps from one on: what else runs on the machine slows the others."""
        steps = self.trainings[-1].steps
        seconds = np.sort(steps["duration_seconds"][steps["step"] >= first_step])
        return float(seconds[: len(seconds) // 4].mean())

    def _by_step(self, column: str) -> dict[int, float]:
        found = {}
        for training in self.trainings:
            found |= dict(zip(training.steps["step"].tolist(), training.steps[column].tolist(), strict=True))
        return dict(sorted(found.items()))


class Stage:
    """A sandbox in which scenarios are played, one after the other."""

    def __init__(self, sandbox: Path, directory: Path):
        self._sandbox, self._directory, self._played = sandbox, directory, 0

    def play(self, name, changes=(), **others) -> Played:
        """Play a scenario, with another job file or other circumstances where told; nothing of it may be left."""
        self._played += 1
        directory = self._directory / str(self._played)
        directory.mkdir()
        scenario = replace(SCENARIOS[name], **others)
        text = (EXAMPLES / scenario.job).read_text()
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        job = self._directory / f"{self._played}.toml"
        job.write_text(text)
        for module in (EXAMPLES / scenario.job).parent.glob("*.py"):  # a provider of its samples
            shutil.copy(module, self._directory)
        boxes.up(self._sandbox, scenario.sandbox())
        with (directory / "followed").open("w") as output:
            run = Run(self._sandbox, directory, replace(scenario, job=str(job)), output.fileno())
            try:
                scenario.act(run)
                code = run.end()
            finally:
                run.stop()
        self._assert_nothing_left()
        return Played(run, code)

    def twin(self, name, *changes) -> Played:
        """The same run, but nothing happens to it and nothing is changed in it."""
        undisturbed = [*changes, ("[balance]", "[balance]\ndry_run = true")]
        return self.play(name, undisturbed, inject="", act=lambda run: None)

    def _assert_nothing_left(self) -> None:
        """No process of a job, and no node that is not idle."""
        box, places = boxes.find(self._sandbox), Places(self._sandbox)
        deadline = time.monotonic() + 60
        while processes.on_nodes(places) or set(boxes.node_states(box).values()) != {"IDLE"}:
            assert time.monotonic() < deadline, (processes.on_nodes(places), boxes.node_states(box))
            time.sleep(0.2)


@pytest.fixture
def stage(slurm_installed, box_directory, tmp_path):
    return Stage(box_directory, tmp_path)


def assert_same_losses(played: Played, twin: Played) -> None:
    first = next((int(training.orders["step"][0]) for training in played.trainings if training.orders), 0)
    assert played.losses[: first + 10] == pytest.approx(twin.losses[: first + 10], rel=ROUNDING)
    assert played.losses == pytest.approx(twin.losses, rel=GROWN)


def test_intrinsic_layers_move_and_the_run_is_as_fast_as_the_best_static_layout(stage, capsys):
    best = stage.twin("intrinsic", ("pipeline = 2", 'pipeline = 2\nlayout = "Ettttttt|tttL"'))
    moved = stage.play("intrinsic")
    assert moved.code == 0, moved.text
    assert moved.orders == [("move layers", "carried out")]
    moved.assert_whole(90)
    assert_same_losses(moved, best)
    step = int(moved.trainings[0].orders["step"][0])
    assert moved.compute_seconds(step + 5, 90) < 0.95 * moved.compute_seconds(6, step - 1)
    seconds = best.undisturbed_seconds(step + 5), moved.undisturbed_seconds(step + 5)
    with capsys.disabled():
        print(f"intrinsic: a step takes {seconds[0]:.3f} s in the best layout, {seconds[1]:.3f} s after the move")
    assert seconds[0] / seconds[1] >= 0.95


def test_hardware_a_slow_node_is_left_behind_where_there_is_another(stage):
    played = stage.play("hardware")
    *_, before, last = played.chain.attempts
    assert (before.nodes, last.nodes) == (("n1", "n2"), ("n1", "n3"))
    assert [exclusion.node for exclusion in played.chain.exclusions] == ["n2"]
    assert played.orders[-1][0] == "exclude a node"
    played.assert_whole(last.last_step)
    assert last.last_step >= before.last_step + 60


def test_fewer_a_slow_node_is_given_back_and_the_job_goes_on_at_once_in_its_allocation(stage):
    played = stage.play("fewer")
    *_, before, last = played.chain.attempts
    assert (before.nodes, last.nodes) == (("n1", "n2", "n3"), ("n1", "n3"))
    assert (before.restart_count, last.restart_count) == (1, 1)
    assert last.setting.microbatches == (2, 1)
    assert played.orders[-2:] == [("run on fewer nodes", "given"), ("run on fewer nodes", "carried out")]
    assert last.first_step == before.last_step + 1
    played.assert_whole(last.last_step)
    assert last.last_step >= before.last_step + 60


def test_hardware_without_another_node_microbatches_move(stage):
    played = stage.play("no-spare")
    assert played.code == 0, played.text
    assert played.orders == [("move microbatches", "carried out")]
    (before, after) = (
        [int(count) for count in text.split("|")] for text in played.trainings[0].settings["microbatches"]
    )
    assert before == [8, 8]
    assert after[1] < 8 < after[0]
    played.assert_whole(100)
    assert_same_losses(played, stage.twin("no-spare"))


def test_data_repacking_is_asked_for_and_no_layer_moves(stage):
    played = stage.play("data")
    assert played.code == 0, played.text
    assert played.orders == [("repack", "asked for")]
    assert len(played.trainings[0].settings["step"]) == 1


def test_noise_nothing_is_done_in_500_steps(stage):
    played = stage.play("noise")
    assert played.code == 0, played.text
    assert played.orders == []
    played.assert_whole(500)


@pytest.fixture(scope="module")
def untouched(slurm_installed, tmp_path_factory):
    """The run that is interrupted in what follows, uninterrupted."""
    with tempfile.TemporaryDirectory(prefix="trimtab-") as name:
        directory = Path(name)
        directory.chmod(0o755)
        try:
            return Stage(directory, tmp_path_factory.mktemp("untouched")).twin("preemption")
        finally:
            boxes.down(directory)


def test_preemption_the_job_saves_and_goes_on_where_it_was(stage, untouched):
    assert_went_on(stage.play("preemption"), untouched)


def test_time_limit_the_job_requeues_itself_and_goes_on_where_it_was(stage, untouched):
    assert_went_on(stage.play("time-limit"), untouched)


def test_hang_the_rank_that_holds_the_others_up_is_named_and_the_job_goes_on(stage, untouched):
    played = stage.play("hang")
    assert played.code == 0, played.text
    hung, last = played.chain.attempts
    assert "rank 1 (node n2, stage 1) did not wait for the others" in hung.why
    assert (hung.last_step, last.first_step) == (69, 61)
    told = "\n".join(event.text for event in played.trainings[0].events)
    assert "in _hang" in told, "the stacks are in the profile"
    assert_all_of_it(played, untouched)


def test_crash_the_job_goes_on_from_its_last_checkpoint_each_time(stage, untouched):
    played = stage.play("crash")
    assert played.code == 0, played.text
    ends = [attempt.why for attempt in played.chain.attempts[:-1]]
    assert len(ends) == 5, ends
    for end, expected in zip(
        ends, ("rank 1", "rank 0", "rank 1", "the wrapper was killed by SIGKILL", "n2"), strict=True
    ):
        assert expected in end
    assert_all_of_it(played, untouched)


def assert_went_on(played: Played, twin: Played) -> None:
    assert played.code == 0, played.text
    first, last, *more = played.chain.attempts
    assert first.last_step >= 80
    assert last.first_step == first.last_step + 1
    # Slurm 24.11 begins a job that was preempted, and had itself requeued, once more after its end.
    assert [attempt.last_step for attempt in more] in ([], [None])
    assert_all_of_it(played, twin)


def assert_all_of_it(played: Played, twin: Played) -> None:
    played.assert_whole(twin.job.train.steps)
    assert_same_losses(played, twin)
