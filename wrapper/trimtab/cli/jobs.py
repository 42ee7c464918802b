"""`trimtab submit`, `trimtab run`."""

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from trimtab.cli.refusal import refuse

if TYPE_CHECKING:
    from trimtab_slurm.cluster import SlurmClient


@click.command()
@click.argument("job_file", type=click.Path(path_type=Path))
@click.option("--template", default="multi-node", show_default=True, help="Name of a template, or a path.")
@click.option("--nodes", default=1, show_default=True, type=click.IntRange(1))
@click.option("--gpus-per-node", default=1, show_default=True, type=click.IntRange(1), help="Also ranks per node.")
@click.option("--cpus-per-gpu", default=1, show_default=True, type=click.IntRange(1))
@click.option("--time", "time_limit", default="1:00:00", show_default=True, help="Time limit, as sbatch takes it.")
@click.option("--dry-run", is_flag=True, help="Print the sbatch script; submit nothing.")
@click.option("--follow", is_flag=True, help="See the job through: its output, its report, its exit code.")
@click.argument("sbatch_arguments", nargs=-1)
def submit(
    job_file: Path,
    template: str,
    nodes: int,
    gpus_per_node: int,
    cpus_per_gpu: int,
    time_limit: str,
    dry_run: bool,
    follow: bool,
    sbatch_arguments: tuple[str, ...],
) -> None:
    """Submit JOB_FILE through an sbatch template.

    What follows a `--` goes to sbatch: trimtab submit job.toml --nodes 2 -- --account=lab --partition=long
    """
    from trimtab import jobfile
    from trimtab import submit as sbatch
    from trimtab.protocol import JobError
    from trimtab_slurm.cluster import SlurmError, client

    request = sbatch.Request(nodes, gpus_per_node, cpus_per_gpu, time_limit, sbatch_arguments=sbatch_arguments)
    try:
        script = sbatch.render(template, job_file, jobfile.load(job_file), request)
        if dry_run:
            click.echo(script, nl=False)
            return
        slurm = client()
        job_id = slurm.submit(script)
        click.echo(f"submitted job {job_id}; `trimtab report {job_id}` says how it went")
        if follow:
            _see_through(slurm, job_id)
    except (JobError, SlurmError) as error:
        refuse(error)


def _see_through(slurm: "SlurmClient", job_id: int) -> NoReturn:
    """Print a job's output, then its report; end with its exit code."""
    from trimtab.follow import Left, follow, never_began, profile_of
    from trimtab.planning.advice import advised
    from trimtab.report.find import ReportError
    from trimtab.report.terminal import show

    try:
        state = follow(slurm, job_id, lambda text: click.echo(text, nl=False))
    except Left as left:
        click.echo(f"\ntrimtab: {left}", err=True)
        sys.exit(128 + signal.SIGINT)
    if state and (told := never_began(state)):
        click.echo(f"trimtab: {told}", err=True)
        sys.exit(state.exit_code)
    page_file = Path(f"trimtab-{job_id}.html").absolute()
    try:
        recorded = advised(profile_of(job_id))
        show(recorded.summary, sys.stdout)
        click.echo(f"\nProfile: {recorded.file}")
        from trimtab.report import page

        page.write(page_file, recorded)
        click.echo(f"Page:    {page_file}")
    except ReportError as error:
        click.echo(f"trimtab: {error}", err=True)
    except ModuleNotFoundError as error:
        click.echo(f"trimtab: the page needs {error.name}: pip install 'trimtab[report]'", err=True)
    sys.exit(state.exit_code if state else 0)


@click.command()
@click.argument("job_file", type=click.Path(path_type=Path))
@click.option("--ranks-per-node", type=click.IntRange(1), help="Default: the GPUs of a node of the allocation.")
def run(job_file: Path, ranks_per_node: int | None) -> None:
    """Inside a job: start the ranks of JOB_FILE with srun, and see them through.

    \b
    Exit codes:
      0   trained to the last step
      2   the job file, its data or checkpoints, the allocation or the machine does not fit: another attempt would meet
          the same
      3   a rank failed or vanished; the message names it
      4   srun could not start the ranks
      5   the ranks took no step for too long, and were ended; the message says which
      75  stopped before the last step, progress saved where the job file says: requeue or submit again to go on
      128+n  ended by signal n before all ranks had saved

    Where it helps, and the job file allows it, the job begins again instead, or has itself requeued.
    """
    from trimtab.supervise import outlive

    ended = outlive()  # before anything else is imported: the process that stays behind shall be small
    if ended is not None and ended >= 0:
        sys.exit(ended)
    from trimtab import jobfile, launch
    from trimtab import run as wrapper
    from trimtab.protocol import JobError
    from trimtab_slurm.cluster import SlurmError

    try:
        job = jobfile.load(job_file)
        if ended is not None:
            outcome = wrapper.outlived(job, ranks_per_node, -ended)
        else:
            outcome = wrapper.run(job, ranks_per_node)
    except (JobError, launch.LaunchError, SlurmError) as error:
        refuse(error)
    click.echo(f"trimtab: {outcome.sentence} (exit code {outcome.exit_code})")
    sys.exit(outcome.exit_code)
