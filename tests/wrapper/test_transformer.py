import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from trimtab.balance.model.accelerators import ACCELERATORS
from trimtab.balance.model.overhead import overhead_seconds
from trimtab.balance.model.transformer import OptimizerState, Sizes, parameter_memory, sizes_of, transformer_costs
from trimtab.balance.plan import Link
from trimtab.protocol import Job, Model
from trimtab.simulation.presets import PRESETS

H100 = ACCELERATORS["h100"]
LLAMA_70B = Sizes(**PRESETS["70b"])


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        # As the published weights count them.
        ("7b", 6_738_415_616),
        ("13b", 13_015_864_320),
        ("8b", 8_030_261_248),
        ("70b", 70_553_706_496),
        ("405b", 405_853_388_800),
    ],
)
def test_parameters_of_published_models(preset, parameters):
    assert Sizes(**PRESETS[preset]).parameters == parameters


def test_tied_embeddings_are_counted_once():
    sizes = Sizes(2, 8, 2, 2, 16, 100, 4)
    assert sizes.parameters - Sizes(2, 8, 2, 2, 16, 100, 4, tied_embeddings=True).parameters == 100 * 8


@pytest.mark.parametrize("preset", PRESETS)
def test_model_flops_are_six_for_each_parameter_and_the_attention(preset):
    sizes = Sizes(**PRESETS[preset])
    attention = 6 * sizes.layers * sizes.sequence_length * sizes.hidden_size
    # The embedding is looked up, norms are no matrix products: their parameters have no FLOPs.
    idle = sizes.vocabulary_size * sizes.hidden_size + (2 * sizes.layers + 1) * sizes.hidden_size
    assert sizes.model_flops_per_token == pytest.approx(6 * (sizes.parameters - idle) + attention, rel=1e-12)


def test_the_parts_hold_all_parameters_once():
    costs = transformer_costs(LLAMA_70B, H100)
    parts = (costs.embedding, *costs.layers, costs.head)
    assert sum(part.parameters for part in parts) == LLAMA_70B.parameters


@hypothesis_settings(deadline=None, max_examples=30)
@given(tensor=st.sampled_from([2, 4, 8]), sequence_parallel=st.booleans())
def test_tensor_parallel_ranks_share_all_but_norms(tensor, sequence_parallel):
    whole = transformer_costs(LLAMA_70B, H100)
    shared = transformer_costs(LLAMA_70B, H100, tensor=tensor, sequence_parallel=sequence_parallel)
    norms = 2 * LLAMA_70B.hidden_size
    assert shared.layers[0].parameters - norms == (whole.layers[0].parameters - norms) / tensor
    # Less work each, but not by the whole factor: they exchange.
    assert whole.layers[0].compute_seconds / tensor < shared.layers[0].compute_seconds < whole.layers[0].compute_seconds


def test_activations_of_a_layer_counted_by_hand():
    # 2 bytes each for 1,024 tokens: norm inputs and outputs 4 x 64, q 64, k and v 2 x 16, attention 64, MLP 3 x 96;
    # 4 bytes for the attention's sum of each of 4 heads.
    sizes = Sizes(2, 64, 4, 1, 96, 512, 1024)
    layer = transformer_costs(sizes, H100).layers[0]
    assert layer.activation_bytes == 1024 * (2 * (4 * 64 + 64 + 2 * 16 + 64 + 3 * 96) + 4 * 4)
    assert layer.recomputed_bytes == 1024 * 2 * 64


