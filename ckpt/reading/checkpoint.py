"""Keep what is known of an open checkpoint: its records, and facts about its files when needed."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec

from ckpt.backends.base import Store, is_key, read_bytes
from ckpt.consistency.block_digests import digest_of
from ckpt.consistency.checksums import crc64nvme, crc_text
from ckpt.consistency.commit import COMMIT_KEY, STOCK_METADATA_KEY
from ckpt.consistency.digests import StoredDigest
from ckpt.consistency.expected import check_expected
from ckpt.consistency.seal import unseal_pickle
from ckpt.consistency.visibility import when_visible
from ckpt.errors import CommitConflict, FormatError, IntegrityError, Truncated, UnsafeContent
from ckpt.format.columns import Columns
from ckpt.format.elements import StoredTensor
from ckpt.format.index import decode_index
from ckpt.format.names import INDEX_SUFFIX, ObjectName, manifest_key, owned_path, split_path
from ckpt.format.records import (
    MAX_METADATA_BYTES,
    CommitRecord,
    FileRecord,
    ItemRecord,
    ObjectRef,
    RankManifest,
    StoredCommit,
    decode_manifest,
    read_commit,
)
from ckpt.siblings.sibling_objects import SiblingObjects
from ckpt.transfer.fetcher import StoredFile
from ckpt.transfer.manifest_sizes import manifest_bytes
from ckpt.transfer.reports import Tally

if TYPE_CHECKING:  # what only looks into a checkpoint does not wait for torch
    import torch
    from torch.distributed.checkpoint.metadata import Metadata

T = TypeVar("T")

ReadAll = Callable[[Sequence[ObjectRef], Callable[[ObjectRef], bytearray], Executor], Iterable[bytearray]]
"""Reads objects that the commit lists, some of them by what it is given."""

_TRUSTED_BYTES = 1 << 20
"""Memory that is set aside for an item because the records say that it is that long."""


@dataclass(frozen=True)
class ReadSettings:
    """Say how to read a checkpoint.

    Attributes:
        verify: check blocks against their checksums.
        visibility_timeout_s: how long to wait for an object that must exist but is not visible yet;
            None: 60 s on storage that may lag, else 5 s.
        tally: told of the bytes of index and manifests to read, and as they are read.
        expect: the digest of the checkpoint; no other is opened.
        digests: check the digests of blocks and records too, if it has any. What is expected is so checked.
    """

    verify: bool = True
    visibility_timeout_s: float | None = None
    tally: Tally | None = None
    expect: str | None = None
    digests: bool = False

    def algorithm(self, commit: CommitRecord | None) -> str | None:
        """Return the algorithm of the digests that are to be checked."""
        if commit is None or not commit.block_digests or not (self.digests or self.expect):
            return None
        return commit.block_digests.algorithm

    def timeout_s(self, store: Store) -> float:
        """Return how long to wait for an object of this store."""
        if self.visibility_timeout_s is not None:
            return self.visibility_timeout_s
        return 5.0 if store.capabilities.cross_client_visibility else 60.0


_SHARED = msgspec.msgpack.Decoder(tuple[bytes, str, bytes])  # made once, before there are threads
"""The commit record (empty for a stock checkpoint), and the key and bytes of the metadata."""


class Checkpoint:
    """An open checkpoint: one that this library committed, or one of stock PyTorch.

    Attributes:
        settings: how the rest of it is to be read.
        stored_commit, commit: the commit record, as read and decoded; None in a stock checkpoint.
        metadata_key, metadata_bytes: the stored index; in a stock checkpoint `.metadata`.
        located, chunk_sizes: what a load found out about a stock checkpoint: the tensors in its
            files, by file and offset; the sizes of a tensor's chunks, by FQN and offsets.
    """

    def __init__(
        self,
        store: Store,
        settings: ReadSettings,
        commit: StoredCommit | None,
        metadata_key: str,
        metadata: bytes,
        *,
        is_shared: bool = False,
        columns: Columns | None = None,
    ) -> None:
        """`is_shared`: another rank has decoded this metadata already; `columns`: this one has, and these are they."""
        self.settings = settings
        self.stored_commit, self.metadata_key, self.metadata_bytes = commit, metadata_key, metadata
        if settings.expect is not None:
            check_expected(settings.expect, None if commit is None else commit.raw, store.url)
        self.commit: CommitRecord | None = None if commit is None else commit.record
        self._algorithm = settings.algorithm(self.commit)
        if self._algorithm is not None and self.commit is not None:
            check_root(self.commit, store.url)
        refers = self.commit is not None and bool(self.commit.owners)
        self.store = SiblingObjects(store) if refers else store
        self._described = columns or self._decode(is_shared)
        self.located: dict[tuple[str, int], StoredTensor | None] = {}
        self.chunk_sizes: dict[str, dict[bytes, torch.Size]] = {}
        self._refs = {ref.path: ref for ref in self.commit.manifests} if self.commit else {}
        self._files: dict[str, StoredFile] = {}
        self._stored_sizes: dict[str, int] = {}
        self._items: dict[tuple[str, int], ItemRecord] = {}
        self._digests: dict[tuple[str, int], tuple[RankManifest, int]] = {}

    @functools.cached_property
    def columns(self) -> Columns:
        """What it holds. Raises FormatError if stock metadata contradicts itself."""
        if isinstance(self._described, Columns):
            return self._described
        from ckpt.format.dcp_view import columns_of

        return columns_of(self._described, url=self.store.url)

    @functools.cached_property
    def metadata(self) -> Metadata:
        """DCP's view of what it holds. Raises FormatError for a dtype that this torch does not have."""
        if not isinstance(self._described, Columns):
            return self._described
        from ckpt.format.dcp_view import metadata_of

        try:
            return metadata_of(self._described)
        except FormatError as error:
            raise self.fault(error.message, self.metadata_key) from None

    @property
    def is_model_folder(self) -> bool:
        """True for safetensors files without a commit; `metadata_bytes` are an index made of their headers."""
        return self.commit is None and self.metadata_key.endswith((".safetensors", INDEX_SUFFIX))

    @property
    def is_model(self) -> bool:
        """True for a model in safetensors files, with a commit or without."""
        return self.is_model_folder or (self.commit is not None and self.commit.is_model)

    @property
    def identity(self) -> str:
        """Tell this checkpoint from others at the same place; every rank has the same answer."""
        if self.commit is not None:
            return self.commit.id
        if self.metadata_key != STOCK_METADATA_KEY and not self.is_model_folder:
            return "one rank's part"
        return crc_text(crc64nvme(self.metadata_bytes))

    def close(self) -> None:
        """Release what was opened beside the caller's store, which stays open."""
        if isinstance(self.store, SiblingObjects):
            self.store.close()

    def share(self) -> bytes:
        """Encode the records, so that another rank can `adopt` them without reading storage."""
        commit = b"" if self.stored_commit is None else self.stored_commit.raw
        return zlib.compress(msgspec.msgpack.encode((commit, self.metadata_key, self.metadata_bytes)), 1)

    @staticmethod
    def adopt(store: Store, settings: ReadSettings, shared: bytes) -> Checkpoint:
        """Make the checkpoint that another rank encoded with `share`."""
        raw, metadata_key, metadata = _SHARED.decode(zlib.decompress(shared))
        commit = StoredCommit(raw, store.url) if raw else None
        return Checkpoint(store, settings, commit, metadata_key, metadata, is_shared=True)

    def when_visible(self, read: Callable[[], T]) -> T:
        """Call `read` for one of its objects until that is visible. Raises as `read_listed`."""
        return _when_visible(read, self.store, self.settings, self.stored_commit)

    def fault(self, message: str, key: str | None = None) -> FormatError:
        """Make an error about the checkpoint, or one of its objects."""
        return FormatError(message, url=self.store.url, key=key)

    def prepare(self, paths: Iterable[str], threads: Executor, read_all: ReadAll | None = None) -> None:
        """Fetch facts about these files: manifests, by `read_all` if it is given, or sizes of stock files."""
        missing = set(paths) - self._files.keys()
        if self.commit is None:
            self._files |= {file.key: file for file in threads.map(self._stock_file, sorted(missing))}
            return
        keys = sorted(set(map(self._manifest_key, missing)))
        refs = [self._refs[key] for key in keys]
        if self.settings.tally is not None:
            self.settings.tally.expect(sum(ref.size_bytes for ref in refs))
        read = self._read_listed
        found = threads.map(read, refs) if read_all is None else read_all(refs, read, threads)
        for key, data in zip(keys, found, strict=True):
            manifest = self._decode_manifest(key, data)
            owner = split_path(key)[0]
            paths = [owned_path(owner, file.path) for file in manifest.files]
            for path, file in zip(paths, manifest.files, strict=True):
                if self.settings.verify:
                    stored = stored_file(
                        path, file, manifest.block_size_bytes, self._algorithm, self.store.url
                    )
                else:
                    stored = StoredFile(path, file.size_bytes)
                self._files[path] = stored
            for number, item in enumerate(manifest.items):
                self._items[paths[item.file], item.offset] = item
                if manifest.digests:
                    self._digests[paths[item.file], item.offset] = manifest, number

    def file(self, path: str, start: int = 0, stop: int = 0) -> StoredFile:
        """Return the file of an item in `[start, stop)`, after `prepare`.

        Raises Truncated, or FormatError if it is not listed.
        """
        file = self._files.get(path)
        if file is None:
            message = "the metadata names this file, but the manifest of its rank does not list it"
            raise self.fault(message, path)
        if stop > file.size_bytes:
            message = f"ends at byte {file.size_bytes}"
            raise Truncated(message, url=self.store.url, key=path, start=start, stop=stop)
        return file

    def check_length(self, path: str, start: int, stop: int) -> None:
        """Check that a large item is stored, before memory is set aside to read it. Raises Truncated."""
        if stop - start <= _TRUSTED_BYTES:
            return
        size_bytes = self._stored_sizes.get(path)
        if size_bytes is None:
            size_bytes = self._stored_sizes[path] = self._stored_bytes(path)
        if size_bytes < stop:
            message = f"has {size_bytes} bytes, fewer than the checkpoint's records say"
            raise Truncated(message, url=self.store.url, key=path, start=start, stop=stop)

    def item(
        self, fqn: str, offsets: Sequence[int] | None, path: str, offset: int, length: int
    ) -> ItemRecord | None:
        """Return the manifest's record of an item, after `prepare`; None in a stock checkpoint.

        Raises FormatError if it is another item there: one item is one chunk, however many chunks
        the index finds in it.
        """
        if self.commit is None:
            return None
        item = self._items.get((path, offset))
        chunk = None if offsets is None else list(offsets)
        if item is None or (item.fqn, item.offsets, item.length) != (fqn, chunk, length):
            message = f"the metadata and the manifest disagree on the item at byte {offset}"
            raise self.fault(message, path)
        return item

    def digest(
        self, fqn: str, offsets: Sequence[int], path: str, offset: int, length: int
    ) -> StoredDigest | None:
        """Return the digest of an item's payload, after `prepare`; None if it has none. Raises as `item`."""
        item = self.item(fqn, offsets, path, offset, length)
        manifest, number = self._digests.get((path, offset), (None, 0))
        digest = b"" if manifest is None else manifest.digest(number)
        if item is None or manifest is None or not digest or item.payload_offset < 0:
            return None
        probe, block = manifest.probe(number), manifest.block_size_bytes
        return StoredDigest(item.payload_offset, item.payload_bytes, block, digest, probe)

    def _decode(self, is_shared: bool) -> Columns | Metadata:
        store, key, data = self.store, self.metadata_key, self.metadata_bytes
        if self.is_model_folder:
            return decode_index(data, url=store.url, key=key)
        if self.commit is not None and self.commit.has_index:
            stored = functools.partial(manifest_bytes, store, self.commit, self._stored_bytes)
            return decode_index(data, url=store.url, key=key, manifest_bytes=None if is_shared else stored)
        from ckpt.stock.metadata_reader import decode_metadata

        pickled = data if self.commit is None else unseal_pickle(data, url=store.url, key=key)  # version 1
        return decode_metadata(pickled, url=store.url, key=key)

    def _stored_bytes(self, key: str) -> int:
        return self.when_visible(lambda: self.store.stat(key).size_bytes)

    def _stock_file(self, key: str) -> StoredFile:
        if not is_key(key):
            message = f"the metadata names a file outside of the checkpoint: {key[:80]!r}"
            raise UnsafeContent(message, url=self.store.url)
        return StoredFile(key, self.store.stat(key).size_bytes)

    def _manifest_key(self, path: str) -> str:
        owner, file = split_path(path)
        name = ObjectName.parse(file)
        key = owned_path(owner, manifest_key(name.rank, name.token)) if name and name.is_data else ""
        if key not in self._refs:
            message = f"the metadata names a file that no manifest of this commit can list: {path[:80]!r}"
            raise self.fault(message, COMMIT_KEY)
        return key

    def _read_listed(self, ref: ObjectRef) -> bytearray:
        assert self.stored_commit is not None
        return read_listed(self.store, self.settings, ref, self.stored_commit)

    def _decode_manifest(self, key: str, data: bytearray) -> RankManifest:
        manifest = decode_manifest(data, url=self.store.url, key=key)
        names = [ObjectName.parse(file.path) for file in manifest.files]
        stem = split_path(key)[1].removesuffix(".json")
        if not all(name and name.is_data and name.stem == stem for name in names):
            raise self.fault("lists a data file under a name that this library does not give it", key)
        return manifest


