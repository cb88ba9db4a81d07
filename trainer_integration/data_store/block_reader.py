"""Read files of stores in blocks: from memory, from the local disk, or ahead of use from their store."""

from __future__ import annotations

import functools
import hashlib
import os
import secrets
import weakref
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt.backends.base import ObjectStat, Store, is_key
from ckpt.backends.options import redact_url
from ckpt.backends.paths import path_of
from ckpt.backends.registry import normal_url, open_store, options_dict
from ckpt.errors import ConfigurationError, NotFound, StorageError
from ckpt.trainer_integration.data_store.disk_cache import BLOCK_BYTES, DiskCache
from ckpt.trainer_integration.data_store.fetchers import fetchers_of_process
from ckpt.trainer_integration.sources import Cache

DEFAULT_DISK_CACHE_BYTES = 64 << 30

_THREADS = 16
_LARGE_SPAN = 16
"""Blocks that are fetched and kept on the disk at a time."""
_WINDOW_SPANS = 16
"""Fetched ahead inside of one read."""
_MAX_PENDING = 1024
_BUCKETS = ("s3://", "cos://")
"""Stores of this library that take some time and memory to open: one serves all folders of a bucket."""
_stores: weakref.WeakValueDictionary[tuple[int, str, str], Store] = weakref.WeakValueDictionary()

_PATIENCE = {
    "read_timeout_s": 5.0,
    "connect_timeout_s": 5.0,
    "max_attempts": 40,
    "longest_pause_s": 4.0,
    "unreachable_timeout_s": 120.0,
}
"""Storage options of S3 and COS for requests of at most 1 MiB: a server that is silent for 5 s is asked again."""


class StoredFile(NamedTuple):
    """A file of a store.

    Attributes:
        url: without credentials, for messages.
        root, stat: the URL of its store, and what that showed when the file was found; no other object is read.
        name: a text that changes with the file's bytes, as far as the store shows it.
        span_blocks: the blocks that are fetched at a time.
    """

    number: int
    url: str
    full_url: str
    root: str
    stat: ObjectStat
    name: str
    span_blocks: int

    @property
    def size_bytes(self) -> int:
        return self.stat.size_bytes

    def span(self, number: int) -> tuple[str, int, int]:
        """Return the name of a span in the disk cache, where it begins, and its size in bytes."""
        size = self.span_blocks * BLOCK_BYTES
        start = number * size
        return f"{self.name}-{self.span_blocks}-{number}", start, min(size, self.size_bytes - start)


def _stored_url(path: str | os.PathLike[str]) -> str | None:
    """Return the URL that a path is, None for a local one. Raises ConfigurationError for a URL that is mangled."""
    text = os.fspath(path)
    if not isinstance(text, str) or ":/" not in text or os.path.exists(text):
        return None
    url = normal_url(text)
    return url if "://" in url and not url.startswith("file://") else None


def find_files(
    paths: Sequence[str | os.PathLike[str]], reader: BlockReader, *, at_random: bool = False
) -> list[StoredFile | Path]:
    """Return what is read: paths of this machine, which need not exist, and files of stores as `BlockReader.open` does.

    Raises NotFound, StorageError for a file of a store, ConfigurationError for a URL that names none.
    """
    urls = [_stored_url(path) for path in paths]
    stored = [url for url in urls if url is not None]
    found = reader.find(stored)
    for url, file in zip(stored, found, strict=True):
        if file is None:
            raise NotFound("the store has no such object to read data from", url=redact_url(url))
    opened = iter(reader.open([file for file in found if file is not None], at_random=at_random))
    return [_local(path) if url is None else next(opened) for path, url in zip(paths, urls, strict=True)]


def _local(path: str | os.PathLike[str]) -> Path:
    text = os.fspath(path)
    return Path(path_of(text) if text.startswith("file://") else text).absolute()


