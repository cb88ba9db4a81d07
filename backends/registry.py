"""Open the store behind a URL."""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

from ckpt.backends.base import Store
from ckpt.backends.options import redact_url
from ckpt.errors import ConfigurationError

__all__ = ["ENTRY_POINT_GROUP", "default_threads", "open_store", "register"]

ENTRY_POINT_GROUP = "ckpt.backends"

StoreFactory = Callable[..., Store]
"""Called as `factory(url, storage_options, threads=...)`."""

_factories: dict[str, StoreFactory | str] = {
    "file": "ckpt.backends.posix:PosixStore",
    "memory": "ckpt.backends.memory:MemoryStore",
    "s3": "ckpt.backends.s3:S3Store",
    "cos": "ckpt.backends.cos:CosStore",
}


def register(scheme: str, factory: StoreFactory) -> None:
    """Serve `scheme://` in this process through `factory(url, storage_options, threads=...)`.

    A package does the same for every process with an entry point of that name in the group
    `ckpt.backends`.
    """
    _factories[scheme] = factory


def open_store(
    url: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None = None,
    *,
    threads: int | None = None,
) -> Store:
    """Open the store rooted at `url`. No request is sent and no directory is made.

    Args:
        url: a plain path, `file://`, `s3://`, `cos://`, `memory://`, a registered scheme, or any
            fsspec protocol (`fsspec+s3://` takes fsspec's file system instead of this library's
            store).
        storage_options: of that store; see its class.
        threads: how many operations may run at the same time.

    Raises:
        ConfigurationError: the URL or an option is wrong, or its package is not installed.
    """
    text = os.fspath(url) if isinstance(url, str | os.PathLike) else None
    if not isinstance(text, str) or not text:
        raise ConfigurationError(f"a checkpoint's place is a path or URL in a str, not {url!r}")
    threads = default_threads() if threads is None else threads
    if storage_options is not None and not isinstance(storage_options, Mapping):
        raise ConfigurationError(f"storage_options must be a dict, not a {type(storage_options).__name__}")
    if not isinstance(threads, int) or threads < 1:
        raise ConfigurationError(f"threads must be at least 1, not {threads!r}")
    scheme, separator, _ = text.partition("://")
    if not separator:
        _refuse_mangled(text)
        scheme = "file"
    return _factory(scheme)(text, storage_options, threads=threads)


def default_threads() -> int:
    """Return twice the number of cores, from 4 to 16: transfers wait more than they compute."""
    return max(4, min(16, 2 * (os.cpu_count() or 4)))


def _factory(scheme: str) -> StoreFactory:
    if scheme in _factories:
        factory = _factories[scheme]
        return pkgutil.resolve_name(factory) if isinstance(factory, str) else factory
    for entry_point in entry_points(group=ENTRY_POINT_GROUP, name=scheme):
        return entry_point.load()  # type: ignore[no-any-return]
    from ckpt.backends.fsspec_store import FsspecStore

    return FsspecStore


def _refuse_mangled(path: str) -> None:
    """Raise ConfigurationError for a URL that `pathlib.Path` made a relative path (`s3:/b/k`)."""
    scheme, colon, rest = path.partition(":")
    if not colon or not rest.startswith("/") or not scheme.replace("+", "").isalnum():
        return
    # `file:///x` became `file:/x`, and `s3://b` became `s3:/b`.
    local = scheme.rpartition("+")[2] in ("file", "local")
    meant = redact_url(f"{scheme}://{rest}" if local else f"{scheme}:/{rest}")
    raise ConfigurationError(
        f"{scheme}:/... looks like a URL that went through pathlib; pass it as a str: {meant!r}"
    )
