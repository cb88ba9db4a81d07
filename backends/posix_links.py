"""The symbolic links of a store in a directory: those that lead out of it, and the one that is its root."""

from __future__ import annotations

import contextlib
import os
from abc import abstractmethod
from collections.abc import Iterator

from ckpt.backends.base import Store, is_key
from ckpt.backends.paths import fsync_directory, is_within


class PosixLinks(Store):
    """Links of a store in a directory."""

    directory: str
    _fsync: bool

    @abstractmethod
    def _translated(self, key: str, action: str) -> contextlib.AbstractContextManager[None]:
        """Turn OSErrors into ours."""

    @abstractmethod
    def _at(self, path: str) -> Store:
        """Make a store of another directory, with the same options."""

    @abstractmethod
    def _folder(self, prefix: str) -> str: ...

    def links(self, prefix: str = "") -> Iterator[str]:
        top = self._folder(prefix[:-1])
        with self._translated(prefix, "list"), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for entry in list(os.scandir(top)):
                if entry.is_symlink() and is_key(entry.name) and self._leads_out(entry.path):
                    yield entry.name

    def open_link(self, path: str) -> Store | None:
        link = self._folder(path)
        if not (os.path.islink(link) and self._leads_out(link)):
            return None
        return self._at(link)

    def root_is_link(self) -> bool:
        return os.path.islink(self.directory)

    def unlink_root(self) -> None:
        with self._translated("", "remove the link"):
            os.unlink(self.directory)
            if self._fsync:
                fsync_directory(os.path.dirname(self.directory))

    def _leads_out(self, link: str) -> bool:
        """Return True if a link leads to a folder outside of the root: one inside has a name of its own."""
        return os.path.isdir(link) and not is_within(os.path.realpath(link), os.path.realpath(self.directory))
