"""Opening a checkpoint: from a place to what is committed there, and to the facts about its files."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import msgspec
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from ckpt.backends.base import Store, check_key, exists, read_bytes
from ckpt.consistency import environment
from ckpt.consistency.checksums import crc64nvme, crc_text
from ckpt.consistency.commit import COMMIT_KEY, STOCK_METADATA_KEY, is_foreign
from ckpt.consistency.seal import unseal_pickle
from ckpt.consistency.visibility import when_visible
from ckpt.errors import (
    CommitConflict,
    ConfigurationError,
    FormatError,
    IntegrityError,
    NotCommitted,
    NotFound,
    Truncated,
    UnsafeContent,
)
from ckpt.format.columns import Chunks, packed
from ckpt.format.index import decode_index
from ckpt.format.names import ObjectName, is_data_key, manifest_key
from ckpt.format.records import (
    CommitRecord,
    FileRecord,
    ItemRecord,
    ObjectRef,
    RankManifest,
    StoredCommit,
    decode_manifest,
    read_commit,
)
from ckpt.stock.metadata_reader import MAX_METADATA_BYTES, decode_metadata
from ckpt.torch_private import StorageInfo
from ckpt.transfer.fetcher import StoredFile

__all__ = [
    "Checkpoint",
    "ReadSettings",
    "is_rank_local",
    "open_checkpoint",
    "open_rank_local",
    "read_listed",
]

T = TypeVar("T")

_OPEN_ATTEMPTS = 3
_MAX_RANKS = 1 << 20
_PROMPT_STORE_TIMEOUT_S = 5.0
_LAGGING_STORE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class ReadSettings:
    """How a checkpoint is read.

    Attributes:
        verify: check blocks against their checksums.
        visibility_timeout_s: how long to wait for what must exist but is not visible yet; None goes by whether
            the store may lag.
    """

    verify: bool = True
    visibility_timeout_s: float | None = None

    def timeout_s(self, store: Store) -> float:
        if self.visibility_timeout_s is not None:
            return self.visibility_timeout_s
        prompt = store.capabilities.cross_client_visibility
        return _PROMPT_STORE_TIMEOUT_S if prompt else _LAGGING_STORE_TIMEOUT_S


class _Shared(NamedTuple):
    commit: bytes  # empty: a foreign checkpoint
    metadata_key: str
    metadata: bytes


_SHARED = msgspec.msgpack.Decoder(_Shared)  # made once, before there are threads


class Checkpoint:
    """What stands at a place: a committed checkpoint of ours (`commit` is set), or one of stock PyTorch.

    It holds the records; facts about files are fetched by `prepare` when a load knows which ones it needs.
    """

    def __init__(
        self,
        store: Store,
        settings: ReadSettings,
        commit: StoredCommit | None,
        metadata_key: str,
        metadata: bytes,
    ) -> None:
        self._store, self._settings = store, settings
        self.stored_commit, self.metadata_key, self.metadata_bytes = commit, metadata_key, metadata
        self.commit: CommitRecord | None = None if commit is None else commit.record
        self.metadata = _decode(self.commit, metadata, url=store.url, key=metadata_key)
        self._refs = {ref.path: ref for ref in self.commit.manifests} if self.commit else {}
        self._chunks: dict[str, dict[bytes, torch.Size]] = {}
        self._files: dict[str, StoredFile] = {}
        self._items: dict[tuple[str, int], ItemRecord] = {}

    @property
    def identity(self) -> str:
        """What tells this checkpoint from another one at the same place, on every rank alike."""
        if self.commit is not None:
            return self.commit.id
        if self.metadata_key != STOCK_METADATA_KEY:
            return "one rank's part"
        return crc_text(crc64nvme(self.metadata_bytes))

    def share(self) -> bytes:
        """Everything another rank needs to hold the same checkpoint without reading it from storage."""
        commit = b"" if self.stored_commit is None else self.stored_commit.raw
        shared = _Shared(commit, self.metadata_key, self.metadata_bytes)
        return zlib.compress(msgspec.msgpack.encode(shared), 1)

    @staticmethod
    def adopt(store: Store, settings: ReadSettings, shared: bytes) -> Checkpoint:
        """The checkpoint that `share` described on another rank."""
        raw, metadata_key, metadata = _SHARED.decode(zlib.decompress(shared))
        commit = StoredCommit(raw, store.url) if raw else None
        return Checkpoint(store, settings, commit, metadata_key, metadata)

    def when_visible(self, read: Callable[[], T]) -> T:
        """`read()` of one of its objects, which is given time to become visible.

        Raises:
            NotVisible: it did not in time.
            CommitConflict: another save has replaced this checkpoint, whose objects then go away.
        """
        return when_visible(
            read, timeout_s=self._settings.timeout_s(self._store), still_expected=self._check_current
        )

    def _check_current(self) -> None:
        if self.stored_commit is not None:
            _check_current(self._store, self.stored_commit)

    def prepare(self, infos: Iterable[StorageInfo], threads: Executor) -> None:
        """Fetch the facts about the files of these items: our manifests, or the sizes of foreign files."""
        if self.commit is None:
            keys = {info.relative_path for info in infos} - self._files.keys()
            self._files |= {file.key: file for file in threads.map(self._foreign_file, sorted(keys))}
            return
        missing = (info for info in infos if info.relative_path not in self._files)
        for manifest in threads.map(
            self._read_manifest, sorted({self._manifest_key(info) for info in missing})
        ):
            for file in manifest.files:
                self._files[file.path] = self._our_file(file, manifest.block_size_bytes)
            for item in manifest.items:
                self._items[manifest.files[item.file].path, item.offset] = item

    def chunk(self, index: MetadataIndex) -> tuple[torch.Size, torch.dtype]:
        """Shape and dtype of a stored chunk.

        Raises:
            FormatError: there is no such chunk.
        """
        found = self.metadata.state_dict_metadata.get(index.fqn)
        if not isinstance(found, TensorStorageMetadata):
            raise FormatError(f"{index.fqn!r} is not a tensor in this checkpoint", url=self._store.url)
        shape: torch.Size | None
        if isinstance(found.chunks, Chunks):
            shape = found.chunks.size_at(index)
        else:
            if index.fqn not in self._chunks:
                self._chunks[index.fqn] = {packed(chunk.offsets): chunk.sizes for chunk in found.chunks}
            shape = self._chunks[index.fqn].get(packed(index.offset or ()))
        if shape is None:
            raise FormatError(f"{index.fqn!r} has no chunk at {index.offset}", url=self._store.url)
        return shape, found.properties.dtype

    def file(self, info: StorageInfo) -> StoredFile:
        """The file of an item, after `prepare`.

        Raises:
            Truncated: the file ends before the item does.
            FormatError: the manifest knows no such file.
        """
        file = self._files.get(info.relative_path)
        if file is None:
            raise FormatError(
                "the metadata name this file, but the rank's manifest does not list it",
                url=self._store.url,
                key=info.relative_path,
            )
        stop = info.offset + info.length
        if stop > file.size_bytes:
            raise Truncated(
                f"ends at byte {file.size_bytes}",
                url=self._store.url,
                key=file.key,
                start=info.offset,
                stop=stop,
            )
        return file

    def item(self, info: StorageInfo) -> ItemRecord | None:
        """The manifest's word on an item, after `prepare`; None in a foreign checkpoint.

        Raises:
            FormatError: the manifest knows no such item.
        """
        if self.commit is None:
            return None
        found = self._items.get((info.relative_path, info.offset))
        if found is None or found.length != info.length:
            raise FormatError(
                f"metadata and manifest disagree on the item at byte {info.offset}",
                url=self._store.url,
                key=info.relative_path,
            )
        return found

    def _our_file(self, file: FileRecord, block_size_bytes: int) -> StoredFile:
        if not self._settings.verify:
            return StoredFile(file.path, file.size_bytes)
        return StoredFile(file.path, file.size_bytes, block_size_bytes, file.block_crcs())

    def _foreign_file(self, key: str) -> StoredFile:
        try:
            check_key(key)
        except ConfigurationError as error:
            raise UnsafeContent(
                f"the metadata name a file outside of the checkpoint: {key[:80]!r}", url=self._store.url
            ) from error
        return StoredFile(key, self._store.stat(key).size_bytes)

    def _manifest_key(self, info: StorageInfo) -> str:
        name = ObjectName.parse(info.relative_path)
        key = manifest_key(name.rank, name.token) if name is not None and name.kind == "distcp" else ""
        if key not in self._refs:
            raise FormatError(
                f"the metadata name a file that the commit does not cover: {info.relative_path[:80]!r}",
                url=self._store.url,
                key=COMMIT_KEY,
            )
        return key

    def _read_manifest(self, key: str) -> RankManifest:
        assert self.stored_commit is not None
        data = read_listed(self._store, self._settings, self._refs[key], self.stored_commit)
        manifest = decode_manifest(data, url=self._store.url, key=key)
        if not all(is_data_key(file.path) for file in manifest.files):
            raise FormatError("names a file that no rank of a save would write", url=self._store.url, key=key)
        return manifest


def _decode(commit: CommitRecord | None, data: bytes, *, url: str, key: str) -> Metadata:
    if commit is None:
        return decode_metadata(data, url=url, key=key)
    if not commit.has_index:  # format version 1
        return decode_metadata(unseal_pickle(data, url=url, key=key), url=url, key=key)
    return decode_index(data, url=url, key=key).metadata()


def open_checkpoint(store: Store, settings: ReadSettings) -> Checkpoint:
    """What is committed at the store's root, or the stock checkpoint that stands there.

    Raises:
        NotFound: there is nothing at all.
        NotCommitted: there is something, but no checkpoint (yet).
        IntegrityError, FormatError, UnsafeContent: a record is damaged, not understood, or not safe.
        NotVisible: a listed object did not appear in time.
    """
    commit = _await_commit(store, settings)
    for attempt in range(1, _OPEN_ATTEMPTS + 1):
        if commit is None:
            break
        try:
            ref = commit.record.described_by
            metadata = read_listed(store, settings, ref, commit)
            return Checkpoint(store, settings, commit, ref.path, bytes(metadata))
        except (IntegrityError, CommitConflict):
            # A save that replaces the checkpoint right now can make us read half of each record.
            again = read_commit(store)
            if again == commit or attempt == _OPEN_ATTEMPTS:
                raise
            commit = again
    return _open_foreign(store, settings)


def open_parts(store: Store, settings: ReadSettings) -> list[Checkpoint]:
    """What stands at a place: one checkpoint, or a part per rank where stock saved with `use_collectives=False`.

    Raises:
        NotFound, NotCommitted, IntegrityError, FormatError, UnsafeContent, NotVisible: as `open_checkpoint`.
    """
    try:
        return [open_checkpoint(store, settings)]
    except (NotFound, NotCommitted):
        if not is_rank_local(store):
            raise
    parts = [open_rank_local(store, settings, 0)]
    while len(parts) < _MAX_RANKS:
        try:
            parts.append(open_rank_local(store, settings, len(parts)))
        except NotFound:
            break
    return parts


def open_rank_local(store: Store, settings: ReadSettings, rank: int) -> Checkpoint:
    """One rank's part of a stock checkpoint that was saved with `use_collectives=False`."""
    key = f"__{rank}{STOCK_METADATA_KEY}"
    return Checkpoint(store, settings, None, key, _read_replaceable(store, key))


