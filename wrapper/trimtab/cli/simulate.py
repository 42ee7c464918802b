"""`trimtab simulate`."""

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trimtab.balance.model.accelerators import ACCELERATORS
from trimtab.cli.refusal import refuse
from trimtab.simulation.presets import PRESETS, SEQUENCES_PER_GPU

if TYPE_CHECKING:
    from trimtab.balance.model.transformer import Sizes
    from trimtab.simulation.compare import Comparison, Question

POSITIVE = click.IntRange(min=1)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2")
"""Those of `Schedule`: what a command needs is imported when it runs, and that needs numpy."""
OPTIMIZERS = ("device", "host", "bf16")
"""Those of `OptimizerState`, likewise."""


@click.command()
@click.option("--preset", type=click.Choice(list(PRESETS)), help="Sizes by name; options below override them.")
@click.option("--layers", type=POSITIVE, help="Transformer layers.")
@click.option("--hidden-size", type=POSITIVE, help="Width of the residual stream.")
@click.option("--attention-heads", type=POSITIVE, help="Query heads of a layer.")
@click.option("--query-groups", type=POSITIVE, help="Key and value heads of a layer. Default: as many as query heads.")
@click.option("--ffn-hidden-size", type=POSITIVE, help="Width inside the MLP. Default: four times --hidden-size.")
@click.option("--vocabulary-size", type=POSITIVE)
@click.option("--sequence-length", type=POSITIVE, help="Tokens of a sequence.")
@click.option("--gpus", type=POSITIVE, required=True, help="GPUs of the job.")
@click.option("--gpus-per-node", type=POSITIVE, default=8, show_default=True)
@click.option("--gpu", type=click.Choice(list(ACCELERATORS)), default="h100", show_default=True)
@click.option(
    "--global-batch-size", type=POSITIVE, help=f"Sequences of a step. Default: {SEQUENCES_PER_GPU} for each GPU."
)
@click.option("--tensor", type=POSITIVE, help="Only plans with so many ranks that share each layer.")
@click.option("--pipeline", type=POSITIVE, help="Only plans with so many stages.")
@click.option("--virtual", type=POSITIVE, help="Only plans with so many chunks a stage.")
@click.option("--microbatch-size", type=POSITIVE, help="Only plans with so many sequences a microbatch.")
@click.option(
    "--schedule",
    "schedules",
    type=click.Choice(SCHEDULES),
    multiple=True,
    help="Only plans with this schedule; can be repeated. Default: those of Megatron-core, 1f1b and interleaved.",
)
@click.option(
    "--optimizer",
    type=click.Choice(OPTIMIZERS),
    help="Where optimizer state is: on the device, on the host, or on the device all in bf16. "
    "Default: device, or where nothing fits then, host.",
)
@click.option("--speed", "speeds", metavar="STAGE=RATIO", multiple=True, help="A stage of another speed: 2=0.8.")
@click.option(
    "--link", "links", metavar="NODE-NODE=MS", multiple=True, help="Latency between two nodes, in milliseconds: 0-1=60."
)
@click.option("--json", "as_json", is_flag=True, help="Print every figure as JSON instead of tables.")
@click.option("--timeline", type=click.Path(path_type=Path, dir_okay=False), help="Also draw both plans into FILE.")
def simulate(as_json: bool, timeline: Path | None, **asked: Any) -> None:
    """Say what a model would take on GPUs: with equal stages, and with the best plan.

    Nothing is run: times come from the model's operations and the GPU's data sheet, and all that is assumed is printed.
    """
    from trimtab.simulation import figures, terminal
    from trimtab.simulation.compare import compare
    from trimtab.simulation.needs import needs, static_by_microbatches

    try:
        comparison = compare(_question(asked))
        if timeline:
            _draw(comparison, timeline)
    except ModuleNotFoundError as error:
        refuse(ValueError(f"--timeline needs {error.name}: pip install 'trimtab[report]'"))
    except (ValueError, OSError) as error:
        refuse(error)
    found, statics = needs(comparison), static_by_microbatches(comparison)
    if as_json:
        click.echo(json.dumps(figures.as_json(comparison, found, statics), indent=2))
    else:
        terminal.show(comparison, found, statics, sys.stdout)
    if timeline:
        click.echo(f"\nTimeline: {timeline.absolute()}", err=as_json)


