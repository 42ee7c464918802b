"""Layers that are recomputed in the backward: the same numbers, bit for bit."""

import pytest

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

CASES = {
    "some layers of each stage": {"pipeline": 2, "recomputed_layers": [1, 2]},
    "interleaved, over the chunks of a stage": {"pipeline": 2, "virtual": 2, "recomputed_layers": [2, 1]},
    "tensor-parallel, sequence-parallel, all layers": {
        "tensor": 2,
        "sequence_parallel": True,
        "recomputed_layers": [4],
    },
}


def test_recomputed_layers_change_no_bit(train_series, tiny_job, tmp_path):
    (tmp_path / "freeing.py").write_text(PROVIDER)
    freeing = {"model": {"provider": "freeing:build"}, "parallel": {"pipeline": 2}}
    with_layers = [tiny_job(parallel=parallel, train={"steps": 4}) for parallel in CASES.values()]
    with_layers.append(tiny_job(**freeing | {"parallel": {"pipeline": 2, "recomputed_layers": [2, 1]}}))
    without = [job | {"parallel": job["parallel"] | {"recomputed_layers": []}} for job in with_layers]
    ended = train_series([*with_layers, *without], 2, working_directory=tmp_path)
    for name, one, other in zip([*CASES, "freeing"], ended[: len(with_layers)], ended[len(with_layers) :], strict=True):
        assert len(one.losses) >= 4, name
        assert (one.losses, one.gradient_norms) == (other.losses, other.gradient_norms), name
    microbatches = 6 * 4
    lines = [line for stdout in ended[0].stdout for line in stdout.splitlines()]
    computed = {layer: lines.count(f"layer {layer}") for layer in (1, 2, 3, 4)}
    assert computed == {1: 3 * microbatches, 2: 3 * microbatches, 3: 3 * microbatches, 4: 2 * microbatches}
