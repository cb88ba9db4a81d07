"""Open the store behind a URL."""

from __future__ import annotations

import functools
import os
import pkgutil
import re
from collections.abc import Callable, Mapping
from typing import Any

from ckpt.backends.base import Store
from ckpt.backends.options import nearest, options_dict, redact_url
from ckpt.backends.paths import absolute, expand_user, path_of
from ckpt.errors import ConfigurationError
from ckpt.settings import settings_for

__all__ = ["ENTRY_POINT_GROUP", "default_threads", "normal_url", "open_store", "options_dict", "register"]

ENTRY_POINT_GROUP = "ckpt.backends"

StoreFactory = Callable[..., Store]
"""Called as `factory(url, storage_options, threads=...)`."""

_factories: dict[str, StoreFactory | str] = {
    "file": "ckpt.backends.posix:PosixStore",
    "memory": "ckpt.backends.memory:MemoryStore",
    "s3": "ckpt.backends.s3:S3Store",
    "cos": "ckpt.backends.cos:CosStore",
}
_MAX_THREADS = 4096
_WITH_PART_SIZE = frozenset({"s3", "cos"})
"""Schemes whose part size is a storage option too."""
_WITH_BUCKETS = frozenset({"s3", "cos", "gs", "gcs", "oss", "fsspec+s3"})
_FSSPEC_PATHS = frozenset({"local", "fsspec+file", "fsspec+local"})
"""Schemes whose URLs can be relative paths."""
_MANGLED = re.compile(r"((?:[A-Za-z0-9+]+::)*[A-Za-z0-9+]+)(:/|:(?!:)|//)(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$\{[A-Za-z_]\w*\}|\$[A-Z_][A-Z0-9_]*\b|(?<![^/])\$[A-Za-z_]\w*(?![^/])")
"""`$NAME` or `${NAME}`; in small letters only as a whole name between slashes."""
_WINDOWS = re.compile(r"[A-Za-z]:[\\/]|\\\\")
_FSSPEC_STORAGE = frozenset(
    {"abfs", "abfss", "adl", "az", "dbfs", "ftp", "gcs", "gdrive", "gs", "hdfs", "hf", "http", "https", "lakefs",
     "oci", "ocilake", "oss", "s3a", "s3n", "sftp", "smb", "ssh", "tos", "tosfs", "webdav", "webhdfs"}
)  # fmt: skip
"""Protocols of fsspec; not those that are names of folders too: `data//x` is `data/` joined with `/x`."""


def register(scheme: str, factory: StoreFactory) -> None:
    """Serve `scheme://` in this process through `factory(url, storage_options, threads=...)`.

    A package does the same for every process with an entry point of that name in the group
    `ckpt.backends`.
    """
    _factories[scheme.lower()] = factory


def open_store(
    url: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None = None,
    *,
    threads: int | None = None,
) -> Store:
    """Open the store rooted at `url`. No request is sent and no directory is made.

    Args:
        url: a plain path (`~` is the home directory), `file://`, `s3://`, `cos://`, `memory://`, a
            registered scheme, or any fsspec protocol (`fsspec+s3://` takes fsspec's file system
            instead of this library's store).
        storage_options: of that store; see its class.
        threads: how many operations may run at the same time.

    What is not given is looked up in the user's file of settings (`ckpt.settings`), then a default.

    Raises:
        ConfigurationError: the URL, an option or a setting is wrong, or the store's package is not installed.
    """
    text = normal_url(url)
    settings = settings_for(text)
    threads = settings.threads if threads is None else threads
    threads = default_threads() if threads is None else threads
    options = options_dict(storage_options)
    if not isinstance(threads, int) or isinstance(threads, bool) or not 1 <= threads <= _MAX_THREADS:
        raise ConfigurationError(f"threads must be at least 1, at most {_MAX_THREADS}, not {threads!r}")
    scheme, separator, _ = text.partition("://")
    scheme = scheme if separator else "file"
    if settings.part_size_bytes is not None and scheme in _WITH_PART_SIZE:
        options.setdefault("part_size_bytes", settings.part_size_bytes)
    store = _factory(scheme)(text, options, threads=threads)
    store.part_size_bytes = settings.part_size_bytes
    store.open_parent = functools.partial(_open_parent, text, options, threads)
    return store


def _open_parent(url: str, options: Mapping[str, Any], threads: int) -> Store:
    """Open the folder above a normal URL. Raises ConfigurationError if there is none."""
    if url.startswith("file://") or "://" not in url:
        return open_store(os.path.dirname(os.path.realpath(path_of(url))), options, threads=threads)
    parent = url.rstrip("/").rpartition("/")[0]
    if parent.endswith(":/") or "::" in url or "?" in url:
        raise ConfigurationError("no folder holds this place", url=redact_url(url))
    return open_store(parent, options, threads=threads)