class _Process:
    """What one process has open: stores, threads that fetch, and what they fetch."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.pid = os.getpid()
        self.pending: OrderedDict[tuple[int, int], Future[bytearray | None]] = OrderedDict()
        self.fetchers = fetchers_of_process(_THREADS)
        self._options = options
        self._stores: dict[str, Store] = {}

    def store(self, root: str) -> Store:
        if root not in self._stores:
            options = {**_PATIENCE, **self._options} if root.startswith(_BUCKETS) else self._options
            self._stores[root] = _store_of_process(root, options)
        return self._stores[root]


def _store_of_process(root: str, options: Mapping[str, Any]) -> Store:
    """Return the store that all sources of this process share which read there with these options."""
    key = os.getpid(), root, repr(sorted(options.items()))
    store = _stores.get(key)
    if store is None:
        store = open_store(root, options, threads=_THREADS)
        _stores[key] = store
    return store


class BlockReader:
    """Read files of stores. It pickles without what it has open or read; a forked process opens its own stores.

    Args:
        disk_cache: a folder of the local disk, which processes of a host may share; None keeps blocks in memory alone.
        cache_bytes: memory for blocks.
    """

    def __init__(
        self,
        *,
        storage_options: Mapping[str, Any] | None,
        disk_cache: str | os.PathLike[str] | None,
        disk_cache_bytes: int,
        cache_bytes: int,
    ) -> None:
        self._options = options_dict(storage_options)
        if disk_cache_bytes < 1 or cache_bytes < 1:
            raise ConfigurationError("disk_cache_bytes and cache_bytes must be positive")
        self._disk = None
        if disk_cache is not None:
            folder = os.path.abspath(os.path.expanduser(os.fspath(disk_cache)))
            self._disk = DiskCache(folder, disk_cache_bytes)
        self._capacity_bytes = cache_bytes if self._disk is None else disk_cache_bytes
        self._cache_bytes = cache_bytes
        self._blocks: Cache[bytearray] = Cache(cache_bytes)
        self._kept: Counter[int] = Counter()  # blocks in memory of each file
        self._open_bytes = 0
        self._process: _Process | None = None
        self._files = 0
        # In place of a version, where a store shows none: the next run reads all from the store.
        self._unknown = secrets.token_hex()

    def find(self, urls: Sequence[str]) -> list[StoredFile | None]:
        """Look for files, many at a time; None for one that does not exist. Raises StorageError, ConfigurationError."""
        for root in {_split(url)[0] for url in urls}:
            self._here().store(root)  # in this thread: several would open one each
        futures = [self._here().fetchers.submit(functools.partial(self._look, url)) for url in urls]
        return [future.result() for future in futures]

    def _look(self, url: str) -> StoredFile | None:
        root, key = _split(url)
        try:
            stat = self._here().store(root).stat(key)
        except NotFound:
            return None
        version: object = stat.version
        if version is None and stat.modified_at_s is not None:  # servers may have files of one name and time
            options = sorted((name, value) for name, value in self._options.items() if isinstance(value, str))
            version = stat.modified_at_s, options
        facts = repr((url, stat.size_bytes, version or self._unknown))
        name = hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()
        return StoredFile(0, redact_url(url), url, root, stat, name, _LARGE_SPAN)

    def open(self, files: Sequence[StoredFile], *, at_random: bool = False) -> list[StoredFile]:
        """Return files as they are read; `at_random`: by single blocks, if they do not all fit into the caches."""
        is_small = at_random and sum(file.size_bytes for file in files) > self._capacity_bytes
        first = self._files
        self._files += len(files)
        self._open_bytes += sum(file.size_bytes for file in files)
        blocks = 1 if is_small else _LARGE_SPAN
        return [file._replace(number=first + at, span_blocks=blocks) for at, file in enumerate(files)]

    def block(self, file: StoredFile, number: int) -> bytearray:
        """Return a block of a file: `BLOCK_BYTES`, fewer at its end. Raises StorageError."""
        block = self._blocks.kept((file.number, number))
        return self._load(file, number) if block is None else block

    def read(self, file: StoredFile, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Read bytes `start` to `stop` of a file; more than a block are fetched by several threads."""
        read = np.empty(stop - start, np.uint8)
        window_bytes = _WINDOW_SPANS * file.span_blocks * BLOCK_BYTES
        at = start
        while at < stop:
            number, offset = divmod(at, BLOCK_BYTES)
            if number % file.span_blocks == 0 or at == start:
                self.ahead(file, at, min(stop, at + window_bytes))
            block = self.block(file, number)
            count = min(len(block) - offset, stop - at)
            read[at - start : at - start + count] = memoryview(block)[offset : offset + count]
            at += count
        return read

    def is_in_memory(self, file: StoredFile) -> bool:
        """Tell whether all blocks of a file are in memory, which has room for those of all files."""
        has_room = self._open_bytes <= self._cache_bytes
        return has_room and self._kept[file.number] * BLOCK_BYTES >= file.size_bytes

    def whole(self, file: StoredFile) -> npt.NDArray[np.uint8]:
        """Read a whole file, whose blocks need not be kept any longer."""
        data = self.read(file, 0, file.size_bytes)
        for number in range(-(-file.size_bytes // BLOCK_BYTES)):
            self._blocks.drop((file.number, number))
        return data

    def ahead(self, file: StoredFile, start: int, stop: int) -> None:
        """Begin to fetch bytes of a file that are in no cache, unless enough is being fetched."""
        first = start // BLOCK_BYTES
        if stop <= (first + 1) * BLOCK_BYTES and (file.number, first) in self._blocks:
            return
        span_bytes = file.span_blocks * BLOCK_BYTES
        process = self._here()
        process.store(file.root)
        for number in range(start // span_bytes, -(-stop // span_bytes)):
            key = (file.number, number)
            if key in process.pending or self._has(file, max(first, number * file.span_blocks), number):
                continue
            if len(process.pending) * span_bytes >= self._most_pending_bytes():
                oldest = next(iter(process.pending))
                if not process.pending[oldest].done():
                    return
                del process.pending[oldest]  # an iteration that ended did not take it
            fetch = functools.partial(self._fetch_ahead, process, file, number)
            process.pending[key] = process.fetchers.submit(fetch)

    def _most_pending_bytes(self) -> int:
        """Return how much may be fetched ahead: what the disk keeps takes no memory."""
        if self._disk is None or self._disk.is_paused:
            return self._cache_bytes // 2
        return _MAX_PENDING * _LARGE_SPAN * BLOCK_BYTES

    def _has(self, file: StoredFile, block: int, span: int) -> bool:
        if (file.number, block) in self._blocks:
            return True
        return self._disk is not None and self._disk.has(file.span(span)[0])

    def _load(self, file: StoredFile, number: int) -> bytearray:
        span, inside = divmod(number, file.span_blocks)
        data = self._taken(file, span)
        name, _, size = file.span(span)
        if data is None and self._disk is not None:
            block = self._disk.read(name, inside, size)
            if block is not None:
                self._keep(file, number, block)
                return block
        is_on_disk = False
        if data is None:
            data = self._fetch(self._here(), file, span)
            is_on_disk = self._disk is not None and self._disk.write(name, memoryview(data))
        blocks = [data[at : at + BLOCK_BYTES] for at in range(0, size, BLOCK_BYTES)]
        for at, block in enumerate(blocks):
            if at == inside or not is_on_disk:
                self._keep(file, span * file.span_blocks + at, block)
        return blocks[inside]

    def _keep(self, file: StoredFile, number: int, block: bytearray) -> None:
        if (file.number, number) not in self._blocks:
            self._blocks.keep((file.number, number), block, len(block))
            self._kept[file.number] += 1

    def _taken(self, file: StoredFile, span: int) -> bytearray | None:
        """Take a span that was fetched ahead. One that failed is read again: it had the patience of one request."""
        future = self._here().pending.pop((file.number, span), None)
        try:
            return None if future is None else future.result()
        except StorageError:
            return None

    def _fetch_ahead(self, process: _Process, file: StoredFile, span: int) -> bytearray | None:
        """Fetch a span; return None if the disk has it."""
        data = self._fetch(process, file, span)
        if self._disk is not None and self._disk.write(file.span(span)[0], memoryview(data)):
            return None
        return data

    def _fetch(self, process: _Process, file: StoredFile, span: int) -> bytearray:
        _, start, size = file.span(span)
        data = bytearray(size)
        process.store(file.root).read_version(file.stat, start, [memoryview(data)])
        return data

    def _here(self) -> _Process:
        """Return what this process has open."""
        if self._process is None or self._process.pid != os.getpid():
            self._process = _Process(self._options)
        return self._process

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_process": None, "_kept": Counter()}


def _split(url: str) -> tuple[str, str]:
    """Split the URL of a file into that of a store, for S3 and COS its bucket or else its folder, and its key there."""
    first, separator, chain = url.partition("::")
    if "://" not in first:  # a link without a path: `simplecache::s3://...`
        folder, key = _split(chain)
        return f"{first}::{folder}", key
    folder, _, key = first.rpartition("/")
    if not key or folder.endswith(":/"):
        raise ConfigurationError(f"{redact_url(url)!r} does not name a file in a bucket or folder")
    scheme, _, place = first.partition("://")
    bucket, _, path = place.partition("/")
    if first.startswith(_BUCKETS) and not separator and is_key(path):
        return f"{scheme}://{bucket}", path
    return f"{folder}{separator}{chain}", key
