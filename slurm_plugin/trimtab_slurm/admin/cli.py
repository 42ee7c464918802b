"""The `trimtab-node` command line, for admins. Thin: parse, call, print."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import click

DEFAULT_CONFIG = "/etc/trimtab/node.toml"


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="trimtab")
def main() -> None:
    """Look after trimtab on the nodes of a cluster."""


@main.command()
@click.option("--environment", "environment_file", required=True, type=click.Path(path_type=Path), metavar="FILE")
@click.option("--inventory", "inventory_file", required=True, type=click.Path(path_type=Path), metavar="FILE")
@click.option("--gres-conf", type=click.Path(path_type=Path), metavar="FILE", help="The node's gres.conf.")
@click.option("--node", metavar="NAME", help="In gres.conf.  [default: SLURMD_NODENAME in the environment's FILE]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def resolve(
    environment_file: Path, inventory_file: Path, gres_conf: Path | None, node: str | None, as_json: bool
) -> None:
    """Say which devices a job would be found to hold.

    The environment is that of a hook: lines of KEY=VALUE. The inventory is a JSON list of the node's devices, each with
    `uuid`, `index`, `minor`, `pci`, and a MIG instance with `parent_uuid`, `gpu_instance`, `compute_instance`.
    """
    from trimtab_slurm.admin.inventory import InventoryError, read_environment, read_gres_conf, read_inventory
    from trimtab_slurm.gresconf import GresConfError
    from trimtab_slurm.resolve import resolve as decide

    gpus = None
    try:
        environment, devices = read_environment(environment_file), read_inventory(inventory_file)
        if gres_conf:
            gpus = read_gres_conf(gres_conf, node or environment.get("SLURMD_NODENAME", ""))
    except InventoryError as error:
        _refuse(error)
    except GresConfError as error:
        click.echo(f"trimtab-node: {gres_conf} does not prove the order of slurmd's list: {error}", err=True)
    resolution = decide(environment, devices, gpus)
    if as_json:
        click.echo(json.dumps(asdict(resolution)))
        return
    click.echo(f"{resolution.status}: {resolution.reason}")
    for uuid in resolution.devices:
        click.echo(uuid)


_config = click.option(
    "--config",
    default=DEFAULT_CONFIG,
    show_default=True,
    envvar="TRIMTAB_NODE_CONFIG",
    show_envvar=True,
    type=click.Path(path_type=Path),
)


@main.command()
@_config
@click.option("--json", "as_json", is_flag=True, help="Print what `resolve --inventory` reads.")
def inventory(config: Path, as_json: bool) -> None:
    """List the devices that this node's driver has. It is asked here and now, and can hang."""
    from trimtab_slurm.admin.inventory import to_json
    from trimtab_slurm.devices import DeviceError, open_driver
    from trimtab_slurm.settings import load_or_default

    settings, doubt = load_or_default(config)
    try:
        driver = open_driver(settings.nvml_library)
    except DeviceError as error:
        _refuse(error)
    for note in filter(None, (doubt, *driver.notes)):
        click.echo(f"trimtab-node: {note}", err=True)
    if as_json:
        click.echo(to_json(driver.inventory))
        return
    for device in driver.inventory:
        what = f"instance {device.index} of {device.parent_uuid}" if device.parent_uuid else f"GPU {device.index}"
        minor = "" if device.minor is None else f", minor number {device.minor}"
        click.echo(f"{device.uuid}  {what}, {device.pci}{minor}")


@main.command()
@_config
def recover(config: Path) -> None:
    """Make profiles of what samplers have left behind that are gone: after a crash, or a reboot."""
    from trimtab_slurm import collect, journal
    from trimtab_slurm.settings import SettingsError, load_trusted

    os.umask(0o022)  # others must come to what is made on the way to their profiles
    try:
        settings = load_trusted(config)
        found = journal.orphans(Path(settings.journal_directory))
        failed = collect.recover(settings)
    except (SettingsError, OSError) as error:
        if isinstance(error, PermissionError) and os.geteuid() != 0:
            error = PermissionError(f"{settings.journal_directory} is root's: run as root")
        _refuse(error)
    click.echo(f"recovered: {len(found) - len(failed)} of {len(found)} journals")
    for path, reason in failed:
        click.echo(f"trimtab-node: {path} could not be: {reason}", err=True)
    sys.exit(1 if failed else 0)


_prefix = click.option(
    "--prefix",
    default="/",
    show_default=True,
    type=click.Path(path_type=Path, resolve_path=True),
    help="Where the node's part lives: hooks, configuration, state and profiles are all below it.",
)
_slurm_conf = click.option(
    "--slurm-conf", type=click.Path(path_type=Path), help="Default: SLURM_CONF, or /etc/slurm/slurm.conf. Only read."
)


@main.command()
@_prefix
@_slurm_conf
def install(prefix: Path, slurm_conf: Path | None) -> None:
    """Put the hooks on this node, and say what is to be done for Slurm to run them.

    Again, after an upgrade, it brings everything up to date; a node.toml that was changed is kept.
    """
    from trimtab_slurm.admin import install as installation
    from trimtab_slurm.admin import registration, slurmconf
    from trimtab_slurm.admin.nodefiles import CONFIG, HOOKS, UNIT

    try:
        found = slurmconf.find(slurm_conf)
        conf = slurmconf.read(found) if found else None
        for line in installation.install(prefix, sys.executable):
            click.echo(line)
    except (installation.InstallError, slurmconf.SlurmConfError) as error:
        _refuse(error)
    at_home = prefix == Path("/")
    click.echo(f"\nOn every node:\n\nsystemctl enable {UNIT.name if at_home else prefix / UNIT}")
    click.echo(
        f"trimtab doctor{'' if at_home else f' --config {prefix / CONFIG}'}\n\nThen, for Slurm to run the hooks:\n"
    )
    for line in registration.advice(conf, {which: prefix / hook for which, hook in HOOKS.items()}):
        click.echo(line)


@main.command()
@_prefix
@_slurm_conf
def uninstall(prefix: Path, slurm_conf: Path | None) -> None:
    """Remove what `install` wrote, and nothing else. Profiles, journals and what was changed since stay."""
    from trimtab_slurm.admin import install as installation
    from trimtab_slurm.admin import slurmconf

    try:
        found = slurmconf.find(slurm_conf)
        for line in installation.uninstall(prefix, slurmconf.read(found) if found else None):
            click.echo(line)
    except (installation.InstallError, slurmconf.SlurmConfError) as error:
        _refuse(error)


def _refuse(error: Exception) -> NoReturn:
    click.echo(f"trimtab-node: {error}", err=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
