"""From a decoder-only transformer's sizes to what its parts cost on an accelerator: time, parameters, activations.

The model is what the ranks build: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases, no dropout. An
operation takes as long as the slower of its arithmetic and its memory traffic (roofline, Williams et al.
2009); what tensor-parallel ranks exchange comes on top, not overlapped. The host launches kernels ahead of the device:
a layer or head takes no less than its launches.

Sizes in formulas: T tokens of a microbatch, h hidden, k width of all keys (= of all values), f MLP, V vocabulary,
t tensor-parallel ranks, e bytes of an element.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from trimtab.balance.model.accelerators import Accelerator
from trimtab.balance.plan import Costs, ParameterMemory, Part
from trimtab.protocol import Job, JobError

MOST_LAYERS = 2000
"""With more, searches take minutes, and memory by the square."""
VOCABULARY_MULTIPLE = 128
"""The ranks pad the vocabulary of a job's tokenizer to a multiple of this."""
FP32_BYTES = 4
KERNELS = 12
"""Of a layer, or of the head, in its forward and in either half of its backward: about as many. Assumed."""
FLASH_BACKWARD = 2.5
"""Backward over forward of fused attention: five matrix products for two, the scores being computed again
(Dao 2023, FlashAttention-2, section 4.1)."""
CROSS_ENTROPY_FORWARD_BYTES = 38
"""Memory traffic of Megatron-core's vocabulary-parallel cross entropy for each bf16 logit: to fp32 (2 + 4), maximum
(4), subtraction (8), exponential (8), sum (4), division (8)."""
CROSS_ENTROPY_BACKWARD_BYTES = 14
"""Likewise: scaling the kept softmax (8), back to bf16 (6)."""
ELEMENT_BYTES = {"bf16": 2, "fp32": 4}
"""By precision."""


@dataclass(frozen=True)
class Sizes:
    """What determines a transformer's costs."""

    layers: int
    hidden_size: int
    attention_heads: int
    query_groups: int
    """Heads of keys, and of values."""
    ffn_hidden_size: int
    vocabulary_size: int
    sequence_length: int
    tied_embeddings: bool = False

    @property
    def key_size(self) -> int:
        """Width of all keys of a token; its values have the same."""
        return self.hidden_size // self.attention_heads * self.query_groups

    @property
    def layer_matrix_parameters(self) -> int:
        """Of the matrices of a layer: query, key, value, output; gate, up, down."""
        return self.hidden_size * (2 * self.hidden_size + 2 * self.key_size + 3 * self.ffn_hidden_size)

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        vocabulary_matrices = 1 if self.tied_embeddings else 2
        layer = self.layer_matrix_parameters + 2 * self.hidden_size
        return self.layers * layer + vocabulary_matrices * self.vocabulary_size * self.hidden_size + self.hidden_size

    @property
    def model_flops_per_token(self) -> float:
        """Forward and backward of one token, as a model's FLOPs utilization counts them: nothing recomputed.

        6 for each parameter in a matrix product, and the causal attention: of 4 s h forward (scores and values) half,
        the backward twice that (Narayanan et al. 2021, appendix; Dao 2023, section 4.1).
        """
        matrices = self.layers * self.layer_matrix_parameters + self.vocabulary_size * self.hidden_size
        return 6 * matrices + 6 * self.layers * self.sequence_length * self.hidden_size


