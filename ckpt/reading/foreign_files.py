"""Read the files of another program that this library stores as tensors of bytes, checked as in any load."""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ckpt.backends.base import Store
from ckpt.backends.registry import open_store
from ckpt.errors import AccessDenied, NotCommitted, NotFound
from ckpt.format.records import read_commit
from ckpt.reading.checkpoint import ReadSettings
from ckpt.reading.latest import await_commit
from ckpt.reading.slices import OpenCheckpoint

_AHEAD_BYTES = 1 << 20
"""Shorter reads are served from a run of this length: every read of a store takes a request."""

_MAX_FOLDERS = 4
"""Levels of folders in a checkpoint that are looked through for its root."""

_KEPT_OPEN = 4


def is_committed(
    url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None, *, wait: bool = False
) -> bool:
    """Tell whether a checkpoint of this library is here; `wait`: give storage time to show it."""
    with contextlib.closing(open_store(url, storage_options)) as store:
        try:
            commit = await_commit(store, ReadSettings().timeout_s(store)) if wait else read_commit(store)
        except NotFound:  # the bucket
            return False
        return commit is not None and commit.is_ours


class ForeignFiles:
    """The files of a committed checkpoint, by name. Raises as `OpenCheckpoint`."""

    def __init__(self, url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> None:
        self._checkpoint = OpenCheckpoint(url, storage_options)
        self._lock = threading.Lock()  # of what is noted about manifests

    @property
    def names(self) -> list[str]:
        return self._checkpoint.names

    @property
    def is_current(self) -> bool:
        """Tell whether this is still the checkpoint at its place."""
        return read_commit(self._checkpoint.store) == self._checkpoint.parts[0].stored_commit

    def open(self, name: str) -> FileReader:
        """Open a file. Raises NotFound if there is none of that name."""
        entry = self._checkpoint.tensor(name)
        if entry.dtype != "uint8" or len(entry.size) != 1:
            raise NotFound(f"{name[:200]!r} is a tensor, not a file", url=self._checkpoint.store.url)
        with self._lock:
            self._checkpoint.prepare([name])

        def read(start: int, nbytes: int) -> memoryview:
            (elements,) = self._checkpoint.read([(name, [start], [nbytes])])
            return elements.data

        return FileReader(int(entry.size[0]), read)

    def close(self) -> None:
        self._checkpoint.close()


class ForeignPlaces:
    """Find files by their paths or URLs, in the checkpoints at or above them, of which a few stay open.

    `top`: a folder above which no checkpoint is looked for.
    """

    def __init__(self, top: str, storage_options: Mapping[str, Any] | None) -> None:
        self._top, self._options = top.rstrip("/"), storage_options
        self._lock = threading.Lock()
        self._stores: dict[str, Store] = {}
        self._open: dict[str, ForeignFiles] = {}

    def store(self, place: str) -> Store:
        with self._lock:
            if place not in self._stores:
                while len(self._stores) >= _KEPT_OPEN:
                    self._stores.pop(next(iter(self._stores))).close()
                self._stores[place] = open_store(place, self._options)
            return self._stores[place]

    def parent(self, place: str) -> str:
        """Return the folder of a place; an empty text above the top, a bucket, a first folder."""
        scheme, separator, rest = place.rpartition("://")
        above = rest.rpartition("/")[0]
        return f"{scheme}{separator}{above}" if above and place != self._top else ""

    def source(self, path: str, *, again: bool = False, wait: bool = False) -> tuple[ForeignFiles, str]:
        """Find the checkpoint and the name of a file; raises NotCommitted if none is at or above the path.

        `again`: see whether the checkpoint at `path` was replaced. `wait`: give storage
        that may lag time to show one there.
        """
        places = [(path, "")]
        while len(places) < _MAX_FOLDERS and (above := self.parent(places[-1][0])):
            place, name = places[-1]
            places.append((above, f"{place[len(above) + 1 :]}/{name}".rstrip("/")))
        with self._lock:
            if again and (files := self._open.get(path)) is not None and not files.is_current:
                self._close(path)
            for place, name in places:
                if place in self._open:
                    return self._open[place], name
        for number, (place, name) in enumerate(places):
            try:
                if is_committed(place, self._options, wait=wait and number == 0):
                    return self._opened(place), name
            except AccessDenied:  # credentials may be for the folder that was asked for alone
                if number == 0:
                    raise
        raise NotCommitted("no checkpoint is committed here", url=path)

    def forget(self, place: str) -> None:
        """Let go of a checkpoint that is about to be removed."""
        with self._lock:
            self._close(place)

    def _opened(self, place: str) -> ForeignFiles:
        with self._lock:
            if place not in self._open:
                while len(self._open) >= _KEPT_OPEN:
                    self._close(next(iter(self._open)))
                self._open[place] = ForeignFiles(place, self._options)
            return self._open[place]

    def _close(self, place: str) -> None:
        files = self._open.pop(place, None)
        if files is not None:
            files.close()


class FileReader(io.RawIOBase):
    """A stored file of `size_bytes`, of which `read` returns so many bytes from a position on."""

    def __init__(self, size_bytes: int, read: Callable[[int, int], memoryview]) -> None:
        self.size_bytes, self._read, self._position = size_bytes, read, 0
        self._ahead, self._ahead_from = memoryview(b""), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size_bytes}[whence]
        if base + offset < 0:
            raise ValueError(f"negative position: {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        # The buffer is let go of before anything is raised: callers unmap it then.
        with memoryview(buffer) as view:
            nbytes = max(0, min(view.nbytes, self.size_bytes - self._position))
        data = self._bytes(nbytes) if nbytes else memoryview(b"")
        with memoryview(buffer).cast("B") as view:
            view[: data.nbytes] = data
        self._position += data.nbytes
        return data.nbytes

    def _bytes(self, nbytes: int) -> memoryview:
        """Return up to so many bytes at the position, at least one."""
        if nbytes >= _AHEAD_BYTES:
            return self._read(self._position, nbytes)
        begin = self._position - self._ahead_from
        if not 0 <= begin < self._ahead.nbytes:
            self._ahead = self._read(self._position, min(_AHEAD_BYTES, self.size_bytes - self._position))
            self._ahead_from, begin = self._position, 0
        return self._ahead[begin : begin + nbytes]
