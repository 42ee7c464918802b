"""A model and data of one's own: a GPT as GPT-2 had it, which learns to count."""

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig

from trimtab.protocol import Job


def build_model(
    config: TransformerConfig,
    job: Job,
    vocabulary_size: int,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
) -> GPTModel:
    """LayerNorm, GELU and learned positions, in place of RMSNorm, SwiGLU and rotary ones."""
    config.normalization = "LayerNorm"
    config.activation_func = torch.nn.functional.gelu
    config.gated_linear_unit = False
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="LayerNorm"),
        vocab_size=vocabulary_size,
        max_sequence_length=job.model.sequence_length,
        position_embedding_type="learned_absolute",
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
    )


class Counting:
    """Counting up from each number in steps of 1 to 5, modulo the vocabulary: the step has to be found out."""

    vocabulary_size = 100

    def __init__(self, sequence_length: int) -> None:
        self._places = torch.arange(sequence_length + 1)

    def __len__(self) -> int:
        return self.vocabulary_size * 5

    def __getitem__(self, index: int) -> torch.Tensor:
        stride, start = divmod(index, self.vocabulary_size)
        return (start + (stride + 1) * self._places) % self.vocabulary_size


def build_samples(job: Job) -> Counting:
    """The samples of the run."""
    return Counting(job.model.sequence_length)
