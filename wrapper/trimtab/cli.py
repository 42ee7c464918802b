"""The `trimtab` command line. Thin: parse, call, print; what a command needs is imported when it runs."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

if TYPE_CHECKING:
    from trimtab_slurm.cluster import SlurmClient


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="trimtab")
def main() -> None:
    """Keep a Megatron pipeline level under Slurm."""


@main.command()
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
        _refuse(error)


def _see_through(slurm: "SlurmClient", job_id: int) -> NoReturn:
    """Print a job's output, then its report; end with its exit code."""
    from trimtab.follow import follow, profile_of
    from trimtab.report.find import ReportError
    from trimtab.report.terminal import show

    state = follow(slurm, job_id, lambda text: click.echo(text, nl=False))
    page_file = Path(f"trimtab-{job_id}.html").absolute()
    try:
        recorded = profile_of(job_id)
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


@main.command()
@click.argument("job_file", type=click.Path(path_type=Path))
@click.option("--ranks-per-node", type=click.IntRange(1), help="Default: the GPUs of a node of the allocation.")
def run(job_file: Path, ranks_per_node: int | None) -> None:
    """Inside a job: start the ranks of JOB_FILE with srun, and see them through.

    \b
    Exit codes:
      0   trained to the last step
      2   the job file, the allocation or the machine does not fit; nothing was started
      3   a rank failed or vanished; the message names it
      4   srun could not start the ranks
      75  stopped before the last step, progress saved where the job file says: requeue or submit again to go on
      128+n  ended by signal n before all ranks had saved
    """
    from trimtab import jobfile, launch
    from trimtab import run as wrapper
    from trimtab.protocol import JobError
    from trimtab_slurm.cluster import SlurmError

    try:
        plan = wrapper.prepare(jobfile.load(job_file), ranks_per_node)
    except (JobError, launch.LaunchError, SlurmError) as error:
        _refuse(error)
    outcome = wrapper.run(plan)
    click.echo(f"trimtab: {outcome.sentence} (exit code {outcome.exit_code})")
    sys.exit(outcome.exit_code)


@main.command()
@click.argument("target")
@click.option("--json", "as_json", is_flag=True, help="Print every figure as JSON instead of tables.")
@click.option("--html", "html_file", type=click.Path(path_type=Path, dir_okay=False), help="Also write a page to FILE.")
@click.option("--attempt", metavar="N|all", help="Which run of a job that was requeued. Default: the newest.")
@click.option("--profiles", type=click.Path(path_type=Path), help="Where to look for a job's profiles.")
def report(target: str, as_json: bool, html_file: Path | None, attempt: str | None, profiles: Path | None) -> None:
    """Say what happened in a job, what it cost, and what to change.

    TARGET is a job id, or the HDF5 file of an attempt.
    """
    from trimtab.report.find import ReportError, load
    from trimtab.report.summary import to_json
    from trimtab.report.terminal import show

    try:
        found = load(target, attempt, profiles)
        if html_file and len(found) > 1:
            raise ReportError("--html writes one attempt: choose it with --attempt N")
        if html_file:
            from trimtab.report import page

            page.write(html_file, found[0])
    except ModuleNotFoundError as error:
        _refuse(ReportError(f"--html needs {error.name}: pip install 'trimtab[report]'"))
    except (ReportError, OSError) as error:
        _refuse(error)
    if as_json:
        click.echo(to_json([recorded.summary for recorded in found]))
    else:
        for recorded in found:
            show(recorded.summary, sys.stdout)
    if html_file:
        click.echo(f"\nPage: {html_file.absolute()}", err=as_json)


@main.group()
def sandbox() -> None:
    """A real Slurm on this machine, in one private directory, beside any other."""


_directory = click.option(
    "--dir", "directory", type=click.Path(path_type=Path), help="Default: /tmp/trimtab-sandbox-<user id>."
)


def _spec(command: Callable[..., None]) -> Callable[..., None]:
    """The options that say what a sandbox has."""
    for option in (
        click.option("--profiles", type=click.Path(path_type=Path), help="Where profiles go, to outlive the sandbox."),
        click.option("--cpus", default=4, show_default=True, type=click.IntRange(1), help="CPUs a node claims."),
        click.option("--gpu-type", default="sim", show_default=True, help="Type of the GPUs."),
        click.option("--gpus", default=2, show_default=True, type=click.IntRange(0, 256), help="GPUs a node claims."),
        click.option("--nodes", default=4, show_default=True, type=click.IntRange(1, 256)),
        _directory,
    ):
        command = option(command)
    return command


