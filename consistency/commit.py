"""The commit protocol: how a save becomes a checkpoint in one step, or not at all.

All objects that a commit lists have new names, and are durable before `commit.json` is put in one
atomic step. Who reads it finds all that it lists, or waits for it on storage that lags; who does not
find it has no checkpoint. `.metadata`, which stock readers look for, is put after that
(`ckpt.writing.stock_metadata`): where it is, the commit is, also if the save was killed between the two.
"""

from __future__ import annotations

import contextlib
import math
import pickle
from collections.abc import Callable

from ckpt.backends.base import PutMode, Store, put_bytes, read_bytes
from ckpt.consistency import environment
from ckpt.consistency.seal import JSON_SEAL_BYTES, PICKLE_SEAL_BYTES, is_sealed_json, is_sealed_pickle
from ckpt.errors import (
    AlreadyExists,
    CheckpointError,
    CommitConflict,
    CommitError,
    CommitUnknown,
    NotFound,
    StorageError,
    Truncated,
)

COMMIT_KEY = "commit.json"
STOCK_METADATA_KEY = ".metadata"
MAX_COMMIT_BYTES = 64 << 20
_READ_ATTEMPTS = 5
_STALE_SIZE_TIMEOUT_S = 60.0
"""For how long a client may remember the size of an object that was replaced (NFS: `acregmax`)."""
_CONFIRM_TIMEOUT_S = 10.0
"""How long to look for the record after its put."""


def read_commit_bytes(store: Store) -> bytes | None:
    """Read the commit record at this place as it is stored, unchecked; None if there is none."""
    return read_record_bytes(store, COMMIT_KEY, max_bytes=MAX_COMMIT_BYTES)


def read_record_bytes(store: Store, key: str, *, max_bytes: int) -> bytes | None:
    """Read a sealed JSON record that may be replaced meanwhile, unchecked; None if there is none."""

    def read() -> tuple[bytes, bool]:
        data = bytes(read_bytes(store, key, max_bytes=max_bytes))
        return data, is_sealed_json(data)

    return _read_whole(store, read)


def read_json_seal(store: Store, key: str) -> bytes | None:
    """Read the end of a sealed JSON record, where its seal is; None if there is none."""

    def read() -> tuple[bytes, bool]:
        size_bytes = store.stat(key).size_bytes
        tail = bytearray(min(size_bytes, JSON_SEAL_BYTES))
        store.read_into(key, size_bytes - len(tail), [memoryview(tail)])
        return bytes(tail), is_sealed_json(tail)

    return _read_whole(store, read)


def is_foreign(store: Store) -> bool:
    """Return True if another program, such as stock PyTorch, wrote `.metadata` at this place."""
    seal = stock_metadata_seal(store)
    return seal is not None and not is_sealed_pickle(seal)


def stock_metadata_seal(store: Store) -> bytes | None:
    """Read the end of `.metadata`, which tells one save's from another's; None if there is none."""

    def read() -> tuple[bytes, bool]:
        size_bytes = store.stat(STOCK_METADATA_KEY).size_bytes
        tail = bytearray(min(size_bytes, PICKLE_SEAL_BYTES))
        store.read_into(STOCK_METADATA_KEY, size_bytes - len(tail), [memoryview(tail)])
        # A whole pickle without seal: another look would show the same.
        is_stock = tail.endswith(pickle.STOP) and _ends_at(store, STOCK_METADATA_KEY, size_bytes)
        return bytes(tail), is_stock or is_sealed_pickle(tail)

    return _read_whole(store, read)


def _ends_at(store: Store, key: str, size_bytes: int) -> bool:
    try:
        store.read_into(key, size_bytes, [memoryview(bytearray(1))])
    except Truncated:
        return True
    return False


def _read_whole(store: Store, read: Callable[[], tuple[bytes, bool]]) -> bytes | None:
    """Call `read` until it tells that its bytes are whole; return the last ones, None if NotFound.

    The object can be replaced between the request for its size and the read. A client that
    remembers the size of the old object reads part of the new one, for as long as it remembers.
    """
    prompt = store.capabilities.cross_client_visibility
    backoff = environment.Backoff(0.0 if prompt else _STALE_SIZE_TIMEOUT_S)
    attempt = 0
    while True:
        attempt += 1
        # Asked before the read, which then shows the object as it is when the time is up.
        is_last = attempt >= _READ_ATTEMPTS and backoff.is_over
        try:
            data, is_whole = read()
            if is_whole or is_last:
                return data
        except NotFound:
            return None
        except Truncated:
            if is_last:
                raise
        if attempt >= _READ_ATTEMPTS:
            backoff.pause()


