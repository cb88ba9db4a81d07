"""Open the file or folder that a URL names."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.backends.base import ObjectStat, Store, is_key
from ckpt.backends.prefix import PrefixStore
from ckpt.backends.registry import open_store
from ckpt.errors import AccessDenied, ConfigurationError, NotFound


@dataclass
class Location:
    """A folder, or one file of a folder (`key`, with its `stat` if it exists).

    Closing it closes the store, or the store `base` that `folder` is a part of.
    """

    folder: Store
    key: str | None = None
    stat: ObjectStat | None = None
    base: Store | None = None

    @property
    def url(self) -> str:
        return self.folder.url if self.key is None else f"{self.folder.url.rstrip('/')}/{self.key}"

    def close(self) -> None:
        """Close the store."""
        (self.base or self.folder).close()


Guard = Callable[[Store], Store]
"""Wraps a store; closing the wrapper closes the store."""


def _bare(store: Store) -> Store:
    return store


def file_name(url: str | os.PathLike[str]) -> str:
    """Return the last segment of a URL; empty if it ends in a slash."""
    return os.fspath(url).rpartition("/")[2]


def open_file(
    url: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None,
    *,
    threads: int | None = None,
    guard: Guard = _bare,
) -> Location:
    """Open the file that `url` names, which need not exist.

    Raises:
        ConfigurationError: `url` does not name a file, or an option is wrong.
    """
    text = os.fspath(url)
    parent, slash, name = text.rpartition("/")
    if not is_key(name) or (slash and parent.endswith(":/")):
        raise ConfigurationError(f"{text!r} does not name a file")
    if not slash:
        parent = "."
    elif not parent or parent.endswith("://"):  # the root of a file system
        parent += "/"
    return Location(guard(open_store(parent, storage_options, threads=threads)), name)


def open_source(
    url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None, *, guard: Guard = _bare
) -> Location:
    """Open the file or folder that `url` names, for reading.

    A link that the caller names is followed, and so are those of a Hugging Face cache, whose files
    are all links to the `blobs` beside its `snapshots`. The store refuses other links out of a
    folder.
    """
    text = os.fspath(url)
    if "://" not in text and os.path.isfile(text):
        text = os.path.realpath(text)
    file = _existing_file(text, storage_options, guard)
    if file is not None:
        return file
    repository, name = os.path.split(os.path.abspath(text))
    repository, snapshots = os.path.split(repository)
    if "://" not in text and snapshots == "snapshots" and os.path.isdir(os.path.join(repository, "blobs")):
        base = guard(open_store(repository, storage_options))
        return Location(PrefixStore(base, f"{snapshots}/{name}"), base=base)
    return Location(guard(open_store(text, storage_options)))


def _existing_file(url: str, storage_options: Mapping[str, Any] | None, guard: Guard) -> Location | None:
    try:
        location = open_file(url, storage_options, guard=guard)
    except ConfigurationError:
        return None
    assert location.key is not None
    try:
        location.stat = location.folder.stat(location.key)
    except (NotFound, AccessDenied):  # without permission to list, a missing file is refused
        location.close()
        return None
    except BaseException:
        location.close()
        raise
    return location
