"""A hook's script as it lies on a node: where it is, and what it would do."""

import ast
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trimtab_slurm.admin import registration
from trimtab_slurm.admin.nodefiles import CONFIG, HOOKS
from trimtab_slurm.admin.slurmconf import SlurmConf


@dataclass(frozen=True)
class Hook:
    """A hook's script, as far as it can be understood."""

    python: str
    """The interpreter that it starts."""
    imports: str
    """What that runs first."""
    config: Path
    state_directory: Path


def find_hook(which: str, config: Path, conf: SlurmConf | None) -> Path:
    """Where a hook is: beside its node.toml as it is installed, or what slurm.conf runs with that node.toml."""
    installed = config.parent / HOOKS[which].relative_to(CONFIG.parent)
    if not installed.exists() and conf:
        for path in registration.scripts(conf, which):
            if (hook := read_hook(path)) and hook.config == config:
                return path
    return installed


def read_hook(path: Path) -> Hook | None:
    """A hook's script; None where it is none that trimtab has made."""
    with suppress(OSError, ValueError, SyntaxError):
        for line in path.read_text(encoding="utf-8").splitlines():
            if " -I -S -c " in line:
                *_, python, _, _, _, code = shlex.split(line)
                imports, _, arguments = code.rpartition("main(")
                _, config, state_directory = ast.literal_eval(f"({arguments}")
                return Hook(python, imports, Path(config), Path(state_directory))
    return None