def publish(
    store: Store,
    record: bytes,
    *,
    previous: bytes | None,
    confirm_s: float = math.inf,
    check: Callable[[], None] = lambda: None,
) -> bool:
    """Make the save described by `record` the checkpoint at this place.

    The record was then seen at its place, whatever the store said. Returns whether the store acknowledged it.

    Args:
        record: the commit record, whose objects are all durable.
        previous: the commit record found here when the save began; it must still be there.
        confirm_s: how long to look for the record (at most 10 s; 60 s on storage that lags and acknowledged it).
        check: called last before that put; what it raises ends the save, of which nothing was committed.

    Raises:
        CommitConflict: the place does not hold `previous` any more.
        CommitUnknown: the record is not to be seen, and its put got no answer, or was acknowledged. It may still
            appear, so nothing that it lists may be deleted. Or the record is there, but may not be durable.
        CommitError: the commit failed; what was committed before still is.
    """
    if read_commit_bytes(store) != previous:
        raise _conflict(store)
    check()
    mode = PutMode.CREATE if previous is None else PutMode.OVERWRITE
    try:
        put_bytes(store, COMMIT_KEY, record, mode=mode)
    except CheckpointError as error:
        # A retried put can fail, or find its own record, after a first try that worked but whose
        # reply was lost. So whatever the error: if the place holds the record, that is the answer.
        _judge_failure(store, record, error, min(confirm_s, _CONFIRM_TIMEOUT_S))
        return False
    prompt = store.capabilities.cross_client_visibility
    if (
        _look_for(store, record, min(confirm_s, _CONFIRM_TIMEOUT_S if prompt else _STALE_SIZE_TIMEOUT_S))
        == record
    ):
        return True
    raise CommitUnknown(
        "the storage acknowledged the commit record, and does not show it: it may appear, or not have been kept, or "
        "another save replaced it; look again before trusting or deleting this save",
        url=store.url,
        key=COMMIT_KEY,
    )


def _judge_failure(store: Store, record: bytes, failure: CheckpointError, confirm_s: float) -> None:
    """Return if the commit is there although its put failed; raise as `publish` does if not."""
    refused = isinstance(failure, AlreadyExists)
    settled = isinstance(failure, StorageError) and failure.settled
    commit = _look_for(store, record, 0.0 if settled or refused else confirm_s)
    if commit == record and store.capabilities.visible_is_durable:
        return
    if commit == record:
        raise CommitUnknown(
            f"the checkpoint was committed and can be loaded, but may be lost in a power failure ({failure.message}); "
            "save again before you delete others",
            url=store.url,
            key=COMMIT_KEY,
        ) from failure
    if refused and settled and commit is not None:
        raise _conflict(store) from failure
    # An earlier try of this put may have made what refused it, and another save replaced it since.
    if not settled or refused:
        raise CommitUnknown(
            f"the commit may or may not have happened ({failure.message}); "
            "look again before trusting or deleting this save",
            url=store.url,
            key=COMMIT_KEY,
        ) from failure
    raise CommitError(f"nothing was committed: {failure.message}", url=store.url, key=COMMIT_KEY) from failure


def proves_no_commit(failure: BaseException) -> bool:
    """Tell whether a failed save was surely not committed. An unexpected error proves nothing."""
    return isinstance(failure, CheckpointError) and not isinstance(failure, CommitUnknown)


def _look_for(store: Store, record: bytes, timeout_s: float) -> bytes | None:
    """Read the commit record until it is `record` or the time is up; return the last one seen."""
    backoff = environment.Backoff(timeout_s)
    while True:
        commit = None
        with contextlib.suppress(CheckpointError):
            commit = read_commit_bytes(store)
        if commit == record or backoff.is_over:
            return commit
        backoff.pause()


def _conflict(store: Store) -> CommitConflict:
    return CommitConflict(
        "another save was committed at this place while this one was running; "
        "give every save a place of its own, and every place one writer at a time",
        url=store.url,
        key=COMMIT_KEY,
    )
