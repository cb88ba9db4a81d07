"""`ckpt inspect`: show the contents of a checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any

import typer

import ckpt
from ckpt.cli.options import Expect, Json, StorageOptions, Urls, check_expect, parse_storage_options
from ckpt.cli.printing.outline import Row, natural, outline, pattern
from ckpt.cli.printing.output import MAX_LINES, Output, command, for_each, table
from ckpt.errors import CheckpointError
from ckpt.words import count, shown, size, tags_text

if TYPE_CHECKING:
    from rich.table import Table

    from ckpt.format.records import BaseRef
    from ckpt.reading.slices import OpenCheckpoint
    from ckpt.tools.inspect import Inspection, ObjectInfo, TensorInfo

    _Row = Row[TensorInfo | ObjectInfo]

_MAX_ROWS = 27
"""What fits one screen together with the facts below it."""
_MAX_DEEP_ROWS = 2000
_MAX_VALUES = 256
"""Values that are read, of all rows together."""
_MAX_TEXTS = 3
_FEW_SLICES = 4
"""Of each of many tensors."""
_LINES_AROUND = 4
"""The slices of a tensor."""
_MAX_SLICES = 1 << 15
"""Of one tensor: more than any job has ranks, and than anybody reads."""
_COMMIT_FACTS = ("id", "created_at", "library", "torch", "world_size", "data_bytes", "tags")

EXAMPLES = """
ckpt inspect runs/step-100
ckpt inspect s3://bucket/run/step-100 --depth 3
ckpt inspect runs/step-100 --tensor '*.lm_head.weight'
"""


def inspect(
    urls: Urls,
    tensor: Annotated[
        str | None,
        typer.Option(metavar="GLOB", help="Show the stored slices of these tensors, and the rank of each."),
    ] = None,
    depth: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Open N levels of names, not only what fits one screen."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Show every name, file and slice, and fold nothing.")
    ] = False,
    expect: Expect = None,
    storage_options: StorageOptions = None,
    json: Json = False,
) -> None:
    """Show the contents of each checkpoint or safetensors model: names, sizes, sharding, small values, commit.

    Names that differ only in numbers, and are alike otherwise, are one line (`layers.0..31`). Reads
    the records and, unless with --json, small values. Runs no code of the checkpoint.
    """
    with command(json) as output:
        options = parse_storage_options(storage_options)
        check_expect(expect, urls)

        def show(url: str) -> None:
            if tensor is None and not output.as_json:
                from ckpt.reading.slices import OpenCheckpoint

                with (
                    output.progress("reading records") as progress,
                    OpenCheckpoint(
                        url, options, wait_for_data=False, models=True, report=progress, expect=expect
                    ) as checkpoint,
                ):
                    _print(output, checkpoint, depth, everything)
                return
            with output.progress("reading records") as progress:
                inspection = ckpt.inspect(url, storage_options=options, progress=progress, expect=expect)
            chosen = None if tensor is None else _chosen(inspection, tensor)
            if output.as_json:
                output.json(_as_json(inspection, chosen))
            elif chosen is not None:
                _print_slices(output, chosen, everything)

        for_each(output, urls, show)


def _chosen(inspection: Inspection, glob: str) -> list[TensorInfo]:
    """List the tensors of a pattern, in order. Raises NotFound if there is none."""
    chosen = [info for fqn, info in inspection.tensors.items() if fnmatchcase(fqn, glob)]
    if not chosen:
        from ckpt.reading.slices import no_such_name

        raise no_such_name(glob, inspection.tensors, inspection.url, "tensor ")
    return sorted(chosen, key=lambda info: natural(info.fqn))


def _as_json(inspection: Inspection, chosen: Sequence[TensorInfo] | None) -> dict[str, Any]:
    commit = inspection.commit
    tensors = inspection.tensors.values() if chosen is None else chosen
    return {
        "url": inspection.url,
        "format": inspection.format,
        "version": inspection.version,
        "digest": inspection.digest or None,
        "commit": None if commit is None else {name: getattr(commit, name) for name in _COMMIT_FACTS},
        "parameters": inspection.parameters,
        "stored_bytes": inspection.stored_bytes,
        "referred_bytes": 0 if commit is None else commit.carried_bytes,
        "stock_readers": commit is None or commit.is_for_stock,
        "seconds": inspection.seconds,
        "ranks": [vars(each) for each in inspection.ranks],
        "bases": [] if commit is None else [_base(base) for base in commit.owners.values()],
        "bytes_by_dtype": inspection.bytes_by_dtype(),
        "bytes_by_part": inspection.bytes_by_part(),
        "tensors": [_tensor(info, with_slices=chosen is not None) for info in tensors],
        "objects": [vars(info) for info in inspection.objects.values()],
        "files": [
            {"path": path, "items": items, "item_bytes": nbytes}
            for path, (items, nbytes) in inspection.files.items()
        ],
    }


def _base(base: BaseRef) -> dict[str, Any]:
    return {"path": base.path, "id": base.id, "referred_bytes": base.carried_bytes}


def _tensor(info: TensorInfo, *, with_slices: bool) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "fqn": info.fqn, "shape": list(info.shape), "dtype": info.dtype, "part": info.part,
        "nbytes": info.nbytes, "chunks": info.chunks, "sharding": info.sharding,
        "referred_bytes": info.referred_bytes,
    }  # fmt: skip
    if with_slices:
        facts["slices"] = [vars(each) for each in itertools.islice(info.slices(), _MAX_SLICES)]
    return facts


# -- for people ----------------------------------------------------------------------------------------


def _print(output: Output, checkpoint: OpenCheckpoint, depth: int | None, everything: bool) -> None:
    from ckpt.format.fqns import STRUCTURE
    from ckpt.tools.inspect import describe

    inspection = describe(checkpoint.store.url, checkpoint.parts)
    entries: list[TensorInfo | ObjectInfo] = [*inspection.tensors.values(), *inspection.objects.values()]
    limit = None if everything else _MAX_ROWS if depth is None else _MAX_DEEP_ROWS
    # Notes of structure are no part of the state: `--all` shows them.
    shown_entries = [each for each in entries if everything or not each.fqn.startswith(f"{STRUCTURE}.")]
    named = ((info.fqn, _kind(info), info) for info in shown_entries)
    top = outline(named, max_rows=limit, depth=depth, fold=not everything)
    lines = list(top.lines())
    values, problem = _values(checkpoint, [row for _, row in lines if row is not None and row.is_leaf])
    rows = [(name, *(("", "", "") if row is None else _cells(row, values))) for name, row in lines]
    sharded = any(sharding not in ("", "whole") for _, _, _, sharding in rows)
    rows = [("name", "content", "size", "sharding"), *rows]
    output.print_columns(rows if sharded else [row[:3] for row in rows], right=[2])
    output.print("")
    if everything:
        files = [("file", "items", "bytes")]
        for path in sorted(inspection.files, key=natural):
            items, nbytes = inspection.files[path]
            files.append((path, f"{items:,}", size(nbytes)))
        output.print_columns(files, right=[1, 2])
        output.print("")
    facts = _facts(inspection)
    output.print(facts)
    if inspection.digest:  # no column of a table takes it in 80 characters
        width = max(len(str(label)) for label in facts.columns[0].cells)
        output.print(f"{'digest':{width}}  {inspection.digest}")
    if problem:
        output.print(f"[yellow]values are not shown:[/] {shown(problem)}")
    if not everything and len(lines) < len(entries):
        output.print("[dim]--depth N opens N levels, --all shows every name and file[/]")


def _kind(info: TensorInfo | ObjectInfo) -> Hashable:
    """Tell what may be folded into one row: objects only where their names differ in numbers alone."""
    from ckpt.tools.inspect import ObjectInfo

    if isinstance(info, ObjectInfo):
        return pattern(info.fqn.rpartition(".")[2])
    return info.dtype, info.shape, info.sharding


def _values(checkpoint: OpenCheckpoint, leaves: Sequence[_Row]) -> tuple[dict[str, str], str | None]:
    """Read some of the small values of each row; return them as texts, or why they cannot be read."""
    from ckpt.tools.cat import short_text

    most = max(1, _MAX_VALUES // max(1, len(leaves)))
    names: list[str] = []
    for row in leaves[:_MAX_VALUES]:
        values = row.values
        picked = values[:: -(-len(values) // most)]
        names += [info.fqn for info in picked if info.is_small]
    try:
        return {name: short_text(value) for name, value in checkpoint.peek(names)}, None
    except CheckpointError as error:
        return {}, str(error)


def _cells(row: _Row, values: Mapping[str, str]) -> tuple[str, str, str]:
    """Describe the entries of a row: content, size, sharding."""
    from ckpt.tools.inspect import ObjectInfo

    infos = row.values
    objects = [info for info in infos if isinstance(info, ObjectInfo)]
    tensors = [info for info in infos if not isinstance(info, ObjectInfo)]
    nbytes = sum(info.nbytes for info in tensors) + sum(info.length for info in objects)
    if not row.is_leaf:
        parts = [count(len(tensors), "tensor")] * bool(tensors) + [count(len(objects), "object")] * bool(
            objects
        )
        return ", ".join(parts), size(nbytes), ""
    known = [values[info.fqn] for info in infos if info.fqn in values]
    texts = list(dict.fromkeys(known))
    more = len(texts) > _MAX_TEXTS or 0 < len(known) < len(infos)
    text = ", ".join([*texts[:_MAX_TEXTS], *["..."] * more])
    if objects:
        return text or "object", size(nbytes), ""
    shape = "x".join(map(str, tensors[0].shape)) or ("" if text else "scalar")
    content = f"{tensors[0].dtype} {shape}".rstrip()
    return f"{content} = {text}" if text else content, size(nbytes), tensors[0].sharding


def _facts(inspection: Inspection) -> Table:
    facts = table("", "", header=False)
    commit = inspection.commit
    facts.add_row("checkpoint", f"[bold]{shown(inspection.url)}[/]")
    if commit is None:
        writer = "stock PyTorch" if inspection.format == "stock" else "safetensors of another program"
        facts.add_row("format", f"{writer} (no checksums, no commit record)")
    else:
        facts.add_row("format", f"ckpt-storage, version {commit.version}")
        facts.add_row("committed", f"{shown(commit.created_at)}, id {shown(commit.id)}")
        if commit.block_digests:
            facts.add_row(
                "fixed", f"every byte, by {shown(commit.block_digests.algorithm)} and the digest below"
            )
        world = count(commit.world_size, "rank") + _times(inspection)
        facts.add_row("written by", f"{world}, {shown(commit.library)}, torch {shown(commit.torch)}")
        if not commit.is_for_stock:
            facts.add_row("stock PyTorch", "no .metadata, left out as too large (`ckpt convert --to dcp`)")
        if commit.tags:
            facts.add_row("tags", shown(tags_text(commit.tags)))
        for base in commit.owners.values():
            facts.add_row("refers to", f"{shown(base.path)}: {size(base.carried_bytes)} there")
    names = f"{count(len(inspection.tensors), 'tensor')}, {count(len(inspection.objects), 'object')}"
    facts.add_row("holds", f"{count(inspection.parameters, 'parameter')}, {names}")
    sizes = [nbytes for _, nbytes in inspection.files.values()]
    stored = f"{size(sum(sizes))} in {count(len(sizes), 'file')}"
    if len(sizes) > 1:
        stored += f" of {size(min(sizes))} to {size(max(sizes))}"
    facts.add_row("stored", stored)
    for title, by in (("by part", inspection.bytes_by_part()), ("by dtype", inspection.bytes_by_dtype())):
        if listed := ", ".join(f"{shown(name)} {size(nbytes)}" for name, nbytes in by.items() if nbytes):
            facts.add_row(title, listed)
    return facts


def _times(inspection: Inspection) -> str:
    """Say how long the save took, and which rank took longest; nothing if it did not say."""
    if not inspection.seconds:
        return ""
    text = f" in {sum(inspection.seconds.values()):.2f} s"
    timed = [(each.write_s, each.rank) for each in inspection.ranks if each.write_s is not None]
    return f"{text} (slowest: rank {max(timed)[1]})" if len(timed) > 1 else text


def _print_slices(output: Output, chosen: Sequence[TensorInfo], everything: bool) -> None:
    most = _MAX_SLICES if everything else max(_FEW_SLICES, MAX_LINES // max(1, len(chosen)))
    ends = itertools.accumulate(min(info.chunks, most) + _LINES_AROUND for info in chosen)
    fitting = max(1, sum(end <= MAX_LINES + 2 * _LINES_AROUND for end in ends))
    tensors = chosen if everything else chosen[:fitting]
    for info in tensors:
        rows = [("rank", "slice", "file", "bytes")]
        for each in itertools.islice(info.slices(), most):
            spans = ", ".join(f"{o}:{o + n}" for o, n in zip(each.offsets, each.sizes, strict=True))
            rank = "?" if each.rank is None else str(each.rank)
            rows.append((rank, f"[{spans}]", each.file, f"{each.offset}-{each.offset + each.length}"))
        shape = "x".join(map(str, info.shape)) or "scalar"
        summary = f"{info.dtype} {shape}, {size(info.nbytes)}, {shown(info.sharding)}"
        output.print(f"[bold]{shown(info.fqn)}[/]  {summary}")
        output.print_columns(rows, names=2, right=[0])
        if info.chunks > most:
            output.print(f"... and {info.chunks - most:,} more slices")
        output.print("")
    if len(tensors) < len(chosen):
        output.print(f"... and {count(len(chosen) - len(tensors), 'more tensor')}")
    if not everything and (len(tensors) < len(chosen) or any(info.chunks > most for info in tensors)):
        output.print("[dim]--all shows all of them[/]")
