"""Try a place out before it is needed: may this process write, read, create and delete there?"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

from ckpt.backends.base import PutMode, Store, put_bytes, read_bytes
from ckpt.backends.registry import open_store
from ckpt.consistency import environment
from ckpt.errors import AccessDenied, AlreadyExists, IntegrityError, StorageError, StorageFull
from ckpt.words import size


def check_place(
    url: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None, needed_bytes: int = 0
) -> int | None:
    """Try a small object below `url`: write, read back, create, delete.

    Returns:
        the free bytes, if known.

    Raises:
        StorageFull: less than `needed_bytes` is free. Nothing was written.
        IntegrityError: other bytes were read than had been written.
        StorageError: the storage refused, or could not be reached; the text names the action.
    """
    with contextlib.closing(open_store(url, storage_options)) as store:
        free = store.free_bytes()
        if free is not None and free < needed_bytes:
            text = f"only {size(free)} are free, but the checkpoint takes {size(needed_bytes)}"
            raise StorageFull(text, url=store.url)
        _try_out(store)
        return free


def _try_out(store: Store) -> None:
    # A folder of its own, as other ranks try at the same time and remove theirs.
    token = environment.token()
    folder, data = f"ckpt-preflight-{token}", 64 * token.encode()
    key = f"{folder}/object"
    action = "make a folder"
    try:
        try:
            store.prepare(folder)
            action = "write"
            put_bytes(store, key, data)
            action = "read back"
            if read_bytes(store, key) != data:
                text = "the storage returned other bytes than had been written"
                raise IntegrityError(text, url=store.url, key=key)
            action = "create an object that exists already"
            _create_again(store, key)
        except BaseException:
            with contextlib.suppress(Exception):
                _remove(store, folder, key)
            raise
        action = "delete"
        _remove(store, folder, key)
    except StorageError as error:
        text = f"trying to {action}: {error.message}"
        if action == "delete" and isinstance(error, AccessDenied):
            text += "; if a lock is meant to forbid it, pass preflight=False to the manager"
        raise type(error)(text, url=store.url, key=error.key) from error


def _create_again(store: Store, key: str) -> None:
    """Try a put as of a first commit. It must fail if the store declares `conditional_create`."""
    try:
        put_bytes(store, key, b"again", mode=PutMode.CREATE)
    except AlreadyExists:
        return
    if store.capabilities.conditional_create:
        text = "a conditional create overwrote an existing object, although the store declares conditional_create"
        raise StorageError(text, url=store.url, key=key)


def _remove(store: Store, folder: str, key: str) -> None:
    store.delete([key])
    store.remove_empty(folder)
