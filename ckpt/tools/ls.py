"""List the checkpoints under a root, their state, and the latest that can be loaded.

A listing only suggests where to look; the commit record decides. So a listing that lags can hide a
checkpoint, but never changes whether one looks committed.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt.backends.base import ObjectStat, Store, exists
from ckpt.backends.registry import open_store
from ckpt.backends.wrapper import LinkedFolder, PrefixStore, folder_of
from ckpt.consistency.commit import COMMIT_KEY, STOCK_METADATA_KEY
from ckpt.errors import AccessDenied, CheckpointError, NotFound, StorageError, short_traceback
from ckpt.format.names import (
    MODEL_INDEX_KEY,
    MODEL_PREFIX,
    is_our_name,
    is_rank_directory,
    step_of,
)
from ckpt.format.records import CommitRecord, read_commit
from ckpt.format.run_record import RunRecord, read_run
from ckpt.format.saved_over import SAVED_OVER, is_saved_over
from ckpt.reading.latest import created_at_s, is_stock, missing_object, newest_first
from ckpt.tools.findings import find_uploads
from ckpt.transfer.reports import Report, Tally, no_report
from ckpt.transfer.threads import in_order, workers
from ckpt.words import METRIC_TAG

_MAX_DEPTH = 8
_MAX_UPLOADS = 100_000


@dataclass(frozen=True)
class ListedCheckpoint:
    """A checkpoint, or the remains of one.

    Attributes:
        path: relative to the root; empty for the root itself.
        state: `committed`, `incomplete` (an interrupted or running save), `foreign` (written by
            stock PyTorch), `damaged` (its commit record cannot be read, or another program saved over it; `problem` says), or
            `unreadable` (the storage allows no look into it).
        step: the tag `step`, or the number in the folder's name.
        size_bytes: own data of a committed checkpoint; of others the sum of all objects, and of files that
            are still being written.
        created_at_s: seconds since 1970, by the clock of the process that wrote it.
        referred_bytes: what it names in others beside it, `bases`.
        save_s: how long its save took until the commit, if it says; `retries`, the requests sent again meanwhile.
        metrics: by name, from its tags and from the record of the run, which has those added later; None: not a number.
        latest: it is the latest in its folder, the run, of those with all objects in their sizes; of
            the run of a `CheckpointManager` that which its restore tries first.
    """

    path: str
    url: str
    state: str
    step: int | None
    size_bytes: int | None = None
    created_at_s: float | None = None
    world_size: int | None = None
    id: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    problem: str | None = None
    referred_bytes: int | None = None
    bases: tuple[str, ...] = ()
    save_s: float | None = None
    retries: int = 0
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    latest: bool = False


@short_traceback
def list_checkpoints(
    root: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    depth: int = 3,
    threads: int | None = None,
    progress: Report | None = None,
) -> list[ListedCheckpoint]:
    """List the checkpoints at and below `root`, by folder, then step, then age.

    `pandas.DataFrame(ckpt.list_checkpoints(root))` makes a table of them.

    Args:
        storage_options: of the root, by name, as for a save there.
        threads: folders that are looked at in parallel.
        depth: levels of folders below the root to search.
        progress: called with the folders looked at so far and those found, and then with the runs whose latest
            checkpoint is known; `noun` of both numbers says which.

    Raises:
        NotFound: the root is empty, or does not exist.
        StorageError: the storage refused, or could not be reached.
    """
    report = progress or no_report
    with contextlib.closing(open_store(root, storage_options, threads=threads)) as store:
        checkpoints = [listed for _, listed in find_folders(store, depth=depth, report=report)]
        if not checkpoints and next(iter(store.list()), None) is None:
            raise NotFound("there is nothing here", url=store.url)
        runs: dict[str | None, list[ListedCheckpoint]] = {}
        for listed in sorted(checkpoints, key=_age_order):
            runs.setdefault(_run_of(listed.path), []).append(listed)
        tally = Tally(report, "run")
        tally.expect(len(runs))

        def look(run: tuple[str | None, list[ListedCheckpoint]]) -> list[ListedCheckpoint]:
            completed = _with_run(store, *run)
            tally.add(1)
            return completed

        ordered = sorted(runs.items(), key=lambda run: (run[0] is not None, run[0] or ""))
        with workers(store.threads, "ckpt-ls") as pool:
            found = in_order(pool, look, ordered, ahead=4 * store.threads)
            return [*itertools.chain.from_iterable(found)]


def _run_of(path: str) -> str | None:
    """Name the folder that a checkpoint shares with the others of its run; None for the root itself."""
    return path.rpartition("/")[0] if path else None


def _age_order(listed: ListedCheckpoint) -> tuple[int, float, str]:
    return -1 if listed.step is None else listed.step, listed.created_at_s or 0.0, listed.path


def _with_run(
    store: Store, run: str | None, checkpoints: Sequence[ListedCheckpoint]
) -> list[ListedCheckpoint]:
    """Complete the checkpoints of a run, the oldest first: which is the latest that is whole, and metrics on record."""
    newest = [listed.path for listed in reversed(checkpoints) if listed.state == "committed"]
    record = None if run is None or not newest else _read_record(PrefixStore(store, run))
    added: dict[str, Mapping[str, float | None]] = {}
    if record is not None:
        prefix, committed = f"{run}/" if run else "", set(newest)
        names = [path.removeprefix(prefix) for path in newest]
        newest = [path for _, name in newest_first(names, record) if (path := prefix + name) in committed]
        added = {prefix + each.path: _finite(each.metrics) for each in record.checkpoints}
    latest = next((path for path in newest if _is_whole(folder_of(store, path))), None)
    return [
        replace(each, latest=each.path == latest, metrics={**each.metrics, **added.get(each.path, {})})
        for each in checkpoints
    ]


def _read_record(run: Store) -> RunRecord | None:
    try:
        return read_run(run)
    except CheckpointError as error:
        if isinstance(error, StorageError) and not isinstance(error, AccessDenied):
            raise
        return None  # a manager does without it too


def _is_whole(folder: Store) -> bool:
    commit = read_commit(folder)
    try:
        return commit is not None and missing_object(folder, commit.record) is None
    except CheckpointError as error:
        if isinstance(error, StorageError) and not isinstance(error, AccessDenied):
            raise  # the objects may exist, though they cannot be seen now
        return False


def find_folders(
    store: Store, *, depth: int, report: Report
) -> Iterator[tuple[PrefixStore, ListedCheckpoint]]:
    """Find every folder at or below the root that holds a checkpoint, or the start of one.

    Reports the folders that were looked at, and those that are known.
    """
    tally = Tally(report, "folder")

    def look(path: str) -> tuple[PrefixStore, ListedCheckpoint | None, list[str]]:
        found = look_into(path)
        tally.add(1)
        return found

    def look_into(path: str) -> tuple[PrefixStore, ListedCheckpoint | None, list[str]]:
        folder = folder_of(store, path)
        names: list[str] = []
        try:
            names += folder.folders()
            listed = _classify(folder, names)
            if isinstance(folder, LinkedFolder):
                return folder, listed, []  # only what restore would take: not all that is below elsewhere
            return folder, listed, [*names, *folder.links()]
        except CheckpointError as error:
            # One bad folder (a link out of the root, one that only the superuser may list)
            # hides no others.
            if not path or (isinstance(error, StorageError) and not isinstance(error, AccessDenied)):
                raise
            state = "unreadable" if isinstance(error, AccessDenied) else "damaged"
            bad = ListedCheckpoint(path, folder.url, state, step_of(path), problem=error.message)
            return folder, bad, names

    level = [""]
    with workers(store.threads, "ckpt-ls") as threads:
        for _ in range(min(depth, _MAX_DEPTH) + 1):
            below: list[str] = []
            tally.expect(len(level))
            for folder, listed, names in in_order(threads, look, level, ahead=4 * store.threads):
                if listed is not None:
                    yield folder, listed
                # The folder of a run may also hold a checkpoint of its own.
                prefix = f"{folder.path}/" if folder.path else ""
                below += [prefix + name for name in names if not is_rank_directory(name)]
            level = sorted(below)


def _classify(folder: PrefixStore, names: Iterable[str]) -> ListedCheckpoint | None:
    """Classify a folder by its objects; None if it neither holds a checkpoint nor the start of one.

    Of the folders in it, `names`, one with a rank's name is a sign of an interrupted save.
    """
    begun = any(map(is_rank_directory, names))
    base = ListedCheckpoint(folder.path, folder.url, "incomplete", step_of(folder.path or folder.url))
    commit = read_commit(folder)
    if commit is not None and (commit.is_ours or begun):
        try:
            listed = _committed(base, commit.record)
            if is_saved_over(folder, commit):
                return replace(listed, state="damaged", problem=SAVED_OVER)
            return listed
        except CheckpointError as error:
            return _summed(folder, replace(base, state="damaged", problem=error.message))
    if commit is None and _is_no_file(folder, COMMIT_KEY):
        problem = f"{COMMIT_KEY} is no file, but a folder or a link to nothing"
        return _summed(folder, replace(base, state="damaged", problem=problem))
    if is_stock(folder):
        return _summed(folder, replace(base, state="foreign"))
    has_metadata = exists(folder, STOCK_METADATA_KEY) or _has_own_index(folder)
    if not begun and not has_metadata and not _begins_model(folder):
        return None
    uploads: list[ObjectStat] = []
    with contextlib.suppress(StorageError):  # not allowed, or not known to the server
        uploads = find_uploads(folder, _MAX_UPLOADS)
    incomplete = _summed(folder, base, uploads)
    # Folders may stay empty where uploads were aborted (`rclone serve s3`).
    return incomplete if has_metadata or incomplete.size_bytes is not None else None


def _is_no_file(folder: Store, key: str) -> bool:
    """Tell whether something of a name is there that is no file, in a local folder."""
    if folder.directory is None:
        return False
    path = os.path.join(folder.directory, key)
    return os.path.lexists(path) and not os.path.isfile(path)


def _has_own_index(folder: Store) -> bool:
    """Tell whether there is the index of a model of this library, which may have lost its commit."""
    if not exists(folder, MODEL_INDEX_KEY):
        return False
    from ckpt.writing.stock_metadata import is_anothers  # with numpy, and this is rare

    return not is_anothers(folder, MODEL_INDEX_KEY)


def _begins_model(folder: PrefixStore) -> bool:
    """Tell whether there are files of an interrupted save of a model.

    Such a save has made the folder of its first rank before, where there are folders.
    """
    return folder.directory is None and any(is_our_name(stat.key) for stat in folder.list(MODEL_PREFIX))


def _committed(base: ListedCheckpoint, record: CommitRecord) -> ListedCheckpoint:
    timings = record.timings or None
    return replace(
        base,
        state="committed",
        step=record.step(base.path or base.url),
        size_bytes=record.data_bytes,
        referred_bytes=record.carried_bytes,
        bases=tuple(record.owners),
        created_at_s=created_at_s(record),
        world_size=record.world_size,
        id=record.id,
        tags=record.tags,
        metrics=_metrics(record.tags),
        save_s=None if timings is None else sum(timings.coordinator_ms) / 1000,
        retries=0 if timings is None else sum(number for _, number in timings.retries),
    )


def _metrics(tags: Mapping[str, str]) -> dict[str, float | None]:
    """Return the metrics among tags, whose texts may be anything."""
    metrics: dict[str, float | None] = {}
    for name, text in tags.items():
        if name.startswith(METRIC_TAG):
            try:
                metrics[name.removeprefix(METRIC_TAG)] = float(text)
            except ValueError:
                metrics[name.removeprefix(METRIC_TAG)] = None
    return _finite(metrics)


def _finite(metrics: Mapping[str, float | None]) -> dict[str, float | None]:
    """Put None in the place of what is no number: JSON has none."""
    return {
        name: value if value is not None and math.isfinite(value) else None for name, value in metrics.items()
    }


def _summed(folder: Store, base: ListedCheckpoint, unfinished: Iterable[ObjectStat] = ()) -> ListedCheckpoint:
    """Add the size of all objects, and the time of the newest; neither if there is none."""
    size: int | None = None
    newest: float | None = None
    for stat in itertools.chain(folder.list(), unfinished):
        size = (size or 0) + stat.size_bytes
        if stat.modified_at_s is not None:
            newest = max(newest or 0.0, stat.modified_at_s)
    return replace(base, size_bytes=size, created_at_s=newest)
