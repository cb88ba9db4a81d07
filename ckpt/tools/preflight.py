"""Trying a place out before it is needed: whether this process may write, read, create and delete there."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping
from typing import Any

from ckpt.backends.base import PutMode, Store, put_bytes, read_bytes
from ckpt.backends.registry import open_store
from ckpt.errors import AlreadyExists, IntegrityError, StorageError, StorageFull

__all__ = ["check_place"]


def check_place(
    url: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None, needed_bytes: int = 0
) -> int | None:
    """Write, create, read back and delete a small object below `url`; returns the free bytes there, if known.

    Raises:
        StorageFull: less than `needed_bytes` are free. Nothing was written.
        IntegrityError: what was read is not what was written.
        StorageError: the storage refused, or could not be reached; the text says what was tried.
    """
    store = open_store(url, storage_options)
    try:
        free = store.free_bytes()
        if free is not None and free < needed_bytes:
            text = f"{_gib(free)} are free, and the checkpoint takes {_gib(needed_bytes)}"
            raise StorageFull(text, url=store.url)
        _try_out(store)
        return free
    finally:
        store.close()


def _try_out(store: Store) -> None:
    # A folder of its own: other ranks try at the same time, and remove theirs.
    folder, data = f"ckpt-preflight-{secrets.token_hex(8)}", secrets.token_bytes(1024)
    key = f"{folder}/object"
    action = "make a folder"
    try:
        try:
            store.prepare(folder)
            action = "write"
            put_bytes(store, key, data)
            action = "read back"
            if read_bytes(store, key) != data:
                raise IntegrityError("what is read is not what was written", url=store.url, key=key)
            action = "create only if absent"
            _create_again(store, key)
        except BaseException:
            with contextlib.suppress(Exception):
                _remove(store, folder, key)
            raise
        action = "delete"
        _remove(store, folder, key)
    except StorageError as error:
        raise type(error)(f"trying to {action}: {error.message}", url=store.url, key=error.key) from error


def _create_again(store: Store, key: str) -> None:
    """A first commit is such a put. Where the store does not promise to refuse it, nothing depends on that."""
    try:
        put_bytes(store, key, b"again", mode=PutMode.CREATE)
    except AlreadyExists:
        return
    if store.capabilities.conditional_create:
        raise StorageError("a put that has to be refused was carried out", url=store.url, key=key)


def _remove(store: Store, folder: str, key: str) -> None:
    store.delete([key])
    store.remove_empty(folder)


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
