"""`ckpt convert`: convert checkpoints and models between formats."""

from __future__ import annotations

import contextlib
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

import ckpt
from ckpt.cli.options import (
    DestinationOptions,
    Expect,
    Json,
    SourceOptions,
    Threads,
    parse_quantity,
    parse_storage_options,
)
from ckpt.cli.printing.output import Output, command, sigterm_as_ctrl_c
from ckpt.errors import ConfigurationError
from ckpt.words import count, shown, size

if TYPE_CHECKING:
    from ckpt.conversion.convert import Converted

_FACTORS = {
    "": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30,
    "ti": 1 << 40,
}  # fmt: skip
_UNITS = {prefix + unit: factor for prefix, factor in _FACTORS.items() for unit in ("", "b")}
_EXAMPLES = "5GB or 512MiB"
_MAX_LINES = 20
_MAX_NAMES = 5
_MAX_PARTS = 100


_CONTENT = "What is converted"

_Source = Annotated[
    str,
    typer.Argument(
        metavar="SRC", help="A checkpoint, a torch.save file, a safetensors file or a model folder."
    ),
]
_To = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT", help="ckpt, dcp, torch or safetensors; by default DST's ending decides, else ckpt."
    ),
]
_Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        help="Convert floating-point weights to this: bfloat16, ...",
        rich_help_panel=_CONTENT,
    ),
]
_Include = Annotated[
    list[str] | None,
    typer.Option(metavar="GLOB", help="Convert only these names. Can be repeated.", rich_help_panel=_CONTENT),
]
_Exclude = Annotated[
    list[str] | None,
    typer.Option(metavar="GLOB", help="Leave out these names. Can be repeated.", rich_help_panel=_CONTENT),
]
_Rename = Annotated[
    list[str] | None,
    typer.Option(
        metavar="REGEX=NEW",
        help=r"Replace a part of all names: '^model\.='. Can be repeated.",
        rich_help_panel=_CONTENT,
    ),
]
_WeightsOnly = Annotated[
    bool,
    typer.Option("--weights-only", help="Leave out optimizer state and objects.", rich_help_panel=_CONTENT),
]
_ConfigFrom = Annotated[
    str | None,
    typer.Option(
        metavar="DIR", help="Copy config.json, the tokenizer and the like from this model's folder."
    ),
]
_MaxShardSize = Annotated[
    str, typer.Option(metavar="SIZE", help="Size of each safetensors file of a folder: 5GB, 512MiB.")
]
_Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite", help="Replace a checkpoint of this library, one file, or what an interrupted run left."
    ),
]

EXAMPLES = r"""
ckpt convert runs/step-100 model.safetensors --weights-only
ckpt convert runs/step-100 hf/ --to safetensors --rename '^model\.='
ckpt convert runs/step-100 for-dcp --to dcp
ckpt convert model.pt s3://bucket/start
torchrun --nproc-per-node 4 --no-python \
  ckpt convert runs/step-100 exported --to safetensors
"""


def convert(
    source: _Source,
    destination: Annotated[str, typer.Argument(metavar="DST", help="Where the result goes.")],
    to: _To = None,
    dtype: _Dtype = None,
    include: _Include = None,
    exclude: _Exclude = None,
    rename: _Rename = None,
    weights_only: _WeightsOnly = False,
    config_from: _ConfigFrom = None,
    max_shard_size: _MaxShardSize = "5GB",
    overwrite: _Overwrite = False,
    expect: Expect = None,
    threads: Threads = None,
    storage_options: SourceOptions = None,
    dst_storage_options: DestinationOptions = None,
    json: Json = False,
) -> None:
    """Convert to or from stock DCP, torch.save and safetensors.

    Takes less than 1 GiB of memory, whatever the size. Under torchrun all ranks share the work. DST
    appears when it is complete.
    """
    interrupted = "Nothing is visible at DST; the same command starts over."
    is_first = not _has_ranks() or os.environ["RANK"] == "0"
    as_json = json and is_first  # one JSON object, also of an error
    with (
        command(as_json, if_interrupted=interrupted, patience_s=math.inf) as output,
        sigterm_as_ctrl_c(),
        _process_group(),
    ):
        from ckpt.conversion.formats import check_format

        # All of it before `ckpt.convert`, which imports torch.
        form = None if to is None else check_format(to)
        rules = [_rule(text) for text in rename or ()]
        max_shard_bytes = int(parse_quantity("--max-shard-size", max_shard_size, _UNITS, _EXAMPLES))
        options = parse_storage_options(storage_options)
        dst_options = parse_storage_options(dst_storage_options, "--dst-storage-options")
        with output.progress("converting", visible=is_first) as progress:
            converted = ckpt.convert(
                source,
                destination,
                to=form,
                dtype=dtype,
                include=include or (),
                exclude=exclude or (),
                rename=rules,
                weights_only=weights_only,
                config_from=config_from,
                max_shard_bytes=max_shard_bytes,
                overwrite=overwrite,
                storage_options=options,
                destination_options=dst_options,
                threads=threads,
                progress=progress,
                expect=expect,
            )
        if not is_first:
            return
        if output.as_json:
            output.json(vars(converted))
            return
        _print(output, converted)


def _print(output: Output, converted: Converted) -> None:
    lines = _left_out(converted.dropped)
    output.print(*lines[:_MAX_LINES])
    output.print_hidden(len(lines) - _MAX_LINES)
    entries = f"{count(converted.tensors, 'tensor')} and {count(converted.objects, 'object')}"
    output.print(
        f"converted to {converted.format}, {shown(converted.destination)}: {entries}, "
        f"{size(converted.sent_bytes)} in {count(converted.files, 'file')}"
    )
    if converted.lacks_config:
        output.print("it has no config.json, which transformers needs: --config-from DIR copies a model's")


def _left_out(dropped: Mapping[str, str]) -> list[str]:
    """Say what was left out, in a line for each reason; many names under one dict are one."""
    names_by_reason: dict[str, list[str]] = defaultdict(list)
    for name, reason in dropped.items():
        names_by_reason[reason].append(name)
    lines = []
    for reason, names in names_by_reason.items():
        folded = [name if number == 1 else f"{number:,} x {name}" for name, number in _folded(names)]
        more = f" and {len(folded) - _MAX_NAMES:,} more" if len(folded) > _MAX_NAMES else ""
        lines.append(f"left out: {', '.join(map(shown, folded[:_MAX_NAMES]))}{more} ({shown(reason)})")
    return lines


def _folded(names: Sequence[str]) -> list[tuple[str, int]]:
    """Cut names, from the end, until few different ones are left; count the names behind each."""
    split = [tuple(name.split(".")[:_MAX_PARTS]) for name in names]
    folded = Counter(split)
    for depth in range(max(map(len, split)) - 1, 0, -1):
        if len(folded) <= _MAX_NAMES:
            break
        folded = Counter(parts if len(parts) <= depth else (*parts[:depth], "*") for parts in split)
    return [(".".join(parts), number) for parts, number in folded.items()]


def _rule(text: str) -> tuple[str, str]:
    pattern, separator, new = text.rpartition("=")
    if not separator or not pattern:
        raise ConfigurationError(f"--rename: {text!r} is not understood; write REGEX=NEW")
    return pattern, new


def _has_ranks() -> bool:
    return "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


@contextlib.contextmanager
def _process_group() -> Iterator[None]:
    """Join the group of all ranks, under torchrun."""
    if not _has_ranks():
        yield
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()
