"""One rank that times the parts of a model by themselves: embedding, layer, head. Prints them as JSON.

Started like a rank, with all tensor-parallel peers and the same number of processes, but without a pipeline: what it
measures owes nothing to Megatron-core's schedule and to our stage clock.
"""

import json
import os
import statistics
import time
from collections.abc import Callable

from trimtab_megatron import cpu

cuda = cpu.prepare()

import torch  # noqa: E402

from trimtab.protocol import job_from_json  # noqa: E402
from trimtab_megatron import world as worlds  # noqa: E402
from trimtab_megatron.identity import identity  # noqa: E402
from trimtab_megatron.model import build_chunks, transformer_config  # noqa: E402

ROUNDS = 40


def compute_seconds(part: Callable[[], torch.Tensor]) -> float:
    """Median CPU time of one forward and backward of a part."""
    seconds = []
    for _ in range(ROUNDS):
        began = time.process_time()
        output = part()
        output.backward(torch.ones_like(output))
        seconds.append(time.process_time() - began)
    return statistics.median(seconds)


def main() -> None:
    job = job_from_json(os.environ["TRIMTAB_JOB"])
    who = identity()
    world = worlds.arrange(job, who, cuda, worlds.join(who, cuda))
    (chunk,) = build_chunks(job, transformer_config(job, cuda), world, job.data.vocabulary_size)
    chunk.zero_grad_buffer()
    model = chunk.module
    sequence, batch = job.model.sequence_length, job.batch.microbatch_size
    tokens = torch.randint(job.data.vocabulary_size, (batch, sequence))
    positions = torch.arange(sequence).expand(batch, sequence)
    rotary = model.rotary_pos_emb(sequence)

    def hidden() -> torch.Tensor:
        return torch.randn(sequence, batch, job.model.hidden_size, requires_grad=True)

    def head() -> torch.Tensor:
        logits, _ = model.output_layer(model.decoder.final_layernorm(hidden()))
        return model.compute_language_model_loss(tokens, logits)

    layers = model.decoder.layers
    parts = {
        "embedding": compute_seconds(lambda: model.embedding(tokens, positions)),
        "layers": sum(
            compute_seconds(lambda layer=layer: layer(hidden(), attention_mask=None, rotary_pos_emb=rotary)[0])
            for layer in layers
        ),
        "head": compute_seconds(head),
    }
    print(json.dumps(parts))


main()
