"""The `trimtab` command line. Thin: parse, call, print; what a command needs is imported when it runs."""

import click

from trimtab.cli.diagnose import diagnose
from trimtab.cli.doctor import doctor
from trimtab.cli.jobs import run, submit
from trimtab.cli.plan import plan
from trimtab.cli.report import report
from trimtab.cli.sandbox import sandbox
from trimtab.cli.simulate import simulate


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="trimtab")
def main() -> None:
    """Keep a Megatron pipeline level under Slurm."""


for command in (submit, run, report, plan, diagnose, simulate, sandbox, doctor):
    main.add_command(command)
