"""`trimtab sandbox`."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from trimtab.cli.refusal import refuse


@click.group()
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
        refuse(error)


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
        refuse(error)


@sandbox.command()
@_directory
def status(directory: Path | None) -> None:
    """Say what runs. Exit code 0: all of it; 1: a part, or nothing."""
    from trimtab.sandbox import SandboxError, default_directory, find, node_states

    directory = directory or default_directory()
    try:
        box = find(directory)
    except SandboxError as error:
        refuse(error)
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
        refuse(error)
