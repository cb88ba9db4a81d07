"""Let one copy at a time have the files that an interrupted copy has left.

A copy can stop for an hour and go on: right before its commit, when another one has taken up its
files and committed them, and a later save has deleted them. So each copy has a token, and there is
one that may commit the files of a data token: `<data token>.probe` names the first, and whoever
takes them up from `<copy>` puts `<copy>.probe`, which names itself. A copy puts its index before it
looks for that object; who puts that object looks for the index afterwards. So of the two one gives
up: the earlier copy its commit, or the later one these files.
"""

from __future__ import annotations

import contextlib
import re

from ckpt.backends.base import PutMode, Store, exists, put_bytes, read_bytes
from ckpt.consistency import environment
from ckpt.errors import AlreadyExists, CheckpointError, CommitConflict, NotFound
from ckpt.format.names import index_key, probe_key
from ckpt.reading.checkpoint import ReadSettings

_COPY = re.compile(rb"[0-9a-f]{16}")
_MAX_COPIES = 1000


class CopyClaims:
    """The data tokens that a copy may commit; its index will have the token `copy`."""

    def __init__(self, store: Store, copy: str) -> None:
        self._store, self._copy = store, copy
        self._new: str | None = None
        self._taken: dict[str, bool] = {}

    def new(self) -> str:
        """Return the data token of this copy's own, which later ones may take up."""
        if self._new is None:
            token = environment.token()
            put_bytes(self._store, probe_key(0, token), self._copy.encode())
            self._new = token
        return self._new

    def take(self, token: str) -> bool:
        """Take up the files of a data token, so that no earlier copy commits them; False if one may."""
        if token not in self._taken:
            self._taken[token] = self._take(token)
        return self._taken[token]

    def check(self) -> None:
        """Raise CommitConflict if a later copy has taken up files of this one. Its index is there."""
        if exists(self._store, probe_key(0, self._copy)):
            text = "another copy to this place was begun meanwhile and goes on with the files of this one"
            raise CommitConflict(text, url=self._store.url)

    def close(self) -> None:
        """Take the files of this copy off offer: they are committed. Earlier copies stay barred."""
        tokens = [token for token, is_taken in self._taken.items() if is_taken]
        self._delete([*tokens, *self._own()])

    def withdraw(self) -> None:
        """Take back the claim of `new`: no file of it was sent, so there is nothing to take up."""
        self._delete(self._own())

    def _own(self) -> list[str]:
        return [] if self._new is None else [self._new]

    def _delete(self, tokens: list[str]) -> None:
        with contextlib.suppress(CheckpointError):  # `ckpt gc` can
            self._store.delete([probe_key(0, token) for token in tokens])

    def _take(self, token: str) -> bool:
        copy = self._named_by(token)  # None: files of a save, which shares them with nobody
        earlier: list[str] = []
        while copy is not None and len(earlier) < _MAX_COPIES:
            earlier.append(copy)
            try:
                put_bytes(self._store, probe_key(0, copy), self._copy.encode(), mode=PutMode.CREATE)
            except AlreadyExists:
                later = self._named_by(copy)
                if later != self._copy:  # else it is our own, whose reply was lost
                    copy = later
                    continue
            if not self._store.capabilities.cross_client_visibility:
                # The earlier copy may look for what was just put, and not see it, for so long; and
                # the index that it put before may take as long to be seen here.
                environment.sleep(2 * ReadSettings().timeout_s(self._store))
            # Any of them may have come as far as its commit, also one that has been barred since.
            return not any(exists(self._store, index_key(0, each)) for each in earlier)
        return False

    def _named_by(self, token: str) -> str | None:
        try:
            data = bytes(read_bytes(self._store, probe_key(0, token), max_bytes=1 << 10))
        except NotFound:
            return None
        return data.decode() if _COPY.fullmatch(data) else None
