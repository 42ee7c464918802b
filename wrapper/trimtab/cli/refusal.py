"""How a command refuses what it was given."""

import sys
from typing import NoReturn

import click


def refuse(error: Exception) -> NoReturn:
    """Say what is wrong, on stderr, and end with exit code 2."""
    click.echo(f"trimtab: {error}", err=True)
    sys.exit(2)
