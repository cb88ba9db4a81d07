"""Ask a storage for its time: the clocks of this machine and of the storage may differ by hours."""

from __future__ import annotations

import contextlib
import math

from ckpt.backends.base import Store, put_bytes
from ckpt.errors import StorageError


def storage_now(store: Store, key: str) -> float | None:
    """Return the storage's time in seconds since 1970, by an object that is put at `key` and deleted.

    Many storages count whole seconds, so the second that has begun counts as over. None if the
    storage gives its objects no times.
    """
    try:
        put_bytes(store, key, b"clock")
        modified_at_s = store.stat(key).modified_at_s
        return None if modified_at_s is None else math.floor(modified_at_s) + 1.0
    finally:
        with contextlib.suppress(StorageError):
            store.delete([key])
