"""`ckpt scrub`: check what is stored again and again, and mend it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

import ckpt
from ckpt.cli.options import (
    RATE_UNITS,
    SIZE_UNITS,
    TIME_UNITS,
    Depth,
    Json,
    Root,
    StorageOptions,
    Threads,
    parse_quantity,
    parse_storage_options,
    storage_options_of,
)
from ckpt.cli.printing.output import EXIT_PROBLEM, MAX_LINES, Output, command
from ckpt.cli.verify import damage_line, not_checked
from ckpt.words import age, count, shown, size

if TYPE_CHECKING:
    from ckpt.scrubbing.mending import Mended
    from ckpt.scrubbing.scrub import Scrubbed, ScrubbedCheckpoint

EXAMPLES = """
ckpt scrub s3://bucket/run
ckpt scrub runs --bytes 100GB --for 2h --max-bandwidth 200MB/s
ckpt scrub runs --from s3://mirror/runs
ckpt scrub runs --status
"""

_Bytes = Annotated[
    str | None, typer.Option("--bytes", metavar="SIZE", help="Read this much, at least 8 MiB: 100GB.")
]
_For = Annotated[
    str | None, typer.Option("--for", metavar="TIME", help="Begin no reads after this: 30m, 2h.")
]
_Bandwidth = Annotated[str | None, typer.Option(metavar="RATE", help="Read no faster: 200MB/s.")]
_From = Annotated[
    str | None,
    typer.Option("--from", metavar="URL", help="Mend from here, where the same checkpoints are."),
]
_DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check, and write nothing, neither record nor objects.")
]
_Status = Annotated[bool, typer.Option("--status", help="Say what was checked when, and read no data.")]


def scrub(
    root: Root,
    max_bytes: _Bytes = None,
    max_time: _For = None,
    max_bandwidth: _Bandwidth = None,
    source: _From = None,
    dry_run: _DryRun = False,
    status: _Status = False,
    depth: Depth = 3,
    threads: Threads = None,
    storage_options: StorageOptions = None,
    from_storage_options: Annotated[
        list[str] | None, storage_options_of("the place of --from, if not the same", "--from-storage-options")
    ] = None,
    json: Json = False,
) -> None:
    """Check all checkpoints of a folder, again and again, and mend them.

    Reads every block once a pass, what was not checked for longest first, and notes in
    ckpt-scrub.json at ROOT what was checked when. Run it again, or every night with --bytes or --for:
    it goes on where the last one stopped, however that ended.

    With --from, damaged objects are put again as a whole: the blocks that are damaged come from the
    same checkpoint there, and each is held against its checksum first.
    """
    interrupted = "What was checked is noted; the same command goes on where this one stopped."
    with command(json, if_interrupted=interrupted) as output:
        options = parse_storage_options(storage_options)
        with output.progress("scrubbing") as progress:
            result = ckpt.scrub(
                root,
                storage_options=options,
                max_bytes=_quantity("--bytes", max_bytes, SIZE_UNITS, "100GB or 1TiB"),
                max_s=_quantity("--for", max_time, TIME_UNITS, "90s, 30m or 2h"),
                max_bandwidth_bytes_per_s=_quantity("--max-bandwidth", max_bandwidth, RATE_UNITS, "200MB/s"),
                repair_from=source,
                repair_options=parse_storage_options(from_storage_options, "--from-storage-options"),
                depth=depth,
                dry_run=dry_run,
                status_only=status,
                threads=threads,
                progress=progress,
            )
        if output.as_json:
            output.json({**dataclasses.asdict(result), "ok": result.ok})
        else:
            _print(output, result)
        if not result.ok:
            raise typer.Exit(EXIT_PROBLEM)


def _quantity(option: str, text: str | None, units: Mapping[str, float], examples: str) -> float | None:
    return None if text is None else parse_quantity(option, text, units, examples)


def _print(output: Output, result: Scrubbed) -> None:
    if result.problem:
        output.print(f"[yellow]warning:[/] {shown(result.problem)}")
    told = [each for each in result.checkpoints if each.state != "checked" or each.damages]
    for each in told[:MAX_LINES]:
        _print_checkpoint(output, each)
    output.print_hidden(len(told) - MAX_LINES)
    named = {each.path for each in told if each.damages}
    for path in [path for path in result.damaged if path not in named][:MAX_LINES]:
        output.print(f"[bold red]damaged:[/] {shown(path or '.')}: by its last check, and not mended since")
    known = {each.path for each in told if each.state == "unreadable"}
    for path in [path for path in result.unreadable if path not in known][:MAX_LINES]:
        output.print(
            f"[bold red]unreadable:[/] {shown(path or '.')}: at the last look; the next pass tries again"
        )
    looked = [each for each in result.checkpoints if each.state in ("checked", "partly")]
    if looked:
        output.print(f"read and compared {size(result.checked_bytes)} in {count(len(looked), 'checkpoint')}")
    unchecked = [each.unchecked_digests for each in looked if each.unchecked_digests is not None]
    for algorithm in sorted(set(unchecked)):
        number = count(unchecked.count(algorithm), "checkpoint")
        output.print(f"the digests of the blocks of {number} {not_checked(algorithm)}")
    state = "finished" if result.finished else "under way"
    share = 100 * result.passed_bytes // result.total_bytes if result.total_bytes else 100
    line = (
        f"pass {result.number} {state}: {size(result.passed_bytes)} of {size(result.total_bytes)} ({share} %)"
    )
    if result.never_checked:
        line += f"; {count(result.never_checked, 'checkpoint')} never checked as a whole"
    elif result.oldest_check_at_s is not None:
        line += f"; the oldest check began {age(time.time() - result.oldest_check_at_s)} ago"
    output.print(line)
    bad = [
        f"[bold red]{count(len(paths), f'{what} checkpoint')}[/]"
        for what, paths in (("damaged", result.damaged), ("unreadable", result.unreadable))
        if paths
    ]
    verdict = f"[bold green]ok{'' if result.finished else ' so far'}:[/]"
    output.print(f"{' and '.join(bad) + ' in' if bad else verdict} {shown(result.url)}")


def _print_checkpoint(output: Output, each: ScrubbedCheckpoint) -> None:
    name = shown(each.path or ".")
    if each.state in ("gone", "skipped"):
        reason = shown(each.reason) or "removed or replaced meanwhile"
        output.print(f"[yellow]{each.state}[/] {name}: {reason}")
    elif each.state == "unreadable":
        output.print(f"[bold red]unreadable:[/] {name}: {shown(each.reason)}; the others are checked")
    elif each.state == "partly":
        output.print(f"checked a part of {name}; the next scrub goes on there")
    for damage in each.damages[:MAX_LINES]:
        output.print(f"[bold red]damaged:[/] {name}: {damage_line(damage)}")
    output.print_hidden(len(each.damages) - MAX_LINES)
    for mended in each.mended[:MAX_LINES]:
        output.print(_mended_line(name, mended))
    output.print_hidden(len(each.mended) - MAX_LINES)


def _mended_line(name: str, mended: Mended) -> str:
    color = "red" if mended.state == "not mended" else "green"
    text = f"[{color}]{mended.state}:[/] {name}: {shown(mended.key)}"
    if mended.reason:
        return f"{text}: {shown(mended.reason)}"
    return f"{text}: {count(mended.blocks, 'block')}, {size(mended.nbytes)}" if mended.blocks else text
