"""Conversions to safetensors: one file, or a folder as `save_pretrained` writes it.

Of a model in several files, each rank writes some; the index, which makes them a model, comes last.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from ckpt.backends.base import exists, read_bytes
from ckpt.conversion.job import Job, is_settled
from ckpt.conversion.output_files import OutputFile, OutputFiles
from ckpt.conversion.safetensors_format import DTYPES, INDEX_SUFFIX, METADATA, encode_header, encode_index
from ckpt.conversion.selection import ChosenTensor
from ckpt.errors import AlreadyExists, ConfigurationError
from ckpt.format.stored_tensor import dtype_name
from ckpt.transfer.file_body import BytesPayload, FileItem
from ckpt.writing.layout import pack

__all__ = ["write_safetensors"]

_INDEX = f"model{INDEX_SUFFIX}"
_SINGLE = "model.safetensors"
_CONFIG = "config.json"
_MAX_CONFIG_BYTES = 16 << 20


def write_safetensors(job: Job, dtype: torch.dtype | None) -> None:
    """Write the tensors of `job`; `dtype` is what the weights were converted to, for the model's configuration."""
    _drop(job)
    in_folder = job.place.key is None
    shards = _shards(job.choice.tensors, job.max_shard_bytes if in_folder else None)
    names = [job.place.key] if job.place.key is not None else _names(len(shards))
    files = [_file(job, name, shard) for name, shard in zip(names, shards, strict=True)]
    mine = [files[number] for number in pack([f.nbytes for f in files], job.ranks.size)[job.ranks.rank]]
    counter = job.counter(sum(file.nbytes for file in mine))
    output = OutputFiles(job.place.folder, job.pool, replace=job.overwrite, pace=counter.add)
    first = job.ranks.rank == 0
    with job.discarding(output.discard if not job.replaces_file else lambda: None):
        job.ranks.together(job.call, lambda: _begin(job, output, names, dtype) if first else None)
        job.ranks.together(job.call, lambda: _put(job, output, mine, appears=len(files) == 1))
    if len(files) > 1:
        index = encode_index(
            {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard},
            job.choice.nbytes,
            sum(tensor.elements for tensor in job.choice.tensors),
        )
        job.publish(lambda: output.put_bytes(_INDEX, index), output.discard, is_settled)


def _drop(job: Job) -> None:
    """Leave out what the format cannot hold, or holds once. Raises ConfigurationError for a dtype that it lacks."""
    choice = job.choice
    kept: dict[str, str] = {}
    for tensor in choice.tensors:
        if tensor.name == METADATA:
            raise ConfigurationError(f"{METADATA!r} is no name for a tensor in safetensors; --rename it")
        if tensor.facts.dtype not in DTYPES.values():
            raise ConfigurationError(
                f"{tensor.name[:200]!r} is {str(tensor.facts.dtype).removeprefix('torch.')}, which safetensors cannot "
                "hold; --exclude it, or convert to ckpt, dcp or torch"
            )
        # The first name is kept, as `save_pretrained` keeps the embedding and not the head that is tied to it.
        first = kept.setdefault(job.source.aliases.get(tensor.source, tensor.source), tensor.name)
        if first != tensor.name:
            choice.dropped[tensor.name] = f"the same memory as {first!r}, which is kept"
    choice.tensors = [tensor for tensor in choice.tensors if tensor.name not in choice.dropped]
    for found in choice.objects:
        choice.dropped[found.name] = "no tensor; safetensors hold nothing else"
    choice.objects = []
    if not choice.tensors:
        raise ConfigurationError("there is no tensor to convert")


def _shards(tensors: Sequence[ChosenTensor], max_bytes: int | None) -> list[list[ChosenTensor]]:
    """Tensors by file: in order, as many as fit."""
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


def _file(job: Job, key: str, tensors: Sequence[ChosenTensor]) -> OutputFile:
    """Wide elements first, so that all are aligned."""
    ordered = sorted(tensors, key=lambda tensor: (-tensor.facts.dtype.itemsize, tensor.name))
    header = encode_header({t.name: (t.facts.dtype, t.facts.shape) for t in ordered})
    items = [FileItem(0, b"", BytesPayload(header), b"")]
    end, stream = len(header), job.stream
    for tensor in ordered:
        piece = stream.whole(tensor.source, tensor.facts.shape, tensor.facts.dtype)
        items.append(FileItem(end, b"", piece, b""))
        end += piece.nbytes
    return OutputFile(key, items)


def _begin(job: Job, output: OutputFiles, names: Sequence[str], dtype: torch.dtype | None) -> None:
    """See that nothing is in the way, and bring along what belongs to the model."""
    store = job.place.folder
    if job.place.key is not None:
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
                "an interrupted conversion has left this; remove it, or pass --overwrite to replace it",
                url=store.url, key=key,
            )  # fmt: skip
    for other, stat in job.source.other_files():
        if exists(store, stat.key):
            continue  # somebody's own: it stays
        data = read_bytes(other, stat.key, size_bytes=stat.size_bytes)
        output.put_bytes(stat.key, _with_dtype(data, dtype) if stat.key == _CONFIG else data)


def _with_dtype(data: bytearray, dtype: torch.dtype | None) -> bytearray | bytes:
    """A model's configuration that says what its weights are now."""
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


def _put(job: Job, output: OutputFiles, files: Sequence[OutputFile], *, appears: bool) -> None:
    """Args: appears: a file is a model as soon as it is there, not only with the index."""
    output.put_all(files, vouch=job.source.check_unchanged if appears else None)
    if not appears:
        job.source.check_unchanged()
    job.wrote(len(files), sum(file.nbytes for file in files))
