"""`ckpt verify`: check that a checkpoint is what was saved."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Annotated

import typer

import ckpt
from ckpt.cli.options import Json, StorageOptions, Threads, Url, parse_storage_options
from ckpt.cli.printing.output import EXIT_PROBLEM, MAX_LINES, Output, age, command, count, shown, size, table

if TYPE_CHECKING:
    from ckpt.tools.findings import Damage, Stray, Verification


def verify(
    url: Url,
    quick: Annotated[
        bool, typer.Option("--quick", help="Check records and file sizes only; read no data.")
    ] = False,
    threads: Threads = None,
    storage_options: StorageOptions = None,
    json: Json = False,
) -> None:
    """Check every byte and every record of a checkpoint.

    Also checks that the stored slices cover every tensor, and lists objects that do not belong to
    the checkpoint. Of a stock PyTorch checkpoint it checks sizes, coverage and the CRCs in the
    files; of a safetensors model of another program, which has no checksums, the index, headers and
    sizes. Changes nothing.
    """
    with command(json, if_interrupted="Nothing was changed; verify starts over.") as output:
        options = parse_storage_options(storage_options)
        with output.progress("verifying") as progress:
            result = ckpt.verify(
                url, storage_options=options, quick=quick, threads=threads, progress=progress
            )
        if output.as_json:
            output.json({**dataclasses.asdict(result), "ok": result.ok})
        else:
            _print(output, result)
        if not result.ok:
            raise typer.Exit(EXIT_PROBLEM)


def _print(output: Output, result: Verification) -> None:
    damages = len(result.damages) + result.damages_omitted
    output.print(*(f"[bold red]damaged:[/] {_line(damage)}" for damage in result.damages[:MAX_LINES]))
    output.print_hidden(damages - MAX_LINES)
    output.print(*(f"[yellow]warning:[/] {_line(warning)}" for warning in result.warnings))
    if result.strays is None and result.checked_files:  # else no record could be read
        output.print(
            "the storage did not list the folder, so objects that do not belong here were not looked for"
        )
    elif result.strays:
        _print_strays(output, result.strays)
    if result.format == "safetensors" and result.ok:
        output.print(
            f"a safetensors model of another program has no checksums: the bytes of "
            f"{count(result.unchecked_items, 'tensor')} could not be checked"
        )
    elif result.unchecked_items:
        output.print(
            f"{count(result.unchecked_items, 'item')} without CRCs: their bytes could not be checked"
        )
    if not result.stock_readers:
        output.print(
            f"stock PyTorch cannot read it: .metadata was left out as too large, and not checked; "
            f"`ckpt convert {shown(result.url)} DST --to dcp` makes a checkpoint with one"
        )
    amount = count(result.checked_files, "file")
    amount += (
        ", sizes and records only" if result.quick else f", {size(result.checked_bytes)} read and compared"
    )
    verdict = f"[bold red]{count(damages, 'damage')}[/] in" if damages else "[bold green]ok:[/]"
    output.print(f"{verdict} {shown(result.url)} ({amount})")


def _line(damage: Damage) -> str:
    parts = [shown(damage.key)] if damage.key else []
    if damage.start is not None and damage.stop is not None:
        parts.append(f"bytes {damage.start}-{damage.stop}")
    text = ": ".join([*parts, shown(damage.message)])
    if damage.fqns and damage.kind != "coverage":
        hidden = damage.fqn_count - len(damage.fqns)
        more = f" and {hidden:,} more" if hidden > 0 else ""
        text += f" (affects {', '.join(map(shown, damage.fqns))}{more})"
    return text


def _print_strays(output: Output, strays: list[Stray]) -> None:
    rows = table("stray", ">bytes", ">age", "")
    for stray in strays[:MAX_LINES]:
        origin = "left by a save" if stray.ours else "not written by this library"
        rows.add_row(
            shown(stray.key),
            "?" if stray.unfinished else size(stray.size_bytes),
            age(None if stray.modified_at_s is None else time.time() - stray.modified_at_s),
            "unfinished upload" if stray.unfinished else origin,
        )
    output.print(rows)
    output.print_hidden(len(strays) - MAX_LINES)
    output.print(f"{count(len(strays), 'stray')}: not needed by the checkpoint, and harmless")
