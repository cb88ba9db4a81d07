"""List the checkpoints under a root, their state, and the latest that can be loaded.

A listing only suggests where to look; the commit record decides. So a listing that lags can hide a
checkpoint, but never changes whether one looks committed.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt.backends.base import Store, exists
from ckpt.backends.registry import open_store
from ckpt.backends.wrapper import PrefixStore
from ckpt.consistency.commit import STOCK_METADATA_KEY, is_foreign
from ckpt.errors import AccessDenied, CheckpointError, NotFound, StorageError
from ckpt.format.names import DATA_KEY_IN_BYTES, is_rank_directory
from ckpt.format.records import CommitRecord, ObjectRef, read_commit
from ckpt.transfer.threads import in_order, workers

_STEP = re.compile(r"(?:.*[^0-9])?(\d{1,18})(?:\.[a-z]+)?")
_HEAD_BYTES = 4 << 20
_MAX_DEPTH = 8


@dataclass(frozen=True)
class ListedCheckpoint:
    """A checkpoint, or the remains of one.

    Attributes:
        path: relative to the root; empty for the root itself.
        state: `committed`, `incomplete` (an interrupted or running save), `foreign` (written by
            stock PyTorch), `damaged` (its commit record cannot be read; `problem` says why), or
            `unreadable` (the storage allows no look into it).
        step: the tag `step`, or the last number in the path.
        size_bytes: data of a committed checkpoint; of others the sum of all objects.
        created_at_s: seconds since 1970, by the clock of the process that wrote it.
        latest: it is the latest committed checkpoint with all its records.
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
    latest: bool = False


def list_checkpoints(
    root: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    depth: int = 3,
    threads: int | None = None,
) -> list[ListedCheckpoint]:
    """List the checkpoints at and below `root`, by step, then age.

    Args:
        depth: levels of folders below the root to search.

    Raises:
        NotFound: the root is empty, or does not exist.
        StorageError: the storage refused, or could not be reached.
    """
    with contextlib.closing(open_store(root, storage_options, threads=threads)) as store:
        checkpoints = [listed for _, listed in find_folders(store, depth=depth)]
        if not checkpoints and next(iter(store.list()), None) is None:
            raise NotFound("there is nothing here", url=store.url)
        checkpoints.sort(
            key=lambda each: (-1 if each.step is None else each.step, each.created_at_s or 0.0, each.path)
        )
        for number, listed in reversed(list(enumerate(checkpoints))):
            if listed.state == "committed" and _has_all_records(PrefixStore(store, listed.path)):
                checkpoints[number] = replace(listed, latest=True)
                break
        return checkpoints


def find_folders(store: Store, *, depth: int) -> Iterator[tuple[PrefixStore, ListedCheckpoint]]:
    """Find every folder at or below the root that holds a checkpoint, or the start of one."""

    def look(path: str) -> tuple[PrefixStore, ListedCheckpoint | None, list[str]]:
        folder = PrefixStore(store, path)
        names: list[str] = []
        try:
            names += folder.folders()
            return folder, _classify(folder, names), names
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
            return _committed(base, commit.record)
        except CheckpointError as error:
            return _summed(folder, replace(base, state="damaged", problem=error.message))
    if exists(folder, f"__0{STOCK_METADATA_KEY}") or _is_stock(folder):
        return _summed(folder, replace(base, state="foreign"))
    if (begun and next(iter(folder.list()), None) is not None) or exists(folder, STOCK_METADATA_KEY):
        return _summed(folder, base)
    return None  # folders may stay empty where uploads were aborted (`rclone serve s3`)


def _is_stock(folder: Store) -> bool:
    """Tell whether another program wrote `.metadata`, and not this one, with its seal cut off."""
    if not is_foreign(folder):
        return False
    head = bytearray(min(_HEAD_BYTES, folder.stat(STOCK_METADATA_KEY).size_bytes))
    folder.read_into(STOCK_METADATA_KEY, 0, [memoryview(head)])
    return DATA_KEY_IN_BYTES.search(head) is None


def _committed(base: ListedCheckpoint, record: CommitRecord) -> ListedCheckpoint:
    step = record.tags.get("step", "")
    return replace(
        base,
        state="committed",
        step=int(step) if step.isdecimal() and len(step) < 19 else base.step,
        size_bytes=record.data_bytes,
        created_at_s=_seconds(record.created_at),
        world_size=record.world_size,
        id=record.id,
        tags=record.tags,
    )


def _summed(folder: Store, base: ListedCheckpoint) -> ListedCheckpoint:
    """Add the size of all objects, and the time of the newest."""
    size, newest = 0, None
    for stat in folder.list():
        size += stat.size_bytes
        if stat.modified_at_s is not None:
            newest = max(newest or 0.0, stat.modified_at_s)
    return replace(base, size_bytes=size, created_at_s=newest)


def step_of(path: str) -> int | None:
    """Parse the step in a folder's name (`100`, `epoch=3-step=100`); None if there is none."""
    match = _STEP.fullmatch(path.rstrip("/").rpartition("/")[2])
    return int(match[1]) if match else None


def _seconds(created_at: str) -> float | None:
    try:
        return datetime.datetime.fromisoformat(created_at).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def _has_all_records(folder: PrefixStore) -> bool:
    """Check that the index and all manifests exist, with the sizes in the commit record."""

    def fits(ref: ObjectRef) -> bool:
        try:
            return folder.stat(ref.path).size_bytes == ref.size_bytes
        except CheckpointError as error:
            if isinstance(error, StorageError) and not isinstance(error, NotFound):
                raise  # the record may exist, though it cannot be seen now
            return False

    commit = read_commit(folder)
    try:
        refs = [] if commit is None else commit.record.refs
    except CheckpointError:
        return False
    with workers(folder.threads, "ckpt-ls") as threads:
        return bool(refs) and all(in_order(threads, fits, refs, ahead=4 * folder.threads))
