"""`ckpt diff`: compare two checkpoints."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

import ckpt
from ckpt.cli.options import Json, parse_storage_options, storage_options_of
from ckpt.cli.printing.outline import Row, outline, pattern
from ckpt.cli.printing.output import EXIT_PROBLEM, Output, command
from ckpt.words import count, size

if TYPE_CHECKING:
    from ckpt.tools.diff import Comparison, Difference

_MAX_ROWS = 36
_MAX_TEXTS = 3
_SIGNS = {"only_a": "-", "only_b": "+"}

EXAMPLES = """
ckpt diff runs/step-100 runs/step-200
ckpt diff runs/step-100 s3://bucket/keep/step-100 --full
"""


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another checkpoint.")],
    storage_options: Annotated[
        list[str] | None, storage_options_of("A's storage, and of B's unless it has its own")
    ] = None,
    b_storage_options: Annotated[
        list[str] | None, storage_options_of("B's storage", "--b-storage-options")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Read all data, also where equal checksums are recorded.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="Show every name, and fold nothing.")] = False,
    json: Json = False,
) -> None:
    """Compare two checkpoints: names, shapes, dtypes, values.

    They may be written by anyone and sharded in any way. Where both are stored alike, equal
    checksums in their records show that tensors are equal, without reading them. Exit code 1 if
    anything differs.
    """
    with command(json) as output:
        options = parse_storage_options(storage_options)
        b_options = parse_storage_options(b_storage_options, "--b-storage-options")
        with output.progress("comparing") as progress:
            result = ckpt.diff(
                a, b, storage_options=options, b_storage_options=b_options, full=full, progress=progress
            )
        if output.as_json:
            facts = dataclasses.asdict(result)
            for difference in facts["differences"]:
                for name in ("max_abs", "max_rel"):
                    if difference[name] == math.inf:
                        difference[name] = "inf"
            output.json({**facts, "same": result.same})
        else:
            _print(output, result, everything)
        if not result.same:
            raise typer.Exit(EXIT_PROBLEM)


def _print(output: Output, result: Comparison, everything: bool) -> None:
    if result.differences:
        named = ((each.fqn, _kind(each), each) for each in result.differences)
        top = outline(named, max_rows=None if everything else _MAX_ROWS, depth=None, fold=not everything)
        rows: list[tuple[str, ...]] = [("", "name", "difference", "elements", "max abs", "max rel")]
        for name, row in top.lines():
            sign, *cells = ("", "", "", "", "") if row is None else _cells(row)
            rows.append((sign, name, *cells))
        output.print_columns(rows, names=1, right=[3, 4, 5], optional=3)
        output.print("")
    output.print(_verdict(result))
    if not everything and result.differences and len(rows) <= len(result.differences):
        output.print("[dim]--all shows every name[/]")


def _kind(difference: Difference) -> Hashable:
    """Tell what may be folded into one row: objects only where their names differ in numbers alone."""
    if difference.kind == "object":
        return difference.kind, pattern(difference.fqn.rpartition(".")[2])
    return difference.kind, difference.a, difference.b


def _cells(row: Row[Difference]) -> tuple[str, str, str, str, str]:
    """Describe the differences of a row: sign, difference, elements, max abs, max rel."""
    differences = row.values
    signs = {_SIGNS.get(each.kind, "~") for each in differences}
    sign = signs.pop() if len(signs) == 1 else "~"
    text = _text(differences) if row.is_leaf else count(len(differences), "name")
    elements, nan = sum(each.differing for each in differences), sum(each.nan for each in differences)
    if not elements:
        return sign, text, "", "", ""
    max_abs, max_rel = max(each.max_abs for each in differences), max(each.max_rel for each in differences)
    nans = f" ({nan:,} NaN)" if nan else ""
    return sign, text, f"{elements:,}{nans}", f"{max_abs:.3g}", f"{max_rel:.3g}"


def _text(differences: Sequence[Difference]) -> str:
    """Describe differences of one kind."""
    first = differences[0]
    values = dict.fromkeys(f"{each.a_value} -> {each.b_value}" for each in differences if each.a_value)
    if values:
        more = ["..."] * (len(values) > _MAX_TEXTS)
        text = ", ".join([*itertools.islice(values, _MAX_TEXTS), *more])
        return text if first.kind != "dtype" else f"{first.a} -> {first.b}, {text}"
    return {
        "only_a": f"only in A: {first.a}",
        "only_b": f"only in B: {first.b}",
        "values": first.a,
        "object": "objects with different values",
    }.get(first.kind, f"{first.a} -> {first.b}")


def _verdict(result: Comparison) -> str:
    """Say in one line what is the same, and what is not."""
    names = count(result.tensors, "tensor"), count(result.objects, "object")
    compared = " and ".join(names)
    read = f"{result.equal_by_checksum:,} by checksum alone, {size(result.read_bytes)} read from each"
    if result.same:
        if result.equal_by_checksum == result.tensors + result.objects and result.equal_by_checksum:
            return f"[green]same by their records:[/] {compared}; no data was read (--full reads all of it)"
        return f"[green]same:[/] {compared} compared, {read}"
    kinds = Counter(each.kind for each in result.differences)
    only_a, only_b, either = (kinds.pop(kind, 0) for kind in ("only_a", "only_b", "kind"))
    objects = kinds.pop("object", 0)
    tensors = sum(kinds.values())
    parts = [f"{compared} are the same"]
    if tensors or objects:
        parts = [f"{tensors:,} of {names[0]} and {objects:,} of {names[1]} in both differ"]
    parts += [f"{either:,} a tensor in one and an object in the other"] * bool(either)
    parts += [f"{only_a:,} only in A"] * bool(only_a) + [f"{only_b:,} only in B"] * bool(only_b)
    return f"[red]different:[/] {', '.join(parts)} ({read})"
