"""Layers that are recomputed in the backward: the same numbers, bit for bit."""

from dataclasses import replace

import pytest

from trimtab.protocol import Order, Shape, job_from_dict, setting_of

pytestmark = pytest.mark.mcore

PROVIDER = '''
import trimtab_megatron.model as ours
from megatron.core.models.gpt import GPTModel


def build(config, job, vocabulary_size, pre_process, post_process, vp_stage):
    """As on GPUs: what a stage has sent is freed. Each time that a layer computes is told."""
    config.deallocate_pipeline_outputs = True
    model = GPTModel(
        config=config,
        transformer_layer_spec=ours._block_spec(job.model.layers // job.parallel.pipeline),
        vocab_size=vocabulary_size,
        max_sequence_length=job.model.sequence_length,
        position_embedding_type="rope",
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
    )
    for layer in model.decoder.layers:
        layer.mlp.register_forward_pre_hook(lambda *call, layer=layer: print("layer", layer.layer_number))
    return model
'''

SWITCHED = "switched between steps, and what a stage has sent is freed"
CASES = {
    "some layers of each stage": {"pipeline": 2, "recomputed_layers": [1, 2]},
    "interleaved, over the chunks of a stage": {"pipeline": 2, "virtual": 2, "recomputed_layers": [2, 1]},
    "tensor-parallel, sequence-parallel, all layers": {
        "tensor": 2,
        "sequence_parallel": True,
        "recomputed_layers": [4],
    },
}


@pytest.fixture(scope="module")
def runs(train_series, tiny_job, tmp_path_factory):
    """Of each case: with recomputed layers, and without."""
    directory = tmp_path_factory.mktemp("provider")
    (directory / "freeing.py").write_text(PROVIDER)
    jobs = [tiny_job(parallel=parallel, train={"steps": 2}) for parallel in CASES.values()]
    freeing = {"pipeline": 2, "recomputed_layers": [2, 1]}
    jobs.append(tiny_job(model={"provider": "freeing:build"}, parallel=freeing))
    without = [job | {"parallel": job["parallel"] | {"recomputed_layers": []}} for job in jobs]

    before = setting_of(job_from_dict(jobs[-1]), Shape(1, 2, 1))
    after = replace(before, recomputed_layers=(0, 2))
    switch = Order("reshape", "test", setting=after, replaces=before.fingerprint)
    ended = train_series([*jobs, *without], 2, orders={len(jobs) - 1: {3: switch}}, working_directory=directory)
    return dict(zip([*CASES, SWITCHED], zip(ended[: len(jobs)], ended[len(jobs) :], strict=True), strict=True))


@pytest.mark.parametrize("name", [*CASES, SWITCHED])
def test_recomputed_layers_change_no_bit(name, runs):
    one, other = runs[name]
    assert len(one.losses) == (6 if name == SWITCHED else 2)
    assert (one.losses, one.gradient_norms) == (other.losses, other.gradient_norms)


def test_so_many_layers_of_each_stage_are_recomputed_as_the_setting_says(runs):
    lines = [line for stdout in runs[SWITCHED][0].stdout for line in stdout.splitlines()]
    computed = {layer: lines.count(f"layer {layer}") for layer in (1, 2, 3, 4)}
    steps = {1: 3, 2: 3, 3: 3 + 3, 4: 3}  # in which each was recomputed: 2 and 1 layers at first, then none and 2
    both_runs = 2 * 6 * 4
    assert computed == {layer: both_runs + count * 4 for layer, count in steps.items()}
