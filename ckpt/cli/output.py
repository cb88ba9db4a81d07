"""Print what commands find, draw progress, and turn errors into exit codes."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from ckpt.errors import (
    AlreadyExists,
    CheckpointError,
    ConfigurationError,
    NotCommitted,
    NotFound,
    StorageError,
)

if TYPE_CHECKING:  # rich takes longer to import than most commands take to run
    from rich.console import Console
    from rich.table import Table

EXIT_FINE, EXIT_PROBLEM, EXIT_USAGE, EXIT_MISSING, EXIT_STORAGE = range(5)
EXIT_INTERRUPTED = 130

_WIDE = 1 << 16
"""Columns of an output that is not a terminal: nothing is cut or wrapped."""


def shown(text: object) -> str:
    """Make a text fit for a terminal: without control characters, and without rich's markup."""
    from rich.markup import escape

    plain = (
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in str(text)
    )
    return escape("".join(plain))


def size(nbytes: float) -> str:
    """Write a number of bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(nbytes) < 1024 or unit == "TiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    raise AssertionError


def count(number: int, noun: str) -> str:
    """Write `1 file`, `2 files`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def age(seconds: float | None) -> str:
    """Write a span of time in its largest unit."""
    if seconds is None:
        return "?"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def table(*columns: str, header: bool = True) -> Table:
    """Make a table without lines around its cells."""
    from rich.table import Table

    return Table(*columns, box=None, pad_edge=False, show_header=header)


class Output:
    """Print a command's result to standard output, as text or as one JSON object."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

    @functools.cached_property
    def _console(self) -> Console:
        return _console(sys.stdout)

    def json(self, data: Mapping[str, Any]) -> None:
        """Print the result. Texts that are not valid Unicode are escaped."""
        sys.stdout.write(json.dumps(data, allow_nan=False) + "\n")

    def print(self, *lines: Any) -> None:
        """Print for people: text with rich's markup, tables, trees."""
        for line in lines:
            if self._console.is_terminal:
                self._console.print(line, highlight=False, soft_wrap=isinstance(line, str))
                continue
            with self._console.capture() as captured:
                self._console.print(line, highlight=False, soft_wrap=isinstance(line, str))
            # Tables are padded to their width.
            sys.stdout.writelines(f"{text.rstrip()}\n" for text in captured.get().split("\n")[:-1])

    def print_hidden(self, number: int) -> None:
        """Say how many lines are left out, if any."""
        if number > 0:
            self.print(f"... and {number:,} more; --json shows them")

    @contextlib.contextmanager
    def progress(self, action: str, *, visible: bool = True) -> Iterator[Callable[[int, int], None]]:
        """Draw a bar on standard error, if that is a terminal.

        Yields a function to call with the bytes done so far and those in all.
        """
        if not (visible and sys.stderr.isatty()):
            yield lambda done, total: None
            return
        from rich import progress as bars

        columns = (
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.DownloadColumn(binary_units=True),
            bars.TransferSpeedColumn(),
            bars.TimeRemainingColumn(),
        )
        with bars.Progress(*columns, console=_console(sys.stderr), transient=True) as bar:
            task = bar.add_task(shown(action), total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


def _console(file: Any) -> Console:
    from rich.console import Console

    return Console(file=file, width=None if file.isatty() else _WIDE)


@contextlib.contextmanager
def command(as_json: bool, *, if_interrupted: str = "Nothing was changed.") -> Iterator[Output]:
    """Run a command: an error becomes one line and an exit code, never a traceback.

    After Ctrl-C the line ends in `if_interrupted`.
    """
    output = Output(as_json=as_json)
    try:
        yield output
        sys.stdout.flush()
    except typer.Exit:
        raise
    except BrokenPipeError:
        # Whoever reads has seen enough. Python would complain again when it closes the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(EXIT_FINE) from None
    except KeyboardInterrupt:
        _fail(output, "Interrupted", f"interrupted. {if_interrupted}", EXIT_INTERRUPTED)
    except CheckpointError as error:
        _fail(output, type(error).__name__, str(error), exit_code(error), error)
    except (MemoryError, RecursionError) as error:
        _fail(output, type(error).__name__, f"{type(error).__name__}: {error}", EXIT_PROBLEM)
    except Exception as error:
        if os.environ.get("CKPT_DEBUG"):
            raise
        text = f"unexpected {type(error).__name__}: {error} (set CKPT_DEBUG=1 for a traceback)"
        _fail(output, type(error).__name__, text, EXIT_PROBLEM)


@contextlib.contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Let SIGTERM (from `timeout`, or from torchrun when another rank has failed) clean up too."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def exit_code(error: CheckpointError) -> int:
    """Choose the exit code for an error."""
    if isinstance(error, ConfigurationError):
        return EXIT_USAGE
    if isinstance(error, NotFound | NotCommitted):
        return EXIT_MISSING
    if isinstance(error, StorageError) and not isinstance(error, AlreadyExists):
        return EXIT_STORAGE
    return EXIT_PROBLEM


def _fail(output: Output, kind: str, text: str, code: int, error: CheckpointError | None = None) -> NoReturn:
    text = " ".join(text.split())[:2000]
    if output.as_json:
        facts: dict[str, Any] = {"type": kind, "message": text}
        if error is not None:
            facts |= {"url": error.url, "key": error.key, "start": error.start, "stop": error.stop}
        output.json({"error": facts, "exit_code": code})
    line = f"[bold red]error:[/] {shown(text)}"
    _console(sys.stderr).print(line, highlight=False, soft_wrap=True)
    raise typer.Exit(code) from None
