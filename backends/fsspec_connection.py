"""A file system of fsspec: opened when it is first needed, without its memory, its errors made ours.

Every call of it has a deadline, and is alone where threads cannot share the file system.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

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

T = TypeVar("T")

LOCAL = frozenset({"file", "local"})
HTTP = frozenset({"http", "https"})
S3 = frozenset({"s3", "s3a"})
_SHARED_BY_THREADS = LOCAL | HTTP | S3 | {"gs", "gcs", "abfs", "abfss", "az"}
"""Protocols whose file systems many threads may call: their requests run in one event loop, or keep nothing. Of
others (one connection, one open archive, one cache) each call is alone. So it is in chains (`simplecache::s3`)."""
CALL_TIMEOUT_S = 300.0
"""How long a call may take, by default; one that moves bytes gets more."""
_SLOWEST_BYTES_PER_S = 256 << 10
_chains: dict[str, threading.Lock] = {}
"""Of chains, by protocol: two file systems with caches may have one folder."""
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


class _Abandoned(Exception):
    """A call did not end; `reason` is the error to raise for it."""

    def __init__(self, reason: BaseException) -> None:
        super().__init__(reason)
        self.reason = reason


class FsspecConnection:
    """A file system and a root in it.

    The option `call_timeout_s` is ours: seconds until a call that got no answer ends.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None) -> None:
        self._given_url, self._options = url, dict(options or {})
        self.url = redact_url(url).rstrip("/")
        self._target = url.removeprefix("fsspec+")
        self.protocol = self._target.partition("://")[0]
        self._timeout_s = _timeout_s(self._options.get("call_timeout_s", CALL_TIMEOUT_S))
        self._opened: tuple[Any, str] | None = None
        self._lock = threading.Lock()
        self._turn: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if "::" in self.protocol:
            self._turn = _chains.setdefault(self.protocol, threading.Lock())
        elif self.protocol not in _SHARED_BY_THREADS:
            self._turn = threading.Lock()

    def __reduce__(self) -> tuple[type[FsspecConnection], tuple[str, dict[str, Any]]]:
        return FsspecConnection, (self._given_url, self._options)

    @property
    def root(self) -> str:
        return self._open()[1]

    def run(self, work: Callable[[Any], T], nbytes: int = 0) -> T:
        """Return `work` of the file system, which moves `nbytes`. Within it nothing else of this class is called.

        Raises TimeoutError if it got no answer. The file system is then not used again: its connection may hang.
        """
        opened = self._open()
        with self._turn:  # each call before this one has a deadline
            if self._opened is not opened:  # the call before this one hung
                opened = self._open()
            try:
                return self._within_deadline(lambda: work(opened[0]), nbytes)
            except _Abandoned as error:
                self._forget(opened)
                raise error.reason from None

    def _within_deadline(self, call: Callable[[], T], nbytes: int) -> T:
        """Return the result of a call that a thread of its own carries out. Raises _Abandoned if it does not end."""
        outcome: Future[T] = Future()

        def carry_out() -> None:
            try:
                outcome.set_result(call())
            except BaseException as error:
                outcome.set_exception(error)

        limit_s = self._timeout_s + nbytes / _SLOWEST_BYTES_PER_S
        try:
            threading.Thread(target=carry_out, name="ckpt-fsspec", daemon=True).start()
        except RuntimeError:  # Python starts no thread any more once it is ending
            carry_out()
        done = threading.Event()
        outcome.add_done_callback(lambda _: done.set())
        try:
            is_done = done.wait(limit_s)
        except BaseException as interrupt:
            raise _Abandoned(interrupt) from None
        if not is_done:
            text = f"no answer within {limit_s:.0f} s (storage option call_timeout_s)"
            raise _Abandoned(TimeoutError(text))
        try:
            return outcome.result()
        finally:
            outcome = Future()  # it and its error would keep what all calling frames hold

    def _open(self) -> tuple[Any, str]:
        with self._lock:
            if self._opened is None:
                try:
                    self._opened = self._within_deadline(self._connect, 0)
                except _Abandoned as error:
                    raise error.reason from None
            return self._opened

    def _forget(self, opened: tuple[Any, str]) -> None:
        with self._lock:
            if self._opened is opened:
                self._opened = None

    def _connect(self) -> tuple[Any, str]:
        known = known_protocols(self.protocol)
        import fsspec

        options = {name: value for name, value in self._options.items() if name != "call_timeout_s"}
        try:
            for protocol in self._inner_protocols(
                known
            ):  # else shared with all that open one with the same options
                options[protocol] = {"skip_instance_cache": True, **options.get(protocol, {})}
            fs, root = fsspec.core.url_to_fs(self._target, skip_instance_cache=True, **options)
        except (ImportError, ValueError, TypeError) as error:
            text = f"{self.protocol}://: {type(error).__name__}: {error}"
            raise ConfigurationError(self._without_secrets(text), url=self.url) from None
        return fs, root.rstrip("/")

    def _inner_protocols(self, known: Collection[str]) -> set[str]:
        """Name the protocols of a chain but the first, as fsspec names them in options."""
        return {
            protocol if separator else (protocol if protocol in known else "file")
            for protocol, separator, _ in (link.partition("://") for link in self._target.split("::")[1:])
        }

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

    def below(self, prefix: str) -> tuple[str, dict[str, Any]]:
        """Return the URL of a folder, which may hold a password, and the options."""
        return f"{self._given_url.rstrip('/')}/{prefix}", self._options

    def folder(self, prefix: str) -> str:
        return self.path(prefix) if prefix else self.root

    def key(self, path: str) -> str:
        return path.removeprefix(self.root).lstrip("/")

    def info(self, path: str) -> dict[str, Any]:
        """Ask for the facts about a file, not for a memory of them."""
        return self.run(lambda fs: _info(fs, path))

    def find(self, path: str) -> dict[str, Any]:
        """Return the facts about all files below `path`, by path; empty for a missing folder."""

        def find(fs: Any) -> dict[str, Any]:
            fs.invalidate_cache()
            try:
                return dict(fs.find(path, detail=True))
            except FileNotFoundError:
                return {}

        return self.run(find)

    def entries(self, path: str) -> list[tuple[str, dict[str, Any]]]:
        """Return path and facts of all that is directly in a folder; nothing for a missing one."""

        def list_folder(fs: Any) -> list[tuple[str, dict[str, Any]]]:
            fs.invalidate_cache(path)
            try:
                listed = fs.ls(path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
            return [(str(facts["name"]).rstrip("/"), facts) for facts in listed]

        return self.run(list_folder)

    def make_folder(self, path: str) -> None:
        self.run(lambda fs: fs.makedirs(path, exist_ok=True))

    def open_new(self, path: str, block_size: int) -> Any:
        """Open a file for writing, in a folder that is made if there is none."""

        def open_file(fs: Any) -> Any:
            return fs.open(path, "wb", block_size=block_size)

        try:
            return self.run(open_file)
        except FileNotFoundError:
            self.make_folder(posixpath.dirname(path))
            return self.run(open_file)

    def move(self, source: str, target: str, nbytes: int) -> None:
        """Give a file of `nbytes` its final name."""
        from fsspec import AbstractFileSystem

        def move(fs: Any) -> None:
            if type(fs).mv is AbstractFileSystem.mv:
                # The inherited `mv` is copy and remove too, but takes names for patterns.
                fs.cp_file(source, target)
                fs.rm_file(source)
            else:
                fs.mv(source, target)

        self.run(move, nbytes)

    def remove(self, path: str) -> None:
        def remove(fs: Any) -> None:
            try:
                fs.rm_file(path)
            except FileNotFoundError:
                pass
            except Exception:
                # File systems word this in many ways; whether the file is there tells.
                with contextlib.suppress(FileNotFoundError):
                    _info(fs, path)
                    raise

        self.run(remove)

    @contextlib.contextmanager
    def translated(self, key: str, action: str, *, settled: bool = False) -> Iterator[None]:
        """Turn a file system's exceptions into ours, `settled` as in `StorageError`."""
        try:
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


def _timeout_s(given: object) -> float:
    """Check the option. Raises ConfigurationError."""
    if isinstance(given, bool) or not isinstance(given, int | float) or not given > 0:
        raise ConfigurationError(f"call_timeout_s must be a positive number of seconds, not {given!r}")
    return given


def _info(fs: Any, path: str) -> dict[str, Any]:
    fs.invalidate_cache(posixpath.dirname(path))
    return dict(fs.info(path))


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
