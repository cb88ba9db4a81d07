"""Remember which checkpoints are done, in memory or also in a file or object."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import msgspec

from ckpt.backends.base import put_bytes
from ckpt.backends.options import redact_url
from ckpt.backends.registry import normal_url, open_store
from ckpt.consistency.commit import read_record_bytes
from ckpt.consistency.seal import seal_json, unseal_json
from ckpt.errors import CheckpointError, ConfigurationError, FormatError, IntegrityError
from ckpt.format.bounds import Number

_FORMAT = "ckpt-storage-cursor"
_WINDOW = 1000
"""Checkpoints that are done, but were removed or replaced, to remember: late views show them again."""
_MAX_BYTES = 256 << 20

Name = tuple[str, str]
"""Path and id of a checkpoint."""


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a cursor: what of `root` is done, the last one last."""

    format: str = _FORMAT
    version: Number = 1
    root: str
    done: list[Name]


_decoder = msgspec.json.Decoder(_Record)  # made once, before there are threads


class Cursor:
    """The checkpoints of a root that are done.

    A local file is locked for as long as the cursor is open: two watchers would do all twice. A store
    cannot lock: there a second watcher is noticed by what it has written.

    Attributes:
        is_new: nothing was stored.
    """

    def __init__(
        self,
        place: str | os.PathLike[str] | None,
        root_url: str,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._root_url = root_url
        self._done: dict[Name, None] = {}
        self._tried: set[Name] = set()  # to write: a put can fail, and be carried out
        self._store = None
        self._closing = ExitStack()
        self.is_new = True
        if place is None:
            return
        folder, _, self._key = normal_url(place).rpartition("/")
        if not self._key or folder.endswith(("/", ":")):
            raise ConfigurationError(f"cursor: {redact_url(str(place))} names no file")
        has_options = "://" in folder and folder.partition("://")[0] == root_url.partition("://")[0]
        with ExitStack() as opened:
            self._store = open_store(folder or "/", storage_options if has_options else None)
            opened.callback(self._store.close)
            if self._store.directory is not None:
                if os.path.isdir(os.path.join(self._store.directory, self._key)):
                    raise ConfigurationError(f"the cursor {place} is a folder; name a file in it")
                opened.callback(os.close, _locked(os.path.join(self._store.directory, self._key)))
            self._read()
            self._closing = opened.pop_all()

    def __contains__(self, name: Name) -> bool:
        return name in self._done

    def begin(self) -> None:
        """Store it if it is new: one that cannot be written to is an error now, not after the first."""
        if self.is_new:
            self._write(self._done)

    def add(self, names: Iterable[Name], *, there: Collection[Name]) -> None:
        """Note checkpoints as done, durably; `there` are those that the root has now."""
        new = [name for name in names if name not in self._done]
        if not new:
            return
        done = {**self._done, **dict.fromkeys(new)}
        excess = len(done) - len(there) - _WINDOW
        if excess > 0:
            gone = [name for name in done if name not in there]
            for name in gone[: max(0, len(gone) - _WINDOW)]:
                del done[name]
        self._refuse_another_watcher()
        self._tried.update(new)
        self._write(done)
        self._done, self._tried = done, set()

    def close(self) -> None:
        self._closing.close()

    def _read(self) -> None:
        stored = self._stored()
        if stored is not None:
            self._done, self.is_new = dict.fromkeys(stored), False

    def _refuse_another_watcher(self) -> None:
        if self._store is None or self._store.directory is not None:
            return
        if not self._done.keys() | self._tried >= {*(self._stored() or ())}:
            text = "another watcher writes to this cursor, so both do the same: give each one its own"
            raise ConfigurationError(text, url=self._store.url, key=self._key)

    def _stored(self) -> list[Name] | None:
        """Read what is done; None if nothing is stored."""
        assert self._store is not None
        data = read_record_bytes(self._store, self._key, max_bytes=_MAX_BYTES)
        if data is None:
            return None
        url, key = self._store.url, self._key
        try:
            record = _decoder.decode(unseal_json(data, url=url, key=key))
        except (ValueError, RecursionError, CheckpointError) as error:
            text = "this is no cursor, or it is damaged; name another file, or remove it to begin anew"
            raise IntegrityError(text, url=url, key=key) from error
        if record.format != _FORMAT or record.version != 1:
            text = "a newer version of this library wrote this cursor; upgrade this one"
            raise FormatError(text, url=url, key=key)
        if record.root != self._root_url:
            text = f"this cursor is that of {record.root}; name another file for {self._root_url}"
            raise ConfigurationError(text, url=url, key=key)
        return record.done

    def _write(self, done: Iterable[Name]) -> None:
        if self._store is not None:
            record = _Record(root=self._root_url, done=list(done))
            put_bytes(self._store, self._key, seal_json(msgspec.json.encode(record)))
        self.is_new = False


def _locked(path: str) -> int:
    """Lock the file beside a cursor; the kernel frees it with the process."""
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ConfigurationError(f"the cursor {path} cannot be locked: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise ConfigurationError(f"another watcher uses the cursor {path}") from None
    except OSError:  # this file system has no locks
        pass
    return fd
