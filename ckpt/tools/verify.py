"""Check every byte of a checkpoint against its checksum, and its records against each other."""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from ckpt.backends.base import Store
from ckpt.backends.registry import open_store
from ckpt.consistency import environment
from ckpt.consistency.checksums import crc64nvme
from ckpt.consistency.commit import COMMIT_KEY, STOCK_METADATA_KEY
from ckpt.errors import (
    CommitConflict,
    FormatError,
    IntegrityError,
    NotFound,
    NotVisible,
    Truncated,
    UnsafeContent,
)
from ckpt.format.columns import Columns, columns_of
from ckpt.format.records import (
    FileRecord,
    ItemRecord,
    ManifestRef,
    RankManifest,
    StoredCommit,
    decode_manifest,
    read_commit,
)
from ckpt.reading.checkpoint import Checkpoint, ReadSettings, open_parts, read_listed
from ckpt.tools.findings import Damage, Verification, affected, find_strays
from ckpt.tools.record_checks import IndexedItems, check_coverage_of, check_stock_metadata, items_by_file
from ckpt.transfer.buffer_pool import MIN_MEMORY_BUDGET_BYTES, StagingPool
from ckpt.transfer.relay_bodies import RUN_BYTES
from ckpt.transfer.reports import ReportBytes, no_report
from ckpt.transfer.tensor_memory import memory_of
from ckpt.transfer.threads import in_order, workers

_MAX_UNKNOWN_ITEMS = 1 << 16

T = TypeVar("T")
Checked = tuple[list[Damage], int]
"""Damages, and the number of bytes that were compared."""


def verify(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    quick: bool = False,
    threads: int | None = None,
    progress: ReportBytes | None = None,
) -> Verification:
    """Check every byte and record of the checkpoint at `url`; look for strays.

    Takes 128 MiB of memory beside the records. Changes nothing, and runs no code of the checkpoint.
    Damages are in the result; they raise no error.

    Args:
        quick: read records only, no data; compare sizes.
        threads: number of parallel reads.
        progress: called with the data bytes checked so far and those in all.

    Raises:
        NotFound, NotCommitted: there is no checkpoint.
        CommitConflict: another save replaced it meanwhile.
        StorageError: the storage refused, or could not be reached.
    """
    store = open_store(url, storage_options, threads=threads)
    try:
        with workers(store.threads, "ckpt-verify") as pool:
            return _verify(store, pool, quick, progress or no_report)
    finally:
        store.close()


def _verify(store: Store, threads: Executor, quick: bool, progress: ReportBytes) -> Verification:
    prompt = store.capabilities.cross_client_visibility
    settings = ReadSettings(visibility_timeout_s=0.0 if prompt else None)
    try:
        parts = open_parts(store, settings)
    except (IntegrityError, FormatError, UnsafeContent, NotVisible) as error:
        commit = read_commit(store)
        format_name = "stock" if commit is None else "ckpt-storage"
        result = Verification(store.url, format_name, quick, damages=[Damage.of("record", error)])
        if commit is not None and error.key != COMMIT_KEY:
            _OwnCheck(store, threads, settings, result, commit, None, progress).run()
        return result
    stored = parts[0].stored_commit
    if stored is None:
        from ckpt.tools.verify_stock import verify_stock

        return verify_stock(store, parts, threads, quick=quick, progress=progress)
    result = Verification(store.url, "ckpt-storage", quick)
    _OwnCheck(store, threads, settings, result, stored, parts[0], progress).run()
    return result


class _UnreadBytes(Damage):
    """Bytes that could not be read: no news if their file is known to be missing or too short."""


@dataclass
class _File:
    """A data file under check: its record, its checksums, and its items by offset."""

    record: FileRecord
    block_size_bytes: int
    crcs: Sequence[int]
    items: list[ItemRecord]
    offsets: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.items.sort(key=lambda item: item.offset)
        self.offsets = [item.offset for item in self.items]

    def fqns(self, start: int, stop: int) -> list[str]:
        """List the names whose bytes are in `[start, stop)`."""
        first = max(0, bisect_right(self.offsets, start) - 1)
        touched = self.items[first : bisect_left(self.offsets, stop)]
        return [item.fqn for item in touched if item.offset + item.length > start]

    def damage(
        self, kind: str, message: str, start: int, stop: int, damage_type: type[Damage] = Damage
    ) -> Damage:
        return damage_type(kind, message, self.record.path, start, stop, *affected(self.fqns(start, stop)))


