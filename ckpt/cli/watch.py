"""`ckpt watch`: follow a run, and run a command for each checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ckpt.cli.options import (
    TIME_UNITS,
    JsonLines,
    Root,
    StorageOptions,
    parse_quantity,
    parse_storage_options,
)
from ckpt.cli.printing.output import EXIT_PROBLEM, Output, command
from ckpt.cli.printing.streams import output_is_unread
from ckpt.errors import ConfigurationError
from ckpt.words import age, count, printable, shown, size

if TYPE_CHECKING:
    from ckpt.watching.command import Command, Execution
    from ckpt.watching.sights import WatchedCheckpoint
    from ckpt.watching.watch import Watcher

_STDERR = 2

_COMMAND, _WHICH = "A command for each", "Which checkpoints, until when"

_Exec = Annotated[
    str | None,
    typer.Option(
        "--exec",
        metavar="COMMAND",
        help="Run this for each checkpoint, one at a time; {url}, {path}, {step} and {id} are replaced.",
        rich_help_panel=_COMMAND,
    ),
]
_Cursor = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Remember here (a path or URL) what is done, and go on from there.",
        rich_help_panel=_WHICH,
    ),
]
_After = Annotated[
    int | None,
    typer.Option(metavar="STEP", help="Pass over this step and earlier ones.", rich_help_panel=_WHICH),
]
_SkipExisting = Annotated[
    bool,
    typer.Option(
        "--skip-existing", help="Pass over what is there, unless there is a cursor.", rich_help_panel=_WHICH
    ),
]
_SkipToLatest = Annotated[
    bool,
    typer.Option(
        "--skip-to-latest", help="Of several that wait, take the last one only.", rich_help_panel=_WHICH
    ),
]
_Once = Annotated[bool, typer.Option("--once", help="Take what is there, and end.", rich_help_panel=_WHICH)]
_Timeout = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="End when nothing new came for so long.", rich_help_panel=_WHICH),
]
_Retries = Annotated[
    int,
    typer.Option(
        metavar="N", min=0, max=100, help="Try a command that fails N times again.", rich_help_panel=_COMMAND
    ),
]
_ExecTimeout = Annotated[
    str | None,
    typer.Option(
        metavar="TIME", help="End a command that takes longer; it has failed.", rich_help_panel=_COMMAND
    ),
]
_OnFailure = Annotated[
    Literal["stop", "continue"],
    typer.Option(
        help="When the last try failed: stop, or go on with the next checkpoint.", rich_help_panel=_COMMAND
    ),
]
_Poll = Annotated[str, typer.Option(metavar="TIME", help="Time between two looks: 10s, 5m.")]
_Lag = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="How long the storage may take to show what was written."),
]
_Outage = Annotated[str, typer.Option(metavar="TIME", help="How long the storage may give no answer.")]

EXAMPLES = """
ckpt watch s3://bucket/run
ckpt watch runs --cursor eval.cursor --exec 'python eval.py {url}'
ckpt watch runs --once --skip-to-latest --json
"""


def watch(
    root: Root,
    execute: _Exec = None,
    cursor: _Cursor = None,
    after: _After = None,
    skip_existing: _SkipExisting = False,
    skip_to_latest: _SkipToLatest = False,
    once: _Once = False,
    timeout: _Timeout = None,
    retries: _Retries = 2,
    exec_timeout: _ExecTimeout = None,
    on_failure: _OnFailure = "stop",
    poll: _Poll = "10s",
    lag: _Lag = None,
    outage: _Outage = "1h",
    storage_options: StorageOptions = None,
    json: JsonLines = False,
) -> None:
    """Follow a run: print each new checkpoint, or run a command for it.

    It begins with the checkpoints that are there, in the order in which they were committed, and
    waits for more.
    """
    interrupted = "Checkpoints whose command has not ended are not done."
    with command(json, if_interrupted=interrupted) as output:
        from ckpt.watching.command import Command, Signals
        from ckpt.watching.watch import Watcher

        if once and timeout is not None:
            raise ConfigurationError("--once and --timeout exclude each other")
        signals = Signals()
        watcher = Watcher(
            root=root,
            storage_options=parse_storage_options(storage_options),
            cursor=cursor,
            after=after,
            skip_existing=skip_existing,
            skip_to_latest=skip_to_latest,
            poll_s=_seconds("--poll", poll),
            timeout_s=0.0 if once else _seconds_or_none("--timeout", timeout),
            lag_s=_seconds_or_none("--lag", lag),
            outage_s=_seconds("--outage", outage),
        )
        runs = None
        if execute is not None:
            runs = Command(
                execute,
                retries=retries,
                timeout_s=_seconds_or_none("--exec-timeout", exec_timeout),
                stdout=_STDERR if json else None,
                signals=signals,
                on_failure=_tell_failure,
            )
        with signals.caught():
            failures = _follow(watcher, runs, output, stops=on_failure == "stop")
        if failures:
            raise typer.Exit(EXIT_PROBLEM)


def _follow(watcher: Watcher, runs: Command | None, output: Output, *, stops: bool) -> int:
    """Print each checkpoint, or run the command for it; return how many commands failed."""
    sys.stderr.write(f"watching {printable(watcher.url)}\n")
    failures = 0
    with contextlib.closing(watcher.checkpoints()) as checkpoints:
        while True:
            with output.working("waiting"):
                checkpoint = next(checkpoints, None)
            if checkpoint is None:
                break
            execution = None if runs is None else runs.run(checkpoint, watcher.is_there)
            has_failed = execution is not None and execution.outcome == "failed"
            failures += has_failed
            _print(output, checkpoint, execution)
            if (has_failed and stops) or (runs is None and output_is_unread()):
                break
    return failures


def _print(output: Output, checkpoint: WatchedCheckpoint, execution: Execution | None) -> None:
    if output.as_json:
        facts: dict[str, Any] = dataclasses.asdict(checkpoint)
        output.json(facts if execution is None else facts | vars(execution))
    elif execution is None:
        cells = [_title(checkpoint)]
        if checkpoint.size_bytes is not None:
            cells.append(size(checkpoint.size_bytes))
        if checkpoint.created_at_s is not None:
            cells.append(f"committed {age(time.time() - checkpoint.created_at_s)} ago")
        output.print(shown(", ".join(cells)))
    else:
        text = f"{_title(checkpoint)}: {execution.outcome} after {execution.took_s:.1f} s"
        if execution.problem is not None:
            text += f", {count(execution.attempts, 'attempt')}: {execution.problem}"
        output.print(shown(text))
    sys.stdout.flush()


def _title(checkpoint: WatchedCheckpoint) -> str:
    name = checkpoint.path or checkpoint.url
    return name if checkpoint.step is None else f"{name} (step {checkpoint.step})"


def _tell_failure(checkpoint: WatchedCheckpoint, attempt: int, problem: str) -> None:
    sys.stderr.write(f"{printable(_title(checkpoint))}: attempt {attempt} failed: {printable(problem)}\n")


def _seconds(option: str, text: str) -> float:
    return parse_quantity(option, text, TIME_UNITS, "10s, 5m or 1h")


def _seconds_or_none(option: str, text: str | None) -> float | None:
    return None if text is None else _seconds(option, text)
