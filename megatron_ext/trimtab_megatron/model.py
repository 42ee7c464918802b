"""From a job to the chunks of the model that this rank holds.

Megatron-core's GPTModel from its local layer spec, with our RMSNorm in place of its norms, which refuse sequence
parallelism; or whatever the user's `model.provider` builds from the same TransformerConfig.
"""

import math
from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from trimtab.protocol import Job, JobError, layout_of
from trimtab_kernels.rms_norm import rms_norm
from trimtab_megatron.initialize import initialize, normal
from trimtab_megatron.provider import load_provider
from trimtab_megatron.randomness import Randomness, has_dropout
from trimtab_megatron.stage_clock import StageClock
from trimtab_megatron.world import World

INIT_STD = 0.02
"""Standard deviation of weights; those that write to the residual stream get it over sqrt(2 layers), as in GPT-2."""
NORM_EPSILON = 1e-5
VOCABULARY_MULTIPLE = 128


class RMSNorm(torch.nn.Module):
    """Ours in place of Megatron-core's norms: all layers and the final one. Input and output are [s, b, h]."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = NORM_EPSILON) -> None:
        super().__init__()
        self.eps = eps
        device = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        # Each rank sees a part of the sequence, so the gradients of the weight must be summed over them.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The normalized input."""
        return rms_norm(x, self.weight, self.eps)


def padded_vocabulary(vocabulary_size: int, tensor: int) -> int:
    """The vocabulary that the model has: a multiple of 128 and of the tensor parallel size.

    Where the latter is a power of two up to 128 it does not matter, so that the same job has the same parameters,
    and the same losses, at every shape.
    """
    multiple = math.lcm(VOCABULARY_MULTIPLE, tensor)
    return -(-vocabulary_size // multiple) * multiple


def precision(job: Job, cuda: bool) -> torch.dtype:
    """What parameters and activations are held in; the optimizer's are fp32."""
    default = torch.bfloat16 if cuda else torch.float32
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}.get(job.train.precision, default)


def transformer_config(job: Job, cuda: bool) -> TransformerConfig:
    """Megatron-core's configuration of the job's model. Initializers only note what each weight is to get.

    Fusions that need Transformer Engine or Apex are off. Overlapped sends need unbatched ones; the interleaved
    schedule needs overlapped ones to be right over gloo, and the other refuses them.
    """
    model, parallel = job.model, job.parallel
    interleaved = parallel.virtual > 1
    stages = parallel.pipeline * parallel.virtual
    dtype = precision(job, cuda)
    return TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.attention_heads,
        num_query_groups=model.query_groups or model.attention_heads,
        ffn_hidden_size=job.ffn_hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=NORM_EPSILON,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        hidden_dropout=model.dropout,
        attention_dropout=model.dropout,
        init_method=normal(INIT_STD),
        embedding_init_method=normal(INIT_STD),
        output_layer_init_method=normal(INIT_STD / math.sqrt(2 * model.layers)),
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual if interleaved else None,
        pipeline_model_parallel_layout=str(layout_of(job)) if stages > 1 else None,
        sequence_parallel=parallel.sequence_parallel,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        batch_p2p_sync=cuda,
        deallocate_pipeline_outputs=cuda,
    )


def build_chunks(
    job: Job, config: TransformerConfig, world: World, vocabulary_size: int
) -> list[DistributedDataParallel]:
    """The model chunks of this rank, initialized, in Megatron-core's data-parallel wrapper.

    `vocabulary_size` is the tokenizer's; the model's is padded. Raises JobError for a provider that cannot be used.
    """
    virtual = job.parallel.virtual
    chunks = []
    for stage in range(virtual):
        vp_stage = stage if virtual > 1 else None
        ends: dict[str, Any] = {
            "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            "vp_stage": vp_stage,
        }
        chunks.append(_build(job, config, padded_vocabulary(vocabulary_size, world.shape.tensor), ends, world))
    initialize(chunks, config, job.train.seed, world)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=job.parallel.distributed_optimizer
    )
    wrapped = [
        DistributedDataParallel(
            config=config,
            ddp_config=ddp_config,
            module=Float16Module(config, chunk) if config.bf16 or config.fp16 else chunk,
            disable_bucketing=number > 0,  # as Megatron-core's own scripts do: only the first chunk's is overlapped
        )
        for number, chunk in enumerate(chunks)
    ]
    config.randomness = None
    if has_dropout(chunks, config):
        config.randomness = Randomness(job.train.seed, config, world)
        config.randomness.adopt(chunks)
    config.finalize_model_grads_func = finalize_model_grads
    config.timers = StageClock(world.cuda, world.faults.slow)
    return wrapped


def _build(
    job: Job, config: TransformerConfig, vocabulary_size: int, ends: dict[str, Any], world: World
) -> torch.nn.Module:
    if job.model.provider:
        function = load_provider("model.provider", job.model.provider)
        chunk: torch.nn.Module = function(config=config, job=job, vocabulary_size=vocabulary_size, **ends)
        if not isinstance(chunk, torch.nn.Module):
            reason = f"returned {type(chunk).__name__}, not a Megatron-core module"
            raise JobError("model.provider", job.model.provider, reason)
        if getattr(chunk, "config", None) is not config:
            reason = "built a model with another TransformerConfig: change the one that it is given"
            raise JobError("model.provider", job.model.provider, reason)
    else:
        layers = layout_of(job).chunk_layers((ends["vp_stage"] or 0) * world.shape.pipeline + world.pipeline_rank)
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=_block_spec(len(layers)),
            vocab_size=vocabulary_size,
            max_sequence_length=job.model.sequence_length,
            share_embeddings_and_output_weights=job.model.tied_embeddings,
            position_embedding_type="rope",
            **ends,
        )
    chunk.to(world.device)
    for parameter in chunk.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return chunk


def _block_spec(layers: int) -> TransformerBlockSubmodules:
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.input_layernorm = RMSNorm
    spec.submodules.pre_mlp_layernorm = RMSNorm
    # The whole block is named, and not one layer's spec: the final norm would else be Megatron-core's.
    return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=RMSNorm)
