"""`ckpt verify`: is a checkpoint what was saved?"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ckpt.cli.common import (
    EXIT_PROBLEM,
    Json,
    Output,
    StorageOptions,
    Url,
    age,
    command,
    count,
    parse_storage_options,
    shown,
    size,
)

if TYPE_CHECKING:
    from ckpt.tools.findings import Damage, Verification

__all__ = ["verify"]

_MAX_LINES = 100


def verify(
    url: Url,
    quick: Annotated[
        bool, typer.Option("--quick", help="Read records only, no data: sizes, coverage, strays.")
    ] = False,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Reads at the same time; default by the cores.")
    ] = None,
    storage_options: StorageOptions = None,
    json: Json = False,
) -> None:
    """Check a checkpoint: every byte, every record, every tensor's coverage; look for strays.

    Of a stock checkpoint what is possible: sizes, coverage, the CRCs in its items. Changes nothing.
    """
    with command(json, to_go_on="Nothing was changed; verify again from the start.") as output:
        from ckpt.tools.verify import verify as check

        options = parse_storage_options(storage_options)
        with output.progress("verifying") as progress:
            found = check(url, storage_options=options, quick=quick, threads=threads, progress=progress)
        if output.as_json:
            output.json(_as_json(found))
        else:
            _print(output, found)
        if not found.ok:
            raise typer.Exit(EXIT_PROBLEM)


def _as_json(found: Verification) -> dict[str, Any]:
    return {
        "url": found.url,
        "ok": found.ok,
        "format": found.format,
        "id": found.id,
        "quick": found.quick,
        "checked_files": found.checked_files,
        "checked_bytes": found.checked_bytes,
        "unchecked_items": found.unchecked_items,
        "damages": [
            {
                "kind": d.kind, "message": d.message, "key": d.key, "start": d.start, "stop": d.stop,
                "fqns": list(d.fqns), "fqn_count": d.fqn_count,
            }
            for d in found.damages
        ],
        "damages_omitted": found.damages_omitted,
        "strays": None if found.strays is None else [
            {
                "key": s.key, "size_bytes": s.size_bytes, "modified_at_s": s.modified_at_s,
                "ours": s.ours, "unfinished": s.unfinished,
            }
            for s in found.strays
        ],
    }  # fmt: skip


def _print(output: Output, found: Verification) -> None:
    for damage in found.damages[:_MAX_LINES]:
        output.print(f"[bold red]damaged:[/] {_line(damage)}")
    hidden = len(found.damages) - _MAX_LINES + found.damages_omitted
    if len(found.damages) > _MAX_LINES:
        output.print(f"... and {hidden:,} more; --json shows them")
    _print_strays(output, found)
    if found.unchecked_items:
        output.print(f"{count(found.unchecked_items, 'item')} without CRCs, whose bytes could not be checked")
    what = count(found.checked_files, "file")
    what += ", sizes and records only" if found.quick else f", {size(found.checked_bytes)} read and compared"
    if found.ok:
        output.print(f"[bold green]ok:[/] {shown(found.url)} ({what})")
    else:
        output.print(
            f"[bold red]{count(len(found.damages) + found.damages_omitted, 'damage')}[/] in {shown(found.url)} ({what})"
        )


def _line(damage: Damage) -> str:
    where = [shown(damage.key)] if damage.key else []
    if damage.start is not None and damage.stop is not None:
        where.append(f"bytes {damage.start}-{damage.stop}")
    text = ": ".join([*where, shown(damage.message)])
    if damage.fqns and damage.kind != "coverage":
        names = ", ".join(map(shown, damage.fqns))
        more = (
            f" and {damage.fqn_count - len(damage.fqns):,} more"
            if damage.fqn_count > len(damage.fqns)
            else ""
        )
        text += f" (holds {names}{more})"
    return text


def _print_strays(output: Output, found: Verification) -> None:
    if found.strays is None:
        output.print("the storage would not list the folder: strays could not be looked for")
        return
    if not found.strays:
        return
    table = Table("stray", "bytes", "age", "", box=None, pad_edge=False)
    for stray in found.strays[:_MAX_LINES]:
        since = None if stray.modified_at_s is None else time.time() - stray.modified_at_s
        what = (
            "unfinished put"
            if stray.unfinished
            else "left by a save"
            if stray.ours
            else "not of this library"
        )
        table.add_row(shown(stray.key), "?" if stray.unfinished else size(stray.size_bytes), age(since), what)
    output.print(
        table, f"{count(len(found.strays), 'object')} that the checkpoint does not need; they do no harm"
    )
