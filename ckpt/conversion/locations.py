"""What a URL names: a file in a store, or a folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.backends.base import ObjectStat, Store, is_key
from ckpt.backends.prefix import PrefixStore
from ckpt.backends.registry import open_store
from ckpt.errors import AccessDenied, ConfigurationError, NotFound

__all__ = ["Guard", "Place", "file_name", "open_file", "open_source"]


@dataclass
class Place:
    """A folder, or one file of a folder (`key`, with its facts where it is there). Closing it closes the store."""

    folder: Store
    key: str | None = None
    stat: ObjectStat | None = None
    base: Store | None = None

    @property
    def url(self) -> str:
        return self.folder.url if self.key is None else f"{self.folder.url.rstrip('/')}/{self.key}"

    def close(self) -> None:
        (self.base or self.folder).close()


Guard = Callable[[Store], Store]
"""Puts a store around another one, which it closes."""


def _bare(store: Store) -> Store:
    return store


def file_name(url: str | os.PathLike[str]) -> str:
    """The last segment of a URL; empty where it ends in a slash."""
    return os.fspath(url).rpartition("/")[2]


def open_file(
    url: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None,
    *,
    threads: int | None = None,
    guard: Guard = _bare,
) -> Place:
    """The file that `url` names, which need not be there.

    Raises:
        ConfigurationError: it names no file, or an option is wrong.
    """
    text = os.fspath(url)
    parent, slash, name = text.rpartition("/")
    if not is_key(name) or (slash and parent.endswith(":/")):
        raise ConfigurationError(f"{text!r} names no file")
    if not slash:
        parent = "."
    elif not parent or parent.endswith("://"):  # the root of a file system
        parent += "/"
    return Place(guard(open_store(parent, storage_options, threads=threads)), name)


def open_source(
    url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None, *, guard: Guard = _bare
) -> Place:
    """The file or folder that `url` names, to be read.

    A link that the caller names is followed, and so are those of a Hugging Face cache, whose files are all links to
    the `blobs` beside its `snapshots`. Other links out of a folder are the store's to refuse.
    """
    text = os.fspath(url)
    if "://" not in text and os.path.isfile(text):
        text = os.path.realpath(text)
    found = _as_file(text, storage_options, guard)
    if found is not None:
        return found
    repository, name = os.path.split(os.path.abspath(text))
    repository, snapshots = os.path.split(repository)
    if "://" not in text and snapshots == "snapshots" and os.path.isdir(os.path.join(repository, "blobs")):
        base = guard(open_store(repository, storage_options))
        return Place(PrefixStore(base, f"{snapshots}/{name}"), base=base)
    return Place(guard(open_store(text, storage_options)))


def _as_file(url: str, storage_options: Mapping[str, Any] | None, guard: Guard) -> Place | None:
    try:
        place = open_file(url, storage_options, guard=guard)
    except ConfigurationError:
        return None
    assert place.key is not None
    try:
        place.stat = place.folder.stat(place.key)
    except (NotFound, AccessDenied):  # who may not list is refused what is not there
        place.close()
        return None
    except BaseException:
        place.close()
        raise
    return place