@sandbox.command()
@_spec
def up(directory: Path | None, profiles: Path | None, **sizes: Any) -> None:
    """Bring a sandbox up, and say how to use it."""
    from trimtab.sandbox import SandboxError, Spec, default_directory
    from trimtab.sandbox import up as bring_up

    try:
        spec = Spec(**sizes, profiles=str(profiles.absolute()) if profiles else "")
        box, started = bring_up(directory or default_directory(), spec)
        click.echo(f"{'up' if started else 'up already'}: {box.spec}, in {box.directory}")
        for name in ("SLURM_CONF", "TRIMTAB_NODE_CONFIG"):
            click.echo(f"export {name}={box.environment[name]}")
        if box.spec != spec:
            raise SandboxError(f"{box.directory}: is up with other options; `trimtab sandbox down` it first")
    except SandboxError as error:
        _refuse(error)


@sandbox.command()
@_directory
def down(directory: Path | None) -> None:
    """Take a sandbox down: its jobs, its daemons, and its directory."""
    from trimtab.sandbox import SandboxError, default_directory
    from trimtab.sandbox import down as take_down

    directory = directory or default_directory()
    try:
        click.echo(f"down: {directory}" if take_down(directory) else f"down already: nothing in {directory}")
    except SandboxError as error:
        _refuse(error)


@sandbox.command()
@_directory
def status(directory: Path | None) -> None:
    """Say what runs. Exit code 0: all of it; 1: a part, or nothing."""
    from trimtab.sandbox import SandboxError, default_directory, find, node_states

    directory = directory or default_directory()
    try:
        box = find(directory)
    except SandboxError as error:
        _refuse(error)
    if box is None:
        click.echo(f"down: nothing in {directory}")
        sys.exit(1)
    if box.lost:
        click.echo(f"broken: {', '.join(box.lost)} does not run, in {directory}; `up` or `down` clears it")
        sys.exit(1)
    click.echo(f"up: {box.spec}, in {directory}")
    for node, state in node_states(box).items():
        click.echo(f"  {node} {state}")


@sandbox.command("run")
@_spec
@click.argument("command", nargs=-1, required=True)
def run_in_sandbox(directory: Path | None, profiles: Path | None, command: tuple[str, ...], **sizes: Any) -> None:
    """Run COMMAND in a sandbox, and return its exit code: trimtab sandbox run --nodes 2 -- srun -N2 hostname

    A sandbox that is up is used as it is, and left up. Else one is brought up, and taken down after the command.
    """
    from trimtab.sandbox import SandboxError, Spec, default_directory
    from trimtab.sandbox import run as run_command

    try:
        spec = Spec(**sizes, profiles=str(profiles.absolute()) if profiles else "")
        sys.exit(run_command(directory or default_directory(), spec, command))
    except SandboxError as error:
        _refuse(error)


@main.command()
@click.option(
    "--config",
    default="/etc/trimtab/node.toml",
    show_default=True,
    envvar="TRIMTAB_NODE_CONFIG",
    show_envvar=True,
    type=click.Path(path_type=Path),
)
@click.option("--slurm-conf", type=click.Path(path_type=Path), help="Default: SLURM_CONF, or /etc/slurm/slurm.conf.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def doctor(config: Path, slurm_conf: Path | None, as_json: bool) -> None:
    """On a node: say what is wrong with trimtab's part there, and how to mend it.

    Exit code 0: no problem, warnings aside; 1: problems.
    """
    import json
    from dataclasses import asdict

    from trimtab_slurm.admin import doctor as node_doctor
    from trimtab_slurm.admin import slurmconf

    try:
        findings = node_doctor.examine(config.absolute(), slurmconf.find(slurm_conf))
    except slurmconf.SlurmConfError as error:
        _refuse(error)
    problems = sum(finding.level == node_doctor.PROBLEM for finding in findings)
    if as_json:
        click.echo(json.dumps({"problems": problems, "findings": [asdict(finding) for finding in findings]}, indent=1))
    else:
        for finding in findings:
            click.echo(f"{finding.level:8} {finding.check}: {finding.text}")
            if finding.mend:
                click.echo(f"{'':8} mend: {finding.mend}")
        warnings = sum(finding.level == node_doctor.WARNING for finding in findings)
        click.echo(f"problems: {problems}, warnings: {warnings}")
    sys.exit(1 if problems else 0)


def _refuse(error: Exception) -> NoReturn:
    click.echo(f"trimtab: {error}", err=True)
    sys.exit(2)
