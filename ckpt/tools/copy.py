"""Copy a checkpoint to another place, verified on its way and committed last: `ckpt.copy`.

A copy is a save like any other: its objects get names that were never used at the destination, and
it is a checkpoint once its commit record is put. Data files are the same, block for block, with the
same checksums; records are written anew, with the new names. An interrupted copy is continued: its
files are read, and kept if they are right.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import msgspec

from ckpt.backends.base import PutMode, Store, read_bytes
from ckpt.backends.bodies import Body, CheckedBody
from ckpt.backends.registry import open_store
from ckpt.consistency import environment
from ckpt.consistency.checksums import crc64nvme, crc_text
from ckpt.consistency.commit import proves_no_commit
from ckpt.errors import (
    AlreadyExists,
    CheckpointError,
    CommitConflict,
    ConfigurationError,
    FormatError,
    NotFound,
    StorageError,
)
from ckpt.format.columns import Columns, columns_of
from ckpt.format.names import ObjectName, data_key, manifest_key, rank_directory
from ckpt.format.records import (
    FORMAT_VERSION,
    ManifestRef,
    RankManifest,
    decode_manifest,
    encode,
    read_commit,
)
from ckpt.reading.checkpoint import Checkpoint, ReadSettings, open_checkpoint, open_parts, read_listed
from ckpt.tools.findings import Damage
from ckpt.tools.gc import DEFAULT_GRACE_S
from ckpt.tools.record_checks import IndexedItems, items_by_file
from ckpt.transfer.buffer_pool import StagingPool
from ckpt.transfer.fetcher import StoredFile
from ckpt.transfer.relay_bodies import RunReader, VerifiedBody
from ckpt.transfer.reports import ReportBytes, no_report
from ckpt.transfer.threads import in_order, workers
from ckpt.writing.coordinator import Coordinator
from ckpt.writing.save_objects import SaveObjects

_BUDGET_BYTES = 256 << 20
_FILES_AT_ONCE = 4
_MAX_LEFTOVERS = 1 << 22
_MAX_LEFTOVER_AGE_S = DEFAULT_GRACE_S / 2
"""Older objects are not used: `ckpt gc` could remove them before the commit."""


@dataclass
class Copied:
    """The result of `ckpt.copy`.

    Attributes:
        already_there: the destination already held the same checkpoint; nothing was sent.
        sent_files, sent_bytes: data files that were sent.
        kept_files, kept_bytes: data files that an interrupted copy had left, and that were right.
    """

    source: str
    destination: str
    format: str
    already_there: bool = False
    sent_files: int = 0
    sent_bytes: int = 0
    kept_files: int = 0
    kept_bytes: int = 0


def copy(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    destination_options: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    threads: int | None = None,
    progress: ReportBytes | None = None,
) -> Copied:
    """Copy a checkpoint; `destination` becomes a checkpoint when all of it is there.

    Every block is checked against its checksum before it is sent. Called again after an
    interruption, it sends only the missing files. A stock checkpoint is copied file by file, its
    `.metadata` last.

    Args:
        storage_options: for the source; for both, unless there are `destination_options`.
        overwrite: replace another checkpoint of this library, which stays at the destination until
            the commit.
        progress: called with the data bytes done so far and those in all.

    Raises:
        NotFound, NotCommitted: there is no checkpoint at the source.
        IntegrityError: the source is damaged; nothing becomes visible at the destination.
        AlreadyExists: another checkpoint or file is at the destination.
        CommitError: the commit failed; the checkpoint that was committed before still is.
        StorageError: a storage refused, or could not be reached.
    """
    options = storage_options if destination_options is None else destination_options
    from_store = open_store(source, storage_options, threads=threads)
    try:
        to_store = open_store(destination, options, threads=threads)
        try:
            if from_store.url == to_store.url:
                raise ConfigurationError("source and destination are the same place", url=to_store.url)
            return _copy(from_store, to_store, overwrite, progress or no_report)
        finally:
            to_store.close()
    finally:
        from_store.close()


def _copy(source: Store, destination: Store, overwrite: bool, progress: ReportBytes) -> Copied:
    parts = open_parts(source, ReadSettings())
    if parts[0].commit is None:
        from ckpt.tools.copy_stock import copy_stock

        facts = copy_stock(source, destination, parts, progress)
        return Copied(source.url, destination.url, "stock", **facts)
    done = Copied(source.url, destination.url, "ckpt-storage")
    _CheckpointCopy(source, destination, parts[0], overwrite, progress, done).run()
    return done


@dataclass
class _RankCopy:
    """The files of one rank at the destination.

    Attributes:
        kept: numbers of the files that an interrupted copy has left, and that are right.
        missing: number of files still to be sent.
    """

    ref: ManifestRef
    manifest: RankManifest
    token: str
    kept: frozenset[int]
    missing: int = 0

    def key(self, number: int) -> str:
        """Name a data file."""
        return data_key(self.ref.rank, self.token, number)

    def encode(self) -> bytes:
        """Make the manifest, the same bytes for the same token."""
        files = [
            msgspec.structs.replace(file, path=self.key(number))
            for number, file in enumerate(self.manifest.files)
        ]
        facts = {"version": FORMAT_VERSION, "rank": self.ref.rank, "token": self.token, "files": files}
        return encode(msgspec.structs.replace(self.manifest, **facts))


@dataclass
class _FileCopy:
    rank: _RankCopy
    number: int


_MANIFEST = -1
_Leftovers = dict[int, dict[str, dict[int, int]]]
"""Objects of interrupted copies: by rank and token, their numbers (`_MANIFEST` too) and sizes."""


class _CheckpointCopy:
    def __init__(
        self,
        source: Store,
        destination: Store,
        checkpoint: Checkpoint,
        overwrite: bool,
        progress: ReportBytes,
        done: Copied,
    ) -> None:
        assert checkpoint.stored_commit is not None
        self._from, self._to, self._checkpoint = source, destination, checkpoint
        self._stored_commit = checkpoint.stored_commit
        self._commit = self._stored_commit.record
        self._overwrite, self._progress, self._done = overwrite, progress, done
        self._pool = StagingPool(_BUDGET_BYTES)
        self._stop = threading.Event()
        self._source_columns = columns_of(checkpoint.metadata, url=source.url)
        self._indexed = IndexedItems(self._source_columns)
        self._objects = SaveObjects()
        self._paths: dict[str, str] = {}
        self._refs: list[ManifestRef] = []
        self._reader = RunReader(destination, self._pool)

    def run(self) -> None:
        if not self._overwrite and self._is_there():
            self._done.already_there = True
            return
        coordinator = Coordinator(self._to, self._objects)
        coordinator.look(overwrite=self._overwrite)
        leftovers = self._find_leftovers()
        self._to.prepare(rank_directory(0))
        parallel = self._to.capabilities.parallel_parts
        at_once = min(_FILES_AT_ONCE, self._to.threads) if parallel else self._to.threads
        with workers(at_once, "ckpt-cp") as threads:
            files = self._files(leftovers)
            for file in in_order(threads, self._send, files, ahead=2 * at_once, stop=self._stop):
                self._count(file)
        columns = self._columns()
        record = msgspec.structs.replace(
            self._commit, version=FORMAT_VERSION, manifests=self._refs, metadata=msgspec.UNSET
        )
        try:
            coordinator.commit_columns(columns, record)
        except CheckpointError as error:
            if proves_no_commit(error):
                self._objects.discard(self._to)  # the index; data files serve the next attempt
            raise

    # -- the source ------------------------------------------------------------------------------------

    def _manifest(self, ref: ManifestRef) -> RankManifest:
        data = read_listed(self._from, ReadSettings(), ref, self._stored_commit)
        return decode_manifest(data, url=self._from.url, key=ref.path)

    def _manifests(self) -> Iterator[tuple[ManifestRef, RankManifest]]:
        at_once = min(4, self._from.threads)
        with workers(at_once, "ckpt-manifest") as threads:
            refs = self._commit.manifests
            yield from zip(refs, in_order(threads, self._manifest, refs, ahead=at_once), strict=True)

    def _columns(self) -> Columns:
        """Make the source's index with the new names."""
        self._refuse(self._indexed.left_over())
        files = [self._paths[path] for path in self._source_columns.files]
        return dataclasses.replace(self._source_columns, files=files, save_id=self._objects.token)

    def _compare(self, manifest: RankManifest) -> None:
        for file, items in zip(manifest.files, items_by_file(manifest), strict=True):
            self._refuse(self._indexed.compare(file.path, items))

    def _refuse(self, damages: Iterable[Damage]) -> None:
        """Raise FormatError if the index and a manifest disagree, as in a copy they would too."""
        for damage in damages:
            raise FormatError(f"the source is damaged: {damage.message}", url=self._from.url, key=damage.key)

    # -- the destination -------------------------------------------------------------------------------

    def _is_there(self) -> bool:
        """Tell whether the destination holds the same checkpoint, by its records."""
        if read_commit(self._to) is None:
            return False
        existing = open_checkpoint(self._to, ReadSettings())
        assert existing.stored_commit is not None
        ours, theirs = self._commit, existing.stored_commit.record
        facts = ("created_at", "world_size", "data_bytes", "tags")
        if any(getattr(ours, name) != getattr(theirs, name) for name in facts):
            return False
        if [ref.rank for ref in ours.manifests] != [ref.rank for ref in theirs.manifests]:
            return False
        for (_, manifest), ref in zip(self._manifests(), theirs.manifests, strict=True):
            data = read_listed(self._to, ReadSettings(), ref, existing.stored_commit)
            if _content(manifest) != _content(decode_manifest(data, url=self._to.url, key=ref.path)):
                return False
        return True

    def _find_leftovers(self) -> _Leftovers:
        """List the objects of interrupted copies. Objects that it misses are sent again."""
        commit = read_commit(self._to)
        refs = [] if commit is None else commit.record.refs
        used = {name.token for ref in refs if (name := ObjectName.parse(ref.path)) is not None}
        leftovers: _Leftovers = {}
        for stat in itertools.islice(self._to.list("rank-"), _MAX_LEFTOVERS):
            name = ObjectName.parse(stat.key)
            age_s = 0.0 if stat.modified_at_s is None else environment.now() - stat.modified_at_s
            if name is None or name.token in used or age_s >= _MAX_LEFTOVER_AGE_S:
                continue
            if name.kind in ("distcp", "json"):
                number = _MANIFEST if name.number is None else name.number
                leftovers.setdefault(name.rank, {}).setdefault(name.token, {})[number] = stat.size_bytes
        return leftovers

    def _files(self, leftovers: _Leftovers) -> Iterator[_FileCopy]:
        """Yield the files to send, lazily. `_count` puts a manifest after the rank's last file."""
        with workers(self._to.threads, "ckpt-check") as threads:
            for ref, manifest in self._manifests():
                self._compare(manifest)
                rank = self._rank(ref, manifest, leftovers.get(ref.rank, {}), threads)
                for number, file in enumerate(manifest.files):
                    self._paths[file.path] = rank.key(number)
                    if number in rank.kept:
                        self._done.kept_files += 1
                        self._done.kept_bytes += file.size_bytes
                missing = [number for number in range(len(manifest.files)) if number not in rank.kept]
                rank.missing = len(missing)
                if not missing:
                    self._put_manifest(rank)
                for number in missing:
                    yield _FileCopy(rank, number)

    def _rank(
        self,
        ref: ManifestRef,
        manifest: RankManifest,
        leftovers: dict[str, dict[int, int]],
        threads: Executor,
    ) -> _RankCopy:
        """Continue an interrupted copy of a rank if all its objects are right, else begin a new one."""
        expected = {number: file.size_bytes for number, file in enumerate(manifest.files)}
        for token, sizes in sorted(
            leftovers.items(), key=lambda each: -len(each[1])
        ):  # the most objects first
            data = {number: size for number, size in sizes.items() if number != _MANIFEST}
            if not data or not data.items() <= expected.items():
                continue
            rank = _RankCopy(ref, manifest, token, frozenset(data))
            if _MANIFEST in sizes and not self._holds(manifest_key(ref.rank, token), rank.encode()):
                continue
            if all(self._is_right(rank, number, threads) for number in data):
                return rank
        return _RankCopy(ref, manifest, environment.token(), frozenset())

    def _holds(self, key: str, expected: bytes) -> bool:
        try:
            size = self._to.stat(key).size_bytes
            return size == len(expected) and bytes(read_bytes(self._to, key)) == expected
        except NotFound:
            return False

    def _is_right(self, rank: _RankCopy, number: int, threads: Executor | None = None) -> bool:
        record, block = rank.manifest.files[number], rank.manifest.block_size_bytes
        return self._reader.matches(StoredFile.verified(rank.key(number), record, block), threads)

    def _send(self, file: _FileCopy) -> _FileCopy:
        rank, number = file.rank, file.number
        record, block = rank.manifest.files[number], rank.manifest.block_size_bytes
        when_visible = self._checkpoint.when_visible
        source = StoredFile.verified(record.path, record, block)
        body = VerifiedBody(self._from, source, self._pool, self._check_wanted, when_visible)
        self._put(rank.key(number), body, lambda: self._is_right(rank, number))
        return file

    def _check_wanted(self) -> None:
        if self._stop.is_set():
            raise StorageError("stopped: the copy was interrupted, or another file of it failed")

    def _put(self, key: str, body: Body, is_right: Callable[[], bool]) -> None:
        """Put an object under a name that may belong to another copy, which still runs."""
        try:
            self._to.put(key, body, mode=PutMode.CREATE)
        except AlreadyExists as error:
            if not is_right():
                text = "another copy to this place is running; wait for it, or stop it"
                raise CommitConflict(text, url=self._to.url, key=key) from error

    def _count(self, file: _FileCopy) -> None:
        self._done.sent_files += 1
        self._done.sent_bytes += file.rank.manifest.files[file.number].size_bytes
        self._progress(self._done.sent_bytes + self._done.kept_bytes, self._commit.data_bytes)
        file.rank.missing -= 1
        if file.rank.missing == 0:
            self._put_manifest(file.rank)

    def _put_manifest(self, rank: _RankCopy) -> None:
        key, data = manifest_key(rank.ref.rank, rank.token), rank.encode()
        self._put(key, CheckedBody(data), lambda: self._holds(key, data))
        checksum = crc_text(crc64nvme(data))
        self._refs.append(
            msgspec.structs.replace(rank.ref, path=key, size_bytes=len(data), crc64nvme=checksum)
        )
        self._refs.sort(key=lambda ref: ref.rank)


def _content(manifest: RankManifest) -> tuple[Any, ...]:
    """Take the parts of a manifest that are the same in all copies."""
    files = [(file.size_bytes, file.blocks) for file in manifest.files]
    return manifest.block_size_bytes, files, manifest.items
