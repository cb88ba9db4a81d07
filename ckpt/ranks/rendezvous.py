"""One connection of this process to the rendezvous store, for the heartbeats of all saves and loads."""

from __future__ import annotations

import os
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


_connections: dict[tuple[int, int], tuple[Any, Connection]] = {}
"""By process and store; a store stays referred to as long as its number may be looked up."""


def connect(store: Any, timeout_s: float) -> Connection:
    """Return the connection to `store`, made at the first call. Its requests fail after `timeout_s`."""
    name = os.getpid(), id(store)
    for other in list(_connections):
        if other != name:  # of a default process group that was ended, or of a parent process
            _connections.pop(other, None)
    _, connection = _connections.get(name) or (store, Connection(store.clone()))
    connection.store.set_timeout(timedelta(seconds=timeout_s))
    return _connections.setdefault(name, (store, connection))[1]


def forget(store: Any) -> None:
    """Let the next call make a new connection, as this one broke."""
    _connections.pop((os.getpid(), id(store)), None)
