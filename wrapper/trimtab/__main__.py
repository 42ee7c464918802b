"""`python -m trimtab`: the command line, where its script is not on PATH."""

from trimtab.cli import main

main()
