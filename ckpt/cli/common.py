"""What all commands share: options, output, progress, and from errors to exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from ckpt.errors import (
    AlreadyExists,
    CheckpointError,
    ConfigurationError,
    NotCommitted,
    NotFound,
    StorageError,
)

__all__ = [
    "DryRun",
    "EXIT_FINE",
    "EXIT_INTERRUPTED",
    "EXIT_MISSING",
    "EXIT_PROBLEM",
    "EXIT_STORAGE",
    "EXIT_USAGE",
    "Json",
    "Output",
    "Progress",
    "Root",
    "StorageOptions",
    "Url",
    "age",
    "command",
    "count",
    "ended_as_by_ctrl_c",
    "exit_code",
    "parse_storage_options",
    "shown",
    "size",
]

EXIT_FINE, EXIT_PROBLEM, EXIT_USAGE, EXIT_MISSING, EXIT_STORAGE = range(5)
EXIT_INTERRUPTED = 130

_WIDE = 1 << 16
"""Columns of an output that is no terminal: nothing is cut or wrapped."""

Progress = Callable[[int, int], None]
"""Called with the bytes done so far and the bytes in all."""

Url = Annotated[
    str, typer.Argument(metavar="URL", help="The checkpoint: a path, s3://bucket/key, or any other URL.")
]
Root = Annotated[str, typer.Argument(metavar="ROOT", help="A folder of checkpoints: a path or URL.")]
StorageOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-options",
        metavar="KEY=VALUE|JSON",
        help="An option of the storage, or a JSON object of them. Can be repeated.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, with the fields of docs/cli.md.")]


def parse_storage_options(given: Sequence[str] | None) -> dict[str, Any]:
    """Options as `KEY=VALUE` or JSON objects, later ones first. A value that is JSON but no text is what it says.

    Raises:
        ConfigurationError: neither. Values never appear in the text.
    """
    options: dict[str, Any] = {}
    for text in given or ():
        if text.lstrip().startswith("{"):
            found = _json_or_none(text)
            if not isinstance(found, dict):
                raise ConfigurationError("--storage-options is not valid JSON")
            options |= found
            continue
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise ConfigurationError("--storage-options: write KEY=VALUE, or a JSON object")
        parsed = _json_or_none(value)
        options[name] = value if parsed is None and value != "null" else parsed
    return options


def _json_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def shown(text: object) -> str:
    """A text from a checkpoint, fit for a terminal: no control characters, no markup of rich's."""
    plain = (
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in str(text)
    )
    return escape("".join(plain))


def size(nbytes: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(nbytes) < 1024 or unit == "TiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    raise AssertionError


def count(number: int, what: str) -> str:
    """`1 file`, `2 files`."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def age(seconds: float | None) -> str:
    """A span of time for people: its largest unit."""
    if seconds is None:
        return "?"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


class Output:
    """Where a command's result goes: standard output, as text or as one JSON object."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.console = _console(sys.stdout)

    def json(self, data: dict[str, Any]) -> None:
        """Print the result. Texts that are not valid Unicode are escaped."""
        sys.stdout.write(json.dumps(data, allow_nan=False) + "\n")

    def print(self, *what: Any) -> None:
        """Print for people: rich's markup and tables."""
        for line in what:
            if self.console.is_terminal:
                self.console.print(line, highlight=False, soft_wrap=isinstance(line, str))
                continue
            with self.console.capture() as captured:
                self.console.print(line, highlight=False, soft_wrap=isinstance(line, str))
            # Tables are padded to their width.
            sys.stdout.writelines(f"{text.rstrip()}\n" for text in captured.get().split("\n")[:-1])

    @contextlib.contextmanager
    def progress(self, what: str) -> Iterator[Progress]:
        """A bar on standard error while work in bytes goes on, if that is a terminal."""
        if not sys.stderr.isatty():
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
            task = bar.add_task(shown(what), total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


def _console(file: Any) -> Console:
    return Console(file=file, width=None if file.isatty() else _WIDE)


@contextlib.contextmanager
def command(as_json: bool, *, to_go_on: str = "Nothing was changed.") -> Iterator[Output]:
    """Run a command: its errors become one line and an exit code, never a traceback.

    Args:
        to_go_on: what to tell who interrupts it.
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
        _fail(output, "Interrupted", f"interrupted. {to_go_on}", EXIT_INTERRUPTED)
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
def ended_as_by_ctrl_c() -> Iterator[None]:
    """SIGTERM (as of `timeout`, or of torchrun when another rank has failed) cleans up too."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def exit_code(error: CheckpointError) -> int:
    """The exit code that goes with an error."""
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
    console = _console(sys.stderr)
    console.print(f"[bold red]error:[/] {shown(text)}", highlight=False, soft_wrap=True)
    raise typer.Exit(code) from None
