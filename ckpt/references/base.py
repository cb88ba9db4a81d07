"""Open the checkpoint that a save refers to, on all ranks the same, and say what stands in it."""

from __future__ import annotations

import bisect
import functools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from ckpt.backends.base import Store
from ckpt.backends.options import redact_url
from ckpt.backends.paths import path_of
from ckpt.backends.registry import normal_url
from ckpt.backends.wrapper import PrefixStore
from ckpt.consistency import environment
from ckpt.consistency.digests import StoredDigest
from ckpt.errors import (
    CheckpointError,
    CommitConflict,
    ConfigurationError,
    FormatError,
    IntegrityError,
    NotCommitted,
    NotFound,
    NotVisible,
)
from ckpt.format.columns import Columns, ObjectRow, TensorColumns
from ckpt.format.names import ObjectName, is_sibling, owned_path, split_path
from ckpt.format.records import CommitRecord, StoredCommit
from ckpt.gc_pause import no_gc
from ckpt.reading.checkpoint import Checkpoint, ReadSettings
from ckpt.reading.opening import open_checkpoint
from ckpt.transfer.fetcher import read_verified
from ckpt.transfer.threads import in_order
from ckpt.writing.stock_metadata import is_there

UNFIT = (NotFound, NotCommitted, NotVisible, IntegrityError, FormatError, CommitConflict, ConfigurationError)
"""Errors that say of a base that it cannot be one."""

_FILES_AHEAD = 16
_BLOCKS_AT_ONCE = 16


def base_name(base: str | os.PathLike[str], url: str | os.PathLike[str]) -> str:
    """Name the folder of a base, which must stand beside `url`. Raises ConfigurationError."""
    place, other = _split(url), _split(base)
    shown = redact_url(os.fspath(base))
    if place == other:
        raise ConfigurationError(f"base={shown!r} is the place that is saved to; name an earlier checkpoint")
    if place[0] != other[0]:
        raise ConfigurationError(
            f"base={shown!r} does not lie in the folder of the checkpoint that is saved; references are names of "
            "folders beside it, so that the whole folder can be moved"
        )
    for name in (other[1], place[1]):
        if not is_sibling(name):
            raise ConfigurationError(
                f"a checkpoint in the folder {name!r} cannot be referred to, or refer: its name must consist of "
                "letters, digits and _ . = + @ , - or spaces"
            )
    return other[1]


def _split(url: str | os.PathLike[str]) -> tuple[str, str]:
    text = normal_url(url)
    if text.startswith("file://") or "://" not in text:
        folder, name = os.path.split(os.path.realpath(path_of(text)))
        return folder, name
    folder, _, name = text.rstrip("/").rpartition("/")
    return folder, name


