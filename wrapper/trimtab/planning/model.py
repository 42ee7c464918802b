"""The model that a job file describes, as a search reckons with it on accelerators of one kind. Pure."""

from dataclasses import dataclass
from functools import cached_property

from trimtab.balance.deciding.search import Appraiser, Configuration, Outcome, Space, Training, search
from trimtab.balance.deciding.situation import Shapes
from trimtab.balance.measuring.samples import parse_spans
from trimtab.balance.model.accelerators import ACCELERATORS
from trimtab.balance.model.placement import Cluster
from trimtab.balance.model.transformer import sizes_of
from trimtab.balance.plan import Link, Plan, Schedule
from trimtab.protocol import Job, Shape, layout_of
from trimtab_slurm.contents import TrainingProfile

BYTES_VOCABULARY = 257
"""Of the tokenizer "bytes"."""
SCHEDULES = (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED)
"""Those of Megatron-core."""


@dataclass(frozen=True)
class Model:
    """A job in a shape, on a cluster."""

    job: Job
    shape: Shape
    cluster: Cluster
    vocabulary_size: int

    @cached_property
    def appraiser(self) -> Appraiser:
        """What estimates it."""
        parallel = self.job.parallel
        training = Training(
            sizes=sizes_of(self.job, self.vocabulary_size),
            global_batch_size=self.job.batch.global_batch_size,
            precision=self.precision,
            distributed_optimizer=parallel.distributed_optimizer,
            sequence_parallel=parallel.sequence_parallel,
        )
        return Appraiser(training, self.cluster, self.job.balance)

    @property
    def on_cpus(self) -> bool:
        """Whether the ranks compute on CPUs."""
        return self.cluster.accelerator == ACCELERATORS["cpu"]

    @property
    def links(self) -> tuple[Link, ...]:
        """[S] as the devices' data sheet has them; empty on CPUs, whose links are anything."""
        return () if self.on_cpus else self.appraiser.placement(self.configuration).links

    @property
    def precision(self) -> str:
        """What "auto" means on this kind of device."""
        chosen = self.job.train.precision
        return chosen if chosen != "auto" else "fp32" if self.on_cpus else "bf16"

    @property
    def plan(self) -> Plan:
        """What the job says."""
        recomputed_layers = self.job.parallel.recomputed_layers or (0,) * self.shape.pipeline
        return self.appraiser.plan(self.configuration, layout_of(self.job), recomputed_layers)

    @property
    def configuration(self) -> Configuration:
        """Likewise, but for the layout."""
        virtual = self.job.parallel.virtual
        return Configuration(
            shape=self.shape,
            schedule=Schedule.INTERLEAVED if virtual > 1 else Schedule.ONE_F_ONE_B,
            virtual=virtual,
            microbatch_size=self.job.batch.microbatch_size,
            microbatches=self.job.shares(self.shape.data),
        )

    @cached_property
    def current(self) -> Outcome:
        """What the job's own plan is reckoned to bring."""
        return self.appraiser.appraise(self.configuration, self.plan)

    def shapes(self) -> Shapes:
        """The current one and the best."""
        return Shapes(self.current, search(self.appraiser, Space(schedules=SCHEDULES)).best)


def vocabulary_size(job: Job) -> int:
    """As far as the job file tells: of a tokenizer's own file, `data.vocabulary_size` stands for it."""
    return BYTES_VOCABULARY if job.data.tokenizer == "bytes" else job.data.vocabulary_size


def measured_vocabulary(job: Job, training: TrainingProfile) -> int | None:
    """From the parameters that a rank of the first stage holds; None where they are not those of the job's model."""
    first = training.ranks["pipeline_rank"].tolist().index(0)
    tensor, alone = int(training.attributes["tensor"]), int(training.attributes["pipeline"]) == 1
    sizes = sizes_of(job, 0)
    layer = sizes.layer_matrix_parameters / tensor + 2 * sizes.hidden_size
    held = len(parse_spans(str(training.ranks["layers"][first])))
    rest = float(training.ranks["parameters"][first]) - held * layer - (sizes.hidden_size if alone else 0)
    tables = 2 if alone and not sizes.tied_embeddings else 1
    size = rest * tensor / (tables * sizes.hidden_size)
    return round(size) if size >= 1 and size == round(size) else None
