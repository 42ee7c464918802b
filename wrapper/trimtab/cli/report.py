"""`trimtab report`."""

import sys
from pathlib import Path

import click

from trimtab.cli.refusal import refuse


@click.command()
@click.argument("target")
@click.option("--json", "as_json", is_flag=True, help="Print every figure as JSON instead of tables.")
@click.option("--html", "html_file", type=click.Path(path_type=Path, dir_okay=False), help="Also write a page to FILE.")
@click.option("--attempt", metavar="N|all", help="Which attempt of a job that has several. Default: the newest.")
@click.option("--profiles", type=click.Path(path_type=Path), help="Where to look for a job's profiles.")
def report(target: str, as_json: bool, html_file: Path | None, attempt: str | None, profiles: Path | None) -> None:
    """Say what happened in a job, what it cost, and what to change.

    TARGET is a job id, or the HDF5 file of an attempt.
    """
    from trimtab.planning.advice import advised
    from trimtab.report.find import ReportError, load
    from trimtab.report.summary import to_json
    from trimtab.report.terminal import show

    try:
        found = [advised(recorded) for recorded in load(target, attempt, profiles)]
        if html_file and len(found) > 1:
            raise ReportError("--html writes one attempt: choose it with --attempt N")
        if html_file:
            from trimtab.report import page

            page.write(html_file, found[0])
    except ModuleNotFoundError as error:
        refuse(ReportError(f"--html needs {error.name}: pip install 'trimtab[report]'"))
    except (ReportError, OSError) as error:
        refuse(error)
    if as_json:
        click.echo(to_json([recorded.summary for recorded in found]))
    else:
        for recorded in found:
            show(recorded.summary, sys.stdout)
    if html_file:
        click.echo(f"\nPage: {html_file.absolute()}", err=as_json)
