"""`trimtab plan`."""

import sys
from pathlib import Path

import click

from trimtab.cli.refusal import refuse


@click.command()
@click.argument("target")
@click.option("--json", "as_json", is_flag=True, help="Print every figure as JSON instead of tables.")
@click.option("--attempt", metavar="N", help="Which attempt of a job that has several. Default: the newest.")
@click.option("--profiles", type=click.Path(path_type=Path), help="Where to look for a job's profiles.")
@click.option(
    "--nodes", type=click.IntRange(1), help="Of a job file: nodes to run on. Default: what one replica takes."
)
@click.option(
    "--gpus-per-node", type=click.IntRange(1), help="Of a job file. Default: what one replica takes, 8 at most."
)
@click.option("--gpu", metavar="NAME", help="Of a job file: what to run on, or cpu. Default: h100.")
def plan(
    target: str,
    as_json: bool,
    attempt: str | None,
    profiles: Path | None,
    nodes: int | None,
    gpus_per_node: int | None,
    gpu: str | None,
) -> None:
    """Say what would make a job faster, what each change would bring and cost, and which one is worth it.

    TARGET is a job id, the HDF5 file of an attempt, or a job.toml that has not run yet.
    """
    from trimtab.diagnosis.answer import DiagnosisError
    from trimtab.planning import sources
    from trimtab.planning.answer import answer, to_json
    from trimtab.planning.observed import PlanError
    from trimtab.planning.terminal import show
    from trimtab.protocol import JobError
    from trimtab.report.find import ReportError

    try:
        if target.endswith(".toml"):
            if attempt or profiles:
                raise PlanError("--attempt and --profiles go with a job that has run, not with a job file")
            case = sources.of_job_file(Path(target), nodes, gpus_per_node, gpu)
        else:
            if nodes or gpus_per_node or gpu:
                raise PlanError("--nodes, --gpus-per-node and --gpu go with a job file, not with a job that has run")
            case = sources.of_recorded(target, attempt, profiles)
        found = answer(case)
    except (PlanError, DiagnosisError, JobError, ReportError) as error:
        refuse(error)
    if as_json:
        click.echo(to_json(found))
    else:
        show(found, sys.stdout)
