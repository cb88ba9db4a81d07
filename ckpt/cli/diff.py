"""`ckpt diff`: what differs between two checkpoints."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ckpt.cli.common import EXIT_PROBLEM, Json, Output, command, count, parse_storage_options, shown, size

if TYPE_CHECKING:
    from ckpt.tools.diff import Comparison, Difference

__all__ = ["diff"]

_MAX_LINES = 1000


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another.")],
    storage_options: Annotated[
        list[str] | None,
        typer.Option(
            "--storage-options", metavar="KEY=VALUE|JSON", help="Options of A; of both, without those of B."
        ),
    ] = None,
    b_storage_options: Annotated[
        list[str] | None,
        typer.Option("--b-storage-options", metavar="KEY=VALUE|JSON", help="Options of B; '{}' for none."),
    ] = None,
    json: Json = False,
) -> None:
    """Compare two checkpoints: names, shapes, dtypes, values. Exit code 1 if anything differs.

    Whoever wrote them and however they are sharded. Where both are stored alike, equal tensors are known by their
    checksums, without reading them.
    """
    with command(json) as output:
        from ckpt.tools.diff import diff as compare

        options = parse_storage_options(storage_options)
        b_options = None if b_storage_options is None else parse_storage_options(b_storage_options)
        with output.progress("comparing") as progress:
            found = compare(a, b, storage_options=options, b_storage_options=b_options, progress=progress)
        if output.as_json:
            output.json(_as_json(found))
        else:
            _print(output, found)
        if not found.same:
            raise typer.Exit(EXIT_PROBLEM)


def _as_json(found: Comparison) -> dict[str, Any]:
    return {
        "a": found.a,
        "b": found.b,
        "same": found.same,
        "tensors": found.tensors,
        "objects": found.objects,
        "equal_by_checksum": found.equal_by_checksum,
        "read_bytes": found.read_bytes,
        "differences": [
            {name: "inf" if value == math.inf else value for name, value in vars(difference).items()}
            for difference in found.differences
        ],
    }


def _print(output: Output, found: Comparison) -> None:
    if found.differences:
        table = Table("", "name", "what", "differing", "max abs", "max rel", box=None, pad_edge=False)
        for difference in found.differences[:_MAX_LINES]:
            table.add_row(*_row(difference))
        output.print(table)
    if len(found.differences) > _MAX_LINES:
        output.print(f"... and {len(found.differences) - _MAX_LINES:,} more; --json shows them")
    what = f"{count(found.tensors, 'tensor')} and {count(found.objects, 'object')} compared, {found.equal_by_checksum:,} of them by "
    what += f"checksum alone, {size(found.read_bytes)} read from each"
    verdict = "[green]same[/]" if found.same else f"[red]{count(len(found.differences), 'difference')}[/]"
    output.print(f"{verdict}: {what}")


def _row(difference: Difference) -> list[str]:
    sign = {"only_a": "-", "only_b": "+"}.get(difference.kind, "~")
    what = {
        "only_a": f"only in A: {difference.a}",
        "only_b": f"only in B: {difference.b}",
        "values": difference.a,
    }.get(difference.kind, f"{difference.a} -> {difference.b}")
    numbers = ["", "", ""]
    if difference.differing:
        nans = f" ({difference.nan:,} NaN)" if difference.nan else ""
        numbers = [
            f"{difference.differing:,}{nans}",
            f"{difference.max_abs:.3g}",
            f"{difference.max_rel:.3g}",
        ]
    return [sign, shown(difference.fqn), shown(what), *numbers]
