"""Where profiles are: below the node's profile root, or below the user's own where no hook has made a directory."""

import os
from pathlib import Path

from trimtab_slurm import settings
from trimtab_slurm.directories import job_directory as directory_below

NODE_CONFIG = Path("/etc/trimtab/node.toml")
OWN_ROOT = Path("trimtab-profiles")
"""Relative to the current directory, which a batch script has in common with its submission."""


def node_config() -> Path:
    """The node's node.toml, which need not be there."""
    return Path(os.environ.get("TRIMTAB_NODE_CONFIG", NODE_CONFIG))


def profile_roots() -> list[Path]:
    """Every directory that may hold profiles: the node's first, then the user's own."""
    config = node_config()
    node_settings = settings.load(config) if config.exists() else settings.NodeSettings()
    return [Path(node_settings.profile_root), OWN_ROOT.absolute()]


def job_directory(cluster: str, job_id: int) -> Path:
    """The directory that takes a running job's profile: the prolog's, where it made one that we may write to."""
    node_root, own_root = profile_roots()
    made_by_prolog = directory_below(node_root, cluster, job_id)
    if os.access(made_by_prolog, os.W_OK | os.X_OK):
        return made_by_prolog
    return directory_below(own_root, cluster, job_id)
