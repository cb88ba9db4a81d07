"""Check every byte of a checkpoint against its checksum, and its records against each other."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ckpt.backends.base import Store, exists
from ckpt.backends.registry import open_store
from ckpt.consistency import environment
from ckpt.consistency.checksums import CheckedBuffers
from ckpt.consistency.commit import COMMIT_KEY, STOCK_METADATA_KEY
from ckpt.consistency.expected import checked_expect, commit_digest
from ckpt.consistency.sampling import BlockSample
from ckpt.consistency.visibility import when_visible
from ckpt.errors import (
    CommitConflict,
    ConfigurationError,
    FormatError,
    IntegrityError,
    NotCommitted,
    NotFound,
    NotVisible,
    StorageUnavailable,
    Truncated,
    UnsafeContent,
    short_traceback,
)
from ckpt.format.model_index import find_models
from ckpt.format.names import SCRUB_KEY, signature_key, split_path
from ckpt.format.records import ManifestRef, ObjectRef, RankManifest, StoredCommit, read_commit
from ckpt.reading.checkpoint import Checkpoint, ReadSettings, read_listed
from ckpt.reading.opening import open_parts
from ckpt.siblings.sibling_objects import SiblingObjects
from ckpt.tools.findings import Damage, Verification, find_strays
from ckpt.tools.record_checks import (
    Choice,
    DataFile,
    IndexedItems,
    by_offset,
    check_coverage_of,
    check_digests,
    check_stock_metadata,
    checkable,
    each_manifest,
    items_by_file,
    no_data,
    read_manifest,
)
from ckpt.transfer.buffer_pool import MIN_MEMORY_BUDGET_BYTES, StagingPool
from ckpt.transfer.fetcher import StoredFile
from ckpt.transfer.reports import ReportBytes, no_report
from ckpt.transfer.threads import in_order, workers
from ckpt.writing.stock_metadata import stock_key

_MAX_UNKNOWN_ITEMS = 1 << 16
_MAX_UNREADABLE = 64  # blocks: more are no bad sectors, but a storage that does not answer

Checked = tuple[list[Damage], int, int]
"""Damages, the number of bytes that were compared, and of those that need no further look."""


@short_traceback
def verify(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    quick: bool = False,
    sample: float | None = None,
    seed: int | None = None,
    threads: int | None = None,
    progress: ReportBytes | None = None,
    expect: str | None = None,
) -> Verification:
    """Check every byte and record of the checkpoint at `url`; look for strays.

    Of a safetensors model of another program, which has no checksums: index, headers and sizes.

    Takes 128 MiB of memory beside the records. Changes nothing, and runs no code of the checkpoint.
    Damages are in the result; they raise no error.

    Args:
        storage_options: of the place, by name, as for a save there.
        quick: read records only, no data; compare sizes.
        sample: read this share of the blocks (0.05: one out of each twenty that follow one another), at least
            16 MiB; `Verification.sample` says what that can have missed. All records are checked as ever.
        seed: draws the blocks, by default at random; the same seed draws the same blocks again.
        threads: number of parallel reads.
        progress: called with the data bytes checked so far and those in all.
        expect: the digest of the checkpoint, `sha256:...`; another one is damage.

    Raises:
        NotFound, NotCommitted: there is no checkpoint.
        CommitConflict: another save replaced it meanwhile.
        ConfigurationError: `sample` is no share, or this is no checkpoint of this library, whose blocks alone can be
            drawn.
        StorageError: the storage refused, or could not be reached.
    """
    choice = Choice(progress=progress or no_report)
    if quick:
        choice = replace(choice, ranges=no_data)
    if sample is not None or seed is not None:
        choice = replace(choice, sample=_sample(sample, seed, quick=quick), only_blocks=True)
    with (
        contextlib.closing(open_store(url, storage_options, threads=threads)) as store,
        workers(store.threads, "ckpt-verify") as pool,
    ):
        return verify_store(store, pool, choice, expect=checked_expect(expect))


def _sample(sample: float | None, seed: int | None, *, quick: bool) -> BlockSample:
    if sample is None or quick:
        raise ConfigurationError("a seed needs a sample, and a quick check reads no data to sample")
    if not 0 < sample <= 1:  # as is NaN
        raise ConfigurationError(f"sample must be above 0 and at most 1 (0.05: 5 %), not {sample!r:.100}")
    return BlockSample.of(sample, int(environment.token()[:8], 16) if seed is None else seed)


def verify_store(
    store: Store, threads: Executor, choice: Choice, *, expect: str | None = None
) -> Verification:
    """Check what is at the store's root, and of its data what is chosen. Raises as `verify`."""
    prompt = store.capabilities.cross_client_visibility
    settings = ReadSettings(visibility_timeout_s=0.0 if prompt else None, expect=expect)
    quick = choice.ranges is no_data
    result = Verification(store.url, "ckpt-storage", quick)
    checkpoint: Checkpoint | None = None
    try:
        parts = open_parts(store, settings, models=True)
    except (NotFound, NotCommitted, IntegrityError, FormatError, UnsafeContent, NotVisible) as error:
        commit = read_commit(store)
        if (
            commit is None
            and expect is None
            and (of_model := _verify_model(store, threads, choice)) is not None
        ):
            return of_model
        if isinstance(error, NotFound | NotCommitted):
            raise
        result.extend([Damage.of_error("record", error)])
        if commit is None:
            result.format = "stock"
        if commit is None or error.key == COMMIT_KEY:
            return result
    except CommitConflict as error:
        if error.key != STOCK_METADATA_KEY:
            raise
        result.extend([Damage.of_error("stock_metadata", error)])
        choice = replace(choice, strays=False)  # objects that this one does not list are of the newer one
        result.strays = []
        commit = read_commit(store)
        assert commit is not None
    else:
        checkpoint = parts[0]
        commit = checkpoint.stored_commit
        if checkpoint.is_model_folder and (of_model := _verify_model(store, threads, choice)) is not None:
            return of_model
        if commit is None:
            _refuse_without_blocks(store, choice)
            from ckpt.tools.verify_stock import verify_stock

            return verify_stock(store, parts, threads, quick=quick, progress=choice.progress)
    with contextlib.closing(SiblingObjects(store)) as everywhere:
        choice = choice.of(commit.record.data_bytes + commit.record.carried_bytes)
        _OwnCheck(everywhere, threads, settings, result, commit, checkpoint, choice).run()
    return result