class _OwnCheck:
    """Check a checkpoint that this library committed."""

    def __init__(
        self,
        store: Store,
        threads: Executor,
        settings: ReadSettings,
        result: Verification,
        commit: StoredCommit,
        checkpoint: Checkpoint | None,
        progress: ReportBytes,
    ) -> None:
        """`checkpoint` is None where its index is damaged."""
        self._store, self._threads, self._result = store, threads, result
        self._stored, self._progress = commit, progress
        self._commit = commit.record
        self._deadline_s = environment.monotonic() + settings.timeout_s(store)
        self._verify = settings.verify
        self._pool = StagingPool(MIN_MEMORY_BUDGET_BYTES)
        self._checkpoint = checkpoint
        self._indexed: IndexedItems | None = None
        self._columns: Columns | None = None
        self._items = 0  # in the manifests
        self._misfits: set[str] = set()  # files that are missing or of another size
        self._known = {COMMIT_KEY, STOCK_METADATA_KEY, self._commit.described_by.path}

    def run(self) -> None:
        self._result.id = self._commit.id
        if self._checkpoint is not None:
            self._check_index(self._checkpoint)
        for damages, nbytes in in_order(
            self._threads, lambda step: step(), self._steps(), ahead=4 * self._store.threads
        ):
            for damage in damages:
                if not (isinstance(damage, _UnreadBytes) and damage.key in self._misfits):
                    self._add(damage)
            self._result.checked_bytes += nbytes
            self._progress(self._result.checked_bytes, self._commit.data_bytes)
        if self._checkpoint is not None and self._indexed is not None and self._columns is not None:
            self._check_index_contents(self._checkpoint, self._indexed, self._columns)
        self._result.strays = find_strays(self._store, self._known)
        if read_commit(self._store) != self._stored:
            raise CommitConflict(
                "this checkpoint was replaced or removed while it was being verified; verify again",
                url=self._store.url,
                key=COMMIT_KEY,
            )

    def _check_index(self, checkpoint: Checkpoint) -> None:
        try:
            columns = columns_of(checkpoint.metadata, url=self._store.url)
        except FormatError as error:
            self._result.add(Damage.of("record", error))
            return
        self._indexed, self._columns = IndexedItems(columns), columns

    def _check_index_contents(self, checkpoint: Checkpoint, indexed: IndexedItems, columns: Columns) -> None:
        """Check every item of the index, unless it lists far more items than are stored."""
        for damage in indexed.left_over():
            self._add(damage)
        if indexed.count > 2 * self._items + _MAX_UNKNOWN_ITEMS:
            message = f"the index lists {indexed.count:,} items, the readable manifests only {self._items:,}"
            self._add(Damage("disagreement", message, checkpoint.metadata_key))
            return
        for damage in check_coverage_of(columns):
            self._result.add(damage)
        backoff = environment.Backoff(self._deadline_s - environment.monotonic())
        while True:
            damages = list(check_stock_metadata(self._store, self._commit, checkpoint, columns))
            if not damages or backoff.is_over:
                break
            backoff.pause()  # storage that lags may show the commit before `.metadata`
        for damage in damages:
            self._result.add(damage)

    def _add(self, damage: Damage) -> None:
        """Add a damage; extend the last one if this one begins where that ended."""
        last = self._result.damages[-1] if self._result.damages else None
        end = None if last is None else (last.kind, last.key, last.stop)
        if last is None or damage.start is None or end != (damage.kind, damage.key, damage.start):
            self._result.add(damage)
            return
        fqns, count = affected([*last.fqns, *damage.fqns])
        shared = bool(set(last.fqns) & set(damage.fqns))  # a name at the border is in both
        count = max(count, last.fqn_count + damage.fqn_count - shared)
        self._result.damages[-1] = replace(last, stop=damage.stop, fqns=fqns, fqn_count=count)

    # -- data ------------------------------------------------------------------------------------------

    def _steps(self) -> Iterator[Callable[[], Checked]]:
        """Yield the steps of the check, lazily: only a few manifests are in memory at a time."""
        with workers(self._store.threads, "ckpt-manifest") as threads:
            manifests = in_order(
                threads, self._manifest, self._commit.manifests, ahead=min(4, self._store.threads)
            )
            for ref, manifest in zip(self._commit.manifests, manifests, strict=True):
                self._known.add(ref.path)
                if isinstance(manifest, Damage):
                    yield partial(_known, [manifest])
                else:
                    yield from self._check_files(manifest)

    def _manifest(self, ref: ManifestRef) -> RankManifest | Damage:
        settings = ReadSettings(visibility_timeout_s=max(0.0, self._deadline_s - environment.monotonic()))
        try:
            data = read_listed(self._store, settings, ref, self._stored)
            return decode_manifest(data, url=self._store.url, key=ref.path)
        except (IntegrityError, FormatError, UnsafeContent, NotVisible) as error:
            fqns = [] if self._indexed is None else self._indexed.fqns_beside(ref.path)
            kind = "missing" if isinstance(error, NotVisible) else "record"
            return replace(Damage.of(kind, error, fqns), key=ref.path)

    def _check_files(self, manifest: RankManifest) -> Iterator[Callable[[], Checked]]:
        self._items += len(manifest.items)
        for record, items in zip(manifest.files, items_by_file(manifest), strict=True):
            self._known.add(record.path)
            file = _File(record, manifest.block_size_bytes, record.block_crcs(), items)
            if self._indexed is not None:
                yield partial(_known, self._indexed.compare(record.path, file.items))
            self._result.checked_files += 1
            yield partial(self._check_size, file)
            if not self._result.quick:
                step = max(RUN_BYTES // file.block_size_bytes, 1) * file.block_size_bytes
                for start in range(0, record.size_bytes, step):
                    yield partial(self._check_run, file, start, min(start + step, record.size_bytes))

    def _check_size(self, file: _File) -> Checked:
        path, expected = file.record.path, file.record.size_bytes
        try:
            size = self._when_visible(lambda: self._store.stat(path).size_bytes)
        except NotFound:
            damage = file.damage("missing", "the commit lists this file, but it is not there", 0, expected)
        except UnsafeContent as error:
            damage = Damage.of("missing", error, file.fqns(0, expected))
        else:
            if size == expected:
                return [], 0
            message = f"has {size} bytes, {expected} were written"
            damage = file.damage("size", message, min(size, expected), max(size, expected))
        self._misfits.add(path)
        return [damage], 0

    def _when_visible(self, read: Callable[[], T]) -> T:
        """Call `read` again until storage that lags must show the object. Raises NotFound."""
        backoff = environment.Backoff(self._deadline_s - environment.monotonic())
        while True:
            try:
                return read()
            except NotFound:
                if backoff.is_over:
                    raise
                backoff.pause()

    def _check_run(self, file: _File, start: int, stop: int) -> Checked:
        block = file.block_size_bytes
        with self._pool.take(stop - start) as scratch:
            memory = memory_of(scratch)
            try:
                self._when_visible(lambda: self._store.read_into(file.record.path, start, [memory]))
            except (Truncated, NotFound, UnsafeContent):
                return list(self._check_blocks(file, range(start, stop, block), stop, memory)), 0
            bad = [
                at
                for at in range(start, stop, block)
                if crc64nvme(memory[at - start : min(at + block, stop) - start]) != file.crcs[at // block]
            ]
            # Perhaps they were only damaged on the way: read them once more.
            damages = list(self._check_blocks(file, bad, stop, memory))
        return damages, stop - start

    def _check_blocks(
        self, file: _File, starts: Iterable[int], stop: int, memory: memoryview
    ) -> Iterator[Damage]:
        """Read blocks one by one; yield those that are damaged."""
        for start in starts:
            end = min(start + file.block_size_bytes, stop)
            try:
                self._store.read_into(file.record.path, start, [memory[: end - start]])
            except (Truncated, NotFound, UnsafeContent):
                message = "the file exists, but these bytes cannot be read"
                yield file.damage("missing", message, start, end, _UnreadBytes)
                continue
            if crc64nvme(memory[: end - start]) != file.crcs[start // file.block_size_bytes]:
                yield file.damage("checksum", "the stored bytes do not match their checksum", start, end)


def _known(damages: list[Damage]) -> Checked:
    return damages, 0
