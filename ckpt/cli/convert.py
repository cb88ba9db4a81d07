"""`ckpt convert`: checkpoints and models from one format into another."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt.cli.common import Json, Output, command, ended_as_by_ctrl_c, parse_storage_options, shown, size
from ckpt.errors import ConfigurationError

if TYPE_CHECKING:
    from ckpt.conversion.convert import Converted

__all__ = ["convert"]

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}
_MAX_LINES = 20


_Source = Annotated[
    str,
    typer.Argument(
        metavar="SRC", help="A checkpoint, a torch.save file, a safetensors file or model folder."
    ),
]
_Destination = Annotated[str, typer.Argument(metavar="DST", help="Where the result goes.")]
_To = Annotated[
    str | None,
    typer.Option(
        "--to",
        metavar="FORMAT",
        help="ckpt, dcp, torch or safetensors; by default by DST's ending, else ckpt.",
    ),
]
_Dtype = Annotated[
    str | None, typer.Option("--dtype", metavar="DTYPE", help="Of floating-point weights: bfloat16, ...")
]
_Include = Annotated[
    list[str] | None, typer.Option("--include", metavar="GLOB", help="Only these names. Can be repeated.")
]
_Exclude = Annotated[
    list[str] | None, typer.Option("--exclude", metavar="GLOB", help="Not these names. Can be repeated.")
]
_Rename = Annotated[
    list[str] | None,
    typer.Option(
        "--rename", metavar="REGEX=NEW", help=r"Replace in names, as in '^model\.='. Can be repeated."
    ),
]
_WeightsOnly = Annotated[bool, typer.Option("--weights-only", help="Without optimizer state and objects.")]
_MaxShardSize = Annotated[
    str,
    typer.Option("--max-shard-size", metavar="SIZE", help="Of a safetensors file in a folder: 5GB, 512MiB."),
]
_Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite", help="Replace a checkpoint of this library, a file, or what a killed run left."
    ),
]
_Threads = Annotated[
    int | None, typer.Option("--threads", min=1, help="Transfers at the same time; default by the cores.")
]
_Options = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-options", metavar="KEY=VALUE|JSON", help="Options of SRC; of both, without those of DST."
    ),
]
_DstOptions = Annotated[
    list[str] | None,
    typer.Option("--dst-storage-options", metavar="KEY=VALUE|JSON", help="Options of DST; '{}' for none."),
]


def convert(
    source: _Source,
    destination: _Destination,
    to: _To = None,
    dtype: _Dtype = None,
    include: _Include = None,
    exclude: _Exclude = None,
    rename: _Rename = None,
    weights_only: _WeightsOnly = False,
    max_shard_size: _MaxShardSize = "5GB",
    overwrite: _Overwrite = False,
    threads: _Threads = None,
    storage_options: _Options = None,
    dst_storage_options: _DstOptions = None,
    json: Json = False,
) -> None:
    """Convert between this library's checkpoints, stock DCP's, torch.save files and Hugging Face safetensors.

    Streams in less than 1 GiB of memory. Under torchrun all ranks share the work. The result appears when it is complete.
    """
    to_go_on = "Nothing is visible at DST; the same command starts over."
    speaks = not _is_one_of_many() or os.environ["RANK"] == "0"  # one JSON object, also of an error
    with (
        command(json and speaks, to_go_on=to_go_on) as output,
        ended_as_by_ctrl_c(),
        _process_group() as is_first,
    ):
        from ckpt.conversion.convert import convert as work

        options = parse_storage_options(storage_options)
        dst_options = None if dst_storage_options is None else parse_storage_options(dst_storage_options)
        with output.progress("converting") if is_first else _silent() as progress:
            done = work(
                source,
                destination,
                to=to,  # type: ignore[arg-type]
                dtype=dtype,
                include=include or (),
                exclude=exclude or (),
                rename=[_rule(text) for text in rename or ()],
                weights_only=weights_only,
                max_shard_bytes=_bytes(max_shard_size),
                overwrite=overwrite,
                storage_options=options,
                destination_options=dst_options,
                threads=threads,
                progress=progress,
            )
        if is_first:
            _show(output, done)


def _show(output: Output, done: Converted) -> None:
    if output.as_json:
        output.json(vars(done))
        return
    lines = [f"left out {shown(name)}: {shown(why)}" for name, why in done.dropped.items()]
    output.print(*lines[:_MAX_LINES])
    if len(lines) > _MAX_LINES:
        output.print(f"... and {len(lines) - _MAX_LINES:,} more; --json shows them")
    what = f"{done.tensors:,} tensors and {done.objects:,} objects, {size(done.sent_bytes)} in {done.files:,} files"
    output.print(f"converted to {done.format}, {shown(done.destination)}: {what}")


def _rule(text: str) -> tuple[str, str]:
    pattern, separator, new = text.rpartition("=")
    if not separator or not pattern:
        raise ConfigurationError(f"--rename: {text!r} is no REGEX=NEW")
    return pattern, new


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", text.strip().upper())
    if found is None or found[2] not in _UNITS:
        raise ConfigurationError(f"--max-shard-size: {text!r} is no size; write 5GB or 512MiB")
    return int(float(found[1]) * _UNITS[found[2]])


def _is_one_of_many() -> bool:
    return "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


@contextlib.contextmanager
def _process_group() -> Iterator[bool]:
    """Under torchrun, the group of its ranks. Yields whether this process is the one that speaks."""
    if not _is_one_of_many():
        yield True
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        yield dist.get_rank() == 0
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _silent() -> Iterator[Any]:
    yield lambda done, total: None
