"""Finds what a job file names as `module:function`: the user's own model or data."""

import importlib
from collections.abc import Callable
from typing import Any

from trimtab.protocol import JobError


def load_provider(key: str, name: str) -> Callable[..., Any]:
    """The function of a `module:function`, imported from the working directory or the Python path.

    Raises JobError, naming `key`, when there is no such module or no such function in it. An error inside the module
    is the user's own, and passes through.
    """
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # the module is there, but imports something that is not
        reason = f"there is no module {module_name}; it is looked for in the working directory and in PYTHONPATH"
        raise JobError(key, name, reason) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        functions = sorted(name for name, value in vars(module).items() if callable(value) and name[0] != "_")
        raise JobError(key, name, f"{module.__file__} has no function {function_name}", functions)
    return function  # type: ignore[no-any-return]
