"""`ckpt.copy`: a checkpoint to another place, on any storage, verified on its way and committed last.

A copy is a save like any other: its objects get names that were never used at the destination, and it is a
checkpoint when its commit record is put. The data files are the same, block for block, so are their checksums;
records are written anew, with the new names. A copy that was interrupted is taken up again: files that it left are
read, and stay where they are if they hold what they should.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ckpt.backends.base import PutMode, Store, read_bytes
from ckpt.backends.bodies import Body, CheckedBody
from ckpt.backends.registry import open_store
from ckpt.consistency.checksums import crc64nvme, crc_text
from ckpt.consistency.commit import proves_no_commit
from ckpt.errors import (
    AlreadyExists,
    CheckpointError,
    CommitConflict,
    ConfigurationError,
    FormatError,
    NotFound,
)
from ckpt.format.columns import Columns, columns_of
from ckpt.format.names import ObjectName, data_key, manifest_key, rank_directory
from ckpt.format.records import (
    CommitRecord,
    FileRecord,
    ItemRecord,
    ManifestRef,
    RankManifest,
    decode_manifest,
    encode,
    read_commit,
)
from ckpt.reading.checkpoint import Checkpoint, ReadSettings, open_checkpoint, open_parts, read_listed
from ckpt.tools.gc import DEFAULT_GRACE_S
from ckpt.tools.record_checks import IndexedItems
from ckpt.transfer.buffer_pool import StagingPool
from ckpt.transfer.relay_bodies import RunReader, VerifiedBody
from ckpt.transfer.threads import in_order, thread_pool
from ckpt.writing.coordinator import Coordinator
from ckpt.writing.save_objects import SaveObjects

__all__ = ["Copied", "copy"]

_BUDGET_BYTES = 256 << 20
_FILES_AT_ONCE = 4
_MAX_LEFTOVERS = 1 << 22
_MAX_LEFTOVER_AGE_S = DEFAULT_GRACE_S / 2
"""What is older, `ckpt gc` may take away before the commit."""


@dataclass
class Copied:
    """What a copy did.

    Attributes:
        already_there: the destination held the same checkpoint before; nothing was sent.
        sent_files, sent_bytes: data files that were sent.
        kept_files, kept_bytes: those that an interrupted copy had left, read and found right.
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
    progress: Any = None,
) -> Copied:
    """Copy the checkpoint at `source` to `destination`, which becomes a checkpoint when all of it is there.

    Every block is checked against its checksum before it is sent. Called again after an interruption, it sends only
    what is missing. A stock checkpoint is copied file by file, its `.metadata` last.

    Args:
        storage_options: of the source; of both, without `destination_options`.
        overwrite: replace another checkpoint of this library at the destination, which stays until the commit.
        progress: called with the data bytes done so far and those in all.

    Raises:
        NotFound, NotCommitted: there is no checkpoint at the source.
        IntegrityError: the source is damaged; nothing becomes visible at the destination.
        AlreadyExists: something else is at the destination.
        CommitError: the commit failed; what was committed before still is.
        StorageError: a storage refused, or could not be reached.
    """
    options = storage_options if destination_options is None else destination_options
    from_store = open_store(source, storage_options, threads=threads)
    try:
        to_store = open_store(destination, options, threads=threads)
        try:
            if from_store.url == to_store.url:
                raise ConfigurationError("source and destination are the same place", url=to_store.url)
            return _copy(from_store, to_store, overwrite, progress or (lambda done, total: None))
        finally:
            to_store.close()
    finally:
        from_store.close()


def _copy(source: Store, destination: Store, overwrite: bool, progress: Any) -> Copied:
    parts = open_parts(source, ReadSettings())
    if parts[0].commit is None:
        from ckpt.tools.copy_stock import copy_foreign

        facts = copy_foreign(source, destination, parts, progress)
        return Copied(source.url, destination.url, "stock", **facts)
    done = Copied(source.url, destination.url, "ckpt-storage")
    _Copy(source, destination, parts[0], overwrite, progress, done).run()
    return done


@dataclass
class _Rank:
    """A rank's files at the destination."""

    ref: ManifestRef
    manifest: RankManifest
    token: str
    kept: frozenset[int]
    missing: int = 0


@dataclass
class _Job:
    rank: _Rank
    number: int


