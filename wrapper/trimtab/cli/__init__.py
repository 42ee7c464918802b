"""The `trimtab` command line. Thin: parse, call, print; what a command needs is imported when it runs."""

import errno
import os
import sys
from typing import Any

import click

from trimtab.cli.diagnose import diagnose
from trimtab.cli.doctor import doctor
from trimtab.cli.jobs import run, submit
from trimtab.cli.plan import plan
from trimtab.cli.refusal import refuse
from trimtab.cli.report import report
from trimtab.cli.sandbox import sandbox
from trimtab.cli.simulate import simulate


class _Commands(click.Group):
    """All commands; of each, what it prints may meet a full device. A closed pipe is click's, and quiet."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left goes nowhere, in silence
            refuse(OSError(f"the output cannot be written: {error.strerror}"))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="trimtab")
def main() -> None:
    """Keep a Megatron pipeline level under Slurm."""


for command in (submit, run, report, plan, diagnose, simulate, sandbox, doctor):
    main.add_command(command)