@dataclass(eq=False)
class Base:
    """An open base.

    Attributes:
        name: that of its folder.
        record, columns: its records.
    """

    name: str
    record: CommitRecord
    columns: Columns
    _checkpoint: Checkpoint
    _root: Store

    @staticmethod
    def open(
        store: Store, name: str, shared: bytes | None = None, *, block_digests: str | None = None
    ) -> Base:
        """Open the base in the folder `name` beside the root of `store`, or adopt what another rank `share`d.

        Raises what opening it raises; ConfigurationError if it is not there to be referred to, or has not the
        `block_digests` that all bytes of the save are to have.
        """
        root = store.parent()
        try:
            beside = PrefixStore(root, name)
            if shared is not None:
                checkpoint = Checkpoint.adopt(beside, ReadSettings(), shared)
            else:
                checkpoint = _remembered(beside) or open_checkpoint(beside, ReadSettings())
            record = checkpoint.commit
            if record is None or not record.is_referable:
                raise ConfigurationError(
                    "the base was not saved to be referred to: save it with digests=True (or a base of its own)",
                    url=beside.url,
                )
            if block_digests not in (None, record.block_digests.algorithm if record.block_digests else ""):
                raise ConfigurationError(
                    f'the base was not saved with block_digests="{block_digests}": save everything anew, once',
                    url=beside.url,
                )
            if _split(store.directory or store.url)[1] in record.owners:
                raise ConfigurationError(
                    "the base names bytes of the checkpoint that this save replaces: save to another place, or "
                    "without a base",
                    url=beside.url,
                )
            return Base(name, record, checkpoint.columns, checkpoint, root)
        except CheckpointError as error:
            root.close()
            error.args = (f"cannot be the base of a save: {error.message}", *error.args[1:])
            raise

    def share(self) -> bytes:
        """Encode it for another rank."""
        return self._checkpoint.share()

    @property
    def url(self) -> str:
        return self._checkpoint.store.url

    @functools.cached_property
    def owners(self) -> list[str]:
        """The folder of each of its `files`."""
        return [split_path(path)[0] or self.name for path in self.columns.files]

    def path(self, file: int) -> str:
        """Name one of its files as a checkpoint beside it does."""
        return owned_path(self.owners[file], split_path(self.columns.files[file])[1])

    @property
    def data_bytes(self) -> dict[str, int]:
        """How much data each owner has."""
        return {self.name: self.record.data_bytes} | {
            owner: base.data_bytes for owner, base in self.record.owners.items()
        }

    def bytes_by_owner(self, fqn: str) -> dict[str, int]:
        """Say how many bytes of an entry each owner has."""
        entry = self.columns.entries[fqn]
        if isinstance(entry, ObjectRow):
            return {self.owners[entry.file]: entry.length}
        if entry.count == 1:
            return {self.owners[entry.file[0]]: int(entry.length[0])}
        entry = entry.plain()
        total: dict[str, int] = {}
        for file in np.unique(entry.file).tolist():
            owner = self.owners[file]
            total[owner] = total.get(owner, 0) + int(entry.length[entry.file == file].sum())
        return total

    def tensor(self, fqn: str, dtype: str, size: Sequence[int]) -> TensorColumns | None:
        """Return an entry if it is a tensor of this dtype and size."""
        entry = self.columns.entries.get(fqn)
        if not isinstance(entry, TensorColumns) or (entry.dtype, entry.size) != (dtype, tuple(size)):
            return None
        return entry

    def names_of(self, prefixes: Collection[str]) -> Iterator[str]:
        """List the entries whose names begin with one of `prefixes`. Raises ConfigurationError if one has none."""
        names = sorted(self.columns.entries) if prefixes else []
        for prefix in sorted(prefixes):
            start = stop = bisect.bisect_left(names, prefix)
            while stop < len(names) and names[stop].startswith(prefix):
                stop += 1
            if start == stop:
                raise ConfigurationError(
                    f"{prefix!r}* is to be carried, but is not in the base", url=self.url
                )
            yield from names[start:stop]

    def rows_of(self, fqn: str) -> int:
        """Count the stored chunks of a tensor."""
        entry = self.columns.entries[fqn]
        return entry.count if isinstance(entry, TensorColumns) else 0

    def rows_at(self, entry: TensorColumns, chunk: ChunkStorageMetadata, rank: int, size: int) -> list[int]:
        """List the rows of a chunk that this rank of `size` compares: those that a rank of its number wrote."""
        rows = [0]
        if entry.count != 1:
            rows = np.flatnonzero((entry.offsets == np.array(chunk.offsets)).all(axis=1)).tolist()
        box = list(chunk.offsets), list(chunk.sizes)
        return [
            row for row in rows if entry.box(row) == box and self._writers[entry.place(row)[0]] % size == rank
        ]

    @functools.cached_property
    def _writers(self) -> list[int]:
        """The rank that wrote each file."""
        names = (ObjectName.parse(split_path(path)[1]) for path in self.columns.files)
        return [0 if name is None else name.rank for name in names]

    def file_of(self, fqn: str, row: int) -> int:
        """Return the number of the file that holds a chunk of a tensor."""
        entry = self.columns.entries[fqn]
        assert isinstance(entry, TensorColumns)
        return entry.place(row)[0]

    def files_of(self, fqns: Iterable[str], rank: int, size: int) -> set[int]:
        """List the files that hold entries: those that a rank of the number `rank`, of `size`, wrote."""
        found = (self._files_of(self.columns.entries[fqn]) for fqn in fqns)
        return {file for files in found for file in files if self._writers[file] % size == rank}

    @staticmethod
    def _files_of(entry: TensorColumns | ObjectRow) -> Sequence[int]:
        if isinstance(entry, ObjectRow):
            return [entry.file]
        if entry.count == 1:
            return [int(entry.file[0])]
        files: list[int] = np.unique(entry.file).tolist()
        return files

    def check_files(
        self, files: Iterable[int], threads: Executor, moved: Callable[[], None], nbytes: int = 0
    ) -> None:
        """Check that files exist as they were written: the size of each, and the checksums of some of its blocks.

        These are one, or as many as `nbytes` have, from one on that is drawn; all of a file that has no more bytes.
        `moved` is called after each. Raises NotVisible, IntegrityError, FormatError.
        """
        paths = [self.columns.files[file] for file in sorted(files)]
        self._checkpoint.prepare(paths, threads)
        for _ in in_order(threads, lambda path: self._check_file(path, nbytes), paths, ahead=_FILES_AHEAD):
            moved()

    def _check_file(self, path: str, nbytes: int) -> None:
        checkpoint = self._checkpoint
        file = checkpoint.file(path)
        size_bytes = checkpoint.when_visible(lambda: checkpoint.store.stat(path).size_bytes)
        if size_bytes != file.size_bytes:
            text = f"has {size_bytes} bytes, {file.size_bytes} were written"
            raise IntegrityError(text, url=checkpoint.store.url, key=path)
        blocks = -(-size_bytes // file.block_size_bytes)
        if not blocks:
            return
        count = min(blocks, max(1, -(-nbytes // file.block_size_bytes)))
        first = int(environment.token()[:8], 16) % (blocks - count + 1)
        for block in range(first, first + count, _BLOCKS_AT_ONCE):
            start = block * file.block_size_bytes
            stop = min(first + count, block + _BLOCKS_AT_ONCE) * file.block_size_bytes
            data = bytearray(min(stop, size_bytes) - start)
            read_verified(checkpoint.store, file, start, [memoryview(data)], checkpoint.when_visible)

    def digests(self, rows: Sequence[tuple[str, int]], threads: Executor) -> list[StoredDigest | None]:
        """Return what is stored of each row; None where there is no digest. Raises as a load."""
        places = []
        for fqn, row in rows:
            entry = self.columns.entries[fqn]
            assert isinstance(entry, TensorColumns)
            file, offset, length = entry.place(row)
            places.append((fqn, entry.offsets_at(row), self.columns.files[file], offset, length))
        self._checkpoint.prepare({path for _, _, path, *_ in places}, threads)
        with no_gc():
            return [
                self._checkpoint.digest(fqn, offsets, path, offset, length)
                for fqn, offsets, path, offset, length in places
            ]

    @staticmethod
    def remember(commit: StoredCommit, index: bytes, columns: Columns) -> None:
        """Keep the records of a checkpoint that was just committed, which the next save may refer to."""
        _last[:] = [(commit, index, columns)]

    def close(self) -> None:
        """Release what was opened for it."""
        self._checkpoint.close()
        self._root.close()


_last: list[tuple[StoredCommit, bytes, Columns]] = []
"""The last checkpoint that this process has committed."""


def _remembered(store: Store) -> Checkpoint | None:
    """Return the checkpoint at the store's root if it is the last one, and still there: by one request."""
    for commit, index, columns in _last:
        if commit.url == store.url and is_there(store, commit):
            key = commit.record.described_by.path
            return Checkpoint(store, ReadSettings(), commit, key, index, columns=columns)
    return None
