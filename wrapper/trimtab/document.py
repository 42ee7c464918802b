"""An HTML file that holds everything it shows and loads nothing.

Texts that may be anybody's reach it escaped and without control characters, and its security policy allows only the
scripts that were put in here, by their hashes: even text that slipped through could not run.
"""

import base64
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import markupsafe
from markupsafe import Markup

from trimtab import wording


def render(
    package: str, template: str, *, scripts: Sequence[str], styles: Sequence[str], data: Any, **more: Any
) -> str:
    """A template of a package, given `style`, `scripts`, `hashes` of these, `data` as JSON, and `more`."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(package, "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_plain,
    )
    environment.filters |= {
        name: getattr(wording, name)
        for name in ("percent", "milliseconds", "duration", "data_size", "count", "moment", "clock", "plural", "watts")
    }
    environment.filters["lines"] = lambda text: markupsafe.escape(wording.plain_lines(text))
    return environment.get_template(template).render(
        style=Markup("\n".join(styles)),
        scripts=[Markup(script) for script in scripts],
        hashes=" ".join(f"'sha256-{_sha256(script)}'" for script in scripts),
        data=_embedded(data),
        **more,
    )


def resource(package: str, name: str) -> str:
    """A file of a package, as text."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def write(path: Path, text: str) -> None:
    """Write the file; whoever reads meanwhile sees the old one or the new one, never a half. Raises OSError."""
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    except OSError as error:  # of a file that nobody has named
        raise OSError(error.errno, error.strerror, str(path)) from error
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).chmod(0o666 & ~_umask())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _embedded(data: Any) -> Markup:
    """JSON that cannot end the script element which holds it."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _plain(value: object) -> object:
    """Every text that a template prints passes here before it is escaped."""
    return wording.plain(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _umask() -> int:
    umask = os.umask(0o077)
    os.umask(umask)
    return umask
