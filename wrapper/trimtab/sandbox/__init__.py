"""A real Slurm on this machine: munged, slurmctld and some slurmd, in one private directory, beside any other.

`config` says what it is, `machine` what it needs, `processes` ends what was started and nothing else, `lifecycle`
brings it up and takes it down, `command` runs something in it.
"""

from trimtab.sandbox.command import run
from trimtab.sandbox.config import SandboxError, Spec
from trimtab.sandbox.lifecycle import Sandbox, default_directory, down, find, node_states, up
from trimtab.sandbox.machine import check as check_machine

__all__ = [
    "Sandbox",
    "SandboxError",
    "Spec",
    "check_machine",
    "default_directory",
    "down",
    "find",
    "node_states",
    "run",
    "up",
]
