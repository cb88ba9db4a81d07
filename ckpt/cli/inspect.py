"""`ckpt inspect`: show the contents of a checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any

import typer

import ckpt
from ckpt.cli.options import Json, StorageOptions, Url, parse_storage_options
from ckpt.cli.output import Output, command, count, shown, size, table

if TYPE_CHECKING:
    from rich.table import Table
    from rich.tree import Tree

    from ckpt.tools.inspect import Inspection, ObjectInfo, TensorInfo

_MAX_TREE_LINES = 2000
_MAX_SLICES = 1 << 15
"""Of one tensor: more than any job has ranks, and than anybody reads."""
_COMMIT_FACTS = ("id", "created_at", "library", "torch", "world_size", "data_bytes", "tags")


def inspect(
    url: Url,
    tensor: Annotated[
        str | None,
        typer.Option(metavar="GLOB", help="Show the stored slices of these tensors, and the rank of each."),
    ] = None,
    storage_options: StorageOptions = None,
    json: Json = False,
) -> None:
    """Show the contents of a checkpoint: tensors, files, commit.

    Shows shapes, dtypes, sharding and sizes. Reads the records only, no data, and runs no code of
    the checkpoint.
    """
    with command(json) as output:
        inspection = ckpt.inspect(url, storage_options=parse_storage_options(storage_options))
        chosen = None
        if tensor is not None:
            chosen = [info for fqn, info in inspection.tensors.items() if fnmatchcase(fqn, tensor)]
        if output.as_json:
            output.json(_as_json(inspection, chosen))
        elif chosen is not None:
            _print_slices(output, chosen)
        else:
            _print(output, inspection)


def _as_json(inspection: Inspection, chosen: Sequence[TensorInfo] | None) -> dict[str, Any]:
    commit = inspection.commit
    tensors = inspection.tensors.values() if chosen is None else chosen
    return {
        "url": inspection.url,
        "format": inspection.format,
        "version": inspection.version,
        "commit": None if commit is None else {name: getattr(commit, name) for name in _COMMIT_FACTS},
        "parameters": inspection.parameters,
        "stored_bytes": inspection.stored_bytes,
        "bytes_by_dtype": inspection.bytes_by_dtype(),
        "bytes_by_part": inspection.bytes_by_part(),
        "tensors": [_tensor(info, with_slices=chosen is not None) for info in tensors],
        "objects": [vars(info) for info in inspection.objects.values()],
        "files": [
            {"path": path, "items": items, "item_bytes": nbytes}
            for path, (items, nbytes) in inspection.files.items()
        ],
    }


def _tensor(info: TensorInfo, *, with_slices: bool) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "fqn": info.fqn, "shape": list(info.shape), "dtype": info.dtype, "part": info.part,
        "nbytes": info.nbytes, "chunks": info.chunks, "sharding": info.sharding,
    }  # fmt: skip
    if with_slices:
        facts["slices"] = [vars(each) for each in itertools.islice(info.slices(), _MAX_SLICES)]
    return facts


# -- for people ----------------------------------------------------------------------------------------


def _print(output: Output, inspection: Inspection) -> None:
    files = table("file", "items", "bytes")
    for path, (items, nbytes) in inspection.files.items():
        files.add_row(shown(path), str(items), size(nbytes))
    title = f"[bold]{shown(inspection.url)}[/]"
    output.print(title, _facts(inspection), "", _tree(inspection), "", files)


def _facts(inspection: Inspection) -> Table:
    facts = table(header=False)
    commit = inspection.commit
    if commit is None:
        facts.add_row("format", "stock PyTorch (no checksums, no commit record)")
    else:
        facts.add_row("format", f"ckpt-storage, version {commit.version}")
        facts.add_row("committed", f"{shown(commit.created_at)}, id {shown(commit.id)}")
        facts.add_row("written by", f"{shown(commit.library)}, torch {shown(commit.torch)}")
        facts.add_row("world size", str(commit.world_size))
        for name, value in commit.tags.items():
            facts.add_row("tag", f"{shown(name)} = {shown(value)}")
    facts.add_row("parameters", f"{inspection.parameters:,}")
    facts.add_row("tensors", f"{len(inspection.tensors):,}")
    facts.add_row("objects", f"{len(inspection.objects):,}")
    facts.add_row("stored", f"{size(inspection.stored_bytes)} in {count(len(inspection.files), 'file')}")
    facts.add_row("by part", _listed(inspection.bytes_by_part()))
    facts.add_row("by dtype", _listed(inspection.bytes_by_dtype()))
    return facts


def _listed(sizes: dict[str, int]) -> str:
    return ", ".join(f"{shown(name)} {size(nbytes)}" for name, nbytes in sizes.items() if nbytes) or "-"


def _tree(inspection: Inspection) -> Tree:
    """Arrange entries by module path; folders are the parts of a name between its dots."""
    from rich.tree import Tree

    tree = Tree("", hide_root=True)
    folders: dict[str, Tree] = {"": tree}
    entries: list[TensorInfo | ObjectInfo] = [*inspection.tensors.values(), *inspection.objects.values()]
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
        rows = table("rank", "slice", "file", "bytes")
        for each in itertools.islice(info.slices(), _MAX_SLICES):
            spans = ", ".join(f"{o}:{o + n}" for o, n in zip(each.offsets, each.sizes, strict=True))
            rank = "?" if each.rank is None else str(each.rank)
            rows.add_row(
                rank, shown(f"[{spans}]"), shown(each.file), f"{each.offset}-{each.offset + each.length}"
            )
        output.print(f"[bold]{shown(info.fqn)}[/]  {_summary(info)}", rows, "")
        if info.chunks > _MAX_SLICES:
            output.print(f"... and {info.chunks - _MAX_SLICES:,} more slices")
