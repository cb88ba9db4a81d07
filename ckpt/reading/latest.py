"""Choose the latest checkpoint of a run: the same one for `ckpt ls` and for the restore of a manager.

Records and the sizes of all objects decide, so that it takes no time; `ckpt verify` reads the data.
"""

from __future__ import annotations

import contextlib
import datetime
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ckpt.backends.base import Store, exists
from ckpt.consistency import environment
from ckpt.consistency.commit import COMMIT_KEY, STOCK_METADATA_KEY, is_foreign
from ckpt.errors import (
    AccessDenied,
    CommitConflict,
    FormatError,
    IntegrityError,
    NotCommitted,
    NotFound,
    UnsafeContent,
)
from ckpt.format.names import DATA_KEY_IN_BYTES, ObjectName, owned_path
from ckpt.format.records import CommitRecord, ManifestRef, ObjectRef, StoredCommit, read_commit
from ckpt.format.run_record import RunRecord
from ckpt.siblings.sibling_objects import SiblingObjects
from ckpt.transfer.threads import in_order, workers

_NAME = re.compile(r"step-(\d{1,18})(?:\.again(?:-\d{1,9})?)?")
_HEAD_BYTES = 4 << 20
_PATIENCE_S = 60.0
"""How long storage that may lag has to show what is there."""


def await_commit(store: Store, timeout_s: float) -> StoredCommit | None:
    """Read the commit record; storage that may lag is given `timeout_s` to show it."""
    backoff = environment.Backoff(timeout_s, first_pause_s=0.25)
    while (commit := read_commit(store)) is None and not backoff.is_over and not is_foreign(store):
        backoff.pause()
    return commit


@dataclass(frozen=True)
class Candidate:
    """A checkpoint, before a restore.

    Attributes:
        fault: why it cannot be restored; None if nothing speaks against it.
        is_foreign: another program wrote it, such as stock PyTorch.
        created_at_s: seconds since 1970, by the clock of the process that wrote it.
        id: of its commit.
        run: the id of the run that saved it; empty if it names none.
    """

    fault: str | None = None
    is_foreign: bool = False
    created_at_s: float | None = None
    id: str | None = None
    run: str = ""


def steps_by_folder(folders: Iterable[str], record: RunRecord) -> dict[str, int]:
    """Return the steps of the folders of a run in which a checkpoint may be, also of superseded ones."""
    named = {name: int(match[1]) for name in folders if (match := _NAME.fullmatch(name))}
    return named | {checkpoint.path: checkpoint.step for checkpoint in record.checkpoints}


def newest_first(folders: Iterable[str], record: RunRecord) -> list[tuple[int, str]]:
    """List steps and folders of a run in which a checkpoint may be, without those that were given up.

    Two processes that went on from one step can each give up what the other saved. Where the record
    gives up all that it lists, these come last: the run must not begin anew, and a folder that is
    not on record may be that of a save that was killed.
    """
    steps = steps_by_folder(folders, record)
    past = {checkpoint.path for checkpoint in record.checkpoints if checkpoint.superseded}
    last = past if len(past) == len(record.checkpoints) else set()
    wanted = [(step, path) for path, step in steps.items() if path not in past or path in last]
    return sorted(
        wanted, key=lambda each: (each[1] not in last, each[0], len(each[1]), each[1]), reverse=True
    )


def examine(store: Store) -> Candidate:
    """Look at the checkpoint at the store's root; storage that may lag is given time to show it.

    Raises NotFound or NotCommitted if there is none, CommitConflict if it was replaced or removed
    meanwhile, StorageError.
    """
    patience_s = 0.0 if store.capabilities.cross_client_visibility else _PATIENCE_S
    try:
        commit = await_commit(store, patience_s)
        if commit is not None:
            record = commit.record
            fault = _fault(store, commit, patience_s)
            return Candidate(fault, created_at_s=created_at_s(record), id=record.id, run=record.run_id)
        if is_stock(store):
            return Candidate("it was not written by this library", is_foreign=True)
    except (IntegrityError, FormatError, UnsafeContent) as error:
        return Candidate(f"damaged: {error.key or COMMIT_KEY}: {error.message}")
    if next(iter(store.list()), None) is None:
        raise NotFound("there is nothing here", url=store.url)
    raise NotCommitted("no checkpoint is committed here", url=store.url)