def test_activations_follow_korthikanti():
    # Their 34 s b h (Korthikanti et al. 2022, equation 1), without two dropout masks 32; SwiGLU of the same width keeps
    # gate and up where GELU has one input, 8 more; fused attention keeps an fp32 sum for each query and head.
    h, s, heads = 128, 256, 4
    layer = transformer_costs(Sizes(1, h, heads, heads, 4 * h, 512, s), H100).layers[0]
    assert layer.activation_bytes == 40 * s * h + 4 * s * heads


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_sequence_parallelism_shares_all_activations(tensor):
    whole = transformer_costs(LLAMA_70B, H100)
    shared = transformer_costs(LLAMA_70B, H100, tensor=tensor, sequence_parallel=True)
    plain = transformer_costs(LLAMA_70B, H100, tensor=tensor)
    assert shared.layers[0].activation_bytes * tensor == whole.layers[0].activation_bytes
    assert shared.boundary_bytes * tensor == whole.boundary_bytes
    # Without it the four residual tensors stay whole on each rank.
    kept = 4 * whole.boundary_bytes * (1 - 1 / tensor)
    assert plain.layers[0].activation_bytes == pytest.approx(shared.layers[0].activation_bytes + kept, rel=1e-12)
    assert plain.boundary_bytes == whole.boundary_bytes


def test_the_head_keeps_the_softmax_in_fp32():
    head = transformer_costs(LLAMA_70B, H100).head
    tokens = LLAMA_70B.sequence_length
    assert head.activation_bytes == tokens * (4 * LLAMA_70B.vocabulary_size + 2 * 2 * LLAMA_70B.hidden_size)


def test_seconds_of_a_matrix_bound_layer_are_flops_over_the_reachable_peak():
    # With infinite memory bandwidth only products and attention take time.
    fast = dataclasses.replace(H100, memory_bytes_per_second=math.inf)
    layer = transformer_costs(LLAMA_70B, fast).layers[0]
    tokens, sizes = LLAMA_70B.sequence_length, LLAMA_70B
    products = 2 * tokens * sizes.layer_matrix_parameters / (H100.flops_per_second * H100.achievable.matmul_ratio)
    attention = 2 * tokens**2 * sizes.hidden_size / (H100.flops_per_second * H100.achievable.attention_ratio)
    assert layer.forward_seconds == pytest.approx(products + attention, rel=1e-12)
    assert layer.backward_input_seconds == pytest.approx(products + 2.5 * attention, rel=1e-12)
    assert layer.backward_weight_seconds == pytest.approx(products, rel=1e-12)


def test_an_all_reduce_moves_what_a_ring_moves():
    # 8 ranks: 14 steps of an eighth of T h e, at 450 GB/s and the reachable share, and as many latencies.
    free = dataclasses.replace(H100, node_bytes_per_second=math.inf, peer_bytes_per_second=math.inf)
    free = dataclasses.replace(free, node_latency_seconds=0.0)
    with_links = transformer_costs(LLAMA_70B, H100, tensor=8).layers[0].forward_seconds
    without = transformer_costs(LLAMA_70B, free, tensor=8).layers[0].forward_seconds
    size = 2 * LLAMA_70B.sequence_length * LLAMA_70B.hidden_size
    ring = 14 * (H100.node_latency_seconds + size / 8 / (450e9 * H100.achievable.link_ratio))
    assert with_links - without == pytest.approx(2 * ring, rel=1e-9)


def test_an_all_reduce_over_nodes_is_as_slow_as_the_network():
    inside, over = (transformer_costs(LLAMA_70B, H100, tensor=8, across_nodes=nodes) for nodes in (False, True))
    sent = 2 * 7 / 8 * 4096 * 8192 * 2
    slower = 2 * 7 * (10e-6 - 3e-6) + sent / (0.75 * 50e9) - sent / (0.75 * 450e9)
    for before, after in zip(inside.layers, over.layers, strict=True):
        assert after.forward_seconds - before.forward_seconds == pytest.approx(2 * slower, rel=1e-9)


def test_a_tiny_layer_takes_as_long_as_its_launches():
    costs = transformer_costs(Sizes(2, 64, 2, 2, 128, 128, 16), H100)
    for part in (*costs.layers, costs.head):
        seconds = (part.forward_seconds, part.backward_input_seconds, part.backward_weight_seconds)
        assert seconds == (12 * 5e-6,) * 3


