"""A real Slurm on this machine: munged, slurmctld and some slurmd, in one private directory, beside any other.

`config` says what it is, `machine` what it needs, `record` what was started, `processes` ends that and nothing else,
`daemons` starts one, `lifecycle` brings all of it up and takes it down, `outages` breaks a part of it and mends it,
`command` runs something in it.
"""

from trimtab.sandbox.command import run
from trimtab.sandbox.config import SandboxError, Spec
from trimtab.sandbox.daemons import node_states
from trimtab.sandbox.lifecycle import down, up
from trimtab.sandbox.machine import check as check_machine
from trimtab.sandbox.outages import kill, restart
from trimtab.sandbox.record import Sandbox, default_directory, find

__all__ = [
    "Sandbox",
    "SandboxError",
    "Spec",
    "check_machine",
    "default_directory",
    "down",
    "find",
    "kill",
    "node_states",
    "restart",
    "run",
    "up",
]
