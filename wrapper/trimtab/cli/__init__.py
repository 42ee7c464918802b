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

ANSWERS = (report, plan, diagnose, simulate)
"""Commands that only print: what of theirs meets a full device is their output."""


class _Commands(click.Group):
    """Says where an answer did not fit. A closed pipe is click's, and quiet."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if not full or ctx.invoked_subcommand not in {command.name for command in ANSWERS}:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left goes nowhere, in silence
            refuse(OSError(f"the output cannot be written: {error.strerror}"))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="trimtab")
def main() -> None:
    """Keep a Megatron pipeline level under Slurm."""


for command in (submit, run, *ANSWERS, sandbox, doctor):
    main.add_command(command)