@dataclass
class _Leftovers:
    """Objects of an interrupted copy, by rank and token: the number of the file (-1: the manifest) and its size."""

    found: dict[tuple[int, str], dict[int, int]] = field(default_factory=lambda: defaultdict(dict))

    def note(self, name: ObjectName, size_bytes: int) -> None:
        if name.number is not None:
            self.found[name.rank, name.token][name.number] = size_bytes
        elif name.kind == "json":
            self.found[name.rank, name.token][-1] = size_bytes

    def of(self, rank: int) -> list[tuple[str, dict[int, int]]]:
        """Tokens and their objects, the one with the most first."""
        found = [(token, held) for (owner, token), held in self.found.items() if owner == rank]
        return sorted(found, key=lambda each: -len(each[1]))


class _Copy:
    def __init__(
        self,
        source: Store,
        destination: Store,
        checkpoint: Checkpoint,
        overwrite: bool,
        progress: Any,
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
        self._leftovers = _Leftovers()
        self._reader = RunReader(destination, self._pool)

    def run(self) -> None:
        if not self._overwrite and self._is_there():
            self._done.already_there = True
            return
        coordinator = Coordinator(self._to, self._objects)
        coordinator.look(overwrite=self._overwrite)
        self._look_for_leftovers()
        self._to.prepare(rank_directory(0))
        parallel = self._to.capabilities.parallel_parts
        at_once = min(_FILES_AT_ONCE, self._to.threads) if parallel else self._to.threads
        with thread_pool(at_once, "ckpt-cp") as threads:
            for job in in_order(threads, self._send, self._jobs(), ahead=2 * at_once, stop=self._stop):
                self._count(job)
        columns = self._columns()
        record = msgspec.structs.replace(
            self._commit,
            version=CommitRecord.__struct_defaults__[1],
            manifests=self._refs,
            metadata=msgspec.UNSET,
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
        with thread_pool(4, "ckpt-manifest") as threads:
            yield from zip(
                self._commit.manifests,
                in_order(threads, self._manifest, self._commit.manifests, ahead=4),
                strict=True,
            )

    def _columns(self) -> Columns:
        """The source's, with the new names."""
        for damage in self._indexed.left_over():
            raise FormatError(
                f"the source is not whole: {damage.message}", url=self._from.url, key=damage.key
            )
        files = [self._paths[path] for path in self._source_columns.files]
        return dataclasses.replace(self._source_columns, files=files, save_id=self._objects.token)

    def _compare(self, manifest: RankManifest) -> None:
        """Raise FormatError where the index says something else than a manifest: no copy of it would be whole."""
        items: list[list[ItemRecord]] = [[] for _ in manifest.files]
        for item in manifest.items:
            items[item.file].append(item)
        for file, held in zip(manifest.files, items, strict=True):
            for damage in self._indexed.compare(file.path, held):
                raise FormatError(
                    f"the source is not whole: {damage.message}", url=self._from.url, key=damage.key
                )

    # -- the destination -------------------------------------------------------------------------------

    def _is_there(self) -> bool:
        """Whether the destination holds the same checkpoint, by its records."""
        if read_commit(self._to) is None:
            return False
        there = open_checkpoint(self._to, ReadSettings())
        assert there.stored_commit is not None
        one, other = self._commit, there.stored_commit.record
        facts = ("created_at", "world_size", "data_bytes", "tags")
        if any(getattr(one, name) != getattr(other, name) for name in facts):
            return False
        if [ref.rank for ref in one.manifests] != [ref.rank for ref in other.manifests]:
            return False
        for (_, manifest), ref in zip(self._manifests(), other.manifests, strict=True):
            data = read_listed(self._to, ReadSettings(), ref, there.stored_commit)
            if _content(manifest) != _content(decode_manifest(data, url=self._to.url, key=ref.path)):
                return False
        return True

    def _look_for_leftovers(self) -> None:
        """What an interrupted copy may have left. A listing that lags costs only that more is sent again."""
        commit = read_commit(self._to)
        refs = [] if commit is None else commit.record.refs
        used = {name.token for ref in refs if (name := ObjectName.parse(ref.path)) is not None}
        for number, stat in enumerate(self._to.list("rank-")):
            if number >= _MAX_LEFTOVERS:
                return
            age_s = time.time() - (stat.modified_at_s or time.time())
            name = ObjectName.parse(stat.key)
            if name is not None and name.token not in used and age_s < _MAX_LEFTOVER_AGE_S:
                self._leftovers.note(name, stat.size_bytes)

    def _jobs(self) -> Iterator[_Job]:
        """Files to send, lazily. Each rank's manifest is written when its last file is there (`_count`)."""
        with thread_pool(self._to.threads, "ckpt-check") as threads:
            for ref, manifest in self._manifests():
                self._compare(manifest)
                rank = self._rank(ref, manifest, threads)
                for number, file in enumerate(manifest.files):
                    self._paths[file.path] = data_key(ref.rank, rank.token, number)
                    if number in rank.kept:
                        self._done.kept_files += 1
                        self._done.kept_bytes += file.size_bytes
                todo = [number for number in range(len(manifest.files)) if number not in rank.kept]
                rank.missing = len(todo)
                if not todo:
                    self._put_manifest(rank)
                for number in todo:
                    yield _Job(rank, number)

    def _rank(self, ref: ManifestRef, manifest: RankManifest, threads: Executor) -> _Rank:
        """A token for a rank: that of an interrupted copy if all it left under it is right, else a new one."""
        for token, held in self._leftovers.of(ref.rank):
            data = {number: size for number, size in held.items() if number >= 0}
            sizes = dict(enumerate(file.size_bytes for file in manifest.files))
            if not data or any(sizes.get(number) != size for number, size in data.items()):
                continue
            rank = _Rank(ref, manifest, token, frozenset(data))
            if -1 in held and not self._holds(manifest_key(ref.rank, token), _encoded(rank)):
                continue
            if all(self._is_right(rank, number, threads) for number in data):
                return rank
        return _Rank(ref, manifest, secrets.token_hex(8), frozenset())

    def _holds(self, key: str, expected: bytes) -> bool:
        try:
            found = self._to.stat(key).size_bytes
            return found == len(expected) and bytes(read_bytes(self._to, key)) == expected
        except NotFound:
            return False

    def _is_right(self, rank: _Rank, number: int, threads: Executor | None = None) -> bool:
        file, block = rank.manifest.files[number], rank.manifest.block_size_bytes
        return self._reader.matches(data_key(rank.ref.rank, rank.token, number), file, block, threads)

    def _send(self, job: _Job) -> _Job:
        rank = job.rank
        file = rank.manifest.files[job.number]
        body = VerifiedBody(
            self._from,
            file,
            rank.manifest.block_size_bytes,
            self._pool,
            self._stop,
            self._checkpoint.when_visible,
        )
        self._put(
            data_key(rank.ref.rank, rank.token, job.number), body, lambda: self._is_right(rank, job.number)
        )
        return job

    def _put(self, key: str, body: Body, is_right: Callable[[], bool]) -> None:
        """Put an object under a name that may be another copy's too: one that runs, and was taken for interrupted."""
        try:
            self._to.put(key, body, mode=PutMode.CREATE)
        except AlreadyExists as error:
            if not is_right():
                raise CommitConflict(
                    "another copy to this place is running; one at a time", url=self._to.url, key=key
                ) from error

    def _count(self, job: _Job) -> None:
        size = job.rank.manifest.files[job.number].size_bytes
        self._done.sent_files += 1
        self._done.sent_bytes += size
        self._progress(self._done.sent_bytes + self._done.kept_bytes, self._commit.data_bytes)
        job.rank.missing -= 1
        if job.rank.missing == 0:
            self._put_manifest(job.rank)

    def _put_manifest(self, rank: _Rank) -> None:
        key, data = manifest_key(rank.ref.rank, rank.token), _encoded(rank)
        self._put(key, CheckedBody(data), lambda: self._holds(key, data))
        self._refs.append(
            msgspec.structs.replace(
                rank.ref, path=key, size_bytes=len(data), crc64nvme=crc_text(crc64nvme(data))
            )
        )
        self._refs.sort(key=lambda ref: ref.rank)


def _encoded(rank: _Rank) -> bytes:
    """The manifest of a rank's copy: the same for the same token."""
    files = [
        msgspec.structs.replace(file, path=data_key(rank.ref.rank, rank.token, number))
        for number, file in enumerate(rank.manifest.files)
    ]
    return encode(
        msgspec.structs.replace(
            rank.manifest,
            version=RankManifest.__struct_defaults__[1],
            rank=rank.ref.rank,
            token=rank.token,
            files=files,
        )
    )


def _content(manifest: RankManifest) -> tuple[Any, ...]:
    """What two copies of a manifest have in common."""
    files: Sequence[FileRecord] = manifest.files
    return manifest.block_size_bytes, [(file.size_bytes, file.blocks) for file in files], manifest.items
