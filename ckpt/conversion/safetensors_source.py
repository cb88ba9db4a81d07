"""Models in the safetensors format as a source: one file, or several with an index, with what stands beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpt.backends.base import ObjectStat, Store, read_bytes
from ckpt.conversion.locations import Place
from ckpt.conversion.safetensors_format import (
    INDEX_SUFFIX,
    LENGTH_BYTES,
    MAX_INDEX_BYTES,
    HeaderEntry,
    header_bytes,
    parse_header,
    parse_index,
)
from ckpt.conversion.source import FileSource, TensorFacts
from ckpt.errors import ConfigurationError, FormatError, NotFound, Truncated
from ckpt.format.stored_tensor import StoredTensor
from ckpt.transfer.threads import in_order, thread_pool

__all__ = ["SafetensorsSource", "belongs_to_model", "find_model"]

_WEIGHTS = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".ot", ".index.json",
    ".distcp", ".ckpt-tmp",
)  # fmt: skip
_MAX_OTHER_BYTES = 256 << 20
_MAX_OTHER_FILES = 1000
_FILES_AT_ONCE = 4


class SafetensorsSource(FileSource):
    """Opened from one file or from an index; `key` names it where `place` is a folder.

    Raises:
        FormatError: a header or the index is not valid, or they disagree.
        NotFound: a file of the index is not there.
    """

    def __init__(self, place: Place, key: str | None = None) -> None:
        store, key = place.folder, key or place.key
        assert key is not None
        self._place, self._has_folder = place, place.key is None
        files, wanted = _files(store, key)
        url = place.url if place.key is not None else store.url
        super().__init__(store, files, format="safetensors", url=url)
        try:
            for file, (data_start, entries) in zip(files, self._headers(list(files)), strict=True):
                self._take(file, data_start, entries, wanted)
            missing = [name for name, file in (wanted or {}).items() if name not in self.tensors]
            if missing:
                raise FormatError(
                    f"the index names {missing[0][:200]!r}, which is not there",
                    url=store.url, key=wanted[missing[0]] if wanted else None,
                )  # fmt: skip
        except BaseException:
            self._threads.shutdown(wait=True, cancel_futures=True)
            raise
        self._sort()

    def _headers(self, files: Sequence[str]) -> Iterator[tuple[int, dict[str, HeaderEntry]]]:
        with thread_pool(_FILES_AT_ONCE, "ckpt-header") as threads:
            yield from in_order(threads, self._header, files, ahead=_FILES_AT_ONCE)

    def _header(self, file: str) -> tuple[int, dict[str, HeaderEntry]]:
        size = self._stats[file].size_bytes
        try:
            raw = bytearray(min(LENGTH_BYTES, size))
            self._store.read_into(file, 0, [memoryview(raw)])
            header = bytearray(header_bytes(raw, size))
            self._store.read_into(file, LENGTH_BYTES, [memoryview(header)])
            start = LENGTH_BYTES + len(header)
            return start, parse_header(header, size - start)
        except (ValueError, Truncated) as error:
            if isinstance(error, ConfigurationError):
                raise
            text = error.message if isinstance(error, Truncated) else str(error)
            raise FormatError(f"no valid safetensors file: {text}", url=self._store.url, key=file) from None

    def _take(
        self, file: str, data_start: int, entries: Mapping[str, HeaderEntry], wanted: Mapping[str, str] | None
    ) -> None:
        for name, entry in entries.items():
            if wanted is not None and wanted.get(name) != file:
                continue
            self.tensors[name] = TensorFacts(entry.dtype, entry.shape)
            stored = StoredTensor.row_major(data_start + entry.start, entry.dtype, entry.shape)
            self._places[name] = (file, stored)
            self.paths[name] = (name,)

    def _sort(self) -> None:
        """By name: the order in a file is that of dtypes, and says nothing."""
        self.tensors = dict(sorted(self.tensors.items(), key=lambda item: _natural(item[0])))

    def load_object(self, name: str) -> Any:
        raise AssertionError("safetensors hold no objects")

    def stored_object(self, name: str) -> bytes:
        raise AssertionError("safetensors hold no objects")

    def other_files(self) -> Iterator[tuple[Store, ObjectStat]]:
        if self._has_folder:
            yield from belongs_to_model(self._store)

    def close(self) -> None:
        super().close()
        self._place.close()


def _natural(name: str) -> list[tuple[int, int | str]]:
    """A key that sorts `layers.2` before `layers.10`."""
    return [(0, int(part)) if part.isdecimal() and len(part) < 19 else (1, part) for part in name.split(".")]


def belongs_to_model(store: Store) -> Iterator[tuple[Store, ObjectStat]]:
    """Small files directly in a folder of a model that are no weights: configuration, tokenizer, licence."""
    found = [stat for stat in store.list() if "/" not in stat.key and not stat.key.startswith(".")]
    for stat in sorted(found, key=lambda stat: stat.key)[:_MAX_OTHER_FILES]:
        if not stat.key.endswith(_WEIGHTS) and stat.key != "commit.json":
            # A listing tells of a link, not of what it leads to.
            facts = store.stat(stat.key)
            if facts.size_bytes <= _MAX_OTHER_BYTES:
                yield store, facts


def find_model(store: Store) -> str | None:
    """The index of a folder, or its only file of the format; None if there is neither.

    Raises:
        ConfigurationError: there are several.
    """
    for key in (f"model{INDEX_SUFFIX}", "model.safetensors"):
        try:
            store.stat(key)
        except NotFound:
            continue
        return key
    names = [stat.key for stat in store.list() if "/" not in stat.key]
    for suffix in (INDEX_SUFFIX, ".safetensors"):
        found = [name for name in names if name.endswith(suffix)]
        if len(found) == 1:
            return found[0]
        if found:
            raise ConfigurationError(
                f"there are {len(found)} {suffix} files here; name the one that is meant", url=store.url
            )
    return None


def _files(store: Store, key: str) -> tuple[dict[str, ObjectStat], dict[str, str] | None]:
    """The files of a model, and which tensor is in which where an index says so."""
    if not key.endswith(INDEX_SUFFIX):
        return {key: store.stat(key)}, None
    wanted = parse_index(read_bytes(store, key, max_bytes=MAX_INDEX_BYTES), url=store.url, key=key)
    return {file: store.stat(file) for file in dict.fromkeys(wanted.values())}, wanted
