"""Print what commands find, draw progress, and turn errors into exit codes."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from ckpt import errors
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

    from ckpt.backends.retries import Retry

EXIT_FINE, EXIT_PROBLEM, EXIT_USAGE, EXIT_MISSING, EXIT_STORAGE = range(5)
EXIT_INTERRUPTED = 130

MAX_LINES = 24
"""Of a kind of thing, however many there are: what else there is to say fits the same screen."""

_PATIENCE_S = 12.0
"""How long a server that cannot be reached is tried again."""
_SILENT_S, _NOTICE_EVERY_S = 1.5, 5.0

_NARROW = 24
"""Characters that a column of texts has, if it must be cut."""

_FRACTION = re.compile(r"-?[0-9]+\.[0-9]+(e[-+]?[0-9]+)?")

_WIDE = 1 << 16
"""Columns of an output that is not a terminal: nothing is cut or wrapped."""


def printable(text: object) -> str:
    """Write control characters as escapes."""
    plain = str(text)
    if plain.isprintable():
        return plain
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in plain
    )


def shown(text: object) -> str:
    """Make a text fit for a terminal: without control characters, and without rich's markup."""
    from rich.markup import escape

    return escape(printable(text))


def size(nbytes: float) -> str:
    """Write a number of bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} TiB"


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


def tags_text(tags: Mapping[str, str], limit: int = 8) -> str:
    """Write tags for people: numbers with few digits, the first `limit` tags."""
    texts = [f"{name}={_short_number(value)}" for name, value in itertools.islice(tags.items(), limit)]
    if len(tags) > limit:
        texts.append(f"and {len(tags) - limit:,} more")
    return ", ".join(texts)


def _short_number(text: str) -> str:
    if len(text) < 9 or not _FRACTION.fullmatch(text):  # such as a date or a hash, which are no numbers
        return text
    return f"{float(text):.4g}"


def table(*columns: str, header: bool = True) -> Table:
    """Make a table without lines around its cells. A column that begins with `>` is one of numbers."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, show_header=header)
    for column in columns:
        made.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    return made


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

    def print_columns(
        self,
        rows: Sequence[Sequence[str]],
        *,
        names: int = 0,
        right: Collection[int] = (),
        heading: bool = True,
        colors: Mapping[str, str] | None = None,
    ) -> None:
        """Print lines of plain text in columns; on a terminal as wide as that, at most.

        `names` is the column that is the last to be cut there; `colors` are those of certain cells.

        A `Table` of rich takes minutes for as many lines as this prints in a second.
        """
        from rich.cells import cell_len, set_cell_size
        from rich.markup import escape

        rows = [[printable(cell) for cell in row] for row in rows]
        widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
        if self._console.is_terminal:
            room = self._console.width - 2 * (len(widths) - 1)
            widths = [min(width, self._console.width) for width in widths]
            while sum(widths) > room and max(widths) > _NARROW:
                wide = [width if at != names else 0 for at, width in enumerate(widths)]
                widths[wide.index(max(wide)) if max(wide) > _NARROW else names] -= 1
        for row in rows:
            cells = []
            for at, (cell, width) in enumerate(zip(row, widths, strict=True)):
                if cell_len(cell) > width:
                    left = set_cell_size(cell, width // 2).rstrip()
                    cell = f"{left}…{set_cell_size(cell[::-1], width - 1 - cell_len(left))[::-1].lstrip()}"
                space = " " * (width - cell_len(cell))
                if self._console.is_terminal:
                    style = "bold" if heading and row is rows[0] else (colors or {}).get(cell)
                    cell = f"[{style}]{escape(cell)}[/]" if style else escape(cell)
                cells.append(space + cell if at in right else cell + space)
            line = "  ".join(cells).rstrip()
            if self._console.is_terminal:
                self.print(line)
            else:
                sys.stdout.write(f"{line}\n")

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

    @contextlib.contextmanager
    def countdown(self) -> Iterator[Callable[[str, float, float], None]]:
        """Draw a bar of time on standard error, if that is a terminal.

        Yields a function to call with what is being done, the seconds gone and those in all.
        """
        if not sys.stderr.isatty():
            yield lambda action, gone_s, total_s: None
            return
        from rich import progress as bars

        columns = (
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.TextColumn("{task.fields[left]}"),
        )
        with bars.Progress(*columns, console=_console(sys.stderr), transient=True) as bar:
            task = bar.add_task("", total=None, left="")

            def show(action: str, gone_s: float, total_s: float) -> None:
                left = f"{age(total_s - gone_s)} left"
                bar.update(task, description=shown(action), completed=gone_s, total=total_s, left=left)

            yield show


def _console(file: Any) -> Console:
    from rich.console import Console

    return Console(file=file, width=None if file.isatty() else _WIDE, emoji=False)


@contextlib.contextmanager
def command(
    as_json: bool, *, if_interrupted: str = "Nothing was changed.", patience_s: float = _PATIENCE_S
) -> Iterator[Output]:
    """Run a command: an error becomes one line and an exit code, never a traceback.

    After Ctrl-C the line ends in `if_interrupted`. Servers out of reach are given up after
    `patience_s`, by default sooner than by a save: somebody waits.
    """
    from ckpt.backends.retries import retry_policy

    output = Output(as_json=as_json)
    try:
        with retry_policy(unreachable_timeout_s=patience_s, on_retry=_RetryNotices()):
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


class _RetryNotices:
    """Say on standard error that requests are sent again, if that goes on for a while."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next_s = _SILENT_S

    def __call__(self, retry: Retry) -> None:
        with self._lock:
            if retry.failing_s < _SILENT_S:
                self._next_s = _SILENT_S  # a new failure
            if retry.failing_s >= self._next_s:
                self._next_s = retry.failing_s + _NOTICE_EVERY_S
                line = f"retrying {retry.url} since {retry.failing_s:.0f} s: {retry.reason}"
                sys.stderr.write(f"{printable(' '.join(line.split())[:500])}\n")


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


def _public_name(error: CheckpointError) -> str:
    """Return the name under which docs/troubleshooting.md explains an error."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in errors.__all__)


def _fail(output: Output, kind: str, text: str, code: int, error: CheckpointError | None = None) -> NoReturn:
    text = " ".join(text.split())[:2000]
    if output.as_json:
        facts: dict[str, Any] = {"type": kind, "message": text}
        if error is not None:
            facts |= {"url": error.url, "key": error.key, "start": error.start, "stop": error.stop}
        output.json({"error": facts, "exit_code": code})
    found_by = "" if error is None else f" [dim]\\[{_public_name(error)}][/]"
    line = f"[bold red]error:[/] {shown(text)}{found_by}"
    _console(sys.stderr).print(line, highlight=False, soft_wrap=True)
    raise typer.Exit(code) from None
