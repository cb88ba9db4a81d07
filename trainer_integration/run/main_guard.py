"""Refuse to start a process that would run the program's script once more, without its main guard."""

from __future__ import annotations

import ast
import multiprocessing
import sys
import threading
from types import CodeType, FrameType

from ckpt.errors import ConfigurationError

_ADVICE = """async_mode="process" starts a process that runs this script once more up to here, unless the code
that trains stands under a guard. Write

    def main():
        ...  # init_process_group, CheckpointManager, the training loop

    if __name__ == "__main__":
        main()
"""


def check_main_guard() -> None:
    """Raise ConfigurationError where a spawned process runs, or would run, the code that is running now."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigurationError(f"this is that process, in the script that it must not run: {_ADVICE}")
    line = _unguarded_line()
    if line is not None:
        raise ConfigurationError(f"{line}: {_ADVICE}")


def _unguarded_line() -> str | None:
    """Return the line of the script that is running now; None if a guard is above it, or it is not run again."""
    frame = _script_frame(sys._current_frames().get(threading.main_thread().ident or 0))
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None)
    # As multiprocessing decides: `__main__.py` of a package, a notebook or `python -c` is not run again.
    if frame is None or (name or "").endswith("__main__") or not (name or hasattr(main, "__file__")):
        return None
    return (
        None if _is_guarded(frame.f_code, frame.f_lineno) else f"{frame.f_code.co_filename}:{frame.f_lineno}"
    )


def _script_frame(frame: FrameType | None) -> FrameType | None:
    """Find the frame of the script's own code, outside of all functions."""
    script = None
    while frame is not None:
        if frame.f_globals is vars(sys.modules["__main__"]) and frame.f_code.co_name == "<module>":
            script = frame
        frame = frame.f_back
    return script


def _is_guarded(code: CodeType, line: int) -> bool:
    """Tell whether the statement at this line asks for `__name__`, or it is not known."""
    try:
        with open(code.co_filename, encoding="utf-8") as file:
            statements = ast.parse(file.read()).body
    except (OSError, SyntaxError, ValueError):
        return True
    return any(
        isinstance(node, ast.Compare)
        and any(getattr(leaf, "id", "") == "__name__" for leaf in ast.walk(node))
        for statement in statements
        if statement.lineno <= line <= (statement.end_lineno or line)
        for node in ast.walk(statement)
    )
