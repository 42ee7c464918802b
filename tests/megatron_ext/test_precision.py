"""Half precisions, and gradients that are no numbers."""

import math

import pytest

from trimtab.protocol import Failed, Notice, Order, StepReport

pytestmark = pytest.mark.mcore

PROVIDER = '''
import os

import trimtab_megatron.model as ours
from megatron.core.models.gpt import GPTModel

STEPS, MICROBATCHES = {range}, 4


class Overflowing(GPTModel):
    """Its loss is too much for fp16 in some steps, once it is scaled."""

    seen = 0

    def compute_language_model_loss(self, labels, logits):
        step, self.seen = 1 + self.seen // MICROBATCHES, self.seen + 1
        return super().compute_language_model_loss(labels, logits) * (float("inf") if step in STEPS else 1.0)


def build(config, job, vocabulary_size, pre_process, post_process, vp_stage):
    return Overflowing(
        config=config,
        transformer_layer_spec=ours._block_spec(job.model.layers // job.parallel.pipeline),
        vocab_size=vocabulary_size,
        max_sequence_length=job.model.sequence_length,
        position_embedding_type="rope",
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
    )
'''


@pytest.fixture(scope="module")
def runs(train_series, tiny_job, tmp_path_factory):
    directory = tmp_path_factory.mktemp("providers")
    (directory / "at_times.py").write_text(PROVIDER.replace("{range}", "range(2, 6)"))
    (directory / "always.py").write_text(PROVIDER.replace("{range}", "range(1, 99)"))

    def job(precision, distributed=False, provider="", steps=4, saved=""):
        return tiny_job(
            model={"provider": provider},
            parallel={"pipeline": 1, "distributed_optimizer": True} if distributed else {"pipeline": 2},
            batch={"global_batch_size": 16 if distributed else 8},
            train={"precision": precision, "steps": steps, "checkpoint_directory": saved},
        )

    jobs = {
        "fp32": job("fp32"),
        "fp16": job("fp16"),
        "bf16": job("bf16"),
        "fp32, distributed": job("fp32", distributed=True),
        "fp16, distributed": job("fp16", distributed=True),
        "overflows always": job("fp16", provider="always:build", steps=30),
        "infinite in fp32": job("fp32", provider="always:build"),
        "infinite in bf16, distributed": job("bf16", True, provider="always:build"),
    }
    stop = {}
    for kind, distributed in {"": False, ", distributed": True}.items():
        overflowing = job("fp16", distributed, "at_times:build", steps=10, saved=str(tmp_path_factory.mktemp("saved")))
        stop[len(jobs)] = {6: Order("stop", "test")}
        jobs |= {f"overflows at times{kind}": overflowing, f"resumed{kind}": overflowing}
    ended = train_series(list(jobs.values()), 2, orders=stop, working_directory=directory)
    return dict(zip(jobs, ended, strict=True))


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [("fp16", 2**-10), ("fp16, distributed", 2**-10), ("bf16", 2**-7)],
)
def test_half_precision_trains_as_single_does(name, tolerance, runs):
    exact = runs["fp32, distributed" if "distributed" in name else "fp32"]
    assert runs[name].losses == pytest.approx(exact.losses, rel=tolerance)  # two units in the last place
    assert runs[name].losses != exact.losses
    assert runs[name].gradient_norms == pytest.approx(exact.gradient_norms, rel=0.05)


def told_of(ended):
    return [notice.text for notice in ended.all(Notice) if notice.kind == "precision"]


def skipped(step, scale):
    return (
        f"skipped step {step}: its gradients overflowed fp16 at the loss scale {scale}, "
        f"which is {scale // 2} from here on"
    )


@pytest.mark.parametrize("kind", ["", ", distributed"])
def test_a_step_that_overflows_is_skipped_and_counts(kind, runs):
    ended = runs[f"overflows at times{kind}"]
    assert list(ended.losses) == [1, 2, 3, 4, 5, 6]
    assert [step for step, norm in ended.gradient_norms.items() if norm is None] == [2, 3, 4, 5]
    # The first is borne: Megatron-core's hysteresis is 2.
    assert told_of(ended) == [skipped(3, 16384), skipped(4, 8192), skipped(5, 4096)]
    consumed = [report.consumed_samples for report in ended.all(StepReport) if report.loss is not None]
    assert consumed == [(16 if kind else 8) * step for step in range(1, 7)]


@pytest.mark.parametrize("kind", ["", ", distributed"])
def test_a_resumed_run_keeps_the_loss_scale(kind, runs):
    ended = runs[f"resumed{kind}"]
    assert [step for step, norm in ended.gradient_norms.items() if norm is None] == [8, 9, 10]
    assert math.isfinite(ended.gradient_norms[7])
    assert told_of(ended) == [skipped(8, 2048), skipped(9, 1024), skipped(10, 512)]  # nothing more is borne


def test_a_run_that_overflows_at_the_least_scale_ends(runs):
    ended = runs["overflows always"]
    failed = ended.all(Failed)
    assert [failure.step for failure in failed] == [15, 15]  # 2^14 twice, then halved 14 times down to 1
    assert failed[0].error == (
        "the gradients of step 16 overflow fp16 at the least loss scale, 1: "
        "lower train.learning_rate, or set train.precision to bf16 or fp32"
    )


@pytest.mark.parametrize("name", ["infinite in fp32", "infinite in bf16, distributed"])
def test_gradients_that_are_no_numbers_end_other_precisions_at_once(name, runs):
    failed = runs[name].all(Failed)
    assert [(failure.rank, failure.step) for failure in failed] == [(0, 0), (1, 0)]
    assert failed[0].error == "the gradient norm of step 1 is nan: lower train.learning_rate"
