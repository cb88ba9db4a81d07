"""Tell the first rank exactly which files of which rank belong to a save, through the store of torch.distributed.

A rank tells it after the barrier at the end of the save, and takes it back before it writes again at
that place. So what the first rank reads after that barrier is of this save, and all of it.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist

from ckpt.consistency import environment
from ckpt.errors import CommitError, ConfigurationError
from ckpt.torch_private import default_store
from ckpt.writing.foreign_files import WrittenFile

__all__ = ["SavedFiles", "SharedKeys"]

_PATIENCE_S = 120.0
"""How long the other ranks have to leave the barrier that the first rank has left."""

_REQUEST_TIMEOUT_S = 300.0
_KEPT_PLACES = 4
_made = 0


class SharedKeys:
    """Keys that all ranks see: of the default process group, under a prefix that no other start of the run has.

    It can be sent to another process, whose own connection it makes.

    Raises:
        ConfigurationError: the process group has a store that no other process can reach.
    """

    def __init__(self, rank: int, is_alone: bool = False) -> None:
        global _made  # all ranks make theirs in the same order
        self._address: tuple[str, int] | str | None = None
        self._kept: Any = None  # the server of a TCPStore ends with the last reference to it
        if is_alone:
            self._prefix = environment.token()
            return
        _made += 1
        self._kept = store = default_store()
        name = f"ckpt-storage/start/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{_made}"
        if rank == 0:
            store.set(name, environment.token())
        self._prefix = f"ckpt-storage/{store.get(name).decode()}"  # waits as long as init_process_group does
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        if isinstance(store, dist.TCPStore):
            self._address = store.host, store.port
        elif isinstance(store, dist.FileStore):
            self._address = store.path  # type: ignore[attr-defined]

    def connect(self) -> Any:
        """Return a store for the keys of this run."""
        timeout = timedelta(seconds=_REQUEST_TIMEOUT_S)
        store: Any
        if isinstance(self._address, tuple):
            host, port = self._address
            store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        elif isinstance(self._address, str):
            store = dist.FileStore(self._address)
        else:
            store = dist.HashStore() if self._kept is None else self._kept
        return dist.PrefixStore(self._prefix, store)

    def __getstate__(self) -> dict[str, Any]:
        if self._kept is not None and self._address is None:
            raise ConfigurationError(
                f"the process group was made with a {type(self._kept).__name__}, which another process cannot "
                'reach: use init_method="env://" or a FileStore, or a synchronous saver'
            )
        return {**self.__dict__, "_kept": None}


@dataclass
class _Save:
    """What a rank has written at one place.

    Attributes:
        names: of the files that were begun.
        files: those that were closed.
        before: names of an earlier save here that did not end, and was begun again.
        is_announced: the first rank was told.
    """

    names: set[str] = field(default_factory=set)
    files: dict[str, WrittenFile] = field(default_factory=dict)
    before: set[str] = field(default_factory=set)
    is_announced: bool = False


class _Announced(msgspec.Struct, array_like=True):
    before: list[str]
    files: list[WrittenFile]


_ANNOUNCED = msgspec.msgpack.Decoder(_Announced)


class SavedFiles:
    """The files that a rank has written for saves that are not committed yet."""

    def __init__(self, keys: SharedKeys, rank: int, world_size: int) -> None:
        self._keys, self._rank, self._world_size = keys, rank, world_size
        self._lock = threading.Lock()
        self._saves: dict[str, _Save] = {}
        self._connection: Any = None

    def begin(self, place: str, name: str) -> tuple[int, Callable[[WrittenFile], None]]:
        """Begin a file; return a number that no other file of the save has, and what to call once it is written."""
        with self._lock:
            save = self._current(place)
            if save is not None and name in save.names:
                save = self._begin_again(place)
            if save is None:
                self._saves.pop(place, None)
                while len(self._saves) >= _KEPT_PLACES:
                    self._saves.pop(next(iter(self._saves)))
                save = self._saves[place] = _Save()
            writer = self._rank + self._world_size * len(save.names)
            save.names.add(name)
            save.before.discard(name)
        files = save.files
        return writer, lambda file: files.update({name: file})

    def begin_again(self, place: str, folder: str) -> None:
        """Begin the save anew if it has files in this folder, which a writer makes before it writes any."""
        with self._lock:
            save = self._current(place)
            if save is not None and any(name.rpartition("/")[0] == folder for name in save.names):
                self._begin_again(place)

    def _begin_again(self, place: str) -> _Save:
        earlier = self._saves[place]
        save = self._saves[place] = _Save(before=earlier.names | earlier.before)
        return save

    def names(self, place: str) -> set[str]:
        """Return the names of the files that were begun."""
        with self._lock:
            return set(self._saves[place].names) if place in self._saves else set()

    def announce(self, place: str) -> None:
        """Tell the first rank what this one has written."""
        with self._lock:
            save = self._saves.setdefault(place, _Save())
            announced = _Announced(sorted(save.before), list(save.files.values()))
            data = zlib.compress(msgspec.msgpack.encode(announced), 1)
            self._shared().set(self._key(place, self._rank), data)
            save.is_announced = True

    def take(self, place: str, url: str) -> list[WrittenFile]:
        """Return the files of all ranks, for one commit.

        Raises CommitError if a rank has announced none, or has begun its save twice with other files.
        """
        with self._lock:
            save, store = self._saves.pop(place, _Save()), self._shared()
        announced = {self._rank: _Announced(sorted(save.before), list(save.files.values()))}
        keys = {rank: self._key(place, rank) for rank in range(self._world_size) if rank != self._rank}
        backoff = environment.Backoff(_PATIENCE_S, first_pause_s=0.01, longest_pause_s=0.5)
        while keys and not store.check(list(keys.values())):
            if backoff.is_over:
                absent = [rank for rank, key in keys.items() if not store.check([key])]
                raise CommitError(
                    f"nothing was committed: rank {min(absent, default=0)} has not said within {_PATIENCE_S:g} s "
                    f"that its part of the save is complete ({len(absent)} of {self._world_size} ranks)",
                    url=url,
                )
            backoff.pause()
        for rank, key in keys.items():
            announced[rank] = _ANNOUNCED.decode(zlib.decompress(store.get(key)))
            store.delete_key(key)
        store.delete_key(self._key(place, self._rank))
        for rank, of_rank in sorted(announced.items()):
            if of_rank.before:
                raise CommitError(
                    f"nothing was committed: rank {rank} wrote {of_rank.before[0][:200]!r}, then began the save anew "
                    "without it, as after a save that failed; save to another place",
                    url=url,
                )
            if not of_rank.files:
                raise CommitError(
                    f"nothing was committed: rank {rank} wrote no file; every rank has to save at least one item",
                    url=url,
                )
        return [file for _, of_rank in sorted(announced.items()) for file in of_rank.files]

    def _current(self, place: str) -> _Save | None:
        """Return the save that is being written, and take back what was announced; None if a new one begins."""
        save = self._saves.get(place)
        if save is not None and not save.is_announced:
            return save
        store, key = self._shared(), self._key(place, self._rank)
        if not store.check([key]):
            return None  # the first rank took it: that save has ended
        store.delete_key(key)
        if save is not None:
            save.is_announced = False
        return save

    def _key(self, place: str, rank: int) -> str:
        return f"{rank}/{place}"

    def _shared(self) -> Any:
        if self._connection is None:
            self._connection = self._keys.connect()
        return self._connection
