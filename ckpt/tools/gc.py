"""Remove the leftovers of interrupted saves: `ckpt.collect_garbage`.

An object is removed if only this library gives such names, if no commit of its checkpoint lists it
or anything of its token, and if it and all others of its token are older than a grace period; so is a commit of
which nothing is there. A save that runs longer than that looks like an interrupted one; a drain that waits for other
nodes puts a manifest again. A model without a commit stays if other programs can read it.

On storage that lags, a commit may exist and not be seen yet. So all folders are looked at, then
they are given time, and looked at again before anything is deleted.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ckpt.backends.base import ObjectStat, Store, exists, read_bytes
from ckpt.backends.registry import normal_url, open_store
from ckpt.backends.wrapper import LinkedFolder, PrefixStore
from ckpt.consistency import environment
from ckpt.consistency.commit import COMMIT_KEY, STOCK_METADATA_KEY, is_foreign
from ckpt.consistency.storage_clock import storage_now
from ckpt.errors import AccessDenied, CheckpointError, FormatError, NotFound, StorageError, short_traceback
from ckpt.format.names import (
    MODEL_INDEX_KEY,
    SCRUB_KEY,
    ObjectName,
    is_config_name,
    is_our_name,
    probe_key,
    rank_directory,
    split_place,
)
from ckpt.format.records import CommitRecord, StoredCommit, read_commit
from ckpt.format.saved_over import SAVED_OVER
from ckpt.tools.findings import find_uploads, is_hollow, stems_of
from ckpt.tools.ls import find_folders
from ckpt.tools.remove import delete_counted, remove_folders
from ckpt.transfer.reports import Report, Tally, no_report
from ckpt.writing.pins import GRACE_S, PinReader, is_pin, wait_for_pins
from ckpt.writing.stock_metadata import is_anothers, put_stock_metadata, stock_key, stock_metadata_of

DEFAULT_GRACE_S = GRACE_S
_PROMPTLY_S = 10.0
"""A save puts `.metadata` so soon after its commit; one that comes later may be of a save that had stalled."""


@dataclass(frozen=True)
class GarbageItem:
    """A leftover that was removed, or would be.

    Attributes:
        place: the checkpoint's folder, relative to the root.
        unfinished: it is an upload, whose size is unknown (0), or a temporary file.
    """

    place: str
    key: str
    size_bytes: int
    age_s: float
    unfinished: bool = False


@dataclass
class Garbage:
    """The result of `collect_garbage`.

    Attributes:
        items: the leftovers that were removed, or would be.
        young: number of leftovers that are younger than the grace period, or of unknown age.
        restored: folders whose `.metadata` was missing or that of another save; it was written anew,
            or removed if the commit has none.
        skipped: folders in which nothing was removed, and why.
        referred: folders in which objects of a checkpoint that is gone stay, and who refers to them.
        keeps_versions: the storage keeps what was deleted as old versions, which are paid for.
        models: folders with a model that has lost its commit record, or was about to get it: other programs can read
            it, and it stays.
    """

    url: str
    items: list[GarbageItem] = field(default_factory=list)
    young: int = 0
    restored: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    referred: dict[str, list[str]] = field(default_factory=dict)
    models: list[str] = field(default_factory=list)
    keeps_versions: bool = False

    @property
    def freed_bytes(self) -> int:
        """Sum the sizes of all items; those of uploads are unknown."""
        return sum(item.size_bytes for item in self.items)


@short_traceback
def collect_garbage(
    root: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    grace_s: float = DEFAULT_GRACE_S,
    depth: int = 3,
    dry_run: bool = False,
    uncommitted_models: bool = False,
    progress: Report | None = None,
) -> Garbage:
    """Remove the leftovers of interrupted saves at and below `root`, and no other files.

    Args:
        storage_options: of the root, by name, as for a save there.
        dry_run: list what would go, and remove nothing.
        grace_s: seconds since an object was written until it counts as a leftover. Choose it longer
            than any save takes.
        depth: levels of folders below the root to search.
        uncommitted_models: remove `Garbage.models` too.
        progress: called with the folders looked at and those found, then with the checkpoints searched, then with
            the leftovers removed and those to remove. `noun` of both numbers says which, `size_bytes` how large.

    Raises:
        NotFound: the root is empty, or does not exist.
        StorageError: the storage refused, or could not be reached.
    """
    report = progress or no_report
    with contextlib.closing(open_store(root, storage_options)) as store:
        base = normal_url(root).rstrip("/")
        garbage = Garbage(store.url)
        ours: set[str] = set()
        leftovers: list[_OldObjects] = []
        folders = list(find_folders(store, depth=depth, report=report))
        if not folders and next(iter(store.list()), None) is None and not find_uploads(store, 1):
            raise NotFound("there is nothing here", url=store.url)
        collector = _Collector(garbage, store, grace_s, dry_run, uncommitted_models)
        searched = Tally(report, "checkpoint")
        searched.expect(len(folders))
        for folder, listed in folders:
            if isinstance(folder, LinkedFolder):
                pass  # what is elsewhere is collected there
            elif listed.state in ("damaged", "unreadable"):
                text = "" if listed.problem == SAVED_OVER else "its commit record cannot be read: "
                garbage.skipped[listed.path] = f"{text}{listed.problem}"
            elif listed.state != "foreign":
                ours.add(listed.path)
                leftovers += collector.look(folder)
            searched.add(1)
        if leftovers and not dry_run and not store.capabilities.cross_client_visibility:
            wait_for_pins(store)  # twice as long as a commit record takes to be seen
        removed = Tally(report, "object")
        for old in leftovers:
            removed.expect(len(old.stats), sum(stat.size_bytes for stat in old.stats))
        for old in leftovers:
            # As a store of its own, which refuses a link that leads out of the folder, into another
            # checkpoint.
            url = f"{base}/{old.path}".rstrip("/") or "/"
            with contextlib.closing(open_store(url, storage_options)) as own:
                collector.clean(own, old, removed)
                garbage.keeps_versions |= own.keeps_versions
        if all(listed.state == "incomplete" for _, listed in folders):
            collector.remove_scrub_record()
        collector.abandon(store, ours)
        garbage.keeps_versions |= store.keeps_versions
        for path in () if dry_run else {item.place for item in garbage.items}:
            remove_folders(PrefixStore(store, path))
    return garbage


@dataclass(frozen=True)
class _OldObjects:
    """The leftovers of a folder, and its commit when it was looked at."""

    path: str
    commit: StoredCommit | None
    stats: Sequence[ObjectStat]


@dataclass(frozen=True)
class _Collector:
    """Find and remove leftovers older than `grace_s`; note them in `garbage`."""

    garbage: Garbage
    store: Store
    grace_s: float
    dry_run: bool
    uncommitted_models: bool

    @cached_property
    def now_s(self) -> float:
        """The storage's time; this machine's where nothing is to be written."""
        return environment.now() if self.dry_run else time_of(self.store)

    def look(self, folder: PrefixStore) -> Iterator[_OldObjects]:
        """Find the old leftovers of a folder."""
        with self._skipping(folder.path):
            # List first: an object that is listed and that the commit does not name belongs to
            # another save.
            listed = list(folder.list())
            commit = read_commit(folder)
            kept = stems_of(self._record(folder, commit))
            left = [
                stat
                for stat in listed
                if (name := ObjectName.parse(stat.key)) is not None
                # A probe belongs to no checkpoint, not even to that of its own save.
                and (name.stem not in kept or name.kind == "probe")
                and name.kind != "pin"
            ]
            pins = [stat for stat in listed if is_pin(stat.key)]
            if any(map(self._is_old, pins)) or (pins and left):
                left = self._unreferred(folder, folder.path, left, pins)
            keys = _stock_keys(commit)
            records = {stat.key: stat for stat in listed if stat.key in (*keys, COMMIT_KEY)}
            if commit is None:
                left += [
                    stat for key, stat in records.items() if key in keys and not is_anothers(folder, key)
                ]
            old = self._old(left)
            self.garbage.young += len(left) - len(old)
            if commit is None and not self.uncommitted_models:
                old = self._without_models(folder, [stat.key for stat in listed], old)
            if commit is not None and COMMIT_KEY in records and is_hollow(folder, listed, commit.record):
                old += filter(self._is_old, records.values())
            if old or self._lacks_metadata(commit, records):
                yield _OldObjects(folder.path, commit, old)

    def _without_models(
        self, folder: PrefixStore, keys: Sequence[str], old: list[ObjectStat]
    ) -> list[ObjectStat]:
        """Leave out what other programs can read, and the records of it: whether it was committed, nobody knows."""
        if not any(_is_of_model(stat.key) for stat in old):
            return old
        from ckpt.stock.safetensors_files import usable_files  # which imports torch

        usable = usable_files(folder, set(keys))
        stems = {name.stem for key in usable if (name := ObjectName.parse(key)) is not None}

        def is_usable(key: str) -> bool:
            name = ObjectName.parse(key)
            return key in usable or (name is not None and name.stem in stems and name.kind != "probe")

        left = [stat for stat in old if not is_usable(stat.key)]
        if len(left) < len(old):
            self.garbage.models.append(folder.path)
        return left

    def clean(self, store: Store, old: _OldObjects, tally: Tally) -> None:
        """Remove leftovers, unless a save was committed or wrote there meanwhile."""
        with self._skipping(old.path):
            commit = read_commit(store)
            if commit != old.commit:
                self.garbage.skipped[old.path] = "a save was committed meanwhile"
                return
            self._record(store, commit)
            was_hollow = any(stat.key == COMMIT_KEY for stat in old.stats)
            if was_hollow and commit is not None and not self._is_still_hollow(store, commit.record):
                return
            if commit is not None and not was_hollow:
                key = stock_key(commit.record)
                metadata = self._old_metadata(store, key, commit)
                if metadata is not None or not exists(store, key):
                    self._restore(store, old.path, commit, metadata)
            keys = _stock_keys(None)
            going = [s for s in old.stats if s.key not in keys or self._old_metadata(store, s.key, commit)]
            # A save may have put its pin since, and have seen the commit record before that went.
            pins = [stat for stat in store.list(f"{rank_directory(0)}/") if is_pin(stat.key)]
            going = self._unreferred(store, old.path, [s for s in going if not is_pin(s.key)], pins)
            sizes = {stat.key: stat.size_bytes for stat in going}
            if was_hollow and read_commit(store) != commit:
                self.garbage.skipped[old.path] = "a save was committed meanwhile"
                return
            if not self.dry_run:
                try:
                    delete_counted(store, sizes, tally)
                except AccessDenied as error:  # object lock, say: the other folders are not locked for that
                    self.garbage.skipped[old.path] = f"some of it may not be deleted: {error.message}"
                    return
            left = [stat for stat in old.stats if self.dry_run or stat.key not in sizes]
            tally.add(len(left), sum(stat.size_bytes for stat in left))
            for stat in going:
                self._note(old.path, stat)

    def _is_still_hollow(self, store: Store, record: CommitRecord) -> bool:
        """Tell whether a commit that lists nothing is still that, and no save is under way."""
        listed = list(store.list())
        # The record's own age, as a listing may show that of one that was replaced.
        is_quiet = all(map(self._is_old, [*listed, store.stat(COMMIT_KEY)]))
        return is_quiet and is_hollow(store, listed, record)

    def _unreferred(
        self, store: Store, path: str, stats: Sequence[ObjectStat], pins: Sequence[ObjectStat]
    ) -> list[ObjectStat]:
        """Return those objects to which nobody refers, and the pins that do not count any more."""
        if not pins:
            return list(stats)
        referrers = PinReader(store, grace_s=self.grace_s, now=lambda: self.now_s).look()
        if any(referrers.hold(stat.key) for stat in stats):
            self.garbage.referred[path] = referrers.names()
        dead = [stat for stat in pins if stat.key in referrers.dead]
        return [*(stat for stat in stats if not referrers.hold(stat.key)), *dead]

    def _note(self, path: str, stat: ObjectStat, *, unfinished: bool = False) -> None:
        age_s = self.now_s - (stat.modified_at_s or 0.0)
        self.garbage.items.append(GarbageItem(path, stat.key, stat.size_bytes, age_s, unfinished))

    def _record(self, store: Store, commit: StoredCommit | None) -> CommitRecord | None:
        """Decode the commit record. Raises FormatError if another program wrote the checkpoint."""
        if commit is None and is_foreign(store):
            raise FormatError("the checkpoint here was written by another program")
        return None if commit is None else commit.record

    @contextlib.contextmanager
    def _skipping(self, path: str) -> Iterator[None]:
        try:
            yield
        except NotFound as error:  # a removal, or another `ckpt gc`, works here too
            gone = error.key or "the folder"
            self.garbage.skipped[path] = (
                f"{gone} was removed during the search; run `ckpt gc` again for the rest"
            )
        except StorageError:
            raise
        except CheckpointError as error:
            self.garbage.skipped[path] = error.message

    def _old_metadata(self, store: Store, key: str, commit: StoredCommit | None) -> ObjectStat | None:
        """Find `.metadata`, or the index of a model, if a save of this library wrote it and is long over."""
        try:
            stat = store.stat(key)
        except NotFound:
            return None
        return stat if self._is_old(stat) and not is_anothers(store, key, commit) else None

    def remove_scrub_record(self) -> None:
        """Remove what scrubs have noted at a root that holds no checkpoint any more."""
        with contextlib.suppress(NotFound):
            if not self._is_old(stat := self.store.stat(SCRUB_KEY)):
                self.garbage.young += 1
                return
            if not self.dry_run:
                self.store.delete([SCRUB_KEY])
            self._note("", stat)

    def abandon(self, store: Store, ours: set[str]) -> None:
        """Abort uploads and remove temporary files whose names are this library's."""

        def choose(stat: ObjectStat) -> bool:
            parts = split_place(stat.key)
            path, _, name = stat.key.rpartition("/")
            # A temporary file has a name of ours; an upload of such a name can be of another program.
            if parts is None and store.directory is not None and is_config_name(name):
                parts = path, name
            if parts is None:
                return False
            path, key = parts
            if not is_our_name(key) and path not in ours:
                return False
            if not self._is_old(stat):
                self.garbage.young += 1
                return False
            self._note(path, replace(stat, key=key), unfinished=True)
            return not self.dry_run

        store.abandon(choose=choose)

    def _old(self, stats: Sequence[ObjectStat]) -> list[ObjectStat]:
        """Return those that are old, as all objects of their token are: a drain that waits puts one of them again."""
        young = {_token_of(stat.key) for stat in stats if not self._is_old(stat)}
        return [stat for stat in stats if _token_of(stat.key) not in young]

    def _is_old(self, stat: ObjectStat) -> bool:
        return stat.modified_at_s is not None and stat.modified_at_s < self.now_s - self.grace_s

    def _lacks_metadata(self, stored: StoredCommit | None, records: Mapping[str, ObjectStat]) -> bool:
        """Tell whether `.metadata` may not be that of the commit: missing, or put long after it."""
        commit, metadata = (
            records.get(COMMIT_KEY),
            next((s for key, s in records.items() if key != COMMIT_KEY), None),
        )
        if commit is None or not self._is_old(commit):
            return False
        if stored is not None and not stored.record.is_for_stock:
            return metadata is not None
        if metadata is None:
            return True
        return (metadata.modified_at_s or 0.0) > (commit.modified_at_s or 0.0) + _PROMPTLY_S

    def _restore(self, store: Store, path: str, commit: StoredCommit, stat: ObjectStat | None) -> None:
        """Write the committed `.metadata`, if a save that died did not, given the one that is there."""
        expected = stock_metadata_of(store, commit.record)
        if expected is None and stat is None:
            return
        if (
            expected is not None
            and stat
            and stat.size_bytes == len(expected)
            and bytes(read_bytes(store, stat.key)) == expected
        ):
            return
        self.garbage.restored.append(path)
        if not self.dry_run:
            put_stock_metadata(store, commit, expected)


def _token_of(key: str) -> str:
    """Return the token in a name that a save gives; the key itself if it is none."""
    name = ObjectName.parse(key)
    return key if name is None else name.token


def _is_of_model(key: str) -> bool:
    name = ObjectName.parse(key)
    return key == MODEL_INDEX_KEY or (name is not None and name.kind == "safetensors")


def _stock_keys(commit: StoredCommit | None) -> tuple[str, ...]:
    """List what programs look for, that of a commit; without one, what a removal may have left."""
    return (STOCK_METADATA_KEY, MODEL_INDEX_KEY) if commit is None else (stock_key(commit.record),)


def time_of(store: Store) -> float:
    """Take the time from the storage that dates the objects; this machine's clock may be wrong."""
    now_s = storage_now(store, probe_key(0, environment.token()))
    remove_folders(store)
    return environment.now() if now_s is None else now_s