def is_rank_local(store: Store) -> bool:
    """Whether the place holds such a checkpoint."""
    return exists(store, f"__0{STOCK_METADATA_KEY}")


def _open_foreign(store: Store, settings: ReadSettings) -> Checkpoint:
    key = STOCK_METADATA_KEY
    if is_foreign(store):
        found = Checkpoint(store, settings, None, key, _read_replaceable(store, key))
        # A tool may have cut off the seal, but the names of the files are ours.
        if not any(is_data_key(info.relative_path) for info in found.metadata.storage_data.values()):
            return found
    elif next(iter(store.list()), None) is None:
        raise NotFound("there is nothing here", url=store.url)
    raise NotCommitted(
        "no checkpoint is committed here: there are objects, but no commit.json; "
        "the save did not finish, or the copy is not complete",
        url=store.url,
    )


def _read_replaceable(store: Store, key: str) -> bytes:
    """An object without a checksum that may be replaced at any time: all of one version, never half of two."""
    for attempt in range(1, _OPEN_ATTEMPTS + 1):
        before = store.stat(key)
        try:
            data = bytes(read_bytes(store, key, max_bytes=MAX_METADATA_BYTES))
        except Truncated:
            if attempt == _OPEN_ATTEMPTS:
                raise
            continue
        if store.stat(key) == before:
            return data
    raise IntegrityError("it changes while it is read", url=store.url, key=key)


