"""Let the file systems of fsspec in this process forget what a store of this library has changed.

They are shared by all who ask for one with the same arguments, and some, such as s3fs, remember what
they listed until they change it themselves. A program that lists through them would not see new
checkpoints, nor miss removed ones.
"""

from __future__ import annotations

import logging
import posixpath
import sys
from collections.abc import Collection, Iterator
from typing import Any

_SCHEMES = {"cos": "s3"}
"""Schemes that fsspec has under another name."""

_logger = logging.getLogger(__name__)


def forget_listings(url: str, keys: Collection[str]) -> None:
    """Drop the listings of the folders that hold `keys` of the store at `url`, and of those above.

    Does nothing where fsspec is not imported, and never fails.
    """
    fsspec = sys.modules.get("fsspec")
    scheme, separator, root = url.removeprefix("fsspec+").partition("://")
    if fsspec is None or not separator:
        return
    try:
        scheme = _SCHEMES.get(scheme, scheme)
        for files in _file_systems(fsspec.AbstractFileSystem, scheme):
            for folder in _folders(files._strip_protocol(f"{scheme}://{root}"), keys):
                files.invalidate_cache(folder)
    except Exception as error:  # another program's file system; the save itself is done
        _logger.debug("the listings of %s may be out of date: %s", url, error)


def _folders(root: str, keys: Collection[str]) -> set[str]:
    folders: set[str] = set()
    for key in keys:
        folder = posixpath.dirname(f"{root}/{key}")
        while folder.strip("/") and folder not in folders:
            folders.add(folder)
            folder = posixpath.dirname(folder)
    return folders


def _file_systems(kind: Any, scheme: str) -> Iterator[Any]:
    """Yield the shared file systems of a class, and of those below it, that serve a scheme."""
    protocols = (kind.protocol,) if isinstance(kind.protocol, str) else kind.protocol
    if scheme in protocols:
        yield from [*kind._cache.values()]
    for subclass in kind.__subclasses__():
        yield from _file_systems(subclass, scheme)
