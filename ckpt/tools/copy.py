"""Copy a checkpoint to another place, verified on its way and committed last: `ckpt.copy`.

A copy is a save like any other, of the same blocks with the same checksums; its objects and records
have new names. An interrupted copy is continued: its files are read, and kept if they are right.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from ckpt.backends.base import PutMode, Store, exists, read_bytes
from ckpt.backends.bodies import Body, CheckedBody
from ckpt.backends.registry import open_store
from ckpt.consistency.block_digests import digest_of
from ckpt.consistency.checksums import crc64nvme, crc_text
from ckpt.consistency.commit import proves_no_commit
from ckpt.consistency.expected import checked_expect
from ckpt.errors import (
    AlreadyExists,
    CheckpointError,
    CommitConflict,
    ConfigurationError,
    FormatError,
    IntegrityError,
    NotFound,
    short_traceback,
)
from ckpt.format.config_files import check_free, listed_before, put_config_files
from ckpt.format.names import (
    MODEL_PREFIX,
    ObjectName,
    data_key,
    manifest_key,
    model_key,
    rank_directory,
    split_path,
)
from ckpt.format.records import (
    FORMAT_VERSION,
    MODEL_VERSION,
    ManifestRef,
    ObjectRef,
    RankManifest,
    StoredCommit,
    encode,
    read_commit,
)
from ckpt.reading.checkpoint import Checkpoint, ReadSettings, read_listed, stored_file
from ckpt.reading.opening import open_checkpoint, open_parts
from ckpt.siblings.materialised import as_ranks, check_beside, needed
from ckpt.tools.copy_claims import CopyClaims
from ckpt.tools.findings import Copied, Damage, stems_of
from ckpt.tools.gc import DEFAULT_GRACE_S, time_of
from ckpt.tools.record_checks import IndexedItems, each_manifest, items_by_file, read_manifest
from ckpt.transfer.buffer_pool import StagingPool
from ckpt.transfer.relay_bodies import RunReader, VerifiedBody, check_wanted
from ckpt.transfer.reports import FileReports, ReportBytes, no_report
from ckpt.transfer.threads import in_order, workers
from ckpt.writing.coordinator import Coordinator
from ckpt.writing.save_objects import SaveObjects
from ckpt.writing.stock_metadata import put_stock_metadata, stock_key, stock_metadata_of

_BUDGET_BYTES = 256 << 20
_FILES_AT_ONCE = 4
_MAX_LEFTOVERS = 1 << 22
_MAX_LEFTOVER_AGE_S = DEFAULT_GRACE_S / 2
"""Older objects are not used: `ckpt gc` could remove them before the commit."""


@short_traceback
def copy(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    destination_options: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    materialise: bool = False,
    threads: int | None = None,
    progress: ReportBytes | None = None,
    expect: str | None = None,
) -> Copied:
    """Copy a checkpoint; `destination` becomes a checkpoint when all of it is there.

    Every block is checked against its checksum before it is sent. Called again after an interruption, it sends only the
    missing files. A stock checkpoint is copied file by file, its `.metadata` last.

    Args:
        storage_options: for the source; for both, unless there are `destination_options`.
        overwrite: replace another checkpoint of this library, which stays at the destination until the commit.
        materialise: give the copy of a checkpoint that names bytes of others those bytes too, so that it stands alone.
            Else it names them in the same way, and they must be beside it.
        threads: parallel transfers.
        progress: called with the data bytes done so far and those in all.
        expect: the digest of the source, `sha256:...`; anything else is refused. The copy has one of its own.

    Raises:
        NotFound, NotCommitted: there is no checkpoint at the source.
        IntegrityError: the source is damaged; nothing becomes visible at the destination.
        AlreadyExists: another checkpoint or file is at the destination.
        CommitError: the commit failed; the checkpoint that was committed before still is.
        StorageError: a storage refused, or could not be reached.
    """
    options = storage_options if destination_options is None else destination_options
    with (
        contextlib.closing(open_store(source, storage_options, threads=threads)) as from_store,
        contextlib.closing(open_store(destination, options, threads=threads)) as to_store,
    ):
        if from_store.url == to_store.url:
            raise ConfigurationError("source and destination are the same place", url=to_store.url)
        parts = open_parts(from_store, ReadSettings(expect=checked_expect(expect)))
        if parts[0].commit is None:
            from ckpt.tools.copy_stock import copy_stock

            return copy_stock(from_store, to_store, parts, progress or no_report)
        with contextlib.closing(parts[0]) as checkpoint:
            return _CheckpointCopy(checkpoint, to_store, materialise, progress or no_report).run(overwrite)


@dataclass
class _RankCopy:
    """The files of one rank at the destination."""

    ref: ManifestRef
    manifest: RankManifest
    token: str
    kept: frozenset[int]  # numbers of the files that an interrupted copy has left, and that are right
    missing: int = 0  # number of files still to be sent

    def key(self, number: int) -> str:
        """Name a data file."""
        if self.manifest.version == MODEL_VERSION:
            return model_key(self.token, number, len(self.manifest.files))
        return data_key(self.ref.rank, self.token, number)

    def encode(self) -> bytes:
        """Make the manifest, the same bytes for the same token."""
        files = [
            msgspec.structs.replace(file, path=self.key(number))
            for number, file in enumerate(self.manifest.files)
        ]
        version = max(self.manifest.version, FORMAT_VERSION)
        facts = {"version": version, "rank": self.ref.rank, "token": self.token, "files": files}
        return encode(msgspec.structs.replace(self.manifest, **facts))


_FileCopy = tuple[_RankCopy, int]
"""A data file to send: its rank and number."""

_Leftovers = dict[int, dict[str, dict[int | None, int]]]
"""Sizes of the objects of interrupted copies: by rank, token and number (None: the manifest)."""


class _CheckpointCopy:
    def __init__(
        self, checkpoint: Checkpoint, destination: Store, materialise: bool, progress: ReportBytes
    ) -> None:
        assert checkpoint.stored_commit is not None
        source = checkpoint.store
        self._from, self._to, self._checkpoint = source, destination, checkpoint
        self._stored_commit = checkpoint.stored_commit
        self._commit = self._stored_commit.record
        self._reports = FileReports(progress, self._commit.data_bytes)
        self._materialise = materialise and bool(self._commit.owners)
        ranks = as_ranks(self._commit)
        self._ranks = {ref.path: rank for ref, rank in ranks if self._materialise or not ref.owner}
        self._done = Copied(source.url, destination.url, "ckpt-storage")
        self._pool = StagingPool(_BUDGET_BYTES)
        self._reader = RunReader(destination, self._pool)
        self._stop = threading.Event()
        self._indexed = IndexedItems(checkpoint.columns)
        self._paths: dict[str, str] = {}
        self._refs: list[ManifestRef] = []
        self._objects = SaveObjects()
        self._has_sent = False
        self._claims = CopyClaims(destination, self._objects.token)

    def run(self, overwrite: bool) -> Copied:
        if not overwrite and (same := self._same_commit()) is not None:
            if same.record.is_for_stock and not exists(
                self._to, stock_key(same.record)
            ):  # interrupted right after its commit
                put_stock_metadata(self._to, same, stock_metadata_of(self._to, same.record))
            self._put_config_files(self._read_config_files(), same)
            self._done.already_there = True
            return self._done
        if not self._materialise:
            check_beside(self._to, self._commit)
        coordinator = Coordinator(self._to, self._objects)
        coordinator.look(overwrite=overwrite, model=self._commit.is_model)
        files = self._read_config_files()
        leftovers = self._find_leftovers()
        self._to.prepare(rank_directory(0))
        try:
            self._send_files(leftovers)
        except BaseException:
            if not self._has_sent:
                self._claims.withdraw()
            raise
        left = self._indexed.left_over()
        self._refuse(damage for damage in left if self._materialise or not split_path(damage.key or "")[0])
        columns = self._indexed.columns
        renamed = [self._paths.get(path, path) for path in columns.files]  # those of others stay
        facts = self._facts()
        try:
            facts["config_files"] = self._put_config_files(files, coordinator.previous) or msgspec.UNSET
            coordinator.commit(
                dataclasses.replace(columns, files=renamed, save_id=self._objects.token),
                msgspec.structs.replace(self._commit, **facts),
                check=self._claims.check,
            )
        except CheckpointError as error:
            if proves_no_commit(error):
                self._objects.discard(self._to)  # the index; data files serve the next attempt
            raise
        self._claims.close()
        return self._done

    def _read_config_files(self) -> dict[str, bytes]:
        """Read a model's configuration. Raises IntegrityError, AlreadyExists if another one is at the destination."""
        settings = self._checkpoint.settings
        refs = self._commit.config_files or ()
        files = {ref.path: bytes(read_listed(self._from, settings, ref, self._stored_commit)) for ref in refs}
        check_free(self._to, files)
        return files

    def _put_config_files(self, files: Mapping[str, bytes], previous: StoredCommit | None) -> list[ObjectRef]:
        digests = self._commit.block_digests
        algorithm = digests.algorithm if digests else None
        return put_config_files(self._to, files, listed_before(previous), algorithm)

    def _facts(self) -> dict[str, Any]:
        """Return what is different in the commit record of the copy."""
        manifests = sorted(self._refs, key=lambda ref: ref.rank)
        if not self._materialise:
            version = max(self._commit.version, FORMAT_VERSION)
            manifests += self._commit.foreign_manifests
            return {"version": version, "manifests": manifests, "metadata": msgspec.UNSET}
        return {
            "version": FORMAT_VERSION,
            "referable": msgspec.UNSET,
            "bases": msgspec.UNSET,
            "timings": msgspec.UNSET,  # of other ranks
            "manifests": manifests,
            "world_size": max(self._ranks.values(), default=0) + 1,
            "data_bytes": sum(ref.data_bytes for ref in manifests),
        }

    def _send_files(self, leftovers: _Leftovers) -> None:
        parallel = self._to.capabilities.parallel_parts
        at_once = min(_FILES_AT_ONCE, self._to.threads) if parallel else self._to.threads
        with workers(at_once, "ckpt-cp") as threads:
            files = self._files(leftovers)
            for file in in_order(threads, self._send, files, ahead=2 * at_once, stop=self._stop):
                self._count(file)

    # -- the source ------------------------------------------------------------------------------------

    def _manifests(self) -> Iterator[tuple[ManifestRef, RankManifest]]:
        """Yield the manifests of the copy, with the paths of the source."""
        read = partial(read_manifest, self._from, self._checkpoint.settings, self._stored_commit)
        refs = [ref for ref in self._commit.manifests if ref.path in self._ranks]
        for ref, manifest in each_manifest(self._from, refs, read):
            if not ref.owner:
                yield ref, manifest
                continue
            yield needed(ref, self._ranks[ref.path], manifest, self._indexed.offsets)

    def _refuse(self, damages: Iterable[Damage]) -> None:
        """Raise FormatError if the index and a manifest disagree, as in a copy they would too."""
        for damage in damages:
            raise FormatError(f"the source is damaged: {damage.message}", url=self._from.url, key=damage.key)

    # -- the destination -------------------------------------------------------------------------------

    def _same_commit(self) -> StoredCommit | None:
        """Read the destination's commit, if that checkpoint is the same by its records."""
        if read_commit(self._to) is None:
            return None
        existing = open_checkpoint(self._to, ReadSettings())
        assert existing.stored_commit is not None
        ours, theirs = self._commit, existing.stored_commit.record
        facts = ["created_at", "tags"] + ([] if self._materialise else ["world_size", "data_bytes"])
        if any(getattr(ours, name) != getattr(theirs, name) for name in facts):
            return None
        if sorted(self._ranks.values()) != sorted(ref.rank for ref in theirs.own_manifests):
            return None
        if not self._materialise and ours.foreign_manifests != theirs.foreign_manifests:
            return None
        by_rank = {ref.rank: ref for ref in theirs.own_manifests}
        for ref, manifest in self._manifests():
            same = by_rank[ref.rank]
            theirs_manifest = read_manifest(self._to, ReadSettings(), existing.stored_commit, same)
            if _content(manifest) != _content(theirs_manifest):
                return None
        return existing.stored_commit

    def _find_leftovers(self) -> _Leftovers:
        """List the objects of interrupted copies. Objects that it misses are sent again."""
        commit = read_commit(self._to)
        used = stems_of(None if commit is None else commit.record)
        leftovers: _Leftovers = defaultdict(lambda: defaultdict(dict))
        now_s: float | None = None
        listed = map(self._to.list, ("rank-", MODEL_PREFIX) if self._commit.is_model else ("rank-",))
        for stat in itertools.islice(itertools.chain.from_iterable(listed), _MAX_LEFTOVERS):
            name = ObjectName.parse(stat.key)
            if name is None or name.stem in used or not (name.is_data or name.kind == "json"):
                continue
            now_s = time_of(self._to) if now_s is None else now_s
            if stat.modified_at_s is None or now_s - stat.modified_at_s < _MAX_LEFTOVER_AGE_S:
                leftovers[name.rank][name.token][name.number] = stat.size_bytes
        return leftovers

    def _files(self, leftovers: _Leftovers) -> Iterator[_FileCopy]:
        """Yield the files to send, lazily. `_count` puts a manifest after the rank's last file."""
        with workers(self._to.threads, "ckpt-check") as threads:
            for ref, manifest in self._manifests():
                for file, items in zip(manifest.files, items_by_file(manifest), strict=True):
                    self._refuse(self._indexed.compare(file.path, items))
                rank = self._rank(ref, manifest, leftovers.get(ref.rank, {}), threads)
                for number, file in enumerate(manifest.files):
                    self._paths[file.path] = rank.key(number)
                    if number in rank.kept:
                        self._done.count(file.size_bytes, sent=False)
                        self._reports.whole(file.path, file.size_bytes)
                missing = [number for number in range(len(manifest.files)) if number not in rank.kept]
                rank.missing = len(missing)
                if not missing:
                    self._put_manifest(rank)
                for number in missing:
                    yield rank, number

    def _rank(
        self,
        ref: ManifestRef,
        manifest: RankManifest,
        leftovers: dict[str, dict[int | None, int]],
        threads: Executor,
    ) -> _RankCopy:
        """Continue an interrupted copy of a rank if all its objects are right, else begin a new one."""
        expected = {number: file.size_bytes for number, file in enumerate(manifest.files)}
        # The one with the most objects first.
        for token, sizes in sorted(leftovers.items(), key=lambda each: len(each[1]), reverse=True):
            data = {number: size for number, size in sizes.items() if number is not None}
            if not data or not data.items() <= expected.items() or not self._claims.take(token):
                continue
            rank = _RankCopy(ref, manifest, token, frozenset(data))
            if None in sizes and not self._holds(manifest_key(ref.rank, token), rank.encode()):
                continue
            if all(self._is_right(rank, number, threads) for number in data):
                return rank
        return _RankCopy(ref, manifest, self._claims.new(), frozenset())

    def _holds(self, key: str, expected: bytes) -> bool:
        try:
            return read_bytes(self._to, key, size_bytes=len(expected)) == expected
        except (NotFound, IntegrityError):
            return False

    def _is_right(self, rank: _RankCopy, number: int, threads: Executor | None = None) -> bool:
        record, block = rank.manifest.files[number], rank.manifest.block_size_bytes
        algorithm = self._checkpoint.settings.algorithm(self._commit)
        stored = stored_file(rank.key(number), record, block, algorithm, self._to.url)
        return self._reader.matches(stored, threads)

    def _send(self, file: _FileCopy) -> _FileCopy:
        rank, number = file
        record, block = rank.manifest.files[number], rank.manifest.block_size_bytes
        when_visible = self._checkpoint.when_visible
        algorithm = self._checkpoint.settings.algorithm(self._commit)
        source = stored_file(record.path, record, block, algorithm, self._from.url)
        wanted, sent = partial(check_wanted, self._stop), partial(self._reports.part, record.path)
        body = VerifiedBody(self._from, source, self._pool, wanted, when_visible, sent)
        self._put(rank.key(number), body, lambda: self._is_right(rank, number))
        self._has_sent = True
        return file

    def _put(self, key: str, body: Body, is_right: Callable[[], bool]) -> None:
        """Put an object under a name that may belong to another copy, which still runs."""
        try:
            self._to.put(key, body, mode=PutMode.CREATE)
        except AlreadyExists as error:
            if not is_right():
                text = "another copy to this place is running; wait for it, or stop it"
                raise CommitConflict(text, url=self._to.url, key=key) from error

    def _count(self, file: _FileCopy) -> None:
        rank, number = file
        record = rank.manifest.files[number]
        self._done.count(record.size_bytes, sent=True)
        self._reports.whole(record.path, record.size_bytes)
        rank.missing -= 1
        if rank.missing == 0:
            self._put_manifest(rank)

    def _put_manifest(self, rank: _RankCopy) -> None:
        key, data = manifest_key(rank.ref.rank, rank.token), rank.encode()
        self._put(key, CheckedBody(data), lambda: self._holds(key, data))
        checks: dict[str, str] = {"crc64nvme": crc_text(crc64nvme(data))}
        if self._commit.block_digests:
            checks["digest"] = digest_of(self._commit.block_digests.algorithm, data).hex()
        self._refs.append(msgspec.structs.replace(rank.ref, path=key, size_bytes=len(data), **checks))


def _content(manifest: RankManifest) -> tuple[Any, ...]:
    """Take the parts of a manifest that are the same in all copies."""
    files = [(file.size_bytes, file.blocks) for file in manifest.files]
    return manifest.block_size_bytes, files, manifest.items