def _fault(store: Store, commit: StoredCommit, patience_s: float) -> str | None:
    """Return what a checkpoint lacks; None if it is whole, perhaps after a while."""
    backoff = environment.Backoff(patience_s, first_pause_s=0.25)
    while (fault := missing_object(store, commit.record)) is not None:
        if read_commit(store) != commit:
            text = "this checkpoint was replaced or removed meanwhile"
            raise CommitConflict(text, url=store.url, key=COMMIT_KEY)
        if backoff.is_over:
            return f"damaged: {fault}"
        backoff.pause()
    return None


def is_stock(store: Store) -> bool:
    """Tell whether another program saved a checkpoint here, and not this one, with its seal cut off."""
    if exists(store, f"__0{STOCK_METADATA_KEY}"):
        return True
    if not is_foreign(store):
        return False
    head = bytearray(min(_HEAD_BYTES, store.stat(STOCK_METADATA_KEY).size_bytes))
    store.read_into(STOCK_METADATA_KEY, 0, [memoryview(head)])
    return DATA_KEY_IN_BYTES.search(head) is None


def created_at_s(record: CommitRecord) -> float | None:
    """Return when a commit was made; None if it does not tell."""
    try:
        return datetime.datetime.fromisoformat(record.created_at).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def missing_object(store: Store, record: CommitRecord) -> str | None:
    """Name an object of a commit that is not there, or not of its size; None if all are.

    The listing answers for most; what it does not show, or shows otherwise, is asked for by name.
    """
    with (
        contextlib.closing(SiblingObjects(store)) as objects,
        workers(store.threads, "ckpt-latest") as threads,
    ):
        listed = _Listed(objects, record)
        unclear = (ref for ref in record.refs if not listed.shows(ref))
        faults = in_order(threads, listed.fault, unclear, ahead=4 * store.threads)
        return next((fault for fault in faults if fault is not None), None)


class _Listed:
    """The sizes of a commit's objects as a listing shows them."""

    def __init__(self, store: SiblingObjects, record: CommitRecord) -> None:
        self._store, self._is_model = store, record.is_model
        self._sizes: dict[str, int] = dict.fromkeys((ref.path for ref in record.refs), -1)
        self._files: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        for owner in ("", *record.owners):
            with contextlib.suppress(AccessDenied, NotFound):
                for stat in store.of(owner).list():
                    if (path := owned_path(owner, stat.key)) in self._sizes:
                        self._sizes[path] = stat.size_bytes
                    elif (name := ObjectName.parse(stat.key)) is not None and name.is_data:
                        stem = owned_path(owner, name.stem)
                        self._files[stem] += 1
                        self._bytes[stem] += stat.size_bytes

    def shows(self, ref: ObjectRef) -> bool:
        """Tell whether the listing has an object that the commit names, and the data files of a manifest."""
        if self._sizes[ref.path] != ref.size_bytes:
            return False
        if not isinstance(ref, ManifestRef):
            return True
        return (self._files[ref.stem], self._bytes[ref.stem]) == (ref.files, ref.data_bytes)

    def fault(self, ref: ObjectRef) -> str | None:
        """Say what is wrong with an object that the commit names, or with the data files of a manifest."""
        try:
            if self._sizes[ref.path] != ref.size_bytes:
                size_bytes = self._store.stat(ref.path).size_bytes
                if size_bytes != ref.size_bytes:
                    return f"{ref.path}: has {size_bytes} bytes, {ref.size_bytes} were written"
            return self._data_fault(ref) if isinstance(ref, ManifestRef) else None
        except NotFound as error:
            return f"{error.key}: the commit lists this file, but it is not there"

    def _data_fault(self, ref: ManifestRef) -> str | None:
        keys = ref.data_keys(of_model=self._is_model)
        if keys is None:
            return f"{ref.path}: a name that this library does not give, or too many files"
        size_bytes = sum(self._store.stat(owned_path(ref.owner, key)).size_bytes for key in keys)
        if size_bytes == ref.data_bytes:
            return None
        return f"data files of {ref.stem}: {size_bytes} bytes in {ref.files} files, {ref.data_bytes} were written"
