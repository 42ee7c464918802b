"""`trimtab doctor`."""

import sys
from pathlib import Path

import click

from trimtab.cli.refusal import refuse


@click.command()
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
        refuse(error)
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
