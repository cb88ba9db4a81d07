"""Remove a checkpoint, its records before its data: `ckpt.remove`."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.backends.base import Store, exists
from ckpt.backends.registry import open_store
from ckpt.consistency import environment
from ckpt.consistency.commit import COMMIT_KEY, is_foreign
from ckpt.errors import CommitConflict, NotCommitted, NotFound
from ckpt.format.names import MODEL_PREFIX, is_our_name
from ckpt.format.records import CommitRecord, ManifestRef, StoredCommit, read_commit
from ckpt.tools.gc import remove_folders
from ckpt.writing.pins import PinReader, Referrers, release_bases, wait_for_pins
from ckpt.writing.stock_metadata import follow_commit, is_anothers, stock_key


@dataclass(frozen=True)
class Removed:
    """The checkpoint that was removed, or would be.

    Attributes:
        keys: its objects in the order of their removal, `.metadata` and the commit record first.
        data_bytes: size of the data files, by the commit record.
        kept: objects that stay, as `referrers` came to refer to them while it was being removed;
            `collect_garbage` removes them when those are gone.
    """

    url: str
    id: str
    keys: tuple[str, ...]
    data_bytes: int
    kept: tuple[str, ...] = ()
    referrers: tuple[str, ...] = ()


def remove(
    url: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None, dry_run: bool = False
) -> Removed:
    """Remove the checkpoint at `url`: `.metadata`, the commit record, then all that it lists.

    `.metadata` never stands without a commit, so programs that look for it alone do not choose what
    is being removed. Only objects that the record lists are removed, and only names that this
    library gives. `collect_garbage` finds what an interruption leaves.

    A checkpoint of which others name bytes is not removed. One that may be referred to is removed
    slowly where storage shows writes late (two minutes), so that no save that refers to it goes unseen.

    Args:
        storage_options: of the place, by name, as for a save there.
        dry_run: say what would go, and remove nothing.

    Raises:
        StillReferred: other checkpoints, or a save that is running, name its bytes.
        NotFound, NotCommitted: there is no checkpoint of this library.
        IntegrityError, FormatError: its commit record cannot be read.
        CommitConflict: another save was committed there meanwhile.
        StorageError: the storage refused, or could not be reached.
    """
    return remove_and_tell(url, lambda: None, storage_options=storage_options, dry_run=dry_run)


def remove_and_tell(
    url: str | os.PathLike[str],
    when_gone: Callable[[], None],
    *,
    storage_options: Mapping[str, Any] | None = None,
    dry_run: bool = False,
) -> Removed:
    """Do the same, and call `when_gone` once the commit record is: what follows may wait for long."""
    with contextlib.closing(open_store(url, storage_options)) as store:
        commit = read_commit(store)
        if commit is None or not commit.is_ours:
            raise _nothing_to_remove(store, commit)
        record = commit.record
        now = environment.now if dry_run else None
        PinReader(store, now=now).refuse(record, "it was not removed")
        keys = [key for key in _listed(store, record) if is_our_name(key)]
        kept: list[str] = []
        referrers = Referrers()
        stock = [] if is_anothers(store, stock_key(record), of_model=record.is_model) else [stock_key(record)]
        visible = [key for key in stock if exists(store, key)]
        if not dry_run:
            if read_commit(store) != commit:
                text = "another save was committed here meanwhile; nothing was removed"
                raise CommitConflict(text, url=store.url, key=COMMIT_KEY)
            store.delete(stock)  # also if it is not there: storage that lags may not show it yet
            store.delete([COMMIT_KEY])
            when_gone()
            referrers = _late_referrers(store, record)
            kept = [key for key in keys if referrers.hold(key)]
            keys = [key for key in keys if not referrers.hold(key)] + referrers.dead
            store.delete(keys)
            release_bases(store, record)
            if exists(store, stock_key(record)):  # put meanwhile, by a save that had stalled before that
                follow_commit(store, commit)
            remove_folders(store)
        gone = (*visible, COMMIT_KEY, *keys)
        names = tuple(referrers.names()) if kept else ()
        return Removed(store.url, record.id, gone, record.data_bytes, tuple(kept), names)


def _late_referrers(store: Store, record: CommitRecord) -> Referrers:
    """Find the pins that were put before it could be seen that the commit record is gone."""
    if not record.is_referable:
        return Referrers()
    wait_for_pins(store)
    return PinReader(store).look()


def _nothing_to_remove(store: Store, commit: StoredCommit | None) -> NotFound | NotCommitted:
    if commit is None and not is_foreign(store):
        if next(iter(store.list()), None) is None:
            return NotFound("there is nothing here", url=store.url)
        text = "no checkpoint is committed here; `ckpt gc` removes the leftovers of interrupted saves"
    else:
        text = (
            "another program wrote this checkpoint (stock PyTorch?); only those of this library are removed"
        )
    return NotCommitted(text, url=store.url)


def _listed(store: Store, record: CommitRecord) -> list[str]:
    """List all objects of a checkpoint but the commit record, data first: no manifest needs to be read."""
    manifests = record.own_manifests
    files = itertools.chain.from_iterable(_files_of(store, record, ref) for ref in manifests)
    return [*files, *(ref.path for ref in manifests), record.described_by.path]


def _files_of(store: Store, record: CommitRecord, ref: ManifestRef) -> list[str]:
    keys = ref.data_keys(of_model=record.is_model)
    if keys is not None:
        return keys
    # The record is damaged or forged: a listing finds what is there by the names.
    stem = ref.path.removesuffix(".json")
    prefix = MODEL_PREFIX + stem.rpartition("/")[2] if record.is_model else stem
    return [stat.key for stat in store.list(f"{prefix}-")]
