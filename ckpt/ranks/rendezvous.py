"""One connection of this process to the rendezvous store, for the heartbeats of all saves and loads."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any


@dataclass(eq=False)
class Connection:
    """A connection of its own: on the shared one, a long wait of another user holds up all requests.

    Attributes:
        store: the store, over this connection.
        known: keys that exist. They are never deleted, and need not be asked for again.
    """

    store: Any
    known: set[str] = field(default_factory=set)

    def read(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Return the values of those keys that exist: asking for another one would wait for it."""
        if len(keys) == 1:
            # The cheapest way for the store: it returns the value, changes nothing, and does not wait.
            value = self.store.compare_set(keys[0], _NO_VALUE, _NO_VALUE)
            return {} if value == _NO_VALUE.encode() else {keys[0]: value}
        existing = self._existing(keys)
        return dict(zip(existing, self.store.multi_get(existing), strict=True)) if existing else {}

    def _existing(self, keys: Sequence[str]) -> list[str]:
        new = [key for key in keys if key not in self.known]
        if new and not self.store.check(new):
            new = [key for key in new if self.store.check([key])]
        self.known.update(new)
        return [key for key in keys if key in self.known]


_NO_VALUE = "?"

_connections: weakref.WeakKeyDictionary[Any, tuple[int, Connection]] = weakref.WeakKeyDictionary()
"""By store, with the process that made it: a forked one needs its own. A store ends with its process group."""


def connect(store: Any, timeout_s: float) -> Connection:
    """Return the connection to `store`, made at the first call. Its requests fail after `timeout_s`."""
    process, connection = _connections.get(store) or (0, None)
    if connection is None or process != os.getpid():
        connection = Connection(store.clone())
        _connections[store] = os.getpid(), connection
    connection.store.set_timeout(timedelta(seconds=timeout_s))
    return connection


def forget(store: Any) -> None:
    """Let the next call make a new connection, as this one broke."""
    _connections.pop(store, None)
