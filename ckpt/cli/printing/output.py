"""Print what commands find, draw progress, and turn errors into exit codes."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from ckpt import errors
from ckpt.cli.printing.progress import Line, seconds_gone, seconds_left, work_done
from ckpt.cli.printing.streams import output_failure
from ckpt.cli.printing.widths import cut_in_the_middle, fitting, print_wrapped
from ckpt.errors import (
    AlreadyExists,
    CheckpointError,
    ConfigurationError,
    NotCommitted,
    NotFound,
    StorageError,
)
from ckpt.words import printable, shown

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

_WIDE = 1 << 16
"""Columns of an output that is not a terminal: nothing is cut or wrapped."""


def table(*columns: str, header: bool = True) -> Table:
    """Make a table without lines around its cells. A column that begins with `>` is one of numbers."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, show_header=header)
    for column in columns:
        justify: Any = "right" if column.startswith(">") else "left"
        made.add_column(column.removeprefix(">"), justify=justify, overflow="fold")
    return made


class Output:
    """Print a command's result to standard output, as text or as one JSON object."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self._line: Line | None = None

    @functools.cached_property
    def _console(self) -> Console:
        return _console(sys.stdout)

    def json(self, data: Mapping[str, Any]) -> None:
        """Print the result. Texts that are not valid Unicode are escaped."""
        self._end_line()
        sys.stdout.write(json.dumps(data, allow_nan=False) + "\n")

    @property
    def width(self) -> int:
        """Columns of the terminal; very many in a pipe."""
        return self._console.width

    def print(self, *lines: Any) -> None:
        """Print for people: text with rich's markup, tables. On a terminal lines break between words."""
        self._end_line()
        for line in lines:
            if self._console.is_terminal:
                print_wrapped(self._console, line) if isinstance(line, str) else self._console.print(line)
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
        optional: int = 0,
        heading: bool = True,
        colors: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Print lines of plain text in columns, on a terminal as wide as that, at most; return headings left out there.

        `names` is the column that is the last to be cut there; of the last ones, `optional` many are left out
        where there is no room. `colors` are those of certain cells.

        A `Table` of rich takes minutes for as many lines as this prints in a second.
        """
        self._end_line()
        from rich.cells import cell_len
        from rich.markup import escape

        rows = [[printable(cell) for cell in row] for row in rows]
        widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
        if self._console.is_terminal:
            widths = fitting(widths, self.width, names=names, right=right, optional=optional)
        for row in rows:
            cells = []
            for at, (cell, width) in enumerate(zip(row, widths, strict=False)):
                cell = cut_in_the_middle(cell, width)
                space = " " * (width - cell_len(cell))
                if self._console.is_terminal:
                    style = "bold" if heading and row is rows[0] else (colors or {}).get(cell)
                    cell = f"[{style}]{escape(cell)}[/]" if style else escape(cell)
                cells.append(space + cell if at in right else cell + space)
            line = "  ".join(cells).rstrip()
            if self._console.is_terminal:
                self._console.print(line, highlight=False, soft_wrap=True)
            else:
                sys.stdout.write(f"{line}\n")
        return [*rows[0][len(widths) :]]

    def print_hidden(self, number: int) -> None:
        """Say how many lines are left out, if any."""
        if number > 0:
            self.print(f"... and {number:,} more; --json shows them")

    @contextlib.contextmanager
    def progress(self, action: str, *, visible: bool = True) -> Iterator[Callable[[int, int], None]]:
        """Draw a bar. Yields the `progress` of the tools: called with what is done so far, and with all there is.

        Those are bytes, or each an `Amount`, which says of what.
        """
        if not visible:
            yield lambda done, total: None
            return
        with self._drawn(action, work_done) as line:
            yield lambda done, total: line(done=done, total=total)

    def working(self, action: str) -> contextlib.AbstractContextManager[Callable[[str], None]]:
        """Show that work is going on of unknown length. Yields a function to call with another action."""
        return self._drawn(action, seconds_gone)

    def countdown(self) -> contextlib.AbstractContextManager[Callable[[str, float, float], None]]:
        """Draw a bar of time. Yields a function to call with the action, the seconds gone and those in all."""
        return self._drawn("", seconds_left)

    @contextlib.contextmanager
    def _drawn(self, action: str, amounts: Callable[[Any, bool], str]) -> Iterator[Line]:
        """Draw a line on standard error, if that is a terminal, until the block ends or prints something."""
        self._end_line()
        self._line = line = Line(action, amounts)
        try:
            yield line
        finally:
            line.end()

    def _end_line(self) -> None:
        if self._line is not None:
            self._line.end()


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
        with (
            _ctrl_c_raises(),
            retry_policy(unreachable_timeout_s=patience_s, on_retry=_RetryNotices()),
        ):
            yield output
    except typer.Exit:
        raise
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
def _ctrl_c_raises() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt, so that it cleans up; before and afterwards it ends the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


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


def code_after_output(code: str | int | None) -> str | int | None:
    """Return the exit code of a command that ended with `code`: another one only if all went well and its output is lost."""
    failure = output_failure()
    if code or failure is None or failure.errno == errno.EPIPE:
        return code
    text = f"standard output cannot be written: {failure.strerror}; the command itself has ended well"
    sys.stderr.write(f"error: {text}\n")
    return EXIT_STORAGE


def for_each(output: Output, urls: Sequence[str], work: Callable[[str], object]) -> None:
    """Do `work` for each URL: an error is printed, and the next URL follows. Exits with the largest of the exit codes."""
    if len(urls) == 1:
        work(urls[0])
        return
    code = EXIT_FINE
    for url in urls:
        try:
            work(url)
        except typer.Exit as ended:
            code = max(code, ended.exit_code)
        except CheckpointError as error:
            _print_error(output, type(error).__name__, str(error), exit_code(error), error)
            code = max(code, exit_code(error))
    if code != EXIT_FINE:
        raise typer.Exit(code)


def _public_name(error: CheckpointError) -> str:
    """Return the name under which docs/troubleshooting.md explains an error."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in errors.__all__)


def _fail(output: Output, kind: str, text: str, code: int, error: CheckpointError | None = None) -> NoReturn:
    _print_error(output, kind, text, code, error)
    raise typer.Exit(code) from None


def _print_error(output: Output, kind: str, text: str, code: int, error: CheckpointError | None) -> None:
    text = " ".join(text.split())[:2000]
    if output.as_json:
        facts: dict[str, Any] = {"type": kind, "message": text}
        if error is not None:
            facts |= {"url": error.url, "key": error.key, "start": error.start, "stop": error.stop}
        output.json({"error": facts, "exit_code": code})
    found_by = "" if error is None else f" [dim]\\[{_public_name(error)}][/]"
    line = f"[bold red]error:[/] {shown(text)}{found_by}"
    print_wrapped(_console(sys.stderr), line)
