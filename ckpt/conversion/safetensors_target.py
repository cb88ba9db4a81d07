"""Write safetensors: one file, or a folder as `save_pretrained` writes it.

Each rank writes some files of a model in several; the index, which makes them a model, comes last.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from ckpt.backends.base import exists, read_bytes
from ckpt.conversion.job import ConversionJob
from ckpt.conversion.output_files import OutputFile, OutputFiles, is_settled
from ckpt.conversion.safetensors_format import DTYPES, INDEX_SUFFIX, METADATA, encode_header, encode_index
from ckpt.conversion.selection import ChosenTensor
from ckpt.errors import AlreadyExists, ConfigurationError
from ckpt.format.stored_tensor import dtype_name
from ckpt.transfer.file_body import BytesPayload, FileItem
from ckpt.writing.layout import pack

_INDEX = f"model{INDEX_SUFFIX}"
_SINGLE = "model.safetensors"
_CONFIG = "config.json"
_MAX_CONFIG_BYTES = 16 << 20


def write_safetensors(job: ConversionJob) -> None:
    """Write the tensors of `job`."""
    _drop(job)
    selection, ranks, key = job.selection, job.ranks, job.destination.key
    shards = _shards(selection.tensors, job.max_shard_bytes if key is None else None)
    names = _names(len(shards)) if key is None else [key]
    files = [_file(job, name, shard) for name, shard in zip(names, shards, strict=True)]
    own = [files[number] for number in pack([file.nbytes for file in files], ranks.size)[ranks.rank]]
    counter = job.counter(sum(file.nbytes for file in own))
    output = OutputFiles(job.destination.folder, job.pool, replace=job.overwrite, pace=counter.add)
    with job.discarding(output.discard if not job.replaces_file else lambda: None):
        ranks.together(job.call, lambda: _begin(job, output, names) if ranks.rank == 0 else None)
        ranks.together(job.call, lambda: _put(job, output, own, is_model=len(files) == 1))
    if len(files) > 1:
        index = encode_index(
            {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard},
            selection.nbytes,
            sum(tensor.elements for tensor in selection.tensors),
        )
        job.publish(lambda: output.put_bytes(_INDEX, index), output.discard, is_settled)


def _drop(job: ConversionJob) -> None:
    """Drop objects, and all but one of tied tensors. Raises ConfigurationError for a dtype."""
    selection = job.selection
    kept: dict[str, str] = {}
    for tensor in selection.tensors:
        if tensor.name == METADATA:
            raise ConfigurationError(
                f"safetensors files cannot hold a tensor named {METADATA!r}; --rename it"
            )
        if tensor.facts.dtype not in DTYPES.values():
            raise ConfigurationError(
                f"{tensor.name[:200]!r} is {dtype_name(tensor.facts.dtype)}, which "
                "safetensors cannot hold; --exclude it, or convert to ckpt, dcp or torch"
            )
        # The first name is kept, as `save_pretrained` keeps the embedding and not the tied head.
        first = kept.setdefault(job.source.aliases.get(tensor.source, tensor.source), tensor.name)
        if first != tensor.name:
            selection.dropped[tensor.name] = f"it shares the memory of {first!r}, which is kept"
    selection.tensors = [tensor for tensor in selection.tensors if tensor.name not in selection.dropped]
    for chosen in selection.objects:
        selection.dropped[chosen.name] = "not a tensor; safetensors files hold tensors only"
    selection.objects = []
    if not selection.tensors:
        raise ConfigurationError("the selection has no tensor, and safetensors files hold tensors only")


def _shards(tensors: Sequence[ChosenTensor], max_bytes: int | None) -> list[list[ChosenTensor]]:
    """Assign tensors to files: in order, as many as fit."""
    shards: list[list[ChosenTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if max_bytes is not None and shards[-1] and size + tensor.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def _names(count: int) -> list[str]:
    if count == 1:
        return [_SINGLE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _file(job: ConversionJob, key: str, tensors: Sequence[ChosenTensor]) -> OutputFile:
    """Lay out a file: wide elements first, so that all are aligned."""
    ordered = sorted(tensors, key=lambda tensor: (-tensor.facts.dtype.itemsize, tensor.name))
    header = encode_header({t.name: (t.facts.dtype, t.facts.shape) for t in ordered})
    items = [FileItem(0, b"", BytesPayload(header), b"")]
    end, stream = len(header), job.stream
    for tensor in ordered:
        piece = stream.whole(tensor.source, tensor.facts.shape, tensor.facts.dtype)
        items.append(FileItem(end, b"", piece, b""))
        end += piece.nbytes
    return OutputFile(key, items)


def _begin(job: ConversionJob, output: OutputFiles, names: Sequence[str]) -> None:
    """Check that no output exists, and copy the other files of the model."""
    store = job.destination.folder
    if job.destination.key is not None:
        job.refuse_existing_file()
        return
    store.prepare("")
    for key in (_INDEX, _SINGLE, "commit.json", ".metadata"):
        if exists(store, key):
            raise AlreadyExists(
                "there is a model or checkpoint here already; choose another place, or remove it first",
                url=store.url, key=key,
            )  # fmt: skip
    for key in names:
        if not job.overwrite and exists(store, key):
            raise AlreadyExists(
                "an interrupted conversion has left this file; remove it, or pass --overwrite to replace it",
                url=store.url, key=key,
            )  # fmt: skip
    for folder, stat in job.source.other_files():
        if not exists(store, stat.key):  # else it is somebody's own, and stays
            data = read_bytes(folder, stat.key, size_bytes=stat.size_bytes)
            is_config = stat.key == _CONFIG
            output.put_bytes(stat.key, _with_dtype(data, job.rules.dtype) if is_config else data)


def _with_dtype(data: bytearray, dtype: torch.dtype | None) -> bytearray | bytes:
    """Set the dtype in a model's configuration to that of the converted weights."""
    if dtype is None or len(data) > _MAX_CONFIG_BYTES:
        return data
    try:
        config: Any = json.loads(data)
    except (ValueError, RecursionError):
        return data
    names = {"dtype", "torch_dtype"} & set(config) if isinstance(config, dict) else set()
    if not names:
        return data
    config |= dict.fromkeys(names, dtype_name(dtype))
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def _put(job: ConversionJob, output: OutputFiles, files: Sequence[OutputFile], *, is_model: bool) -> None:
    """Write this rank's files; one that `is_model`, without an index, must appear checked."""
    output.put_all(files, check_source=job.source.check_unchanged if is_model else None)
    if not is_model:
        job.source.check_unchanged()
    job.wrote(len(files), sum(file.nbytes for file in files))
