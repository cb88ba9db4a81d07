"""Checkpoints under a root: which there are, in what state, and which is the latest that can be loaded.

Listing only suggests where to look. What a place is, its commit record says: a listing that lags can hide a
checkpoint, but never make one look committed or not.
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt.backends.base import Store, exists
from ckpt.backends.prefix import PrefixStore
from ckpt.backends.registry import open_store
from ckpt.consistency.commit import STOCK_METADATA_KEY, is_foreign
from ckpt.errors import AccessDenied, CheckpointError, NotFound, StorageError
from ckpt.format.names import DATA_KEY_IN_BYTES, is_rank_directory
from ckpt.format.records import CommitRecord, read_commit
from ckpt.transfer.threads import in_order, thread_pool

__all__ = ["Found", "find_places", "is_stock", "list_checkpoints", "look_at", "step_of"]

_STEP = re.compile(r"(?:.*[^0-9])?(\d{1,18})(?:\.[a-z]+)?")
_HEAD_BYTES = 4 << 20
_MAX_DEPTH = 8


@dataclass(frozen=True)
class Found:
    """A checkpoint, or what is left of one.

    Attributes:
        path: relative to the root; empty for the root itself.
        state: `committed`, `incomplete` (a save that did not finish, or still runs), `foreign` (stock PyTorch wrote
            it), or `damaged` (its commit record cannot be read; `problem` says why).
        step: from the tag `step`, or the last number in the path.
        size_bytes: data of a committed checkpoint; of others all that is listed.
        created_at_s: seconds since 1970, by whoever wrote it.
        latest: it is the latest that has all its records.
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
) -> list[Found]:
    """The checkpoints at and below `root`, by step, then age; folders inside of a checkpoint are not looked at.

    Args:
        depth: how many folders below the root to look for checkpoints.

    Raises:
        NotFound: there is nothing at all.
        StorageError: the storage refused, or could not be reached.
    """
    store = open_store(root, storage_options, threads=threads)
    try:
        with thread_pool(store.threads, "ckpt-ls") as workers:
            found = [what for _, what in find_places(store, workers, depth=depth)]
            if not found and next(iter(store.list()), None) is None:
                raise NotFound("there is nothing here", url=store.url)
            return _with_latest(store, sorted(found, key=_order))
    finally:
        store.close()


def find_places(store: Store, threads: Executor, *, depth: int = 3) -> Iterator[tuple[PrefixStore, Found]]:
    """Every place at or below the store's root where a checkpoint is, or was begun."""
    level = [""]
    for _ in range(min(depth, _MAX_DEPTH) + 1):
        below: list[str] = []

        def look(path: str) -> tuple[PrefixStore, Found | None, list[str]]:
            place = PrefixStore(store, path)
            folders: list[str] = []
            try:
                folders += place.folders()
                return place, look_at(place, path, folders), folders
            except CheckpointError as error:
                # One bad place (a link out of the root, a folder that only root may list) hides no others.
                if not path or (isinstance(error, StorageError) and not isinstance(error, AccessDenied)):
                    raise
                found = Found(path, place.url, "damaged", step_of(path), problem=error.message)
                return place, found, folders

        for place, found, folders in in_order(threads, look, level, ahead=4 * store.threads):
            if found is not None:
                yield place, found
            # A place may be a run's folder and hold a checkpoint of its own too.
            prefix = f"{place.path}/" if place.path else ""
            below += [prefix + name for name in folders if not is_rank_directory(name)]
        level = sorted(below)


def look_at(place: PrefixStore, path: str, folders: Iterable[str]) -> Found | None:
    """What stands at a place; None if it is no checkpoint and was not going to be one.

    Args:
        folders: those listed there: the only sign of a save that did not finish.
    """
    begun = any(map(is_rank_directory, folders))
    base = Found(path, place.url, "incomplete", step_of(path or place.url))
    commit = read_commit(place)
    if commit is not None and (commit.is_ours or begun):
        try:
            return _committed(base, commit.record)
        except CheckpointError as error:
            return _listed(place, replace(base, state="damaged", problem=error.message))
    if exists(place, f"__0{STOCK_METADATA_KEY}") or is_stock(place):
        return _listed(place, replace(base, state="foreign"))
    if (begun and next(iter(place.list()), None) is not None) or exists(place, STOCK_METADATA_KEY):
        return _listed(place, base)
    return None  # folders may stay empty where uploads were aborted (`rclone serve s3`)


def is_stock(place: Store) -> bool:
    """Whether `.metadata` there is another program's, and not one of ours whose seal a tool has cut off."""
    if not is_foreign(place):
        return False
    head = bytearray(min(_HEAD_BYTES, place.stat(STOCK_METADATA_KEY).size_bytes))
    place.read_into(STOCK_METADATA_KEY, 0, [memoryview(head)])
    return DATA_KEY_IN_BYTES.search(head) is None


def _committed(base: Found, record: CommitRecord) -> Found:
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


def _listed(place: Store, base: Found) -> Found:
    size, newest = 0, None
    for stat in place.list():
        size += stat.size_bytes
        if stat.modified_at_s is not None:
            newest = max(newest or 0.0, stat.modified_at_s)
    return replace(base, size_bytes=size, created_at_s=newest)


def step_of(path: str) -> int | None:
    """The step that a folder is named after: `100`, `step-100`, `epoch=3-step=100`; None if it has no number."""
    found = _STEP.fullmatch(path.rstrip("/").rpartition("/")[2])
    return int(found[1]) if found else None


def _seconds(created_at: str) -> float | None:
    try:
        moment = datetime.datetime.fromisoformat(created_at)
        return moment.timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def _order(found: Found) -> tuple[int, float, str]:
    step = -1 if found.step is None else found.step
    return step, found.created_at_s or 0.0, found.path


def _with_latest(store: Store, found: list[Found]) -> list[Found]:
    """Mark the latest committed checkpoint whose records are all there."""
    for number in reversed(range(len(found))):
        if found[number].state == "committed" and _is_whole(PrefixStore(store, found[number].path)):
            found[number] = replace(found[number], latest=True)
            break
    return found


def _is_whole(place: PrefixStore) -> bool:
    """Whether the index and all manifests are there, as long as the commit says. Data are not looked at."""
    commit = read_commit(place)
    if commit is None:
        return False
    try:
        record = commit.record
    except CheckpointError:
        return False

    def fits(ref: Any) -> bool:
        try:
            return bool(place.stat(ref.path).size_bytes == ref.size_bytes)
        except NotFound:
            return False
        except StorageError:
            raise  # what cannot be seen may be whole all the same
        except CheckpointError:
            return False

    with thread_pool(place.threads, "ckpt-ls") as threads:
        return all(in_order(threads, fits, record.refs, ahead=4 * place.threads))
