"""A file system of fsspec: opened when it is first needed, without its memory, its errors made ours."""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from ckpt.backends.base import check_key
from ckpt.backends.bodies import BodyError
from ckpt.backends.options import redact_url, scrub, url_secrets
from ckpt.backends.paths import is_within
from ckpt.errors import (
    AccessDenied,
    AlreadyExists,
    CheckpointError,
    ConfigurationError,
    NotFound,
    StorageError,
    StorageFull,
    StorageUnavailable,
    UnsafeContent,
)

LOCAL = frozenset({"file", "local"})
HTTP = frozenset({"http", "https"})
_ONE_AT_A_TIME = frozenset({"ftp"})  # threads cannot share its one connection
# Options that may be quoted in messages; any other text among them may be a credential.
_HARMLESS = frozenset(
    {"endpoint_url", "region", "region_name", "profile", "host", "protocol", "project", "encoding"}
)
_CONNECTION_ERROR = re.compile("Connection|Timeout|HTTPClient|SSL|Server|Client")
_HTTP_LINK = re.compile("(?:^|::)https?://", re.IGNORECASE)
_SHOWN_QUERY = re.compile(r"(https?://[^\s?#]*)[?#]\S*", re.IGNORECASE)
_STATUSES: Mapping[int, type[StorageError]] = {
    401: AccessDenied,
    403: AccessDenied,
    404: NotFound,
    410: NotFound,
    507: StorageFull,
}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def known_protocols(wanted: str) -> set[str]:
    """Return the protocols that fsspec knows. Raises ConfigurationError if it is not installed."""
    try:
        import fsspec
    except ImportError as error:
        raise ConfigurationError(f"{wanted}:// needs fsspec: pip install './ckpt-storage[fsspec]'") from error
    return {*fsspec.available_protocols(), *fsspec.registry}