def test_links_to_single_peers_limit_small_groups():
    mi300x = ACCELERATORS["mi300x"]
    assert mi300x.among_bytes_per_second(2) == 64e9
    assert mi300x.among_bytes_per_second(8) == 448e9
    assert H100.among_bytes_per_second(2) == H100.among_bytes_per_second(8) == 450e9


@hypothesis_settings(deadline=None, max_examples=30)
@given(name=st.sampled_from(sorted(ACCELERATORS)), microbatch_size=st.integers(1, 8))
def test_costs_grow_with_the_microbatch(name, microbatch_size):
    sizes = Sizes(1, 4096, 32, 8, 14336, 32000, 2048)  # more than its launches
    one = transformer_costs(sizes, ACCELERATORS[name], microbatch_size=microbatch_size)
    two = transformer_costs(sizes, ACCELERATORS[name], microbatch_size=2 * microbatch_size)
    for part in ("embedding", "head"):
        assert_grows(getattr(one, part), getattr(two, part))
    assert_grows(one.layers[0], two.layers[0])


def assert_grows(small, large):
    assert small.forward_seconds < large.forward_seconds <= 2 * small.forward_seconds
    # Some work is of the weights' size, whatever the microbatch.
    assert small.compute_seconds < large.compute_seconds <= 2 * small.compute_seconds
    assert large.activation_bytes == 2 * small.activation_bytes
    assert small.parameters == large.parameters


def test_sizes_of_a_job():
    job = Job(model=Model(layers=4, hidden_size=64, attention_heads=4, sequence_length=32))
    # The MLP's and the groups' defaults are resolved, the vocabulary is padded to a multiple of 128.
    assert sizes_of(job, 1000) == Sizes(4, 64, 4, 4, 256, 1024, 32)


@pytest.mark.parametrize(
    ("precision", "optimizer", "total"),
    [
        ("bf16", OptimizerState.DEVICE, 18),  # 2 + 4 + 12
        ("bf16", OptimizerState.HOST, 6),
        ("bf16", OptimizerState.BF16, 8),
        ("fp32", OptimizerState.DEVICE, 16),  # the weight is its own main parameter
    ],
)
def test_bytes_of_a_parameter(precision, optimizer, total):
    assert parameter_memory(precision, optimizer=optimizer).total_bytes == total


def test_replicas_share_optimizer_state():
    assert parameter_memory("bf16", 8).total_bytes == 2 + 4 + 12 / 8


def test_a_step_beside_the_pipeline_by_hand():
    # 1e9 parameters, 4 replicas in a ring of 10 GB/s without latency: 3/4 of 4 bytes there, 3/4 of 2 bytes back.
    memory = parameter_memory("bf16", 4)
    link = Link(0.0, 10e9)
    reduced = 0.75 * (4 + 2) * 1e9 / 10e9
    # A quarter of all 18 bytes read and written.
    step = 2 * 18e9 / 4 / (H100.memory_bytes_per_second * H100.achievable.memory_ratio)
    found = overhead_seconds(
        H100, parameters=1e9, memory=memory, optimizer=OptimizerState.DEVICE, replicas=4, replica_link=link
    )
    assert found == pytest.approx(reduced + step, rel=1e-12)


def test_a_step_on_the_host_by_hand():
    # 1e9 parameters: 4 + 2 bytes over PCIe; on the host 4 read, 12 read and written, 2 written.
    memory = parameter_memory("bf16", optimizer=OptimizerState.HOST)
    found = overhead_seconds(
        H100, parameters=1e9, memory=memory, optimizer=OptimizerState.HOST, replicas=1, replica_link=Link(0.0, 1.0)
    )
    crossing = 6e9 / (H100.host_bytes_per_second * H100.achievable.link_ratio)
    step = 30e9 / (H100.host_memory_bytes_per_second * H100.achievable.memory_ratio)
    assert found == pytest.approx(crossing + step, rel=1e-12)