def _await_commit(store: Store, settings: ReadSettings) -> StoredCommit | None:
    """The commit record. Storage that may lag is given time to show it; elsewhere its absence is an answer."""
    may_lag = not store.capabilities.cross_client_visibility
    backoff = environment.Backoff(settings.timeout_s(store) if may_lag else 0.0, first_pause_s=0.25)
    while True:
        commit = read_commit(store)
        if commit is not None or backoff.is_over or is_foreign(store):
            return commit
        backoff.pause()


def read_listed(store: Store, settings: ReadSettings, ref: ObjectRef, commit: StoredCommit) -> bytearray:
    """An object that the commit lists, checked against it.

    Raises:
        IntegrityError: it is not what the commit says.
        NotVisible: it did not appear in time.
        CommitConflict: another save has replaced the checkpoint.
    """
    data = when_visible(
        lambda: read_bytes(store, ref.path, size_bytes=ref.size_bytes, max_bytes=MAX_METADATA_BYTES),
        timeout_s=settings.timeout_s(store),
        still_expected=lambda: _check_current(store, commit),
    )
    if crc_text(crc64nvme(data)) != ref.crc64nvme:
        raise IntegrityError(
            "the stored bytes do not match their checksum",
            url=store.url,
            key=ref.path,
            start=0,
            stop=len(data),
        )
    return data


def _check_current(store: Store, commit: StoredCommit) -> None:
    if read_commit(store) not in (commit, None):
        raise CommitConflict(
            "this checkpoint was replaced by another save while it was being read; load again",
            url=store.url,
            key=COMMIT_KEY,
        )
