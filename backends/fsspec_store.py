"""Anything fsspec reaches. Slower than the stores written for one system: fsspec hands data over as copies.

A put never writes to the final name. On s3fs it is a multipart upload that is completed at the very end; on
every other file system it is a temporary object that is moved into place once its size was seen to be right.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from ckpt.backends.base import (
    MIB,
    Capabilities,
    ObjectStat,
    PutMode,
    Store,
    check_key,
    is_key,
    part_size_bytes,
)
from ckpt.backends.bodies import Body, BodyError, body_errors_unchanged, fill, open_part
from ckpt.backends.cancellable_reads import Reads
from ckpt.backends.options import redact_url, scrub
from ckpt.errors import (
    AccessDenied,
    AlreadyExists,
    CheckpointError,
    ConfigurationError,
    IntegrityError,
    NotFound,
    StorageError,
    StorageFull,
    StorageUnavailable,
    Truncated,
    UnsafeContent,
)

__all__ = ["FsspecStore"]

_PART_SIZE_BYTES = 8 * MIB
_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.ckpt-tmp$")
_S3 = frozenset({"s3", "s3a"})
# No directories to make, and one object is seen by all clients as soon as it is written.
_OBJECT_STORES = _S3 | {"gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci", "memory"}
_LOCAL = frozenset({"file", "local"})
# Their rmdir removes what is empty, and nothing else; pyarrow's (HDFS) takes along what is inside.
_EMPTY_ONLY = frozenset({"file", "local", "sftp", "ssh"})
_HTTP = frozenset({"http", "https"})
# Their one connection cannot be shared by threads.
_ONE_AT_A_TIME = frozenset({"ftp"})
# Options that may be quoted in messages; any other text among them may be a credential.
_HARMLESS = frozenset(
    {"endpoint_url", "region", "region_name", "profile", "host", "protocol", "project", "encoding"}
)
_CONNECTION_WORDS = ("Connection", "Timeout", "HTTPClient", "SSL", "Server", "Client")
_FULL = (28, 122, 27)  # ENOSPC, EDQUOT, EFBIG


class FsspecStore(Store):
    """`scheme://...` of any fsspec protocol; `fsspec+s3://...` takes s3fs where `s3://` would take boto3.

    Options are passed to the file system, as everywhere with fsspec.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None, *, threads: int = 4) -> None:
        self._target = url.removeprefix("fsspec+")
        self._options = dict(options or {})
        self._protocol = self._target.partition("://")[0]
        self.url = redact_url(url).rstrip("/")
        self.threads = threads
        self._opened: tuple[Any, str] | None = None
        self._reads = Reads()
        self._make_locks()

    def _make_locks(self) -> None:
        self._lock = threading.Lock()
        self._turn: contextlib.AbstractContextManager[Any] = (
            threading.RLock() if self._protocol in _ONE_AT_A_TIME else contextlib.nullcontext()
        )

    @property
    def reads(self) -> Reads:
        return self._reads

    @property
    def capabilities(self) -> Capabilities:
        s3 = self._protocol in _S3
        objects = self._protocol in _OBJECT_STORES
        return Capabilities(
            atomic_replace=objects,
            cross_client_visibility=objects or self._protocol in _LOCAL,
            max_object_size_bytes=5 << 40 if s3 else 1 << 62,
            max_parts=10_000,
            min_part_size_bytes=5 * MIB if s3 else 1,
            max_part_size_bytes=5 << 30 if s3 else 1 << 62,
        )

    def put(self, key: str, body: Body, *, mode: PutMode = PutMode.OVERWRITE) -> None:
        create = mode is PutMode.CREATE
        with body_errors_unchanged():
            if create:
                self._refuse_existing(key)
            if self._protocol in _S3:
                self._put_deferred(key, body, create)
            else:
                self._put_moved(key, body)
        with contextlib.suppress(AccessDenied, StorageUnavailable):
            # The put was acknowledged; that nobody may or can look changes nothing.
            self._check_size(key, self.stat(key).size_bytes, body.nbytes)

    def _refuse_existing(self, key: str) -> None:
        with contextlib.suppress(NotFound):
            self.stat(key)
            error = AlreadyExists("exists already", url=self.url, key=key)
            error.settled = True
            raise error

    def _put_deferred(self, key: str, body: Body, create: bool) -> None:
        """The file exists once `commit` has returned, and not at all if anything fails before."""
        size = part_size_bytes(body.nbytes, _PART_SIZE_BYTES, self.capabilities)
        if create and not body.nbytes:
            # s3fs commits an empty file without the condition.
            with self._translated(key, "put"):
                self._fs.pipe_file(self._path(key), b"", mode="create")
            return
        with self._translated(key, "put", settled=True):
            file = self._fs.open(self._path(key), "xb" if create else "wb", autocommit=False, block_size=size)
        try:
            with self._translated(key, "put", settled=True):
                _write(file, body, size)
                file.close()
            with self._translated(key, "put"):
                file.commit()
        except BaseException:
            file.closed = True  # else the garbage collector closes it, which uploads what is left
            with contextlib.suppress(Exception):
                file.discard()
            raise

    def _put_moved(self, key: str, body: Body) -> None:
        size = part_size_bytes(body.nbytes, _PART_SIZE_BYTES, self.capabilities)
        temporary = f"{key}.{secrets.token_hex(8)}.ckpt-tmp"
        try:
            with self._translated(key, "put", settled=True):
                with self._open_new(self._path(temporary), size) as file:
                    _write(file, body, size)
                self._check_size(key, self.stat(temporary).size_bytes, body.nbytes)
            with self._translated(key, "put"):
                self._move(self._path(temporary), self._path(key))
        except BaseException:
            with contextlib.suppress(Exception), self._turn:
                self._fs.rm_file(self._path(temporary))
            raise

    def _open_new(self, path: str, size: int) -> Any:
        try:
            return self._fs.open(path, "wb", block_size=size)
        except FileNotFoundError:
            self._fs.makedirs(posixpath.dirname(path), exist_ok=True)
            return self._fs.open(path, "wb", block_size=size)

    def _move(self, source: str, target: str) -> None:
        from fsspec import AbstractFileSystem

        if type(self._fs).mv is AbstractFileSystem.mv:
            # The inherited `mv` is copy and remove too, but takes names for patterns.
            self._fs.cp_file(source, target)
            self._fs.rm_file(source)
        else:
            self._fs.mv(source, target)

    def _check_size(self, key: str, found: int, nbytes: int) -> None:
        # What is there stays: under the final name, it may be another writer's.
        if found != nbytes:
            raise IntegrityError(f"the store kept {found} of {nbytes} bytes sent", url=self.url, key=key)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        stop = offset + sum(buffer.nbytes for buffer in buffers)
        if stop == offset:
            self.stat(key)
            return
        with self._reads.begin() as read:
            data = self._read(key, offset, stop)
            with read.filling():
                fill(buffers, data)

    def _read(self, key: str, offset: int, stop: int) -> memoryview:
        try:
            with self._translated(key, "read"):
                data = memoryview(self._fs.cat_file(self._path(key), start=offset, end=stop))
        except (NotFound, AccessDenied, StorageUnavailable):
            raise
        except StorageError:
            # File systems word a range past the end in many ways; the size tells.
            if self.stat(key).size_bytes >= stop:
                raise
            data = memoryview(b"")
        return self._just(key, data, offset, stop)

    def _just(self, key: str, data: memoryview, offset: int, stop: int) -> memoryview:
        """Bytes `[offset, stop)` of what a file system gave for them: those, fewer, or the whole file."""
        where: dict[str, Any] = {"url": self.url, "key": key, "start": offset, "stop": stop}
        asked = data.nbytes == stop - offset
        # A web server that ignores ranges sends the whole file, which can be as long as what was asked for.
        if asked and not (offset and self._protocol in _HTTP):
            return data
        size = self.stat(key).size_bytes
        if size < stop:
            raise Truncated(f"ends at byte {size}", **where)
        if asked:
            return data
        if data.nbytes == size:
            return data[offset:stop]
        raise StorageError(f"the file system gave {data.nbytes} bytes instead", **where)

    def stat(self, key: str) -> ObjectStat:
        with self._translated(key, "stat"):
            found = self._info(self._path(key))
            if found.get("type") == "directory":
                raise FileNotFoundError(key)
            return _stat(key, found)

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        folder = prefix.rpartition("/")[0]
        with self._translated(prefix, "list"):
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(self._path(folder) if folder else self._root, detail=True)
            except FileNotFoundError:
                return
        for path, facts in found.items():
            key = self._key(path)
            if key.startswith(prefix) and is_key(key) and not _TEMPORARY.search(key):
                with self._translated(key, "list"):
                    listed = _stat(key, facts)
                yield listed

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            with self._translated(key, "delete"):
                self._remove(self._path(key))

    def _remove(self, path: str) -> None:
        try:
            self._fs.rm_file(path)
        except FileNotFoundError:
            pass
        except Exception:
            # File systems word this in many ways; whether the file is there tells.
            with contextlib.suppress(FileNotFoundError):
                self._info(path)
                raise

    def prepare(self, prefix: str) -> None:
        # On an object store `makedirs` would try to create the bucket.
        if self._protocol not in _OBJECT_STORES:
            with self._translated(prefix, "make the directory"):
                self._fs.makedirs(self._path(prefix) if prefix else self._root, exist_ok=True)

    def abandon(self, prefix: str = "", *, choose: Callable[[ObjectStat], bool] | None = None) -> int:
        count = 0
        with self._translated(prefix, "abandon"):
            if self._protocol in _S3:
                bucket, _, start = self._root.partition("/")
                start = posixpath.join(start, prefix) if prefix else f"{start}/" if start else ""
                for upload in self._fs.list_multipart_uploads(bucket):
                    if upload["Key"].startswith(start) and (
                        choose is None or choose(self._begun(bucket, upload))
                    ):
                        self._fs.abort_mpu(bucket, upload["Key"], upload["UploadId"])
                        count += 1
                return count
            self._fs.invalidate_cache()
            with contextlib.suppress(FileNotFoundError):
                for path, facts in self._fs.find(self._root, detail=True).items():
                    key = self._key(path)
                    if not key.startswith(prefix) or not _TEMPORARY.search(key):
                        continue
                    if choose is None or choose(_stat(_TEMPORARY.sub("", key), facts)):
                        self._fs.rm_file(path)
                        count += 1
        return count

    def remove_empty(self, prefix: str = "") -> None:
        if self._protocol not in _EMPTY_ONLY:
            return
        top = self._path(prefix) if prefix else self._root
        with self._translated(prefix, "remove the empty directory"):
            self._fs.invalidate_cache()
            found = self._fs.find(top, withdirs=True, detail=True)
            folders = [path for path, facts in found.items() if facts["type"] == "directory"]
            for path in [*sorted({*folders} - {top}, key=len, reverse=True), top]:
                with contextlib.suppress(Exception):  # it is not empty, or not there
                    self._fs.rmdir(path)

    def _begun(self, bucket: str, upload: Mapping[str, Any]) -> ObjectStat:
        """An unfinished upload as an object; its size is not known."""
        initiated = upload.get("Initiated")
        modified = initiated.timestamp() if isinstance(initiated, datetime) else None
        return ObjectStat(self._key(f"{bucket}/{upload['Key']}"), 0, None, modified)

    @property
    def _fs(self) -> Any:
        return self._open()[0]

    @property
    def _root(self) -> str:
        return self._open()[1]

    def _open(self) -> tuple[Any, str]:
        with self._lock:
            if self._opened is None:
                try:
                    import fsspec
                except ImportError as error:
                    raise ConfigurationError(
                        f"{self._protocol}:// needs fsspec: pip install 'ckpt-storage[fsspec]'"
                    ) from error
                try:
                    fs, root = fsspec.core.url_to_fs(self._target, skip_instance_cache=True, **self._options)
                except (ImportError, ValueError, TypeError) as error:
                    shown, cause = self._shown(error)
                    raise ConfigurationError(f"{self._protocol}://: {shown}", url=self.url) from cause
                self._opened = fs, root.rstrip("/")
            return self._opened

    def close(self) -> None:
        with self._lock:
            self._opened = None  # file systems end their sessions when nobody holds them any more

    def _path(self, key: str) -> str:
        path = f"{self._root}/{check_key(key)}"
        if self._protocol in _LOCAL:
            root = os.path.realpath(self._root)
            if os.path.commonpath([root, os.path.realpath(path)]) != root:
                raise UnsafeContent(
                    "is a link that leads out of the checkpoint; refused", url=self.url, key=key
                )
        return path

    def _key(self, path: str) -> str:
        return path.removeprefix(self._root).lstrip("/")

    def _info(self, path: str) -> dict[str, Any]:
        self._fs.invalidate_cache(posixpath.dirname(path))
        return dict(self._fs.info(path))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "_turn": None, "_opened": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_locks()

    @contextlib.contextmanager
    def _translated(self, key: str, action: str, *, settled: bool = False) -> Iterator[None]:
        """`settled`: of the errors raised."""
        try:
            with self._turn:
                yield
        except (CheckpointError, BodyError):
            raise
        except Exception as error:
            shown, cause = self._shown(error)
            raised = _kind(error)(f"cannot {action}: {shown}", url=self.url, key=key)
            raised.settled = settled
            raise raised from cause

    def _shown(self, error: Exception) -> tuple[str, Exception | None]:
        """An exception's text without credentials, and the exception itself if it may be shown as the cause."""
        text = f"{type(error).__name__}: {error}"
        shown = scrub(text, self._secrets())
        return shown, error if shown == text else None

    def _secrets(self) -> Sequence[str]:
        found: list[str] = []
        pending: list[Mapping[str, Any]] = [self._options]
        while pending:
            for name, value in pending.pop().items():
                if isinstance(value, Mapping):
                    pending.append(value)
                elif isinstance(value, str) and name not in _HARMLESS:
                    found.append(value)
        user_info = re.search(r"://([^/@]*)@", self._target)
        return [*found, *(user_info[1].split(":") if user_info else ())]


