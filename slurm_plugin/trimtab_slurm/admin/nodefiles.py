"""What is installed on a node, as text: hooks, node.toml, the unit that recovers at boot. Pure.

A prefix is where the node's part lives, not where it is staged: the hooks below /opt/site read /opt/site/etc/trimtab,
and keep their state, journals and profiles below /opt/site, until its node.toml says otherwise.
"""

import ast
import hashlib
import inspect
import json
import shlex
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trimtab_slurm.hooks import hook_script
from trimtab_slurm.settings import NodeSettings

CONFIG = Path("etc/trimtab/node.toml")
HOOKS = {"Prolog": Path("etc/trimtab/prolog.d/trimtab"), "Epilog": Path("etc/trimtab/epilog.d/trimtab")}
"""By their keys in slurm.conf."""
UNIT = Path("usr/lib/systemd/system/trimtab-recover.service")
TMPFILES = Path("usr/lib/tmpfiles.d/trimtab.conf")
STATE = Path("run/trimtab")
"""Which sampler belongs to which job."""

_UNIT = """\
[Unit]
Description=Profiles of jobs that were running when this node went down
# Profiles may be on a file system that has to be mounted first; slurmd itself waits for that.
After=remote-fs.target
Before=slurmd.service

[Service]
# exec: others wait until this has begun, not until it is done; it gets along with hooks and samplers.
Type=exec
# -: what cannot be recovered now is in syslog, and is tried again by prologs; no reason for a degraded system.
ExecStart=-{command}
Nice=10

[Install]
WantedBy=multi-user.target
"""
_TMPFILES = """\
# Which sampler belongs to which job.
d {state} 0755 root root -
"""
_CONFIG = """\
# trimtab on this node. Lines that are commented out say the defaults.
# It is believed only while it belongs to root and nobody else can write to it.
"""


@dataclass(frozen=True)
class File:
    """A file as it is to be."""

    content: bytes
    mode: int

    @property
    def digest(self) -> str:
        """As `digest` says it."""
        return digest(self.content)


def digest(content: bytes) -> str:
    """SHA-256, in hex."""
    return hashlib.sha256(content).hexdigest()


def files(prefix: Path, python: str) -> dict[Path, File]:
    """Everything that is installed, by its path below the prefix, hooks after what they read.

    `python`: the absolute path of the interpreter of hooks and recovery.
    """
    node, config = node_settings(prefix), prefix / CONFIG
    recover = shlex.join([python, "-I", "-m", "trimtab_slurm.admin.cli", "recover", "--config", str(config)])
    texts = {
        CONFIG: config_text(node),
        UNIT: _UNIT.format(command=recover.replace("%", "%%").replace("$", "$$")),
        TMPFILES: _TMPFILES.format(state=prefix / STATE),
    }
    hooks = {path: hook_script(which.lower(), python, config, prefix / STATE) for which, path in HOOKS.items()}
    return {
        **{path: File(text.encode(), 0o644) for path, text in texts.items()},
        **{path: File(text.encode(), 0o755) for path, text in hooks.items()},
    }


def node_settings(prefix: Path) -> NodeSettings:
    """The defaults, with everything that a node keeps below the prefix."""
    default = NodeSettings()
    below: dict[str, Any] = {
        key: str(prefix / getattr(default, key).lstrip("/")) for key in ("journal_directory", "profile_root")
    }
    return replace(default, **below)


def directories(prefix: Path) -> dict[Path, int]:
    """Those that a node keeps things in, with the modes that hooks make them with."""
    node = node_settings(prefix)
    return {prefix / STATE: 0o755, Path(node.journal_directory): 0o700, Path(node.profile_root): 0o755}


def config_text(node: NodeSettings) -> str:
    """A node.toml of these settings: every key with what it means and its default."""
    documented, default = _documented(), asdict(NodeSettings())
    blocks = [_CONFIG]
    for key, value in asdict(node).items():
        # A JSON value is a TOML value, for what there is here.
        lines = [*(f"# {line}" for line in documented[key]), f"# {key} = {json.dumps(default[key])}"]
        if value != default[key]:
            lines.append(f"{key} = {json.dumps(value)}")
        blocks.append("".join(f"{line}\n" for line in lines))
    return "\n".join(blocks)


def _documented() -> dict[str, list[str]]:
    """What the source of NodeSettings says of each key: the lines of the text that follows it."""
    (definition,) = ast.parse(inspect.getsource(NodeSettings)).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            found[field.target.id] = inspect.cleandoc(ast.literal_eval(text.value)).splitlines()
    return found
