"""job.toml -> Job."""

import tomllib
from pathlib import Path

from trimtab.protocol import Job, JobError, job_from_dict


def load(path: Path) -> Job:
    """The job that a file describes. Raises JobError, with the file's name, for a file that describes none."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise JobError("job file", str(path), "does not exist") from None
    except OSError as error:
        raise JobError("job file", str(path), f"cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise JobError("job file", str(path), f"is not TOML: {error}") from None
    return job_from_dict(tables)