def _write(file: Any, body: Body, size: int) -> None:
    for start in range(0, body.nbytes, size):
        with open_part(body, start, min(start + size, body.nbytes)) as part:
            for buffer in part.buffers:
                if part.pace is not None:
                    part.pace(buffer.nbytes)
                file.write(buffer)


def _kind(error: Exception) -> type[StorageError]:
    """Our name for a file system's exception."""
    if isinstance(error, FileNotFoundError):
        return NotFound
    if isinstance(error, FileExistsError) or _condition_refused(error.__cause__):
        return AlreadyExists
    if isinstance(error, PermissionError):
        return AccessDenied
    if isinstance(error, OSError) and error.errno in _FULL:
        return StorageFull
    name = type(error).__name__
    if isinstance(error, ConnectionError | TimeoutError) or any(word in name for word in _CONNECTION_WORDS):
        return StorageUnavailable
    if "Credentials" in name:
        return AccessDenied
    return StorageError


def _condition_refused(error: BaseException | None) -> bool:
    """Whether s3fs was refused an "only if absent" that it reports as any other error."""
    response = getattr(error, "response", None)
    return isinstance(response, dict) and (response.get("Error") or {}).get("Code") == "PreconditionFailed"


def _stat(key: str, facts: Mapping[str, Any]) -> ObjectStat:
    modified = facts.get("LastModified", facts.get("mtime", facts.get("created")))
    if isinstance(modified, datetime):
        modified = modified.timestamp()
    if facts.get("size") is None:
        raise StorageError(f"the file system does not tell the size of {key!r}")
    version = str(facts.get("ETag") or facts.get("etag") or "").strip('"')
    return ObjectStat(
        key, int(facts["size"]), version or None, modified if isinstance(modified, int | float) else None
    )
