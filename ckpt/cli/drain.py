"""`ckpt drain`: carry checkpoints from a node's own disk to the durable place."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated

import typer

import ckpt
from ckpt.cli.options import (
    RATE_UNITS,
    TIME_UNITS,
    JsonLines,
    Threads,
    parse_quantity,
    parse_storage_options,
    storage_options_of,
)
from ckpt.cli.printing.output import EXIT_PROBLEM, Output, command
from ckpt.words import shown, size

if TYPE_CHECKING:
    from ckpt.draining.drain import Drained
    from ckpt.draining.ending import Grace

_COLORS = {"durable": "green", "waiting": "yellow", "failed": "red", "left out": "cyan"}

_Newest = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="If several wait, carry only the newest N; the others stay here."),
]
_KeepLocal = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Remove from LOCAL what is durable, but for the newest N."),
]
_Bandwidth = Annotated[str | None, typer.Option(metavar="RATE", help="Send no faster: 200MB/s.")]
_Follow = Annotated[bool, typer.Option("--follow", "-f", help="Look for more until a signal ends it.")]
_Poll = Annotated[str, typer.Option(metavar="TIME", help="Time between two looks: 2s, 1m.")]
_Outage = Annotated[str, typer.Option(metavar="TIME", help="How long DURABLE may give no answer.")]
_Grace = Annotated[
    str, typer.Option(metavar="TIME", help="After SIGTERM, carry what fits in this time: 25s, 5m.")
]
_AnyRoot = Annotated[
    bool,
    typer.Option("--any-root", help="LOCAL is of a run with another root: carry to DURABLE all the same."),
]
_Options = Annotated[list[str] | None, storage_options_of("DURABLE's storage")]

EXAMPLES = """
ckpt drain /nvme/run s3://bucket/run
ckpt drain /nvme/run s3://bucket/run --follow --keep-local 2
"""


def drain(
    local: Annotated[str, typer.Argument(metavar="LOCAL", help="The folder of a run on this node.")],
    durable: Annotated[str, typer.Argument(metavar="DURABLE", help="The run's folder in the durable place.")],
    follow: _Follow = False,
    newest: _Newest = None,
    keep_local: _KeepLocal = None,
    max_bandwidth: _Bandwidth = None,
    poll: _Poll = "2s",
    outage: _Outage = "1h",
    grace: _Grace = "25s",
    any_root: _AnyRoot = False,
    threads: Threads = None,
    storage_options: _Options = None,
    json: JsonLines = False,
) -> None:
    """Carry checkpoints from a node's own disk to the durable place.

    Each becomes a checkpoint there in one step, when all of it has arrived, in the order of the steps.
    Every block is checked on its way. After a crash run the same command again: what was sent is
    not sent again. On several nodes, each with its own ranks' files, run it on each.
    """
    interrupted = "What was sent stays; the same command goes on where this one stopped."
    states: dict[str, str] = {}
    with (
        command(json, if_interrupted=interrupted) as output,
        _ending(_seconds("--grace", grace), lambda: _print_left(output, local, durable, states)) as ending,
    ):
        bar: list[Callable[[int, int], None]] = []
        checkpoints = ckpt.drain(
            local,
            durable,
            storage_options=parse_storage_options(storage_options),
            newest=newest,
            keep_local=keep_local,
            max_bandwidth_bytes_per_s=_rate(max_bandwidth),
            follow=follow,
            poll_s=_seconds("--poll", poll),
            outage_s=_seconds("--outage", outage),
            threads=threads,
            any_root=any_root,
            finish=ending.finish,
            stop=ending.stop,
            progress=lambda done, total: bar[-1](done, total),
        )
        while True:
            with output.progress("draining") as progress:  # between two lines
                bar[:] = [progress]
                drained = next(checkpoints, None)
            if drained is None:
                break
            states[drained.path] = drained.state
            _print(output, drained)
        if not states and not output.as_json:
            output.print(f"no checkpoints directly below {shown(local)}{_runs_below(local)}")
        if {"waiting", "failed"} & {*states.values()}:
            raise typer.Exit(EXIT_PROBLEM)


def _runs_below(local: str) -> str:
    """Name a run's folder, if there are some below: `CheckpointManager(local=...)` makes one for each run."""
    from ckpt.draining.marker import durable_of

    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(local)):
            durable = durable_of(os.path.join(local, name))
            if durable is not None:
                return f"; {shown(name)} is the folder of the run {shown(durable)}"
    return ""


def _print(output: Output, drained: Drained) -> None:
    if output.as_json:
        output.json(dataclasses.asdict(drained))
    else:
        text = f"[{_COLORS[drained.state]}]{drained.state}[/]  {shown(drained.path)}"
        if drained.reason:
            text += f": {shown(drained.reason)}"
        elif drained.took_s:
            text += f", {size(drained.sent_bytes)} sent in {drained.took_s:.1f} s"
        output.print(text)
    sys.stdout.flush()


def _print_left(output: Output, local: str, durable: str, states: Mapping[str, str]) -> None:
    """Say which checkpoints wait, of those that nothing was said about."""
    from ckpt.draining.drain import STOPPED, Drained

    for each in ckpt.list_checkpoints(local, depth=1):
        if each.state == "committed" and each.path not in states:
            url = f"{durable.rstrip('/')}/{each.path}"
            _print(output, Drained(each.path, each.step, url, "waiting", STOPPED))


@contextlib.contextmanager
def _ending(grace_s: float, last_words: Callable[[], None]) -> Iterator[Grace]:
    """After SIGTERM carry what is there for `grace_s` seconds at most."""
    from ckpt.draining.ending import Grace

    grace = Grace(grace_s, last_words)
    before = signal.signal(signal.SIGTERM, lambda *_: grace.begin())
    try:
        yield grace
    finally:
        grace.end()
        signal.signal(signal.SIGTERM, before)


def _seconds(option: str, text: str) -> float:
    return parse_quantity(option, text, TIME_UNITS, "10s, 5m or 1h")


def _rate(text: str | None) -> float | None:
    return None if text is None else parse_quantity("--max-bandwidth", text, RATE_UNITS, "200MB/s or 1GiB/s")
