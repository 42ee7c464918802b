"""A Job from plain tables, as TOML and JSON give them, and back."""

import difflib
import json
import math
import typing
from dataclasses import asdict
from typing import Any

from trimtab.protocol.job import Job, JobError


def job_from_dict(tables: dict[str, Any]) -> Job:
    """A Job from the tables of a job file. Raises JobError for an unknown key or a value of the wrong type."""
    sections: dict[str, Any] = {}
    section_types = typing.get_type_hints(Job)
    for section, values in tables.items():
        if section not in section_types:
            raise _unknown(section, values, section_types)
        if not isinstance(values, dict):
            raise JobError(section, values, "is a value; write it as a table", [f"[{section}]"])
        section_type = section_types[section]
        key_types = typing.get_type_hints(section_type)
        for key, value in values.items():
            if key not in key_types:
                raise _unknown(f"{section}.{key}", value, key_types)
            values = {**values, key: _typed(f"{section}.{key}", value, key_types[key])}
        sections[section] = section_type(**values)
    return Job(**sections)


def job_to_json(job: Job) -> str:
    """The job on one line, for the ranks."""
    return json.dumps(asdict(job))


def job_from_json(text: str) -> Job:
    """The inverse of `job_to_json`."""
    return job_from_dict(json.loads(text))


def _typed(key: str, value: object, expected: type) -> object:
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if typing.get_origin(expected) is tuple:
        if not isinstance(value, (list, tuple)) or any(type(entry) is not int for entry in value):
            raise JobError(key, value, "must be a list of whole numbers")
        return tuple(value)
    if type(value) is not expected:
        names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text in quotes"}
        raise JobError(key, value, f"must be {names[expected]}, not {type(value).__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise JobError(key, value, "must be a finite number")
    return value


def _unknown(key: str, value: object, valid: dict[str, Any]) -> JobError:
    name = key.rpartition(".")[2]
    near = difflib.get_close_matches(name, valid, n=1)
    hint = f"is not a key of a job file; did you mean {near[0]}?" if near else "is not a key of a job file"
    return JobError(key, value, hint, sorted(valid))
