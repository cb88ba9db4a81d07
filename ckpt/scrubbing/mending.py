"""Mend damaged objects of a checkpoint from a second place that holds the same one.

Stores have no partial writes, so an object is put again as a whole, under its own name: good blocks of the old
object, the others from the second place, every one with the checksum that the manifest has for it. So the name gets
the bytes that it was given first, and a view that lags shows what it showed before, which no reader takes for good.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial

from ckpt.backends.base import Store, put_bytes
from ckpt.backends.bodies import Part
from ckpt.consistency.checksums import CheckedBuffers, block_crcs, combine_blocks
from ckpt.errors import (
    CheckpointError,
    IntegrityError,
    NotFound,
    StorageUnavailable,
    Truncated,
    UnsafeContent,
)
from ckpt.format.names import ObjectName, is_our_name, split_path
from ckpt.format.records import ManifestRef, ObjectRef, RankManifest, StoredCommit, read_commit
from ckpt.reading.checkpoint import stored_file
from ckpt.scrubbing.record_copies import AT_ONCE, find_record, same_rank
from ckpt.tools.findings import Damage
from ckpt.tools.record_checks import checkable, read_manifest
from ckpt.transfer.buffer_pool import StagingPool
from ckpt.transfer.fetcher import StoredFile, at_once, read_verified
from ckpt.transfer.relay_bodies import RunReader

MENDABLE = ("record", "missing", "size", "checksum")
"""Kinds of damage to an object; others are between records."""

_UNREADABLE = (NotFound, Truncated, UnsafeContent, StorageUnavailable)
_NO_RENAME = (
    "this storage cannot replace an object in one step, so nothing is mended here; copy the checkpoint anew"
)


class Gone(Exception):
    """The checkpoint that is scrubbed was removed or replaced meanwhile: its names are nobody's now."""


@dataclass(frozen=True)
class Mended:
    """An object that was damaged.

    Attributes:
        state: `mended`, `would be mended`, or `not mended`, for a `reason`.
        blocks, nbytes: blocks that came from the second place, and their bytes; of a record the whole of it.
    """

    key: str
    state: str
    blocks: int = 0
    nbytes: int = 0
    reason: str = ""


