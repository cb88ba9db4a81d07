"""`ckpt.collect_garbage`: what saves that did not finish have left behind.

Such objects do no harm: no commit lists them, and their names are never used again. They go when they have the name
that only this library gives, no commit at their place lists them or anything of their token, and they are older than
a grace period. A save that runs longer than the grace period is not told from one that died.

On storage that lags, a commit may be there and not be seen yet: all places are looked at, then they are given time,
and looked at again before anything is deleted.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt.backends.base import ObjectStat, Store, put_bytes, read_bytes
from ckpt.backends.prefix import PrefixStore
from ckpt.backends.registry import open_store
from ckpt.consistency import environment
from ckpt.consistency.commit import STOCK_METADATA_KEY, is_foreign
from ckpt.errors import CheckpointError, FormatError, NotFound, StorageError
from ckpt.format.names import ObjectName, is_our_name, split_place
from ckpt.format.records import CommitRecord, StoredCommit, read_commit
from ckpt.tools.ls import find_places
from ckpt.transfer.threads import thread_pool

__all__ = ["DEFAULT_GRACE_S", "Garbage", "GarbageItem", "collect_garbage"]

DEFAULT_GRACE_S = 24 * 3600.0


@dataclass(frozen=True)
class GarbageItem:
    """An object that was removed, or would be; `unfinished`: an upload or a temporary file, of unknown size."""

    place: str
    key: str
    size_bytes: int
    age_s: float
    unfinished: bool = False


@dataclass
class Garbage:
    """The result of `collect_garbage`.

    Attributes:
        items: what was removed, or would be.
        young: number of leftovers that are still within the grace period, or whose age the storage does not tell.
        restored: places whose `.metadata` named leftovers, and was put back to what is committed.
        skipped: places that were left alone, and why.
    """

    url: str
    items: list[GarbageItem] = field(default_factory=list)
    young: int = 0
    restored: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def freed_bytes(self) -> int:
        return sum(item.size_bytes for item in self.items)


def collect_garbage(
    root: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    grace_s: float = DEFAULT_GRACE_S,
    depth: int = 3,
    dry_run: bool = False,
) -> Garbage:
    """Remove what saves that did not finish have left at and below `root`. Nothing of another program is touched.

    Args:
        grace_s: seconds since it was written before an object is taken for left behind. Choose it longer than any
            save takes.
        depth: how many folders below the root to look.

    Raises:
        NotFound: there is nothing at all.
        StorageError: the storage refused, or could not be reached.
    """
    store = open_store(root, storage_options)
    found = Garbage(store.url)
    base = os.fspath(root).rstrip("/")
    collector = _Collector(found, time.time() - grace_s, dry_run)
    ours: set[str] = set()
    leftovers: list[_Leftovers] = []
    try:
        with thread_pool(store.threads, "ckpt-gc") as threads:
            places = list(find_places(store, threads, depth=depth))
        if not places and next(iter(store.list()), None) is None and not _has_unfinished(store):
            raise NotFound("there is nothing here", url=store.url)
        for place, what in places:
            if what.state == "damaged":
                found.skipped[what.path] = f"its commit record cannot be read: {what.problem}"
            elif what.state != "foreign":
                ours.add(what.path)
                leftovers += collector.look(place)
        if leftovers and not dry_run and not store.capabilities.cross_client_visibility:
            from ckpt.reading.checkpoint import ReadSettings

            environment.sleep(ReadSettings().timeout_s(store))
        for left in leftovers:
            # As a store of its own: there a link that leads out of the place, into another checkpoint, is refused.
            own = open_store(f"{base}/{left.path}" if left.path else root, storage_options)
            try:
                collector.clean(own, left)
            finally:
                own.close()
        collector.abandon(store, ours)
    finally:
        store.close()
    return found


def _has_unfinished(store: Store) -> bool:
    seen: list[ObjectStat] = []

    def note(stat: ObjectStat) -> bool:
        seen.append(stat)
        return False

    store.abandon(choose=note)
    return bool(seen)


@dataclass(frozen=True)
class _Leftovers:
    """What is to go at a place, where `commit` stood when it was looked at."""

    path: str
    commit: StoredCommit | None
    stats: Sequence[ObjectStat]


class _Collector:
    def __init__(self, found: Garbage, before_s: float, dry_run: bool) -> None:
        """`before_s`: what was modified after this moment stays."""
        self._found, self._before_s, self._dry_run = found, before_s, dry_run

    def look(self, place: PrefixStore) -> list[_Leftovers]:
        """What is left at a place, and old."""
        found: list[_Leftovers] = []
        with self._skipping(place.path):
            # The listing first: what it shows and the commit does not list was written by a save that is not this one.
            listed = list(place.list())
            commit = read_commit(place)
            kept = _tokens(self._record(place, commit))
            left = [
                stat
                for stat in listed
                if (name := ObjectName.parse(stat.key)) is not None
                # A probe belongs to no checkpoint, not even to that of its own save.
                and (name.stem not in kept or name.kind == "probe")
            ]
            if commit is None:
                left += [stat for stat in listed if stat.key == STOCK_METADATA_KEY]
            old = [stat for stat in left if self._is_old(stat)]
            self._found.young += len(left) - len(old)
            if old:
                found.append(_Leftovers(place.path, commit, old))
        return found

    def clean(self, store: Store, left: _Leftovers) -> None:
        """Remove leftovers, unless something was committed or written at their place meanwhile."""
        with self._skipping(left.path):
            commit = read_commit(store)
            if commit != left.commit:
                self._found.skipped[left.path] = "a save was committed meanwhile"
                return
            record = self._record(store, commit)
            metadata = self._old_metadata(store)
            if record is not None and metadata is not None:
                self._restore(store, left.path, record, metadata)
            going = [stat for stat in left.stats if stat.key != STOCK_METADATA_KEY or metadata is not None]
            if not self._dry_run:
                store.delete([stat.key for stat in going])
                store.remove_empty()
            self._found.items += [self._item(left.path, stat) for stat in going]

    def _record(self, store: Store, commit: StoredCommit | None) -> CommitRecord | None:
        """Raises FormatError where another program's checkpoint stands."""
        if commit is not None:
            return commit.record
        if is_foreign(store):
            raise FormatError("what stands here was written by another program")
        return None

    @contextlib.contextmanager
    def _skipping(self, path: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except CheckpointError as error:
            self._found.skipped[path] = error.message

    def _old_metadata(self, store: Store) -> ObjectStat | None:
        """`.metadata` as they stand now, if a save of this library wrote them and does not run any more."""
        try:
            stat = store.stat(STOCK_METADATA_KEY)
        except NotFound:
            return None
        return stat if self._is_old(stat) and not is_foreign(store) else None

    def abandon(self, store: Store, ours: set[str]) -> None:
        """Abort uploads, and remove temporary files, that have names of this library."""

        def choose(stat: ObjectStat) -> bool:
            parts = split_place(stat.key)
            if parts is None:
                return False
            path, key = parts
            if not is_our_name(key) and path not in ours:
                return False
            if not self._is_old(stat):
                self._found.young += 1
                return False
            self._found.items.append(self._item(path, stat, key))
            return not self._dry_run

        store.abandon(choose=choose)

    def _is_old(self, stat: ObjectStat) -> bool:
        return stat.modified_at_s is not None and stat.modified_at_s < self._before_s

    def _item(self, path: str, stat: ObjectStat, key: str | None = None) -> GarbageItem:
        age_s = time.time() - (stat.modified_at_s or 0.0)
        if key is None:
            return GarbageItem(path, stat.key, stat.size_bytes, age_s)
        return GarbageItem(path, key, 0, age_s, unfinished=True)

    def _restore(self, store: Store, path: str, record: CommitRecord, stat: ObjectStat) -> None:
        """See that `.metadata` does not name what is about to go: a save died right before its commit."""
        from ckpt.writing.coordinator import stock_metadata_of

        expected = stock_metadata_of(store, record)
        if stat.size_bytes == len(expected) and bytes(read_bytes(store, stat.key)) == expected:
            return
        self._found.restored.append(path)
        if not self._dry_run:
            put_bytes(store, STOCK_METADATA_KEY, expected)


def _tokens(record: CommitRecord | None) -> set[str]:
    """What a commit keeps: everything of a rank's token, whatever its manifest says."""
    refs = [] if record is None else record.refs
    return {name.stem for ref in refs if (name := ObjectName.parse(ref.path)) is not None}
