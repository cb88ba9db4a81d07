"""Read safetensors models as a source of tensors: one file, or several with an index."""

from __future__ import annotations

import threading
from concurrent.futures import Executor

from ckpt.backends.base import ObjectStat, Store, exists, read_bytes
from ckpt.conversion.safetensors_format import (
    INDEX_SUFFIX,
    LENGTH_BYTES,
    MAX_INDEX_BYTES,
    header_bytes,
    parse_header,
    parse_index,
)
from ckpt.conversion.source import FileSource, Location, TensorFacts
from ckpt.errors import ConfigurationError, FormatError, Truncated
from ckpt.format.stored_tensor import StoredTensor
from ckpt.transfer.threads import in_order

SUFFIXES = (".safetensors", INDEX_SUFFIX)
_FILES_AT_ONCE = 4


class SafetensorsSource(FileSource):
    """A model as a source; `key` names its file or index in the folder.

    Raises FormatError if a header or the index is not valid, or they disagree.
    """

    def __init__(self, location: Location, key: str, threads: Executor) -> None:
        store = location.folder
        stats, index = _stats(store, key)
        self._parsing = threading.Lock()
        super().__init__("safetensors", location, stats, threads, has_folder=location.key is None)
        headers = in_order(threads, self._header, stats, ahead=_FILES_AT_ONCE)
        for file, header in zip(stats, headers, strict=True):
            for name, stored in header.items():
                if index is None or index.get(name) == file:  # the index may assign it to another file
                    self.tensors[name] = TensorFacts(stored.dtype, stored.shape)
                    self._stored[name] = (file, stored)
                    self.paths[name] = (name,)
        for name, file in (index or {}).items():
            if name not in self.tensors:
                text = f"the index names {name[:200]!r}, which this file does not hold"
                raise FormatError(text, url=store.url, key=file)
        # The order in a file is that of dtypes, and says nothing.
        self.tensors = dict(sorted(self.tensors.items(), key=lambda item: _natural(item[0])))

    def _header(self, file: str) -> dict[str, StoredTensor]:
        size = self._stats[file].size_bytes
        try:
            raw = bytearray(min(LENGTH_BYTES, size))
            self._store.read_into(file, 0, [memoryview(raw)])
            header = bytearray(header_bytes(raw, size))
            self._store.read_into(file, LENGTH_BYTES, [memoryview(header)])
            with self._parsing:  # one takes up to half a GiB of memory
                return parse_header(header, LENGTH_BYTES + len(header), size)
        except (ValueError, Truncated) as error:
            text = error.message if isinstance(error, Truncated) else str(error)
            text = f"is not a valid safetensors file: {text}"
            raise FormatError(text, url=self._store.url, key=file) from None


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Make a key that sorts `layers.2` before `layers.10`."""
    return [(0, int(part)) if part.isdecimal() and len(part) < 19 else (1, part) for part in name.split(".")]


def find_model(store: Store) -> str | None:
    """Find a folder's index, or its safetensors file. Raises ConfigurationError for several."""
    for key in (f"model{INDEX_SUFFIX}", "model.safetensors"):
        if exists(store, key):
            return key
    keys = [stat.key for stat in store.list() if "/" not in stat.key]
    for suffix in (INDEX_SUFFIX, ".safetensors"):
        matching = [key for key in keys if key.endswith(suffix)]
        if len(matching) > 1:
            raise ConfigurationError(
                f"there are {len(matching)} {suffix} files here; name one of them as the source",
                url=store.url,
            )
        if matching:
            return matching[0]
    return None


def _stats(store: Store, key: str) -> tuple[dict[str, ObjectStat], dict[str, str] | None]:
    """Return the files of a model, and the index (tensor -> file) if it has one."""
    if not key.endswith(INDEX_SUFFIX):
        return {key: store.stat(key)}, None
    index = parse_index(read_bytes(store, key, max_bytes=MAX_INDEX_BYTES), url=store.url, key=key)
    return {file: store.stat(file) for file in dict.fromkeys(index.values())}, index