def read_listed(store: Store, settings: ReadSettings, ref: ObjectRef, commit: StoredCommit) -> bytearray:
    """Read an object that the commit lists, and check it.

    Raises IntegrityError, NotVisible (in time), or CommitConflict if another save has replaced it.
    """
    moved = None if settings.tally is None else settings.tally.add

    def read() -> bytearray:
        return read_bytes(
            store, ref.path, size_bytes=ref.size_bytes, max_bytes=MAX_METADATA_BYTES, moved=moved
        )

    data = _when_visible(read, store, settings, commit)
    if crc_text(crc64nvme(data)) != ref.crc64nvme:
        message = "the stored bytes do not match their checksum"
        raise IntegrityError(message, url=store.url, key=ref.path, start=0, stop=len(data))
    algorithm = settings.algorithm(commit.record)
    if algorithm is not None and digest_of(algorithm, data).hex() != ref.digest:
        message = (
            "the stored bytes do not match their digest, though their checksum: they were forged, or replaced"
        )
        raise IntegrityError(message, url=store.url, key=ref.path, start=0, stop=len(data))
    return data


def check_root(commit: CommitRecord, url: str) -> None:
    """Raise IntegrityError or FormatError unless the root in a record is that of the digests of all that it names."""
    assert commit.block_digests
    if commit.block_digests.root_of([ref.digest for ref in commit.refs]) != commit.block_digests.root:
        message = "the root of its digests is not that of what it names"
        raise IntegrityError(message, url=url, key=COMMIT_KEY)


def stored_file(path: str, file: FileRecord, block: int, algorithm: str | None, url: str) -> StoredFile:
    """Make what a reader needs of a data file, with its digests if they are to be checked. Raises FormatError."""
    if algorithm is None:
        return StoredFile(path, file.size_bytes, block, file.block_crcs())
    if not isinstance(file.digests, bytes):
        raise FormatError(
            "the commit says that blocks have digests, this file's have none", url=url, key=path
        )
    return StoredFile(path, file.size_bytes, block, file.block_crcs(), algorithm, file.digests)


def _when_visible(
    read: Callable[[], T], store: Store, settings: ReadSettings, commit: StoredCommit | None
) -> T:
    def check_current() -> None:
        if commit is not None and read_commit(store) not in (commit, None):
            message = "another save replaced this checkpoint while it was being read; load again"
            raise CommitConflict(message, url=store.url, key=COMMIT_KEY)

    return when_visible(read, timeout_s=settings.timeout_s(store), still_expected=check_current)