def sizes_of(job: Job, vocabulary_size: int) -> Sizes:
    """The sizes of a job's model. `vocabulary_size` is the tokenizer's, which the ranks pad.

    Raises JobError for more than `MOST_LAYERS`.
    """
    model = job.model
    if model.layers > MOST_LAYERS:
        raise JobError("model.layers", model.layers, f"at most {MOST_LAYERS:,} layers can be planned")
    return Sizes(
        layers=model.layers,
        hidden_size=model.hidden_size,
        attention_heads=model.attention_heads,
        query_groups=model.query_groups or model.attention_heads,
        ffn_hidden_size=job.ffn_hidden_size,
        vocabulary_size=-(-vocabulary_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE,
        sequence_length=model.sequence_length,
        tied_embeddings=model.tied_embeddings,
    )


class OptimizerState(StrEnum):
    """Where the optimizer keeps its state, and in what precision."""

    DEVICE = "device"
    """On the device, in fp32: what the ranks of trimtab do."""
    HOST = "host"
    """In the host's memory, in fp32; gradients go there and weights come back in each step."""
    BF16 = "bf16"
    """On the device, gradients and moments in bf16, without fp32 main parameters: other numerics."""


def parameter_memory(
    precision: str, shards: int = 1, optimizer: OptimizerState = OptimizerState.DEVICE
) -> ParameterMemory:
    """Bytes of one parameter on a rank, with Adam.

    bf16 on the device takes 2 (weight) + 4 (fp32 gradient) + 12 (fp32 main parameter and two moments), the last shared
    by `shards` replicas: Rajbhandari et al. 2020 (ZeRO), section 3.1, with the gradient in fp32 as Megatron-core keeps
    it. In fp32 the weight is its own main parameter.
    """
    if precision == "fp32":
        weight, gradient, state = 4.0, 4.0, 8.0
    elif optimizer is OptimizerState.BF16:
        weight, gradient, state = 2.0, 2.0, 4.0
    else:
        weight, gradient, state = 2.0, 4.0, 12.0
    return ParameterMemory(weight, gradient, 0.0 if optimizer is OptimizerState.HOST else state, shards)


def transformer_costs(
    sizes: Sizes,
    accelerator: Accelerator,
    *,
    tensor: int = 1,
    microbatch_size: int = 1,
    sequence_parallel: bool = False,
    precision: str = "bf16",
    across_nodes: bool = False,
) -> Costs:
    """What each part costs on one rank for one microbatch.

    `microbatch_size` counts sequences of full length. With `sequence_parallel` norms and residual paths, and what they
    keep, are shared by the tensor-parallel ranks (Korthikanti et al. 2022, section 4.2). What it gathers once more in
    the backward is taken to be hidden behind matrix products, as Megatron-core does it. `across_nodes`: some
    tensor-parallel ranks that share a layer are in different nodes.
    """
    element_bytes = ELEMENT_BYTES[precision]
    work = _Work(sizes, accelerator, tensor, microbatch_size, sequence_parallel, element_bytes, across_nodes)
    layer, head = (work.launched(part) for part in (work.layer(), work.head()))
    return Costs((layer,) * sizes.layers, work.embedding(), head, work.residual_bytes)


@dataclass(frozen=True)
class _Work:
    """One microbatch on one rank."""

    sizes: Sizes
    accelerator: Accelerator
    tensor: int
    microbatch_size: int
    sequence_parallel: bool
    element_bytes: int
    across_nodes: bool

    @property
    def tokens(self) -> int:
        """T."""
        return self.microbatch_size * self.sizes.sequence_length

    @property
    def stream_bytes(self) -> float:
        """T h e: the residual stream, whole."""
        return self.element_bytes * self.tokens * self.sizes.hidden_size

    @property
    def residual_bytes(self) -> float:
        """What this rank holds of it between parts."""
        return self.stream_bytes / self.tensor if self.sequence_parallel else self.stream_bytes

    def layer(self) -> Part:
        """Attention and MLP, each after a norm and before a residual sum.

        Kept for the backward, counted as Korthikanti et al. 2022 (section 4.1) do, with fused attention, which keeps
        one fp32 sum for each query and head instead of the scores: the inputs of both norms and of what follows them
        (4 T h e); queries, keys, values, the attention's output, gate, up and their product (T (2 h + 2 k + 3 f) e/t).
        """
        h, k, f, t = self.sizes.hidden_size, self.sizes.key_size, self.sizes.ffn_hidden_size, self.tensor
        shared_bytes = self.element_bytes * self.tokens / t
        matrices = ((h, (h + 2 * k) / t), (h / t, h), (h, 2 * f / t), (f / t, h))
        matrices_seconds = sum(self.matrix_seconds(inner, outer) for inner, outer in matrices)
        exchange_seconds = 2 * self.all_reduce_seconds(self.stream_bytes)
        rotary_bytes = 2 * shared_bytes * (h + k)
        matrix_parameters = self.sizes.layer_matrix_parameters / t
        return Part(
            # Norm: reads and writes; residual sum: reads two, writes one; SwiGLU: reads two, writes one.
            forward_seconds=matrices_seconds
            + self.attention_seconds(1)
            + self.traffic_seconds(rotary_bytes + 2 * (2 + 3) * self.residual_bytes + 3 * shared_bytes * f)
            + exchange_seconds,
            # Norm: reads gradient and input, writes one; the sum of its gradient and the residual's; SwiGLU: 3 and 2.
            backward_input_seconds=matrices_seconds
            + self.attention_seconds(FLASH_BACKWARD)
            + self.traffic_seconds(rotary_bytes + 2 * (3 + 3) * self.residual_bytes + 5 * shared_bytes * f)
            + exchange_seconds,
            backward_weight_seconds=matrices_seconds + self.accumulate_seconds(matrix_parameters),
            parameters=matrix_parameters + 2 * h,
            activation_bytes=4 * self.residual_bytes
            + shared_bytes * (2 * h + 2 * k + 3 * f)
            + FP32_BYTES * self.tokens * self.sizes.attention_heads / t,
            recomputed_bytes=self.residual_bytes,
        )

    def embedding(self) -> Part:
        """A look-up in a table split along the vocabulary. Its gradient is a whole table for each microbatch."""
        parameters = self.sizes.vocabulary_size * self.sizes.hidden_size / self.tensor
        exchange_seconds = self.all_reduce_seconds(self.stream_bytes)
        backward_ratio = 0.5 if self.sequence_parallel else 0.0  # reduce-scatter and all-gather, else one all-reduce
        token_ids_bytes = 8.0 * self.tokens
        return Part(
            forward_seconds=self.traffic_seconds(2 * self.stream_bytes) + (1 - backward_ratio) * exchange_seconds,
            backward_input_seconds=0.0,
            backward_weight_seconds=self.traffic_seconds(2 * self.stream_bytes + self.element_bytes * parameters)
            + self.accumulate_seconds(parameters)
            + backward_ratio * exchange_seconds,
            parameters=parameters,
            activation_bytes=token_ids_bytes,
            recomputed_bytes=token_ids_bytes,
        )

    def head(self) -> Part:
        """Final norm, LM head and cross entropy. Kept: the inputs of the first two, and the softmax in fp32.

        Tied embeddings: the table is held, and multiplied by, here too, as it is where there are two stages or more.
        """
        h, logits = self.sizes.hidden_size, self.tokens * self.sizes.vocabulary_size / self.tensor
        parameters = self.sizes.vocabulary_size * h / self.tensor
        matrix_seconds = self.matrix_seconds(h, self.sizes.vocabulary_size / self.tensor)
        exchange_seconds = self.all_reduce_seconds(self.stream_bytes)
        forward_ratio = 0.5 if self.sequence_parallel else 0.0  # all-gather and reduce-scatter, else one all-reduce
        kept_bytes = 2 * self.residual_bytes + FP32_BYTES * logits
        return Part(
            forward_seconds=matrix_seconds
            + self.traffic_seconds(2 * self.residual_bytes + CROSS_ENTROPY_FORWARD_BYTES * logits)
            + forward_ratio * exchange_seconds,
            backward_input_seconds=matrix_seconds
            + self.traffic_seconds(3 * self.residual_bytes + CROSS_ENTROPY_BACKWARD_BYTES * logits)
            + (1 - forward_ratio) * exchange_seconds,
            backward_weight_seconds=matrix_seconds + self.accumulate_seconds(parameters),
            parameters=parameters + h,
            activation_bytes=kept_bytes,
            recomputed_bytes=kept_bytes,
        )

    def launched(self, part: Part) -> Part:
        """A part that takes no less than the launches of its kernels."""
        least = KERNELS * self.accelerator.achievable.launch_seconds
        return replace(
            part,
            forward_seconds=max(part.forward_seconds, least),
            backward_input_seconds=max(part.backward_input_seconds, least),
            backward_weight_seconds=max(part.backward_weight_seconds, least),
        )

    def matrix_seconds(self, inner: float, outer: float) -> float:
        """A product of [T, inner] and [inner, outer]; either of its gradients costs the same."""
        traffic = self.element_bytes * (self.tokens * (inner + outer) + inner * outer)
        peak = self.accelerator.flops_per_second * self.accelerator.achievable.matmul_ratio
        return max(2 * self.tokens * inner * outer / peak, self.traffic_seconds(traffic))

    def attention_seconds(self, passes: float) -> float:
        """Fused causal attention, in forwards: scores and values, 4 T s h, of which the causal half is done."""
        h, k = self.sizes.hidden_size / self.tensor, self.sizes.key_size / self.tensor
        flops = 2 * self.tokens * self.sizes.sequence_length * h
        traffic = self.element_bytes * self.tokens * (2 * h + 2 * k)
        peak = self.accelerator.flops_per_second * self.accelerator.achievable.attention_ratio
        return passes * max(flops / peak, self.traffic_seconds(traffic))

    def accumulate_seconds(self, parameters: float) -> float:
        """Adding a microbatch's gradient to the fp32 sum: Megatron-core without its fused accumulation."""
        return self.traffic_seconds((self.element_bytes + 2 * FP32_BYTES) * parameters)

    def traffic_seconds(self, bytes_moved: float) -> float:
        """Reading and writing so much memory."""
        return bytes_moved / (self.accelerator.memory_bytes_per_second * self.accelerator.achievable.memory_ratio)

    def all_reduce_seconds(self, size_bytes: float) -> float:
        """A ring over the tensor-parallel ranks (Thakur et al. 2005, section 4.4), as fast as its slowest link."""
        if self.tensor == 1:
            return 0.0
        accelerator, steps = self.accelerator, 2 * (self.tensor - 1)
        latency, bandwidth = accelerator.node_latency_seconds, accelerator.among_bytes_per_second(self.tensor)
        if self.across_nodes:
            latency = accelerator.network_latency_seconds
            bandwidth = min(bandwidth, accelerator.network_bytes_per_second)
        return steps * (latency + size_bytes / self.tensor / (bandwidth * accelerator.achievable.link_ratio))
