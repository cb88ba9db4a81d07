"""`ckpt inspect`: what is in a checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.tree import Tree

from ckpt.cli.common import (
    Json,
    Output,
    StorageOptions,
    Url,
    command,
    count,
    parse_storage_options,
    shown,
    size,
)

if TYPE_CHECKING:
    from ckpt.tools.inspect import Inspection, ObjectInfo, TensorInfo

__all__ = ["inspect"]

_MAX_TREE_LINES = 2000
_MAX_SLICES = 1 << 15
"""Of one tensor: more than any job has ranks, and than anybody reads."""


def inspect(
    url: Url,
    tensor: Annotated[
        str | None,
        typer.Option(
            "--tensor", metavar="GLOB", help="Show the slices of these tensors, and who holds each."
        ),
    ] = None,
    storage_options: StorageOptions = None,
    json: Json = False,
) -> None:
    """Show what is in a checkpoint: tensors, shapes, dtypes, sharding, sizes, files, facts of the commit.

    Reads its records only, no data, and runs nothing of it.
    """
    with command(json) as output:
        from ckpt.tools.inspect import inspect as look

        found = look(url, storage_options=parse_storage_options(storage_options))
        chosen = None
        if tensor is not None:
            chosen = [info for fqn, info in found.tensors.items() if fnmatchcase(fqn, tensor)]
        if output.as_json:
            output.json(_as_json(found, chosen))
        elif chosen is not None:
            _print_slices(output, chosen)
        else:
            _print(output, found)


def _as_json(found: Inspection, chosen: Sequence[TensorInfo] | None) -> dict[str, Any]:
    tensors = found.tensors.values() if chosen is None else chosen
    return {
        "url": found.url,
        "format": found.format,
        "version": found.version,
        "commit": _commit(found),
        "parameters": found.parameters,
        "stored_bytes": found.stored_bytes,
        "bytes_by_dtype": found.bytes_by_dtype(),
        "bytes_by_part": found.bytes_by_part(),
        "tensors": [_tensor(info, with_slices=chosen is not None) for info in tensors],
        "objects": [
            {
                "fqn": o.fqn,
                "part": o.part,
                "rank": o.rank,
                "file": o.file,
                "offset": o.offset,
                "length": o.length,
            }
            for o in found.objects.values()
        ],
        "files": [
            {"path": path, "items": items, "item_bytes": nbytes}
            for path, (items, nbytes) in found.files.items()
        ],
    }


def _commit(found: Inspection) -> dict[str, Any] | None:
    commit = found.commit
    if commit is None:
        return None
    return {
        "id": commit.id,
        "created_at": commit.created_at,
        "library": commit.library,
        "torch": commit.torch,
        "world_size": commit.world_size,
        "data_bytes": commit.data_bytes,
        "tags": commit.tags,
    }


def _tensor(info: TensorInfo, *, with_slices: bool) -> dict[str, Any]:
    described: dict[str, Any] = {
        "fqn": info.fqn,
        "shape": list(info.shape),
        "dtype": info.dtype,
        "part": info.part,
        "nbytes": info.nbytes,
        "chunks": info.chunks,
        "sharding": info.sharding,
    }
    if with_slices:
        described["slices"] = [
            {
                "offsets": list(s.offsets), "sizes": list(s.sizes), "rank": s.rank,
                "file": s.file, "offset": s.offset, "length": s.length,
            }
            for s in itertools.islice(info.slices(), _MAX_SLICES)
        ]  # fmt: skip
    return described


# -- for people ----------------------------------------------------------------------------------------


def _print(output: Output, found: Inspection) -> None:
    output.print(f"[bold]{shown(found.url)}[/]", _facts(found), "", _tree(found), "")
    files = Table("file", "items", "bytes", box=None, pad_edge=False)
    for path, (items, nbytes) in found.files.items():
        files.add_row(shown(path), str(items), size(nbytes))
    output.print(files)


def _facts(found: Inspection) -> Table:
    facts = Table(box=None, show_header=False, pad_edge=False)
    commit = found.commit
    if commit is None:
        facts.add_row("format", "stock PyTorch (no checksums, no commit record)")
    else:
        facts.add_row("format", f"ckpt-storage, version {commit.version}")
        facts.add_row("committed", f"{shown(commit.created_at)}, id {shown(commit.id)}")
        facts.add_row("written by", f"{shown(commit.library)}, torch {shown(commit.torch)}")
        facts.add_row("world size", str(commit.world_size))
        for name, value in commit.tags.items():
            facts.add_row("tag", f"{shown(name)} = {shown(value)}")
    facts.add_row("parameters", f"{found.parameters:,}")
    facts.add_row("tensors", f"{len(found.tensors):,}, objects {len(found.objects):,}")
    facts.add_row("stored", f"{size(found.stored_bytes)} in {count(len(found.files), 'file')}")
    facts.add_row("by part", _listed(found.bytes_by_part()))
    facts.add_row("by dtype", _listed(found.bytes_by_dtype()))
    return facts


def _listed(sizes: dict[str, int]) -> str:
    return ", ".join(f"{shown(name)} {size(nbytes)}" for name, nbytes in sizes.items() if nbytes) or "-"


def _tree(found: Inspection) -> Tree:
    """Entries by module path; folders are made for the parts of a name between its dots."""
    tree = Tree("", hide_root=True)
    folders: dict[str, Tree] = {"": tree}
    entries: list[TensorInfo | ObjectInfo] = [*found.tensors.values(), *found.objects.values()]
    for info in entries[:_MAX_TREE_LINES]:
        path, _, name = info.fqn.rpartition(".")
        _folder(folders, path).add(f"{shown(name)}  [dim]{_summary(info)}[/]")
    if len(entries) > _MAX_TREE_LINES:
        tree.add(f"... and {len(entries) - _MAX_TREE_LINES:,} more; --tensor GLOB and --json show them")
    return tree


def _folder(folders: dict[str, Tree], path: str) -> Tree:
    missing: list[str] = []
    while path not in folders and len(missing) < 64:
        missing.append(path)
        path = path.rpartition(".")[0]
    folder = folders.get(path, folders[""])
    for below in reversed(missing):
        folder = folders[below] = folder.add(shown(below.rpartition(".")[2]))
    return folder


def _summary(info: TensorInfo | ObjectInfo) -> str:
    from ckpt.tools.inspect import ObjectInfo

    if isinstance(info, ObjectInfo):
        return f"object, {size(info.length)}"
    shape = "x".join(map(str, info.shape)) or "scalar"
    return f"{info.dtype} {shape}, {size(info.nbytes)}, {shown(info.sharding)}"


def _print_slices(output: Output, chosen: Iterable[TensorInfo]) -> None:
    for info in chosen:
        output.print(f"[bold]{shown(info.fqn)}[/]  {_summary(info)}")
        table = Table("rank", "slice", "file", "bytes", box=None, pad_edge=False)
        for piece in itertools.islice(info.slices(), _MAX_SLICES):
            spans = ", ".join(f"{o}:{o + n}" for o, n in zip(piece.offsets, piece.sizes, strict=True))
            rank = "?" if piece.rank is None else str(piece.rank)
            where = f"{piece.offset}-{piece.offset + piece.length}"
            table.add_row(rank, shown(f"[{spans}]"), shown(piece.file), where)
        output.print(table, "")
        if info.chunks > _MAX_SLICES:
            output.print(f"... and {info.chunks - _MAX_SLICES:,} more slices")
