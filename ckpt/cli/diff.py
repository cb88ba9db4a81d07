"""`ckpt diff`: compare two checkpoints."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Annotated

import typer

import ckpt
from ckpt.cli.options import Json, parse_storage_options, storage_options_of
from ckpt.cli.output import EXIT_PROBLEM, Output, command, count, shown, size, table

if TYPE_CHECKING:
    from ckpt.tools.diff import Comparison, Difference

_MAX_LINES = 1000


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another checkpoint.")],
    storage_options: Annotated[
        list[str] | None, storage_options_of("A's storage, and of B's unless it has its own")
    ] = None,
    b_storage_options: Annotated[
        list[str] | None, storage_options_of("B's storage", "--b-storage-options")
    ] = None,
    json: Json = False,
) -> None:
    """Compare two checkpoints: names, shapes, dtypes, values.

    They may be written by anyone and sharded in any way. Where both are stored alike, equal
    checksums show that tensors are equal, without reading them. Exit code 1 if anything differs.
    """
    with command(json) as output:
        options, b_options = parse_storage_options(storage_options), parse_storage_options(b_storage_options)
        with output.progress("comparing") as progress:
            result = ckpt.diff(a, b, storage_options=options, b_storage_options=b_options, progress=progress)
        if output.as_json:
            facts = dataclasses.asdict(result)
            for difference in facts["differences"]:
                for name in ("max_abs", "max_rel"):
                    if difference[name] == math.inf:
                        difference[name] = "inf"
            output.json({**facts, "same": result.same})
        else:
            _print(output, result)
        if not result.same:
            raise typer.Exit(EXIT_PROBLEM)


def _print(output: Output, result: Comparison) -> None:
    if result.differences:
        rows = table("", "name", "difference", "elements", "max abs", "max rel")
        for difference in result.differences[:_MAX_LINES]:
            rows.add_row(*_row(difference))
        output.print(rows)
    output.print_hidden(len(result.differences) - _MAX_LINES)
    verdict = "[green]same[/]" if result.same else f"[red]{count(len(result.differences), 'difference')}[/]"
    output.print(
        f"{verdict}: {count(result.tensors, 'tensor')} and {count(result.objects, 'object')} compared, "
        f"{result.equal_by_checksum:,} of them by checksum alone, {size(result.read_bytes)} read from each"
    )


def _row(difference: Difference) -> list[str]:
    sign, text = {
        "only_a": ("-", f"only in A: {difference.a}"),
        "only_b": ("+", f"only in B: {difference.b}"),
        "values": ("~", difference.a),
        "object": ("~", "objects with different values"),
    }.get(difference.kind, ("~", f"{difference.a} -> {difference.b}"))
    row = [sign, shown(difference.fqn), shown(text)]
    if difference.differing:
        nans = f" ({difference.nan:,} NaN)" if difference.nan else ""
        row += [f"{difference.differing:,}{nans}", f"{difference.max_abs:.3g}", f"{difference.max_rel:.3g}"]
    return row
