"""`trimtab diagnose`."""

import sys
from pathlib import Path

import click

from trimtab.cli.refusal import refuse


@click.command()
@click.argument("target")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.option("--meta", type=click.Path(path_type=Path, dir_okay=False), help="Sizes of a trace, YAML: TARGET is one.")
@click.option("--attempt", metavar="N", help="Which attempt of a job that has several. Default: the newest.")
@click.option("--profiles", type=click.Path(path_type=Path), help="Where to look for a job's profiles.")
def diagnose(target: str, as_json: bool, meta: Path | None, attempt: str | None, profiles: Path | None) -> None:
    """Say why a job's steps take longer than they need: layers, hardware, data, or nothing that can be named.

    TARGET is a job id, the HDF5 file of an attempt, or, with --meta, a trace in Parquet: one row an operation.
    """
    from trimtab.diagnosis import answer, terminal
    from trimtab.diagnosis.traces import TraceError
    from trimtab.report.find import ReportError, load

    try:
        if meta:
            found = answer.of_trace(Path(target), meta)
        elif target.endswith(".parquet"):
            raise answer.DiagnosisError(f"{target}: a trace needs its sizes: pass --meta META.yaml")
        else:
            recorded = load(target, attempt, profiles)
            if len(recorded) > 1:
                raise ReportError("one attempt is diagnosed at a time: choose it with --attempt N")
            found = answer.of_profile(recorded[0])
    except ModuleNotFoundError as error:
        refuse(answer.DiagnosisError(f"reading a trace needs {error.name}: pip install 'trimtab[traces]'"))
    except (answer.DiagnosisError, TraceError, ReportError) as error:
        refuse(error)
    if as_json:
        click.echo(answer.to_json(found))
    else:
        terminal.show(found, sys.stdout)