def _question(asked: dict[str, Any]) -> "Question":
    """Raises ValueError for what cannot be asked."""
    from trimtab.balance.deciding.search import Space
    from trimtab.balance.model.placement import Cluster
    from trimtab.balance.model.transformer import OptimizerState
    from trimtab.balance.plan import Schedule
    from trimtab.simulation.compare import Question

    pins = ("tensor", "pipeline", "virtual", "microbatch_size")
    space: dict[str, Any] = {name: (asked[name],) for name in pins if asked[name]}
    if asked["schedules"]:
        space["schedules"] = tuple(map(Schedule, asked["schedules"]))
    return Question(
        sizes=_sizes(asked),
        cluster=Cluster(ACCELERATORS[asked["gpu"]], asked["gpus"], asked["gpus_per_node"], _latencies(asked["links"])),
        global_batch_size=asked["global_batch_size"] or SEQUENCES_PER_GPU * asked["gpus"],
        optimizer=OptimizerState(asked["optimizer"]) if asked["optimizer"] else None,
        space=Space(**space),
        speeds=_speeds(asked["speeds"], asked["pipeline"]),
    )


def _sizes(asked: dict[str, Any]) -> "Sizes":
    from dataclasses import replace

    from trimtab.balance.model.transformer import sizes_of
    from trimtab.protocol import Job, Model

    names = PRESETS["70b"].keys()
    given = {**PRESETS.get(asked["preset"], {}), **{name: asked[name] for name in names if asked[name]}}
    needed = ("layers", "hidden_size", "attention_heads", "vocabulary_size", "sequence_length")
    if lacking := [f"--{name.replace('_', '-')}" for name in needed if name not in given]:
        raise ValueError(f"no model: give {', '.join(lacking)}, or --preset; choose from: {', '.join(PRESETS)}")
    vocabulary_size = given.pop("vocabulary_size")
    # The job checks that the sizes belong to a model; the vocabulary is as it was given, not padded.
    return replace(sizes_of(Job(model=Model(**given)), vocabulary_size), vocabulary_size=vocabulary_size)


def _speeds(texts: tuple[str, ...], pipeline: int | None) -> dict[int, float]:
    speeds = {}
    for text in texts:
        if not (found := re.fullmatch(r"(\d+)=(\d*\.?\d+)", text)) or not float(found[2]):
            raise ValueError(f"--speed {text!r}: write STAGE=RATIO, with a ratio above 0: 2=0.8")
        if pipeline is None:
            raise ValueError(f"--speed {text!r}: only with --pipeline N is it clear which GPUs a stage has")
        if int(found[1]) >= pipeline:
            raise ValueError(f"--speed {text!r}: of {pipeline} stages; choose from: 0 to {pipeline - 1}")
        speeds[int(found[1])] = float(found[2])
    return speeds


def _latencies(texts: tuple[str, ...]) -> dict[tuple[int, int], float]:
    latencies = {}
    for text in texts:
        if not (found := re.fullmatch(r"(\d+)-(\d+)=(\d*\.?\d+)", text)) or found[1] == found[2]:
            raise ValueError(f"--link {text!r}: write NODE-NODE=MILLISECONDS, of two nodes: 0-1=60")
        low, high = sorted((int(found[1]), int(found[2])))
        latencies[low, high] = float(found[3]) / 1e3
    return latencies


def _draw(comparison: "Comparison", path: Path) -> None:
    from trimtab import timeline

    pictures = [
        timeline.Picture(
            f"{name}: {outcome.configuration}",
            outcome.estimate.simulations[0],
            f"Beside its pipeline a step takes {outcome.overhead_seconds:.3f} s.",
        )
        for name, outcome in (("Static plan", comparison.static), ("Chosen plan", comparison.chosen))
    ]
    timeline.write(path, "One step of a pipeline", pictures)