@dataclass(frozen=True)
class MendedBody:
    """A data file of which every block has its checksum, and digest: the old one where it has, else the second place's."""

    old: Store
    file: StoredFile
    second: Store
    second_file: StoredFile
    pool: StagingPool
    replaced: set[int] = field(default_factory=set)  # numbers of the blocks that were taken from there
    lock: threading.Lock = field(default_factory=threading.Lock)

    has_checksums = True

    @property
    def nbytes(self) -> int:
        return self.file.size_bytes

    @contextlib.contextmanager
    def part(self, start: int, stop: int) -> Iterator[Part]:
        block = self.file.block_size_bytes
        # Whole blocks, of which the part may be the middle.
        begin, end = start - start % block, min(-(-stop // block) * block, self.nbytes)
        with self.pool.take(end - begin) as memory:
            self._fill(begin, memory)
            buffer = memory[start - begin : stop - begin]
            yield Part([buffer], combine_blocks(block_crcs([buffer], block), buffer.nbytes, block))

    def crc64nvme(self) -> int:
        return combine_blocks(self._expected, self.nbytes, self.file.block_size_bytes)

    @property
    def _expected(self) -> Sequence[int]:
        assert self.file.block_crcs is not None
        return self.file.block_crcs

    def _fill(self, begin: int, memory: memoryview) -> None:
        block = self.file.block_size_bytes
        bad = self._bad_blocks(begin, memory)
        for start in range(0, memory.nbytes, block):
            number, piece = (begin + start) // block, memory[start : start + block]
            # Where not all can be read at once, perhaps this one can.
            is_good = self._bad_blocks(begin + start, piece) == set() if bad is None else number not in bad
            if not is_good:
                self.take(number, piece)

    def _bad_blocks(self, begin: int, memory: memoryview) -> set[int] | None:
        """Read blocks of the old object, and number those that are not right; None if they cannot be read."""
        block = self.file.block_size_bytes
        checked = CheckedBuffers([memory], block)
        try:
            self.old.read_into(self.file.key, begin, checked)
        except _UNREADABLE:
            return None
        numbered = enumerate(checked.crcs(), begin // block)
        bad = {number for number, crc in numbered if crc != self._expected[number]}
        return bad.union(self.file.forged_blocks(begin, [memory]))

    def take(self, number: int, memory: memoryview) -> None:
        """Read a block from the second place. Raises IntegrityError if it is damaged there too."""
        fault = "damaged in the second place too, so it cannot be mended from there"
        start = number * self.file.block_size_bytes
        read_verified(self.second, self.second_file, start, [memory], at_once, fault=fault)
        with self.lock:
            self.replaced.add(number)

    def take_all(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Read the blocks of `ranges` from the second place, to see whether they are good there."""
        block = self.file.block_size_bytes
        with self.pool.take(block) as memory:
            for start, stop in ranges:
                for begin in range(start - start % block, min(stop, self.nbytes), block):
                    self.take(begin // block, memory[: min(block, self.nbytes - begin)])


class Mender:
    """Mends one checkpoint from a second place that holds it too: as it is, or as `ckpt cp` has copied it."""

    def __init__(
        self, store: Store, second: Store, pool: StagingPool, threads: Executor, *, dry_run: bool
    ) -> None:
        self._store, self._second, self._pool, self._threads = store, second, pool, threads
        self._dry_run = dry_run
        self._done = "would be mended" if dry_run else "mended"

    def mend(self, damages: Iterable[Damage], id: str) -> list[Mended]:
        """Mend what can be of the checkpoint `id`; say of every damaged object what became of it.

        Raises Gone, and StorageError of this place.
        """
        by_key: dict[str, list[Damage]] = {}
        for damage in damages:
            if damage.kind in MENDABLE and damage.key is not None and is_our_name(split_path(damage.key)[1]):
                by_key.setdefault(damage.key, []).append(damage)
        if not by_key:
            return []
        commit = read_commit(self._store)
        if commit is None or commit.record.id != id:
            raise Gone
        elsewhere = {key: owner for key in by_key if (owner := split_path(key)[0])}
        done = {
            key: Mended(
                key, "not mended", reason=f"it is another checkpoint's: scrub that one, {owner} beside it"
            )
            for key, owner in elsewhere.items()
        }
        ours = {key: found for key, found in by_key.items() if key not in elsewhere}
        if ours:
            done |= self._mend_ours(ours, commit)
        text = "no readable manifest lists it"
        return [done.get(key) or Mended(key, "not mended", reason=text) for key in by_key]

    def _mend_ours(self, by_key: dict[str, list[Damage]], commit: StoredCommit) -> dict[str, Mended]:
        if not self._store.capabilities.atomic_replace and self._store.directory is None:
            return {key: Mended(key, "not mended", reason=_NO_RENAME) for key in by_key}
        try:
            theirs = read_commit(self._second)
            reason = "no checkpoint is committed there" if theirs is None else ""
        except CheckpointError as error:
            theirs, reason = None, error.message
        if theirs is None:
            text = f"{self._second.url}: {reason}"
            return {key: Mended(key, "not mended", reason=text) for key in by_key}
        done = {
            ref.path: self._attempt(ref.path, partial(self._mend_record, ref, commit, theirs))
            for ref in commit.record.refs
            if ref.path in by_key
        }
        tokens = {name.token for key in by_key if (name := ObjectName.parse(key)) is not None}
        for ref in commit.record.own_manifests:
            name = ObjectName.parse(ref.path)
            if name is not None and name.token in tokens:
                done |= self._files(ref, commit, theirs, by_key)
        return done

    def _attempt(self, key: str, mend: Callable[[], Mended]) -> Mended:
        """Call `mend`; an error is why it was not, unless this storage gives no answer. Raises Gone."""
        try:
            return mend()
        except CheckpointError as error:
            if isinstance(error, StorageUnavailable) and error.url == self._store.url:
                raise
            return Mended(key, "not mended", reason=f"{error.message} ({error.url})")

    # -- records ---------------------------------------------------------------------------------------

    def _mend_record(self, ref: ObjectRef, commit: StoredCommit, theirs: StoredCommit) -> Mended:
        data = find_record(ref, commit.record, self._second, theirs)
        if data is None:
            return Mended(ref.path, "not mended", reason=f"{self._second.url} does not hold the same record")
        if not self._dry_run:
            self._still(commit)
            self._store.prepare(ref.path.rpartition("/")[0])
            put_bytes(self._store, ref.path, data)
        return Mended(ref.path, self._done, 0, len(data))

    # -- data ------------------------------------------------------------------------------------------

    def _files(
        self,
        ref: ManifestRef,
        commit: StoredCommit,
        theirs: StoredCommit,
        damages: dict[str, list[Damage]],
    ) -> dict[str, Mended]:
        """Mend the files of a rank that are damaged."""
        try:
            ours = read_manifest(self._store, AT_ONCE, commit, ref)
        except CheckpointError:
            return {}  # it is damaged itself
        other, found, reason = same_rank(ref, theirs), None, f"{self._second.url} has no rank {ref.rank}"
        if other is not None:
            try:
                found = read_manifest(self._second, AT_ONCE, theirs, other)
            except CheckpointError as error:
                reason = f"{self._second.url}: {error.message}"
        done: dict[str, Mended] = {}
        for number, file in enumerate(ours.files):
            if file.path not in damages:
                continue
            if found is None:
                done[file.path] = Mended(file.path, "not mended", reason=reason)
                continue
            mend = partial(self._mend_file, ours, found, number, commit, damages[file.path])
            done[file.path] = self._attempt(file.path, mend)
        return done

    def _mend_file(
        self,
        ours: RankManifest,
        theirs: RankManifest,
        number: int,
        commit: StoredCommit,
        damages: Sequence[Damage],
    ) -> Mended:
        file, block = ours.files[number], ours.block_size_bytes
        other = theirs.files[number] if number < len(theirs.files) else None
        if (
            other is None
            or (file.size_bytes, file.blocks, block)
            != (other.size_bytes, other.blocks, theirs.block_size_bytes)
            or not is_our_name(other.path)
        ):
            text = f"{self._second.url} does not hold the same checkpoint"
            return Mended(file.path, "not mended", reason=text)
        algorithm = checkable(commit.record, must=False)
        stored = stored_file(file.path, file, block, algorithm, self._store.url)
        source = dataclasses.replace(stored, key=other.path)
        body = MendedBody(self._store, stored, self._second, source, self._pool)
        if self._dry_run:
            body.take_all(
                (each.start or 0, file.size_bytes if each.stop is None else each.stop) for each in damages
            )
        else:
            self._replace(body, commit)
        nbytes = sum(min(block, file.size_bytes - n * block) for n in body.replaced)
        return Mended(file.path, self._done, len(body.replaced), nbytes)

    def _replace(self, body: MendedBody, commit: StoredCommit) -> None:
        """Put a data file under its name again, and read it back."""
        key = body.file.key
        self._still(commit)
        self._store.prepare(key.rpartition("/")[0])
        self._store.put(key, body)
        # If it is gone, this is a leftover now, for `ckpt gc`, which knows whether anybody refers to it.
        self._still(commit)
        if not RunReader(self._store, self._pool).matches(body.file, self._threads):
            text = "it was written anew, but what is read back is damaged: is the disk failing?"
            raise IntegrityError(text, url=self._store.url, key=key)

    def _still(self, commit: StoredCommit) -> None:
        """Raise Gone if the commit record is not that one any more."""
        if read_commit(self._store) != commit:
            raise Gone
