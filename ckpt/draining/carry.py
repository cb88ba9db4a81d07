"""Carry a committed checkpoint to another place: its objects under their own names, its commit last.

Names hold a token that was drawn for the save, so an object of that name and size is that object, and
nothing is sent twice. A node whose disk has some ranks' files carries those. Whoever then finds all
objects of the commit there commits: all nodes have the same record, so any may, and several at once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from ckpt.backends.base import PutMode, Store, UploadNote, exists, put_bytes
from ckpt.backends.bodies import Body, CheckedBody, Part
from ckpt.draining.unfinished import Unfinished
from ckpt.errors import (
    AlreadyExists,
    CommitConflict,
    CommitUnknown,
    ConfigurationError,
    FormatError,
    IntegrityError,
    NotCommitted,
    NotFound,
    StorageUnavailable,
)
from ckpt.format.config_files import unchanged
from ckpt.format.names import ObjectName, rank_directory
from ckpt.format.records import CommitRecord, ManifestRef, ObjectRef, RankManifest, StoredCommit, read_commit
from ckpt.reading.checkpoint import ReadSettings, read_listed
from ckpt.reading.latest import created_at_s, missing_object
from ckpt.siblings.materialised import check_beside
from ckpt.tools.record_checks import read_manifest
from ckpt.transfer.bandwidth import Pacer
from ckpt.transfer.buffer_pool import StagingPool
from ckpt.transfer.fetcher import StoredFile, at_once
from ckpt.transfer.relay_bodies import VerifiedBody, check_wanted
from ckpt.transfer.reports import FileReports, ReportBytes, no_report
from ckpt.transfer.threads import run_all, workers
from ckpt.writing.coordinator import Coordinator
from ckpt.writing.save_objects import SaveObjects
from ckpt.writing.stock_metadata import put_stock_metadata, stock_key, stock_metadata_of

_BUDGET_BYTES = 256 << 20
_FILES_AT_ONCE = 4
_SETTINGS = ReadSettings(visibility_timeout_s=0.0)

NO_BASE = "a checkpoint whose bytes it names is not durable yet"


@dataclass(frozen=True)
class Share:
    """Which files a node carries, of those that it has: others have copies of some.

    Attributes:
        ranks: those whose files are this node's own.
        left: of checkpoints that are older than this choice, by the ids of their commits: the manifests
            that are left to other nodes.
    """

    ranks: frozenset[int]
    left: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def has(self, record: CommitRecord, ref: ManifestRef) -> bool:
        left = self.left.get(record.id)
        return ref.rank in self.ranks if left is None else ref.path not in left


@dataclass
class Carried:
    """What became of a checkpoint.

    Attributes:
        sent_bytes: of data files, that this process has sent.
        lacks: the first object that the durable place still lacks, and why it is not committed; None if it is.
        was_there: it was committed there before.
        is_gone: it was committed there and removed.
        was_replaced: another save is committed at the source than the one that was to be carried.
    """

    sent_bytes: int = 0
    lacks: str | None = None
    was_there: bool = False
    is_gone: bool = False
    was_replaced: bool = False


@dataclass(frozen=True)
class _PacedBody:
    """A body that is sent no faster than a pacer allows."""

    body: VerifiedBody
    pacer: Pacer

    has_checksums = True

    @property
    def nbytes(self) -> int:
        return self.body.nbytes

    @contextlib.contextmanager
    def part(self, start: int, stop: int) -> Iterator[Part]:
        with self.body.part(start, stop) as part:
            yield Part(part.buffers, part.crc64nvme, self.pacer.wait)

    def crc64nvme(self) -> int:
        return self.body.crc64nvme()


@dataclass(frozen=True)
class Carrier:
    """Carries checkpoints between two places.

    Args:
        pacer: bounds the bandwidth of all that it sends.
        stop: set to have it end soon.
        progress: called with the data bytes that are there, and those of the whole checkpoint.
        share: default all that is here.
    """

    pacer: Pacer | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    progress: ReportBytes = no_report
    share: Share | None = None
    unfinished: Unfinished = field(default_factory=lambda: Unfinished(None))

    def carry(
        self,
        source: Store,
        destination: Store,
        *,
        commit_id: str | None = None,
        marks: bool = False,
        was_removed: Callable[[], bool] = lambda: False,
    ) -> Carried:
        """Send the objects that are here and not there; commit if all are there then.

        Args:
            commit_id: carry no other save: the order in which they are carried is that of those that were seen.
            marks: while objects of other nodes are missing, put this node's manifests there again: `ckpt gc` takes what it
                finds by the youngest object of a rank.
            was_removed: tells, once it is not committed there, whether it was: requests of that removal may still be carried out.

        Raises:
            NotCommitted, NotFound: no checkpoint is committed at the source, or it was removed meanwhile.
            IntegrityError, FormatError: the source is damaged; nothing that is damaged was sent.
            CommitConflict: another save, which is later, is committed at the destination.
            AlreadyExists: another program's checkpoint is there.
            StorageError: a storage refused, or could not be reached; also if an earlier save was committed meanwhile.
        """
        commit = read_commit(source)
        if commit is None:
            raise NotCommitted("no checkpoint is committed here", url=source.url)
        record = commit.record
        if commit_id not in (None, record.id):
            return Carried(was_replaced=True)
        before = read_commit(destination)
        if before == commit:
            try:
                _show(destination, commit)
            except NotFound:  # a late put brought back the record of one that was removed
                return Carried(is_gone=True)
            return Carried(was_there=True)
        _check_later(record, before, destination)
        coordinator = Coordinator(destination, SaveObjects())
        coordinator.look(overwrite=True, model=record.is_model)
        if coordinator.previous == commit:  # another node has committed it meanwhile
            return Carried(was_there=True)
        _check_later(record, coordinator.previous, destination)
        try:
            check_beside(destination, record)
        except ConfigurationError:
            return Carried(lacks=NO_BASE)
        if was_removed():
            return Carried(is_gone=True)
        try:
            done = self._send(commit, source, destination, marks=marks)
            done.is_gone = (
                done.lacks is None and was_removed()
            )  # meanwhile, after another node had committed it
            if done.lacks is None and not done.is_gone:
                self._commit(commit, destination, coordinator)
            return done
        except CommitConflict:
            # Another node has committed meanwhile. If that was an earlier save, this one still replaces it.
            _check_later(record, read_commit(destination), destination)
            raise StorageUnavailable(
                "an earlier save was committed here meanwhile", url=destination.url
            ) from None

    def _wanted(self, record: CommitRecord) -> list[ManifestRef]:
        refs = record.own_manifests
        return [ref for ref in refs if self.share is None or self.share.has(record, ref)]

    def _send(self, commit: StoredCommit, source: Store, destination: Store, *, marks: bool) -> Carried:
        record, done, lock, failed = commit.record, Carried(), threading.Lock(), threading.Event()
        sizes = {stat.key: stat.size_bytes for stat in destination.list()}
        pool, reports = StagingPool(_BUDGET_BYTES), FileReports(self.progress, record.data_bytes)

        def count(file: StoredFile, there_bytes: int) -> None:
            with lock:
                done.sent_bytes += file.size_bytes - there_bytes
            reports.whole(file.key, file.size_bytes)

        def check() -> None:
            check_wanted(self.stop)
            check_wanted(failed)

        def send(file: StoredFile) -> None:
            check()
            if sizes.get(file.key) == file.size_bytes:
                count(file, file.size_bytes)
                return
            checked = VerifiedBody(source, file, pool, check, at_once, partial(reports.part, file.key))
            body = checked if self.pacer is None else _PacedBody(checked, self.pacer)
            folder = source.url.rpartition("/")[2]
            with self.unfinished.note(folder, destination.url, file.key) as note:
                count(file, put_once(destination, file.key, body, note))

        def send_small(ref: ObjectRef) -> None:
            if sizes.get(ref.path) != ref.size_bytes:
                put_once(destination, ref.path, CheckedBody(read_listed(source, _SETTINGS, ref, commit)))

        with workers(min(_FILES_AT_ONCE, destination.threads), "ckpt-drain") as threads:
            for ref in self._wanted(record):
                if exists(source, ref.path):  # else it is another node's
                    manifest = read_manifest(source, _SETTINGS, commit, ref)
                    destination.prepare(rank_directory(ref.rank))
                    run_all(threads, send, files_of(ref, manifest), stop=failed)
                    failed.clear()
                    send_small(ref)
        config_files = list(record.config_files or ())
        for small in (record.described_by, *config_files):
            if exists(source, small.path):  # else it is another node's
                send_small(small)
        check_wanted(self.stop)
        done.lacks = missing_object(destination, record) or _missing_config_file(destination, config_files)
        if marks and done.lacks is not None:
            for ref in self._wanted(record):
                if ref.path in sizes and exists(source, ref.path):
                    put_bytes(destination, ref.path, bytes(read_listed(source, _SETTINGS, ref, commit)))
        return done

    def _commit(self, commit: StoredCommit, destination: Store, coordinator: Coordinator) -> None:
        stock_metadata = stock_metadata_of(destination, commit.record)
        try:
            coordinator.commit_as_is(commit, stock_metadata)
        except (CommitConflict, CommitUnknown) as error:
            was_refused = isinstance(error, CommitConflict) or isinstance(error.__cause__, AlreadyExists)
            if not was_refused or read_commit(destination) != commit:  # else another node was sooner
                raise


def _missing_config_file(store: Store, refs: Sequence[ObjectRef]) -> str | None:
    there = set(unchanged(store, refs))
    return next(
        (f"{ref.path}: not there, or not what was saved" for ref in refs if ref.path not in there), None
    )


def files_of(ref: ManifestRef, manifest: RankManifest) -> list[StoredFile]:
    """List the data files of a manifest; they lie beside it, under names that this library gives. Raises FormatError."""
    stem = ref.stem
    files = []
    for file in manifest.files:
        name = ObjectName.parse(file.path)
        if name is None or not name.is_data or name.stem != stem:
            raise FormatError(
                "lists a data file under a name that this library does not give it", key=ref.path
            )
        files.append(StoredFile(file.path, file.size_bytes, manifest.block_size_bytes, file.block_crcs()))
    return files


def put_once(destination: Store, key: str, body: Body, note: UploadNote | None = None) -> int:
    """Put an object that another process may put at the same time; return the bytes that were there.

    Raises StorageError, IntegrityError.
    """
    try:
        if note is not None:
            return destination.put_resumable(key, body, note, mode=PutMode.CREATE)
        destination.put(key, body, mode=PutMode.CREATE)
        return 0
    except AlreadyExists:
        size_bytes = destination.stat(key).size_bytes
        if size_bytes != body.nbytes:
            text = (
                f"has {size_bytes} bytes, {body.nbytes} are to be there: remove it, or drain to another place"
            )
            raise IntegrityError(text, url=destination.url, key=key) from None
        return size_bytes


def _show(destination: Store, commit: StoredCommit) -> None:
    """Put `.metadata` where a process was killed between its commit and that."""
    if commit.record.is_for_stock and not exists(destination, stock_key(commit.record)):
        put_stock_metadata(destination, commit, stock_metadata_of(destination, commit.record))


def _check_later(record: CommitRecord, before: StoredCommit | None, destination: Store) -> None:
    """Raise CommitConflict if what is committed there must not be replaced by an earlier save."""
    if before is not None and before.is_ours and not _is_later(record, before.record):
        text = (
            "a save that is later is committed here already, by the clocks of those who made them; it stays"
        )
        raise CommitConflict(text, url=destination.url)


def _is_later(record: CommitRecord, than: CommitRecord) -> bool:
    made_s, other_s = created_at_s(record), created_at_s(than)
    return made_s is not None and other_s is not None and made_s >= other_s  # they count seconds