class FsspecConnection:
    """A file system and a root in it; users of one that serves one thread at a time hold `turn`."""

    def __init__(self, url: str, options: Mapping[str, Any] | None) -> None:
        self._given_url, self._options = url, dict(options or {})
        self.url = redact_url(url).rstrip("/")
        self._target = url.removeprefix("fsspec+")
        self.protocol = self._target.partition("://")[0]
        self._opened: tuple[Any, str] | None = None
        self._lock = threading.Lock()
        self.turn: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.protocol in _ONE_AT_A_TIME:
            self.turn = threading.RLock()

    def __reduce__(self) -> tuple[type[FsspecConnection], tuple[str, dict[str, Any]]]:
        return FsspecConnection, (self._given_url, self._options)

    @property
    def fs(self) -> Any:
        return self._open()[0]

    @property
    def root(self) -> str:
        return self._open()[1]

    def _open(self) -> tuple[Any, str]:
        with self._lock:
            if self._opened is None:
                self._opened = self._connect()
            return self._opened

    def _connect(self) -> tuple[Any, str]:
        known_protocols(self.protocol)
        import fsspec

        try:
            fs, root = fsspec.core.url_to_fs(self._target, skip_instance_cache=True, **self._options)
        except (ImportError, ValueError, TypeError) as error:
            text = f"{self.protocol}://: {type(error).__name__}: {error}"
            raise ConfigurationError(self._without_secrets(text), url=self.url) from None
        return fs, root.rstrip("/")

    def close(self) -> None:
        """Let go of the file system, which then ends its sessions."""
        with self._lock:
            self._opened = None

    def path(self, key: str) -> str:
        """Return the path of an object; links that lead out of the root are refused."""
        path = f"{self.root}/{check_key(key)}"
        if self.protocol in LOCAL and not is_within(os.path.realpath(path), os.path.realpath(self.root)):
            raise UnsafeContent("is a link that leads out of the checkpoint; refused", url=self.url, key=key)
        return path

    def folder(self, prefix: str) -> str:
        return self.path(prefix) if prefix else self.root

    def key(self, path: str) -> str:
        return path.removeprefix(self.root).lstrip("/")

    def info(self, path: str) -> dict[str, Any]:
        """Ask for the facts about a file, not for a memory of them."""
        self.fs.invalidate_cache(posixpath.dirname(path))
        return dict(self.fs.info(path))

    def find(self, path: str, **options: Any) -> dict[str, Any]:
        """Return the facts about all files below `path`, by path; empty for a missing folder."""
        self.fs.invalidate_cache()
        try:
            return dict(self.fs.find(path, detail=True, **options))
        except FileNotFoundError:
            return {}

    def open_new(self, path: str, block_size: int) -> Any:
        """Open a file for writing, in a folder that is made if there is none."""
        try:
            return self.fs.open(path, "wb", block_size=block_size)
        except FileNotFoundError:
            self.fs.makedirs(posixpath.dirname(path), exist_ok=True)
            return self.fs.open(path, "wb", block_size=block_size)

    def move(self, source: str, target: str) -> None:
        """Give a file its final name."""
        from fsspec import AbstractFileSystem

        if type(self.fs).mv is AbstractFileSystem.mv:
            # The inherited `mv` is copy and remove too, but takes names for patterns.
            self.fs.cp_file(source, target)
            self.fs.rm_file(source)
        else:
            self.fs.mv(source, target)

    def remove(self, path: str) -> None:
        try:
            self.fs.rm_file(path)
        except FileNotFoundError:
            pass
        except Exception:
            # File systems word this in many ways; whether the file is there tells.
            with contextlib.suppress(FileNotFoundError):
                self.info(path)
                raise

    @contextlib.contextmanager
    def translated(self, key: str, action: str, *, settled: bool = False) -> Iterator[None]:
        """Turn a file system's exceptions into ours, `settled` as in `StorageError`."""
        try:
            with self.turn:
                yield
        except (CheckpointError, BodyError):
            raise
        except Exception as raised:
            error = _behind(raised)
            text = f"cannot {action}: {type(error).__name__}: {error}"
            shown = self._without_secrets(text)
            raise _kind(error)(shown, url=self.url, key=key, settled=settled) from None

    def _without_secrets(self, text: str) -> str:
        """Scrub a text about an error."""
        shown = scrub(text, [*_texts_in(self._options), *url_secrets(self._target)])
        if _HTTP_LINK.search(self._target):
            # The client quotes a URL otherwise than it was given, and one that it was sent on to.
            return _SHOWN_QUERY.sub(r"\1?***", shown)
        return shown


def _texts_in(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _texts_in(value)
        elif isinstance(value, str) and name not in _HARMLESS:
            yield value


def _behind(error: Exception) -> Exception:
    """Return the failure that fsspec's http reports as FileNotFoundError, as it does any."""
    cause = error.__cause__
    is_hidden = isinstance(error, FileNotFoundError) and type(cause).__module__.startswith("aiohttp.")
    return cause if is_hidden and isinstance(cause, Exception) else error


def _kind(error: Exception) -> type[StorageError]:
    status = getattr(error, "status", None)  # of a reply to aiohttp
    if isinstance(status, int) and status in _STATUSES:
        return _STATUSES[status]
    if isinstance(error, FileNotFoundError):
        return NotFound
    if isinstance(error, FileExistsError) or _condition_refused(error.__cause__):
        return AlreadyExists
    if isinstance(error, PermissionError):
        return AccessDenied
    if isinstance(error, OSError) and error.errno in _FULL:
        return StorageFull
    name = type(error).__name__
    if isinstance(error, ConnectionError | TimeoutError) or _CONNECTION_ERROR.search(name):
        return StorageUnavailable
    if "Credentials" in name:
        return AccessDenied
    return StorageError


def _condition_refused(error: BaseException | None) -> bool:
    """Tell whether s3fs was refused an "only if absent", which it reports as any other error."""
    response = getattr(error, "response", None)
    return isinstance(response, dict) and (response.get("Error") or {}).get("Code") == "PreconditionFailed"