def normal_url(url: str | os.PathLike[str]) -> str:
    """Return a URL with its scheme in lower case, or an absolute path; `~` is the home directory.

    A relative path means the working directory of this call. Keep the result, not `url`: the program may change its
    directory. Raises ConfigurationError if it can name no place.
    """
    text = os.fspath(url) if isinstance(url, str | os.PathLike) else None
    if not isinstance(text, str) or not text:
        given = "an empty one" if text == "" else f"a {type(url).__name__}"
        raise ConfigurationError(f"a checkpoint's place is a path or URL in a str, not {given}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(f"not valid Unicode: {redact_url(text)!a}") from None
    if "\0" in text:
        raise ConfigurationError(f"no path or URL contains a NUL character: {redact_url(text)!r}")
    scheme, separator, rest = text.partition("://")
    _refuse_unexpanded(text)
    if separator:
        scheme = scheme.lower()
        if "::" in rest and scheme not in _factories:
            return f"{scheme}://{_chain_resolved(rest)}"
        has_path = scheme in _FSSPEC_PATHS or scheme.rpartition("::")[1:] in (("::", "file"), ("::", "local"))
        is_relative = has_path and not rest.startswith(("/", "~"))
        return f"{scheme}://{absolute(rest) if is_relative else rest}"
    _refuse_mangled(text)
    path = absolute(expand_user(text))
    return f"{path}/" if text.endswith("/") and path != "/" else path  # a folder is meant


def is_bucket(url: str) -> bool:
    """Return whether a URL names a whole bucket, and no folder in it."""
    scheme, separator, rest = normal_url(url).partition("://")
    return bool(separator) and scheme in _WITH_BUCKETS and "/" not in rest.rstrip("/")


def _chain_resolved(chain: str) -> str:
    """Make the last link of a chain (`zip://a::run.zip`) absolute if it is a path."""
    rest, _, last = chain.rpartition("::")
    scheme, separator, path = last.partition("://")
    if not separator:
        return f"{rest}::{absolute(expand_user(last))}"
    is_relative = scheme.lower() in ("file", "local") and not path.startswith(("/", "~"))
    return f"{rest}::{scheme}://{absolute(path)}" if is_relative else chain


def default_threads() -> int:
    """Return twice the number of cores, from 8 to 16: transfers wait more than they compute."""
    return max(8, min(16, 2 * (os.cpu_count() or 4)))


def _factory(scheme: str) -> StoreFactory:
    if scheme in _factories:
        factory = _factories[scheme]
        return pkgutil.resolve_name(factory) if isinstance(factory, str) else factory
    return _installed(scheme)


@functools.cache
def _installed(scheme: str) -> StoreFactory:
    """Find who serves a scheme; once, as the search goes through all packages that are installed."""
    from importlib.metadata import entry_points  # with email, zipfile and more, which most do not need

    for entry_point in entry_points(group=ENTRY_POINT_GROUP, name=scheme):
        return entry_point.load()  # type: ignore[no-any-return]
    _refuse_unknown(scheme)
    from ckpt.backends.fsspec_store import FsspecStore

    return FsspecStore


def _refuse_unknown(scheme: str) -> None:
    """Raise ConfigurationError if fsspec does not know the scheme, or one of a chain (`zip::s3`)."""
    from ckpt.backends.fsspec_connection import known_protocols

    known = known_protocols(scheme)
    for name in scheme.removeprefix("fsspec+").split("::"):
        if name not in known:
            own = sorted(_own_schemes())
            raise ConfigurationError(
                f"{name}:// is not known{nearest(name, own) or nearest(name, known)}; known are {', '.join(own)}, "
                "and the protocols of fsspec: gs, abfs, hdfs, sftp, http, ..."
            )


def _own_schemes() -> set[str]:
    """List the schemes of this library and of installed packages."""
    from importlib.metadata import entry_points

    return {*_factories, *(plugin.name for plugin in entry_points(group=ENTRY_POINT_GROUP))}


def _refuse_unexpanded(text: str) -> None:
    """Raise ConfigurationError for the name of a variable, which only a shell expands, and for a path of Windows."""
    variable = _VARIABLE.search(text)
    if variable is not None and not text.lower().startswith("file://"):
        raise ConfigurationError(
            f"{redact_url(text)!r} has {variable[0]!r} in it, which only a shell expands: write its value (os.path.expandvars), "
            "or file:///... for a folder of that name"
        )
    if _WINDOWS.match(text) and os.sep == "/":
        raise ConfigurationError(
            f"{redact_url(text)!r} is a path of Windows, which this system does not have; a folder of that name is './...'"
        )


def _refuse_mangled(path: str) -> None:
    """Raise ConfigurationError for a path that was meant as a URL.

    `pathlib.Path` makes `s3:/b/k` of one; people write `s3//b/k` and `s3:b/k`.
    """
    found = _MANGLED.match(path)
    if found is None:
        return
    scheme, separator, rest = found.groups()
    kind = re.split(r"\+|::", scheme.lower())[-1]
    if separator != ":/" and kind not in _FSSPEC_STORAGE | _own_schemes():
        return
    is_local = kind in ("file", "local")
    meant = redact_url(f"{scheme}://{'/' if is_local else ''}{rest.lstrip('/')}")
    if separator == ":/":
        raise ConfigurationError(
            f"{scheme}:/... looks like a URL that went through pathlib; pass it as a str: {meant!r} "
            "(a framework that makes a Path of every place, as Lightning does, saves to local folders only)"
        )
    raise ConfigurationError(
        f"{scheme}{separator}... looks like a URL with a typing error: write {meant!r}; a folder of that name is "
        f"'./{scheme}{separator}...'"
    )