def _refuse_without_blocks(store: Store, choice: Choice) -> None:
    if choice.only_blocks:
        text = "another program wrote this, without blocks to draw from: `ckpt verify` without --sample checks it"
        raise ConfigurationError(text, url=store.url)


def _verify_model(store: Store, threads: Executor, choice: Choice) -> Verification | None:
    keys = find_models(store)
    if not keys:
        return None
    _refuse_without_blocks(store, choice)
    from ckpt.tools.verify_stock import verify_model  # torch is for who needs it

    return verify_model(store, threads, keys)


class _UnreadBytes(Damage):
    """Bytes that could not be read: no news if their file is known to be missing or too short."""


@dataclass
class _OwnCheck:
    """Check a checkpoint that this library committed."""

    store: Store
    threads: Executor
    settings: ReadSettings
    result: Verification
    stored_commit: StoredCommit
    checkpoint: Checkpoint | None  # None: the index is damaged
    choice: Choice
    indexed: IndexedItems | None = None
    items: int = 0  # in the manifests
    unreadable: int = 0  # blocks
    misfits: set[str] = field(default_factory=set)  # files that are missing or of another size

    def __post_init__(self) -> None:
        self.commit = self.stored_commit.record
        self.deadline_s = environment.monotonic() + self.settings.timeout_s(self.store)
        self.pool = StagingPool(MIN_MEMORY_BUDGET_BYTES)
        index = self.commit.described_by.path
        self.known = {COMMIT_KEY, SCRUB_KEY, stock_key(self.commit), index, signature_key(index)}
        self.algorithm = checkable(self.commit, must=self.settings.expect is not None)
        self.result.block_digests = self.algorithm
        if self.algorithm is None and self.commit.block_digests:
            self.result.unchecked_digests = self.commit.block_digests.algorithm

    def run(self) -> None:
        self.result.id = self.commit.id
        self.result.digest = commit_digest(self.stored_commit.raw)
        if self.algorithm is not None:
            self.result.extend(check_digests(self.store, self.commit, self.checkpoint))
        if self.checkpoint is not None:
            try:
                self.indexed = IndexedItems(self.checkpoint.columns)
            except FormatError as error:
                self.result.extend([Damage.of_error("record", error)])
        total = self.commit.data_bytes + self.commit.carried_bytes
        if self.choice.sample is not None:
            total = int(total * self.choice.sample.fraction)
        for damages, nbytes, passed_bytes in in_order(
            self.threads, lambda step: step(), self._steps(), ahead=4 * self.store.threads
        ):
            self._report(
                damage
                for damage in damages
                if not (isinstance(damage, _UnreadBytes) and damage.key in self.misfits)
            )
            self.result.checked_bytes += nbytes
            self.choice.progress(self.result.checked_bytes, max(total, self.result.checked_bytes))
            self.choice.passed(passed_bytes, bool(damages))
        if self.choice.sample is not None:
            self.result.sample = self.choice.sample.summary()
        if self.indexed is not None:
            self._check_index(self.indexed)
        if self.choice.strays:
            self.result.strays = find_strays(self.store, self.known)
        if read_commit(self.store) != self.stored_commit:
            text = "this checkpoint was replaced or removed while it was being verified; verify again"
            raise CommitConflict(text, url=self.store.url, key=COMMIT_KEY)

    def _check_index(self, indexed: IndexedItems) -> None:
        """Check every item of the index, unless it lists far more items than are stored."""
        self._report(indexed.left_over())
        if indexed.count > 2 * self.items + _MAX_UNKNOWN_ITEMS:
            message = f"the index lists {indexed.count:,} items, the readable manifests only {self.items:,}"
            self._report([Damage("disagreement", message, self.commit.described_by.path)])
            return
        self.result.extend(check_coverage_of(indexed.columns))
        self.result.stock_readers = self.commit.is_for_stock
        check = partial(check_stock_metadata, self.store, self.commit, indexed.columns)
        backoff = environment.Backoff(self._remaining_s())
        while any(found := check()) and not backoff.is_over:
            backoff.pause()  # storage that lags may show the commit before `.metadata`
        damages, self.result.warnings = found
        self.result.extend(damages)

    def _report(self, damages: Iterable[Damage]) -> None:
        """Add damages; extend the last one if the next begins where that ended."""
        for damage in damages:
            last = self.result.damages[-1] if self.result.damages else None
            end = None if last is None else (last.kind, last.key, last.stop)
            if last is None or damage.start is None or end != (damage.kind, damage.key, damage.start):
                self.result.extend([damage])
                continue
            both = Damage.of(
                last.kind, last.message, last.key, last.start, damage.stop, fqns=[*last.fqns, *damage.fqns]
            )
            shared = bool(set(last.fqns) & set(damage.fqns))  # a name at the border is in both
            count = max(both.fqn_count, last.fqn_count + damage.fqn_count - shared)
            self.result.damages[-1] = replace(both, fqn_count=count)

    def _remaining_s(self) -> float:
        """Return how much longer storage that lags may take to show an object."""
        return max(0.0, self.deadline_s - environment.monotonic())

    # -- data ------------------------------------------------------------------------------------------

    def _steps(self) -> Iterator[Callable[[], Checked]]:
        for ref, manifest in each_manifest(self.store, self.commit.manifests, self._manifest):
            self.known.add(ref.path)
            if isinstance(manifest, Damage):
                yield partial(_known, [manifest])
            else:
                yield from self._check_files(manifest)
        for listed in self.commit.config_files or ():
            self.known.add(listed.path)
            yield partial(self._check_config_file, listed)

    def _check_config_file(self, ref: ObjectRef) -> Checked:
        settings = ReadSettings(visibility_timeout_s=self._remaining_s(), digests=self.algorithm is not None)
        try:
            read_listed(self.store, settings, ref, self.stored_commit)
        except IntegrityError as error:
            return _known([Damage.of_error("checksum", error)])
        except (NotFound, NotVisible, UnsafeContent) as error:
            return _known([Damage("missing", error.message, ref.path)])
        return _known([])

    def _manifest(self, ref: ManifestRef) -> RankManifest | Damage:
        settings = ReadSettings(visibility_timeout_s=self._remaining_s(), digests=self.algorithm is not None)
        try:
            return read_manifest(self.store, settings, self.stored_commit, ref)
        except (IntegrityError, FormatError, UnsafeContent, NotVisible) as error:
            fqns = [] if self.indexed is None else self.indexed.fqns_beside(ref.path)
            kind = "missing" if isinstance(error, NotVisible) else "record"
            return replace(Damage.of_error(kind, error, fqns), key=ref.path)

    def _check_files(self, manifest: RankManifest) -> Iterator[Callable[[], Checked]]:
        self.items += len(manifest.items)
        for record, items in zip(manifest.files, items_by_file(manifest), strict=True):
            if self.indexed is not None and split_path(record.path)[0]:
                named = self.indexed.offsets(record.path)
                items = [item for item in items if item.offset in named]
                if not items:
                    continue  # of another checkpoint not all is named
            self.known.add(record.path)
            items.sort(key=by_offset)
            block, crcs = manifest.block_size_bytes, record.block_crcs()
            algorithm = self.algorithm
            if algorithm is not None and not isinstance(record.digests, bytes):
                yield partial(_known, [Damage("record", "blocks have no digests", record.path)])
                algorithm = None
            stored = StoredFile(record.path, record.size_bytes, block, crcs, algorithm, record.digests or b"")
            file = DataFile(record, block, crcs, items, stored)
            if self.indexed is not None:
                yield partial(_known, self.indexed.compare(record.path, file.items))
            self.result.checked_files += 1
            yield partial(self._check_size, file)
            for start, stop in self.choice.ranges(record, file.block_size_bytes):
                yield partial(self._check_run, file, start, stop)

    def _check_size(self, file: DataFile) -> Checked:
        path, expected = file.record.path, file.record.size_bytes
        try:
            size = when_visible(lambda: self.store.stat(path).size_bytes, timeout_s=self._remaining_s())
        except NotVisible:
            damage = file.damage("missing", "the commit lists this file, but it is not there", 0, expected)
        except UnsafeContent as error:
            damage = Damage.of_error("missing", error, file.fqns(0, expected))
        else:
            if size == expected:
                return _known([])
            message = f"has {size} bytes, {expected} were written"
            damage = file.damage("size", message, min(size, expected), max(size, expected))
        self.misfits.add(path)
        return _known([damage])

    def _check_run(self, file: DataFile, start: int, stop: int) -> Checked:
        path, block = file.record.path, file.block_size_bytes
        starts = range(start, stop, block)
        with self.pool.take(stop - start) as memory:
            checked = CheckedBuffers([memory], block)
            read = partial(self.store.read_into, path, start, checked)
            try:
                when_visible(read, timeout_s=self._remaining_s())
            except (Truncated, NotVisible, UnsafeContent, StorageUnavailable):
                return list(self._check_blocks(file, starts, stop, memory)), 0, stop - start
            bad = {
                at for at, crc in zip(starts, checked.crcs(), strict=True) if crc != file.crcs[at // block]
            }
            bad |= {block * number for number in file.stored.forged_blocks(start, [memory])}
            # Perhaps they were only damaged on the way: read them once more.
            return list(self._check_blocks(file, sorted(bad), stop, memory)), stop - start, stop - start

    def _check_blocks(
        self, file: DataFile, starts: Iterable[int], stop: int, memory: memoryview
    ) -> Iterator[Damage]:
        """Read blocks one by one; yield those that are damaged."""
        path = file.record.path
        for start in starts:
            end = min(start + file.block_size_bytes, stop)
            try:
                self.store.read_into(path, start, [memory[: end - start]])
            except (Truncated, NotFound, UnsafeContent, StorageUnavailable) as error:
                message = "the file exists, but these bytes cannot be read"
                if isinstance(error, StorageUnavailable):  # a bad sector, unless the storage is out of reach
                    self.unreadable += 1
                    if self.unreadable > _MAX_UNREADABLE or not exists(self.store, path):
                        raise
                    message += f": {error.message}"
                yield _UnreadBytes.of("missing", message, path, start, end, fqns=file.fqns(start, end))
                continue
            fault = file.fault(start, memory[: end - start])
            if fault is not None:
                yield file.damage("checksum", fault, start, end)


def _known(damages: list[Damage]) -> Checked:
    return damages, 0, 0
