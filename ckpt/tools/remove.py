"""Remove a checkpoint, its records before its data: `ckpt.remove`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt.backends.base import Store, exists
from ckpt.backends.registry import open_store
from ckpt.consistency import environment
from ckpt.consistency.commit import COMMIT_KEY, is_foreign
from ckpt.errors import CommitConflict, ConfigurationError, NotCommitted, NotFound, short_traceback
from ckpt.format.config_files import unchanged
from ckpt.format.names import SCRUB_KEY, is_our_name, is_rank_directory, signature_key
from ckpt.format.own_objects import own_objects
from ckpt.format.records import CommitRecord, StoredCommit, read_commit
from ckpt.format.run_record import RUN_KEY
from ckpt.tools.ls import find_folders, list_checkpoints
from ckpt.transfer.reports import Report, Tally, no_report
from ckpt.transfer.threads import run_all, workers
from ckpt.words import count
from ckpt.writing.pins import PinReader, Referrers, release_bases, wait_for_pins
from ckpt.writing.stock_metadata import follow_commit, is_anothers, stock_key

_SLICE = 250
"""Objects between two reports: a request on S3, and what a store of files deletes in one thread."""
_MAX_THREADS = 8


@dataclass(frozen=True)
class Removed:
    """The checkpoint that was removed, or would be.

    Attributes:
        keys: its objects in the order of their removal, `.metadata` and the commit record first.
        data_bytes: size of the data files, by the commit record.
        kept: objects that stay, as `referrers` came to refer to them while it was being removed;
            `collect_garbage` removes them when those are gone.
        is_link: the place was a symbolic link; it was removed, and the checkpoint that it led to stays.
        keeps_versions: the storage keeps what was deleted as old versions, which are paid for.
    """

    url: str
    id: str
    keys: tuple[str, ...]
    data_bytes: int
    kept: tuple[str, ...] = ()
    referrers: tuple[str, ...] = ()
    keeps_versions: bool = False
    is_link: bool = False


@short_traceback
def remove(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    dry_run: bool = False,
    progress: Report | None = None,
) -> Removed:
    """Remove the checkpoint at `url`: `.metadata`, the commit record, then all that it lists.

    If `url` is a symbolic link to a checkpoint, the link alone is removed.

    `.metadata` never stands without a commit, so programs that look for it alone do not choose what
    is being removed. Only objects that the record lists are removed, and only names that this
    library gives. `collect_garbage` finds what an interruption leaves.

    A checkpoint of which others name bytes is not removed. One that may be referred to is removed
    slowly where storage shows writes late (two minutes), so that no save that refers to it goes unseen.

    Args:
        storage_options: of the place, by name, as for a save there.
        dry_run: say what would go, and remove nothing.
        progress: called with the objects removed so far and those to remove, and their `size_bytes`.

    Raises:
        StillReferred: other checkpoints, or a save that is running, name its bytes.
        NotFound, NotCommitted: there is no checkpoint of this library.
        IntegrityError, FormatError: its commit record cannot be read.
        CommitConflict: another save was committed there meanwhile.
        StorageError: the storage refused, or could not be reached.
    """
    return remove_within(
        url,
        lambda _: contextlib.nullcontext(),
        storage_options=storage_options,
        dry_run=dry_run,
        progress=progress,
    )


def older_than(
    root: str | os.PathLike[str],
    keep: int,
    *,
    storage_options: Mapping[str, Any] | None = None,
    progress: Report | None = None,
) -> list[str]:
    """List the URLs of a folder's committed checkpoints, the newest first, without the newest `keep` and all they name.

    Raises ConfigurationError for the run of a manager, whose rules say what it keeps; else as `list_checkpoints`.
    """
    with contextlib.closing(open_store(root, storage_options)) as store:
        directory = store.directory
        if exists(store, RUN_KEY):
            text = f"{RUN_KEY} says that a CheckpointManager saves here: give it keep={keep}, which regards pins and metrics"
            raise ConfigurationError(text, url=store.url)
    listed = list_checkpoints(root, storage_options=storage_options, depth=1, progress=progress)
    committed = [each for each in listed if each.state == "committed" and each.path]
    if any(each.step is None for each in committed):  # of those the time alone says which is newer
        committed.sort(key=lambda each: (each.created_at_s or 0.0, each.path))
    newest = {each.path for each in committed[-keep:]}
    kept = [each for each in committed if each.latest or each.path in newest]
    stays = {each.path for each in kept} | {base for each in kept for base in each.bases}
    if directory is not None:
        stays |= _led_to(directory, [each.path for each in committed])
    return [os.path.join(root, each.path) for each in reversed(committed) if each.path not in stays]


def _led_to(root: str, paths: Sequence[str]) -> set[str]:
    """Return those of the paths in a local folder to which links in it lead."""
    with os.scandir(root) as entries:
        targets = {os.path.realpath(entry.path) for entry in entries if entry.is_symlink()}
    return {path for path in paths if os.path.realpath(os.path.join(root, path)) in targets}


def remove_within(
    url: str | os.PathLike[str],
    going: Callable[[str], contextlib.AbstractContextManager[None]],
    *,
    storage_options: Mapping[str, Any] | None = None,
    dry_run: bool = False,
    progress: Report | None = None,
) -> Removed:
    """Do the same, and remove the commit record within `going`, to which its id is told; the rest may take long."""
    with contextlib.closing(open_store(url, storage_options)) as store:
        commit = read_commit(store)
        if commit is None or not commit.is_ours:
            raise _nothing_to_remove(store, commit)
        record = commit.record
        now = environment.now if dry_run else None
        PinReader(store, now=now).refuse(record, "it was not removed")
        if store.root_is_link():
            if not dry_run:
                with going(record.id):
                    store.unlink_root()
            return Removed(store.url, record.id, (), 0, is_link=True)
        sizes = own_objects(store, record)
        keys = [*sizes]
        kept: list[str] = []
        referrers = Referrers()
        stock = [] if is_anothers(store, stock_key(record), commit) else [stock_key(record)]
        configuration = unchanged(store, record.config_files or ())
        visible = [key for key in stock if exists(store, key)]
        if not dry_run:
            if read_commit(store) != commit:
                text = "another save was committed here meanwhile; nothing was removed"
                raise CommitConflict(text, url=store.url, key=COMMIT_KEY)
            tally = Tally(progress or no_report, "object")
            tally.expect(len(sizes), sum(sizes.values()))
            with going(record.id):
                store.delete(stock)  # also if it is not there: storage that lags may not show it yet
                store.delete([COMMIT_KEY])
            referrers = _late_referrers(store, record)
            kept = [key for key in keys if referrers.hold(key)]
            keys = [key for key in keys if not referrers.hold(key)] + referrers.dead
            companions = [SCRUB_KEY, *filter(is_our_name, [signature_key(record.described_by.path)])]
            gone_last = (*keys, *companions, *configuration)
            delete_counted(store, {key: sizes.get(key, 0) for key in gone_last}, tally)
            tally.add(len(kept), sum(sizes[key] for key in kept))
            release_bases(store, record)
            if exists(store, stock_key(record)):  # put meanwhile, by a save that had stalled before that
                follow_commit(store, commit)
            remove_folders(store)
        gone = (*visible, COMMIT_KEY, *keys, *configuration)
        names = tuple(referrers.names()) if kept else ()
        return Removed(
            store.url, record.id, gone, record.data_bytes, tuple(kept), names, store.keeps_versions
        )


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
        below = [each.path for _, each in find_folders(store, depth=3, report=no_report) if each.path]
        text = "no checkpoint is committed here; `ckpt gc` removes the leftovers of interrupted saves"
        if below:
            number = count(len(below), "checkpoint")
            text = f"this is a folder of {number}, not a checkpoint: give those to remove, as {store.url}/{min(below)}"
    else:
        text = (
            "another program wrote this checkpoint (stock PyTorch?); only those of this library are removed"
        )
    return NotCommitted(text, url=store.url)


def remove_folders(store: Store) -> None:
    """Remove the folders of ranks, and then the checkpoint's own, where nothing is left in them."""
    for name in store.folders():
        if is_rank_directory(name):
            store.remove_empty(name)
    store.remove_empty()


def delete_counted(store: Store, sizes: Mapping[str, int], tally: Tally) -> None:
    """Delete objects, given by key with their sizes, and count them; one that is not there is fine.

    Raises as the store does, and begins no more then.
    """
    keys = [*sizes]
    slices = [keys[start : start + _SLICE] for start in range(0, len(keys), _SLICE)]

    def work(part: Sequence[str]) -> None:
        store.delete(part)
        tally.add(len(part), sum(sizes[key] for key in part))

    threads = min(store.threads, _MAX_THREADS, max(1, len(slices)))
    with workers(threads, "ckpt-delete") as pool:
        run_all(pool, work, slices)
