"""The Slurm client: the one place with Slurm's commands and the shapes of what they print.

`protocol` says what is asked of Slurm, `command_line` asks it with Slurm's commands, whose text `text` reads, and
`bindings` with pyslurm. Whatever goes wrong becomes a SlurmError with Slurm's own words.
"""

from trimtab_slurm.cluster.bindings import PyslurmClient, pyslurm_version
from trimtab_slurm.cluster.command_line import CommandLineClient
from trimtab_slurm.cluster.protocol import JobState, Node, SlurmClient, SlurmError, SlurmSilent

__all__ = [
    "CommandLineClient",
    "JobState",
    "Node",
    "PyslurmClient",
    "SlurmClient",
    "SlurmError",
    "SlurmSilent",
    "client",
]


def client() -> SlurmClient:
    """The client that fits this machine: pyslurm's when it is built for the site's Slurm, else the command line's."""
    command_line = CommandLineClient()
    probed = pyslurm_version()
    if probed and _major_minor(probed) == _major_minor(command_line.version()):
        return PyslurmClient()
    return command_line


def _major_minor(version: str) -> list[int]:
    """Of "22.05.8" and of "22.5.0", as packages write it: [22, 5]."""
    return [int(part) for part in version.split(".")[:2] if part.isdecimal()]
