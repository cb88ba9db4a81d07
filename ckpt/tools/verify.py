"""`ckpt.verify`: every byte of a checkpoint against its checksum, and its records against each other."""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
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
from ckpt.tools.findings import Damage, Verification, concerned, find_strays
from ckpt.tools.record_checks import IndexedItems, check_coverage_of, check_stock_metadata
from ckpt.transfer.buffer_pool import MIN_MEMORY_BUDGET_BYTES, StagingPool
from ckpt.transfer.relay_bodies import RUN_BYTES
from ckpt.transfer.tensor_memory import memory_of
from ckpt.transfer.threads import in_order, thread_pool

__all__ = ["verify"]

_MAX_UNKNOWN_ITEMS = 1 << 16

_UNREAD = "cannot be read, though the file is there"

T = TypeVar("T")
Progress = Callable[[int, int], None]


def verify(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    quick: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Check the checkpoint at `url`: every byte, every record, every tensor's coverage; look for strays.

    Memory stays below 128 MiB and the records'. Nothing is changed, and nothing of the checkpoint is run. What is
    damaged is in the result, not raised.

    Args:
        quick: read records only, no data; sizes are compared.
        threads: reads at the same time.
        progress: called with the data bytes checked so far and those in all.

    Raises:
        NotFound, NotCommitted: there is no checkpoint.
        CommitConflict: a save replaced it meanwhile.
        StorageError: the storage refused, or could not be reached.
    """
    store = open_store(url, storage_options, threads=threads)
    try:
        with thread_pool(store.threads, "ckpt-verify") as workers:
            return _verify(store, workers, quick, progress or (lambda done, total: None))
    finally:
        store.close()


def _verify(store: Store, threads: Executor, quick: bool, progress: Progress) -> Verification:
    prompt = store.capabilities.cross_client_visibility
    settings = ReadSettings(visibility_timeout_s=0.0 if prompt else None)
    try:
        parts = open_parts(store, settings)
    except (IntegrityError, FormatError, UnsafeContent, NotVisible) as error:
        commit = read_commit(store)
        format_name = "stock" if commit is None else "ckpt-storage"
        found = Verification(store.url, format_name, quick, damages=[Damage.of("record", error)])
        if commit is None or error.key == COMMIT_KEY:
            return found
        _OwnCheck(store, threads, settings, found, commit, None, progress).run()
        return found
    stored = parts[0].stored_commit
    if stored is None:
        from ckpt.tools.verify_stock import verify_foreign

        return verify_foreign(store, parts, threads, quick=quick, progress=progress)
    found = Verification(store.url, "ckpt-storage", quick)
    _OwnCheck(store, threads, settings, found, stored, parts[0], progress).run()
    return found


@dataclass
class _File:
    """A data file under check: its record, and its items in order."""

    record: FileRecord
    block_size_bytes: int
    crcs: Sequence[int]
    items: list[ItemRecord]
    offsets: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.items.sort(key=lambda item: item.offset)
        self.offsets = [item.offset for item in self.items]

    def fqns(self, start: int, stop: int) -> list[str]:
        """Whose bytes are in `[start, stop)`."""
        first = max(0, bisect_right(self.offsets, start) - 1)
        touched = self.items[first : bisect_left(self.offsets, stop)]
        return [item.fqn for item in touched if item.offset + item.length > start]

    def damage(self, kind: str, message: str, start: int, stop: int) -> Damage:
        return Damage(kind, message, self.record.path, start, stop, *concerned(self.fqns(start, stop)))


class _OwnCheck:
    """The check of a checkpoint that this library committed."""

    def __init__(
        self,
        store: Store,
        threads: Executor,
        settings: ReadSettings,
        found: Verification,
        commit: StoredCommit,
        checkpoint: Checkpoint | None,
        progress: Progress,
    ) -> None:
        """`checkpoint` is None where its index is damaged."""
        self._store, self._threads, self._found = store, threads, found
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
        self._found.id = self._commit.id
        if self._checkpoint is not None:
            self._check_index(self._checkpoint)
        for damages, nbytes in in_order(
            self._threads, lambda work: work(), self._work(), ahead=4 * self._store.threads
        ):
            for damage in damages:
                if damage.message != _UNREAD or damage.key not in self._misfits:
                    self._add(damage)
            self._found.checked_bytes += nbytes
            self._progress(self._found.checked_bytes, self._commit.data_bytes)
        if self._checkpoint is not None and self._indexed is not None and self._columns is not None:
            self._check_contents(self._checkpoint, self._indexed, self._columns)
        self._found.strays = find_strays(self._store, self._known)
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
            self._found.add(Damage.of("record", error))
            return
        self._indexed, self._columns = IndexedItems(columns), columns

    def _check_contents(self, checkpoint: Checkpoint, indexed: IndexedItems, columns: Columns) -> None:
        """What takes time for every item of the index: once it is known that they are not more than are stored."""
        for damage in indexed.left_over():
            self._add(damage)
        if indexed.count > 2 * self._items + _MAX_UNKNOWN_ITEMS:
            message = f"the index lists {indexed.count:,} items, manifests that can be read {self._items:,}"
            self._add(Damage("disagreement", message, checkpoint.metadata_key))
            return
        for damage in check_coverage_of(columns):
            self._found.add(damage)
        for damage in check_stock_metadata(self._store, self._commit, checkpoint, columns):
            self._found.add(damage)

    def _add(self, damage: Damage) -> None:
        """Note a damage; one that goes on where the last one ended is the same."""
        last = self._found.damages[-1] if self._found.damages else None
        same = last is not None and (last.kind, last.key, last.stop) == (
            damage.kind,
            damage.key,
            damage.start,
        )
        if last is None or not same or damage.start is None:
            self._found.add(damage)
            return
        fqns, count = concerned([*last.fqns, *damage.fqns])
        # A name at the border is in both.
        count = max(
            count, last.fqn_count + damage.fqn_count - (1 if set(last.fqns) & set(damage.fqns) else 0)
        )
        self._found.damages[-1] = Damage(
            last.kind, last.message, last.key, last.start, damage.stop, fqns, count
        )

    # -- data ------------------------------------------------------------------------------------------

    def _work(self) -> Iterator[Callable[[], tuple[list[Damage], int]]]:
        """Runs of files to read, lazily: only a few manifests are in memory at a time."""
        with thread_pool(self._store.threads, "ckpt-manifest") as threads:
            manifests = in_order(
                threads, self._manifest, self._commit.manifests, ahead=min(4, self._store.threads)
            )
            for ref, manifest in zip(self._commit.manifests, manifests, strict=True):
                self._known.add(ref.path)
                if isinstance(manifest, Damage):
                    yield lambda damage=manifest: ([damage], 0)  # type: ignore[misc]
                    continue
                yield from self._files_of(manifest)

    def _manifest(self, ref: ManifestRef) -> RankManifest | Damage:
        settings = ReadSettings(visibility_timeout_s=max(0.0, self._deadline_s - environment.monotonic()))
        try:
            data = read_listed(self._store, settings, ref, self._stored)
            return decode_manifest(data, url=self._store.url, key=ref.path)
        except (IntegrityError, FormatError, UnsafeContent, NotVisible) as error:
            fqns = [] if self._indexed is None else self._indexed.fqns_beside(ref.path)
            kind = "missing" if isinstance(error, NotVisible) else "record"
            damage = Damage.of(kind, error, fqns)
            return Damage(
                kind, damage.message, ref.path, damage.start, damage.stop, damage.fqns, damage.fqn_count
            )

    def _files_of(self, manifest: RankManifest) -> Iterator[Callable[[], tuple[list[Damage], int]]]:
        self._items += len(manifest.items)
        items: list[list[ItemRecord]] = [[] for _ in manifest.files]
        for item in manifest.items:
            items[item.file].append(item)
        for record, held in zip(manifest.files, items, strict=True):
            self._known.add(record.path)
            file = _File(record, manifest.block_size_bytes, record.block_crcs(), held)
            if self._indexed is not None:
                disagreements = self._indexed.compare(record.path, file.items)
                if disagreements:
                    yield lambda found=disagreements: (found, 0)  # type: ignore[misc]
            self._found.checked_files += 1
            yield lambda file=file: (self._check_size(file), 0)  # type: ignore[misc]
            if not self._found.quick:
                yield from self._runs(file)

    def _check_size(self, file: _File) -> list[Damage]:
        expected = file.record.size_bytes
        try:
            size = self._when_visible(lambda: self._store.stat(file.record.path).size_bytes)
        except NotFound:
            self._misfits.add(file.record.path)
            return [file.damage("missing", "the commit lists this file, but it is not there", 0, expected)]
        except UnsafeContent as error:
            self._misfits.add(file.record.path)
            return [Damage.of("missing", error, file.fqns(0, expected))]
        if size == expected:
            return []
        self._misfits.add(file.record.path)
        message = f"holds {size} bytes, {expected} were written"
        return [file.damage("size", message, min(size, expected), max(size, expected))]

    def _when_visible(self, read: Callable[[], T]) -> T:
        """`read`, again while storage that lags may still show the object. Raises NotFound."""
        backoff = environment.Backoff(self._deadline_s - environment.monotonic())
        while True:
            try:
                return read()
            except NotFound:
                if backoff.is_over:
                    raise
                backoff.pause()

    def _runs(self, file: _File) -> Iterator[Callable[[], tuple[list[Damage], int]]]:
        step = max(RUN_BYTES // file.block_size_bytes, 1) * file.block_size_bytes
        for start in range(0, file.record.size_bytes, step):
            stop = min(start + step, file.record.size_bytes)
            yield lambda start=start, stop=stop: self._check_run(file, start, stop)  # type: ignore[misc]

    def _check_run(self, file: _File, start: int, stop: int) -> tuple[list[Damage], int]:
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
            # Perhaps they were only damaged on their way.
            damages = list(self._check_blocks(file, bad, stop, memory))
        return damages, stop - start

    def _check_blocks(
        self, file: _File, starts: Iterable[int], stop: int, memory: memoryview
    ) -> Iterator[Damage]:
        """Read blocks one by one."""
        for start in starts:
            end = min(start + file.block_size_bytes, stop)
            try:
                self._store.read_into(file.record.path, start, [memory[: end - start]])
            except (Truncated, NotFound, UnsafeContent):
                yield file.damage("missing", _UNREAD, start, end)
                continue
            if crc64nvme(memory[: end - start]) != file.crcs[start // file.block_size_bytes]:
                yield file.damage("checksum", "the stored bytes do not match their checksum", start, end)
