"""Start Python processes that import nothing from the working directory."""

from __future__ import annotations

import functools
import multiprocessing.util
import os
import sys
from typing import Any

_SAFE_PATH = "-P" if sys.version_info >= (3, 11) else "-I"


def command_of(module: str, function: str, *arguments: str) -> list[str]:
    """Return the command of an isolated process that calls a function with `arguments`, texts.

    `python -m` would import modules from the working directory first. The process has the `sys.path` of this one.
    """
    path = [entry or os.getcwd() for entry in sys.path]
    code = (
        f"import sys; sys.path[:] = {path!r}; from importlib import import_module; "
        f"import_module(sys.argv[1]).{function}(*sys.argv[2:])"
    )
    return [sys.executable, "-I", "-c", code, module, *arguments]


def isolate_children() -> None:
    """Have processes that `multiprocessing` starts from now on import nothing from the working directory.

    It starts them by `python -c`, which imports from there until the process has received the `sys.path` of this one.
    """
    util: Any = multiprocessing.util
    flags = util._args_from_interpreter_flags
    if hasattr(flags, "__wrapped__"):
        return

    @functools.wraps(flags)
    def isolated() -> list[str]:
        return [*flags(), _SAFE_PATH]

    util._args_from_interpreter_flags = isolated
