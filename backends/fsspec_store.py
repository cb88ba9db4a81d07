"""Anything fsspec reaches. Slower than the stores written for one system: fsspec hands data over as copies.

A put never writes to the final name. On s3fs it is a multipart upload that is completed at the very end; on
every other file system it is a temporary object that is moved into place once its size was seen to be right.
"""

from __future__ import annotations

import contextlib
import posixpath
import re
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from ckpt.backends.base import (
    MIB,
    Body,
    Capabilities,
    ObjectStat,
    PutMode,
    Store,
    check_key,
    part_size_bytes,
    redact_url,
)
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
)

__all__ = ["FsspecStore"]

_PART_SIZE_BYTES = 8 * MIB
_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.ckpt-tmp$")
_S3 = frozenset({"s3", "s3a"})
# No directories to make, and one object is seen by all clients as soon as it is written.
_OBJECT_STORES = _S3 | {"gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci", "memory"}
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
        self._lock = threading.Lock()
        self._opened: tuple[Any, str] | None = None

    @property
    def capabilities(self) -> Capabilities:
        s3 = self._protocol in _S3
        objects = self._protocol in _OBJECT_STORES
        return Capabilities(
            conditional_create=s3,
            atomic_replace=objects,
            cross_client_visibility=objects or self._protocol in ("file", "local"),
            max_object_size_bytes=5 << 40 if s3 else 1 << 62,
            max_parts=10_000,
            min_part_size_bytes=5 * MIB if s3 else 1,
            max_part_size_bytes=5 << 30 if s3 else 1 << 62,
        )

    def put(self, key: str, body: Body, *, mode: PutMode = PutMode.OVERWRITE) -> None:
        path = self._path(key)
        with self._translated(key, "put"):
            if mode is PutMode.CREATE and self._fs.exists(path):
                raise AlreadyExists("exists already", url=self.url, key=key)
            if self._protocol in _S3:
                self._put_deferred(path, body, "xb" if mode is PutMode.CREATE else "wb")
            else:
                self._put_moved(path, body)
            self._check_size(key, path, body.nbytes)

    def _put_deferred(self, path: str, body: Body, mode: str) -> None:
        """The file exists once `commit` has returned, and not at all if anything fails before."""
        size = part_size_bytes(body.nbytes, _PART_SIZE_BYTES, self.capabilities)
        file = self._fs.open(path, mode, autocommit=False, block_size=size)
        try:
            _write(file, body, size)
            file.close()
            file.commit()
        except BaseException:
            file.closed = True  # else the garbage collector closes it, which uploads what is left
            with contextlib.suppress(Exception):
                file.discard()
            raise

    def _put_moved(self, path: str, body: Body) -> None:
        size = part_size_bytes(body.nbytes, _PART_SIZE_BYTES, self.capabilities)
        temporary = f"{path}.{secrets.token_hex(8)}.ckpt-tmp"
        try:
            try:
                file = self._fs.open(temporary, "wb", block_size=size)
            except FileNotFoundError:
                self._fs.makedirs(posixpath.dirname(path), exist_ok=True)
                file = self._fs.open(temporary, "wb", block_size=size)
            with file:
                _write(file, body, size)
            if self._info(temporary)["size"] != body.nbytes:
                raise StorageError("the file system kept fewer bytes than were written")
            self._move(temporary, path)
        except BaseException:
            with contextlib.suppress(Exception):
                self._fs.rm_file(temporary)
            raise

    def _move(self, source: str, target: str) -> None:
        from fsspec import AbstractFileSystem

        if type(self._fs).mv is AbstractFileSystem.mv:
            # The inherited `mv` is copy and remove too, but takes names for patterns.
            self._fs.cp_file(source, target)
            self._fs.rm_file(source)
        else:
            self._fs.mv(source, target)

    def _check_size(self, key: str, path: str, nbytes: int) -> None:
        found = self._info(path)["size"]
        if found != nbytes:
            with contextlib.suppress(Exception):
                self._fs.rm_file(path)
            raise IntegrityError(f"the store kept {found} of {nbytes} bytes sent", url=self.url, key=key)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        path = self._path(key)
        stop = offset + sum(buffer.nbytes for buffer in buffers)
        if stop == offset:
            self.stat(key)
            return
        try:
            with self._translated(key, "read"):
                data = memoryview(self._fs.cat_file(path, start=offset, end=stop))
        except (NotFound, AccessDenied, StorageUnavailable):
            raise
        except StorageError:
            # File systems word a range past the end in many ways; the size tells.
            if self.stat(key).size_bytes >= stop:
                raise
            data = memoryview(b"")
        if data.nbytes < stop - offset:
            raise Truncated(
                f"ends at byte {offset + data.nbytes}", url=self.url, key=key, start=offset, stop=stop
            )
        position = 0
        for buffer in buffers:
            buffer[:] = data[position : position + buffer.nbytes]
            position += buffer.nbytes

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
            if key.startswith(prefix) and not _TEMPORARY.search(key):
                yield _stat(key, facts)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            with self._translated(key, "delete"), contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._path(key))

    def prepare(self, prefix: str) -> None:
        # On an object store `makedirs` would try to create the bucket.
        if self._protocol not in _OBJECT_STORES:
            with self._translated(prefix, "make the directory"):
                self._fs.makedirs(self._path(prefix) if prefix else self._root, exist_ok=True)

    def abandon(self, prefix: str = "") -> int:
        count = 0
        with self._translated(prefix, "abandon"):
            if self._protocol in _S3:
                bucket, _, start = self._root.partition("/")
                start = posixpath.join(start, prefix) if prefix else f"{start}/" if start else ""
                for upload in self._fs.list_multipart_uploads(bucket):
                    if upload["Key"].startswith(start):
                        self._fs.abort_mpu(bucket, upload["Key"], upload["UploadId"])
                        count += 1
                return count
            self._fs.invalidate_cache()
            with contextlib.suppress(FileNotFoundError):
                for path in self._fs.find(self._root):
                    if self._key(path).startswith(prefix) and _TEMPORARY.search(path):
                        self._fs.rm_file(path)
                        count += 1
        return count

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
                except (ImportError, ValueError) as error:
                    raise ConfigurationError(f"{self._protocol}://: {error}", url=self.url) from error
                self._opened = fs, root.rstrip("/")
            return self._opened

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    def _key(self, path: str) -> str:
        return path.removeprefix(self._root).lstrip("/")

    def _info(self, path: str) -> dict[str, Any]:
        self._fs.invalidate_cache(posixpath.dirname(path))
        return dict(self._fs.info(path))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "_opened": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def _translated(self, key: str, action: str) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            kind = _kind(error)
            if kind is None:
                raise
            text = f"cannot {action}: {type(error).__name__}: {error}"
            # An SDK may quote the URL it was given, with its credentials; then neither text nor cause go on.
            if any(secret in text for secret in self._secrets()):
                raise kind(f"cannot {action}: {type(error).__name__}", url=self.url, key=key) from None
            raise kind(text, url=self.url, key=key) from error

    def _secrets(self) -> Sequence[str]:
        options = [value for value in self._options.values() if isinstance(value, str) and len(value) > 3]
        user_info = re.search(r"://([^/@]*)@", self._target)
        return [*options, *(user_info[1].split(":") if user_info else ())]


def _write(file: Any, body: Body, size: int) -> None:
    for start in range(0, body.nbytes, size):
        with body.part(start, min(start + size, body.nbytes)) as part:
            for buffer in part.buffers:
                file.write(buffer)


def _kind(error: Exception) -> type[StorageError] | None:
    """Our name for a file system's exception; None for one that is not about storage (a body's own)."""
    if isinstance(error, FileNotFoundError):
        return NotFound
    if isinstance(error, FileExistsError):
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
    return StorageError if isinstance(error, OSError) else None


def _stat(key: str, facts: Mapping[str, Any]) -> ObjectStat:
    modified = facts.get("LastModified", facts.get("mtime", facts.get("created")))
    if isinstance(modified, datetime):
        modified = modified.timestamp()
    version = str(facts.get("ETag") or facts.get("etag") or "").strip('"')
    return ObjectStat(
        key, int(facts["size"]), version or None, modified if isinstance(modified, int | float) else None
    )
