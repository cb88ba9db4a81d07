"""Find the safetensors files of a model in a folder, and read their headers, which may be hostile."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ckpt.backends.base import ObjectStat, Store, read_bytes
from ckpt.errors import ConfigurationError, FormatError, Truncated
from ckpt.format.mistaken_files import mistaken_file
from ckpt.format.model_index import MAX_INDEX_BYTES, find_models, parse_model_index
from ckpt.format.names import INDEX_SUFFIX, ObjectName
from ckpt.stock.safetensors_format import LENGTH_BYTES, Header, header_bytes, parse_header

_MAX_INDICES = 100

_parsing = threading.Lock()


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model, by key, and the index (tensor -> file) if it has one."""

    stats: Mapping[str, ObjectStat]
    index: Mapping[str, str] | None = None


def find_model(store: Store) -> str | None:
    """Find a folder's index, or its safetensors file. Raises ConfigurationError for several."""
    keys = find_models(store)
    if len(keys) > 1:
        suffix = INDEX_SUFFIX if keys[0].endswith(INDEX_SUFFIX) else ".safetensors"
        raise ConfigurationError(
            f"there are {len(keys)} {suffix} files here; name one of them as the source", url=store.url
        )
    return keys[0] if keys else None


def model_files(store: Store, key: str) -> ModelFiles:
    """Stat the files of the model that a file or an index names. Raises NotFound, FormatError."""
    if not key.endswith(INDEX_SUFFIX):
        return ModelFiles({key: store.stat(key)})
    raw = read_bytes(store, key, max_bytes=MAX_INDEX_BYTES)
    index = parse_model_index(raw, url=store.url, key=key)
    return ModelFiles({file: store.stat(file) for file in dict.fromkeys(index.values())}, index)


def usable_files(store: Store, keys: Collection[str]) -> set[str]:
    """List what other programs can read, of the objects `keys` of a folder without a commit.

    That is each index that names some of them, these, and files of this library's names of which all are there:
    not every reader needs an index. Raises FormatError, IntegrityError for an index that cannot be read.
    """
    usable: set[str] = set()
    indices = [key for key in keys if "/" not in key and key.endswith(INDEX_SUFFIX)]
    if len(indices) > _MAX_INDICES:
        raise FormatError(f"there are {len(indices)} indices of models here", url=store.url)
    for key in indices:
        raw = read_bytes(store, key, max_bytes=MAX_INDEX_BYTES)
        named = {file for file in parse_model_index(raw, url=store.url, key=key).values() if file in keys}
        usable |= {key, *named} if named else named
    of_save: dict[str, list[str]] = defaultdict(list)
    for key in keys:
        name = ObjectName.parse(key)
        if name is not None and name.kind == "safetensors":
            of_save[f"{name.token}{key.rpartition('-of-')[2]}"].append(key)
    for files in of_save.values():
        count = int(files[0].rpartition("-of-")[2].partition(".")[0])
        if len(files) == count:  # a number that is too high, or twice, is in no name that a save gives
            usable.update(files)
    return usable


def read_header(store: Store, stat: ObjectStat) -> Header:
    """Read the header of a file. Raises FormatError."""
    file, size = stat.key, stat.size_bytes
    try:
        raw = bytearray(min(LENGTH_BYTES, size))
        store.read_into(file, 0, [memoryview(raw)])
        header = bytearray(header_bytes(raw, size))
        store.read_into(file, LENGTH_BYTES, [memoryview(header)])
        with _parsing:  # one takes up to half a GiB of memory
            return parse_header(header, LENGTH_BYTES + len(header), size)
    except (ValueError, Truncated) as error:
        text = error.message if isinstance(error, Truncated) else str(error)
        text = mistaken_file(store, stat) or f"is not a valid safetensors file: {text}"
        raise FormatError(text, url=store.url, key=file) from None


def check_index(files: ModelFiles, headers: Mapping[str, Header], url: str) -> None:
    """Raise FormatError if the index assigns a tensor to a file that does not hold it."""
    for name, file in (files.index or {}).items():
        if name not in headers[file].tensors and name not in headers[file].unreadable:
            text = f"the index names {name[:200]!r}, which this file does not hold"
            raise FormatError(text, url=url, key=file)
