"""What a run can change between two of its steps. Pure."""

import hashlib
import json
from dataclasses import asdict, dataclass

from trimtab.protocol.job import Job, JobError, Shape
from trimtab.protocol.layout import Layout, layout_of
from trimtab.protocol.shares import even_shares


@dataclass(frozen=True)
class Setting:
    """How the ranks share out layers, microbatches and recomputation at one time."""

    layout: Layout
    microbatches: tuple[int, ...]
    """[R] of each replica in one step."""
    recomputed_layers: tuple[int, ...]
    """[S] how many layers of each stage are recomputed in the backward, counted from its first."""

    @property
    def fingerprint(self) -> str:
        """The same for equal settings only: what all ranks compare before anything moves."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        microbatches, recomputed = (
            "|".join(map(str, counts)) for counts in (self.microbatches, self.recomputed_layers)
        )
        text = f"layers {'|'.join(map(str, self.layout.layers))}, microbatches {microbatches}"
        return f"{text}, recomputed {recomputed}" if any(self.recomputed_layers) else text

    @property
    def even(self) -> bool:
        """Whether microbatches are shared out as a run begins: as equally as can be, which need not be equally."""
        multiple = self.layout.stages if self.layout.virtual > 1 else 1
        return self.microbatches == even_shares(sum(self.microbatches), len(self.microbatches), multiple)

    @property
    def loads(self) -> tuple[float, ...]:
        """[R] what each replica has to do over the mean because microbatches cannot be shared out equally.

        1 where they were shifted: that was done for all to take equally long.
        """
        counts, replicas, total = self.microbatches, len(self.microbatches), sum(self.microbatches)
        return tuple(count * replicas / total for count in counts) if self.even else (1.0,) * replicas

    def obstacle(self, job: Job, shape: Shape) -> str:
        """Why ranks of this job and shape cannot run it; empty: they can."""
        layout, parallel, batch = self.layout, job.parallel, job.batch
        if (layout.stages, layout.virtual) != (shape.pipeline, parallel.virtual):
            has = f"{layout.stages} stages of {layout.virtual} chunks"
            return f"the layout has {has}, the ranks have {shape.pipeline} of {parallel.virtual}"
        if sum(layout.layers) != job.model.layers:
            return f"the layout has {sum(layout.layers)} layers, the model has {job.model.layers}"
        if len(self.microbatches) != shape.data or min(self.microbatches, default=0) < 1:
            return f"{shape.data} replicas each need a microbatch, and get {list(self.microbatches)}"
        samples = sum(self.microbatches) * batch.microbatch_size
        if samples != batch.global_batch_size:
            return f"{samples} samples a step are not the global batch of {batch.global_batch_size}"
        if parallel.virtual > 1 and any(count % shape.pipeline for count in self.microbatches):
            return f"the interleaved schedule needs multiples of {shape.pipeline} microbatches"
        if len(self.recomputed_layers) != shape.pipeline:
            return f"{len(self.recomputed_layers)} counts of recomputed layers are not one for each stage"
        for stage, count in enumerate(self.recomputed_layers):
            if not 0 <= count <= len(layout.stage_layers(stage)):
                return f"stage {stage} holds {len(layout.stage_layers(stage))} layers and cannot recompute {count}"
        return ""


def setting_of(job: Job, shape: Shape) -> Setting:
    """What a run of this job begins with. Raises JobError where microbatches cannot be shared out, or where it asks for
    more recomputed layers than there are."""
    recomputed_layers = job.parallel.recomputed_layers or (0,) * shape.pipeline
    setting = Setting(layout_of(job), job.shares(shape.data), recomputed_layers)
    if obstacle := setting.obstacle(job, shape):
        raise JobError("parallel.recomputed_layers", list(recomputed_layers), obstacle)
    return setting
