"""Open a source of any format, and choose and write the destination's format."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

from ckpt.backends.base import Store, exists
from ckpt.consistency.commit import COMMIT_KEY, STOCK_METADATA_KEY
from ckpt.conversion.checkpoint_source import CheckpointSource
from ckpt.conversion.checkpoint_target import write_checkpoint, write_stock_checkpoint
from ckpt.conversion.job import ConversionJob
from ckpt.conversion.locations import Guard, Location, file_name, open_source
from ckpt.conversion.safetensors_format import INDEX_SUFFIX
from ckpt.conversion.safetensors_source import SafetensorsSource, find_model
from ckpt.conversion.safetensors_target import write_safetensors
from ckpt.conversion.source import TensorSource
from ckpt.conversion.torch_source import TorchFileSource
from ckpt.conversion.torch_target import write_torch_file
from ckpt.errors import ConfigurationError, FormatError, NotFound
from ckpt.reading.checkpoint import is_rank_local

Format = Literal["ckpt", "dcp", "torch", "safetensors"]

WRITERS: Mapping[Format, Callable[[ConversionJob], None]] = {
    "ckpt": write_checkpoint,
    "dcp": write_stock_checkpoint,
    "torch": write_torch_file,
    "safetensors": write_safetensors,
}
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_OLD_WEIGHTS = "pytorch_model.bin"
_ZIP = b"PK\x03\x04"


def format_of(destination: str | os.PathLike[str], to: str | None, source_format: str) -> Format:
    """Choose the destination's format: `to`, or by its name. Raises ConfigurationError."""
    name = file_name(destination)
    if to is not None:
        if to not in WRITERS:
            raise ConfigurationError(f"{to!r} is not a format; use one of {', '.join(WRITERS)}")
        return cast(Format, to)
    if name.endswith(".safetensors"):
        return "safetensors"
    if name.endswith(_TORCH_SUFFIXES):
        return "torch"
    if source_format != "ckpt":
        return "ckpt"
    raise ConfigurationError(
        "the destination's name does not tell its format; pass --to dcp, torch, safetensors or ckpt"
    )


def open_tensors(
    url: str | os.PathLike[str], options: Mapping[str, Any] | None, guard: Guard
) -> TensorSource:
    """Open the source at a URL, of any format. Raises FormatError if it has none of them."""
    location = open_source(url, options, guard=guard)
    try:
        if location.key is None:
            return _open_folder(url, location, options, guard)
        assert location.stat is not None
        head = bytearray(min(location.stat.size_bytes, len(_ZIP)))
        location.folder.read_into(location.key, 0, [memoryview(head)])
        if location.key.endswith((INDEX_SUFFIX, ".safetensors")):
            return SafetensorsSource(location)
        if head == _ZIP or location.key.endswith(_TORCH_SUFFIXES):
            return TorchFileSource(location)
        raise FormatError(
            "is not a torch.save archive, nor, by its name, a safetensors file",
            url=location.folder.url,
            key=location.key,
        )
    except BaseException:
        location.close()
        raise


def _open_folder(
    url: str | os.PathLike[str], location: Location, options: Mapping[str, Any] | None, guard: Guard
) -> TensorSource:
    folder = location.folder
    if not _is_checkpoint(folder):
        key = find_model(folder)
        if key is not None:
            return SafetensorsSource(location, key)
        with contextlib.suppress(NotFound):
            stat = folder.stat(_OLD_WEIGHTS)
            return TorchFileSource(Location(folder, stat.key, stat, location.base), has_folder=True)
        if exists(folder, f"{_OLD_WEIGHTS}.index.json"):
            raise FormatError(
                "is an old model in several pickles; load it with transformers, and save it with save_pretrained",
                url=location.url,
            )
    location.close()
    return CheckpointSource(url, options, guard)  # where nothing is, it says best what is missing


def _is_checkpoint(folder: Store) -> bool:
    return any(exists(folder, key) for key in (COMMIT_KEY, STOCK_METADATA_KEY)) or is_rank_local(folder)
