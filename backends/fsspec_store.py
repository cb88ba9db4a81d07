"""A store on any file system of fsspec, slower than the others: fsspec hands data over as copies.

A put never writes to the final name. On s3fs it is a multipart upload that is completed at the very
end; elsewhere it is a temporary object, moved into place once its size proved right.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from ckpt.backends.base import (
    MIB,
    WRITE_SIZE_BYTES,
    Capabilities,
    ObjectStat,
    PutMode,
    Store,
    check_kept,
    check_stored,
    holds,
    is_key,
    part_size_bytes,
    refuse_existing,
)
from ckpt.backends.bodies import Body, body_errors_unchanged, fill, open_part
from ckpt.backends.cancellable_reads import Reads
from ckpt.backends.fsspec_connection import HTTP, LOCAL, S3, FsspecConnection
from ckpt.backends.fsspec_links import is_link, leads_out, links_out, unlink
from ckpt.backends.fsspec_listings import forget_listings
from ckpt.backends.fsspec_s3 import folders_of_s3, objects_of_s3, uploads_of_s3
from ckpt.errors import AccessDenied, NotFound, StorageError, StorageUnavailable, Truncated

_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.ckpt-tmp$")
# No directories to make, and one object is seen by all clients as soon as it is written.
_OBJECT_STORES = S3 | {"gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci", "memory"}
# Their rmdir removes only empty directories; pyarrow's (HDFS) removes the contents too.
_EMPTY_ONLY = LOCAL | {"sftp", "ssh"}


class FsspecStore(Store):
    """`scheme://...` of any fsspec protocol.

    `fsspec+s3://...` takes s3fs, where `s3://` would take boto3. Options are passed to the file
    system, as everywhere with fsspec; this store's own is `call_timeout_s` (300 s): how long a call may take
    that gets no answer. Calls that move bytes get 1 s more for each 256 KiB.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None, *, threads: int = 4) -> None:
        self._files = FsspecConnection(url, options)
        self.url, self.threads = self._files.url, threads
        self._reads = Reads()

    @property
    def reads(self) -> Reads:
        return self._reads

    @property
    def capabilities(self) -> Capabilities:
        protocol = self._files.protocol
        s3, objects = protocol in S3, protocol in _OBJECT_STORES
        return Capabilities(
            atomic_replace=objects,
            cross_client_visibility=objects or protocol in LOCAL,
            visible_is_durable=objects,
            max_object_size_bytes=5 << 40 if s3 else 1 << 62,
            min_part_size_bytes=5 * MIB if s3 else 1,
            max_part_size_bytes=5 << 30 if s3 else 1 << 62,
        )

    def put(self, key: str, body: Body, *, mode: PutMode = PutMode.OVERWRITE) -> None:
        create = mode is PutMode.CREATE
        size = part_size_bytes(body.nbytes, self.part_size_bytes or WRITE_SIZE_BYTES, self.capabilities)
        try:
            with body_errors_unchanged():
                if create:
                    refuse_existing(self, key)
                if self._files.protocol in S3:
                    self._put_deferred(key, body, size, create)
                else:
                    self._put_moved(key, body, size)
        except StorageError as error:
            if error.settled or not _holds(self, key, body):
                raise
        finally:
            forget_listings(self.url, [key])
        check_stored(functools.partial(self.stat, key), body.nbytes, url=self.url, key=key)

    def _put_deferred(self, key: str, body: Body, size: int, create: bool) -> None:
        """Put a file that exists once `commit` has returned, and not if anything fails before."""
        files, path = self._files, self._files.path
        if create and not body.nbytes:
            # s3fs commits an empty file without the condition.
            with files.translated(key, "put"):
                name = path(key)
                files.run(lambda fs: fs.pipe_file(name, b"", mode="create"))
            return
        with files.translated(key, "put", settled=True):
            name = path(key)
            mode = "xb" if create else "wb"
            file = files.run(lambda fs: fs.open(name, mode, autocommit=False, block_size=size))
        try:
            with files.translated(key, "put", settled=True):
                self._write(file, body, size)
                files.run(lambda _: file.close(), min(size, body.nbytes))
            with files.translated(key, "put"):
                files.run(lambda _: file.commit())
        except BaseException:
            file.closed = True  # else the garbage collector closes it, which uploads what is left
            with contextlib.suppress(Exception):
                files.run(lambda _: file.discard())
            raise

    def _put_moved(self, key: str, body: Body, size: int) -> None:
        files, path = self._files, self._files.path
        temporary = f"{key}.{secrets.token_hex(8)}.ckpt-tmp"
        try:
            with files.translated(key, "put", settled=True):
                file = files.open_new(path(temporary), size)
                try:
                    self._write(file, body, size)
                except TimeoutError:
                    with contextlib.suppress(AttributeError):
                        file.closed = True  # to close it would wait as long
                    raise
                except BaseException:
                    with contextlib.suppress(Exception):
                        files.run(lambda _: file.close(), min(size, body.nbytes))
                    raise
                files.run(lambda _: file.close(), min(size, body.nbytes))
                check_kept(self.stat(temporary).size_bytes, body.nbytes, url=self.url, key=key)
            with files.translated(key, "put"):
                files.move(path(temporary), path(key), body.nbytes)
        except BaseException:
            with contextlib.suppress(Exception):
                files.remove(path(temporary))
            raise

    def _write(self, file: Any, body: Body, size: int) -> None:
        for start in range(0, body.nbytes, size):
            with open_part(body, start, min(start + size, body.nbytes)) as part:
                for buffer in part.buffers:
                    if part.pace is not None:
                        part.pace(buffer.nbytes)
                    self._files.run(functools.partial(_write_into, file, buffer), buffer.nbytes)

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
        files, failure = self._files, None
        try:
            with files.translated(key, "read"):
                path = files.path(key)
                read = files.run(lambda fs: fs.cat_file(path, start=offset, end=stop), stop - offset)
                data = memoryview(read)
        except (NotFound, AccessDenied, StorageUnavailable):
            raise
        except StorageError as error:
            # File systems word a range past the end in many ways; the size tells.
            data, failure = memoryview(b""), error
        is_size_right = data.nbytes == stop - offset
        # A web server that ignores ranges sends the whole file, which can be as long as the range.
        if is_size_right and not (offset and files.protocol in HTTP):
            return data
        where: dict[str, Any] = {"url": self.url, "key": key, "start": offset, "stop": stop}
        size = self.stat(key).size_bytes
        if size < stop:
            raise Truncated(f"ends at byte {size}", **where)
        if failure is not None:
            raise failure
        if is_size_right:
            return data
        if data.nbytes == size:
            return data[offset:stop]
        raise StorageError(f"the file system gave {data.nbytes} bytes instead", **where)

    def stat(self, key: str) -> ObjectStat:
        with self._files.translated(key, "stat"):
            facts = self._files.info(self._files.path(key))
            # A web server sends the name of a folder on to its page.
            if facts.get("type") == "directory" or str(facts.get("url")).endswith("/"):
                raise FileNotFoundError(key)
            return _stat(key, facts)

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        files = self._files
        with files.translated(prefix, "list"):
            folder = files.folder(prefix.rpartition("/")[0])
            listed = objects_of_s3(files, folder) if files.protocol in S3 else files.find(folder).items()
            for path, facts in listed:
                key = files.key(path)
                if key.startswith(prefix) and is_key(key) and not _TEMPORARY.search(key):
                    with contextlib.suppress(FileNotFoundError):  # removed since
                        yield _stat(key, facts if facts.get("size") is not None else files.info(path))

    def folders(self, prefix: str = "") -> Iterator[str]:
        files = self._files
        with files.translated(prefix, "list"):
            folder = files.folder(prefix[:-1])
            if files.protocol in S3:
                found = folders_of_s3(files, folder)
            else:
                listed = files.entries(folder)
                found = (
                    path for path, facts in listed if facts.get("type") == "directory" and path != folder
                )
            yield from _names(found)

    def links(self, prefix: str = "") -> Iterator[str]:
        with self._files.translated(prefix, "list"):
            yield from _names(links_out(self._files, self._files.folder(prefix[:-1])))

    def open_link(self, path: str) -> Store | None:
        with self._files.translated(path, "open"):
            if not leads_out(self._files, self._files.path(path)):
                return None
        return FsspecStore(*self._files.below(path), threads=self.threads)

    def root_is_link(self) -> bool:
        with self._files.translated("", "stat"):
            return is_link(self._files, self._files.root)

    def unlink_root(self) -> None:
        with self._files.translated("", "remove the link"):
            unlink(self._files, self._files.root)

    def delete(self, keys: Iterable[str]) -> None:
        keys = [*keys]
        try:
            for key in keys:
                with self._files.translated(key, "delete"):
                    self._files.remove(self._files.path(key))
        finally:
            forget_listings(self.url, keys)

    def prepare(self, prefix: str) -> None:
        # On an object store `makedirs` would try to create the bucket.
        if self._files.protocol not in _OBJECT_STORES:
            with self._files.translated(prefix, "make the directory"):
                self._files.make_folder(self._files.folder(prefix))

    def abandon(self, prefix: str = "", *, choose: Callable[[ObjectStat], bool] | None = None) -> int:
        files = self._files
        unfinished = self._uploads(prefix) if files.protocol in S3 else self._temporaries(prefix)
        with files.translated(prefix, "abandon"):
            count = 0
            for stat, abort in unfinished:
                if choose is None or choose(stat):
                    with contextlib.suppress(FileNotFoundError):  # it ended meanwhile
                        files.run(abort)
                        count += 1
            return count

    def _uploads(self, prefix: str) -> Iterator[tuple[ObjectStat, Callable[[Any], None]]]:
        """List unfinished uploads (their sizes are not known), and how to abort each."""
        files = self._files
        for path, facts, abort in uploads_of_s3(files, files.folder(prefix.rpartition("/")[0])):
            key = files.key(path)
            if key.startswith(prefix):
                yield _stat(key, facts), abort

    def _temporaries(self, prefix: str) -> Iterator[tuple[ObjectStat, Callable[[Any], None]]]:
        """List temporary files, as the objects that they would become, and how to remove each."""
        files = self._files
        for path, facts in files.find(files.root).items():
            key = files.key(path)
            if key.startswith(prefix) and _TEMPORARY.search(key):
                facts = facts if facts.get("size") is not None else files.info(path)
                yield _stat(_TEMPORARY.sub("", key), facts), operator.methodcaller("rm_file", path)

    def remove_empty(self, prefix: str = "") -> None:
        if self._files.protocol in _EMPTY_ONLY:
            with contextlib.suppress(Exception):  # it is not empty, or not there
                folder = self._files.folder(prefix)
                self._files.run(lambda fs: fs.rmdir(folder))

    def close(self) -> None:
        self._files.close()


def _holds(store: Store, key: str, body: Body) -> bool:
    """Tell whether a put that failed was carried out: its answer was lost, or an error."""
    with contextlib.suppress(StorageError):
        return holds(store, key, body)
    return False


def _names(found: Iterable[str]) -> Iterator[str]:
    return filter(is_key, (path.rpartition("/")[2] for path in found))


def _write_into(file: Any, buffer: memoryview, _: Any) -> None:
    file.write(buffer)


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
