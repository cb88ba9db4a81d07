"""The contract between this library and a storage system.

Seven methods and `capabilities` are required; the defaults of the others fit a store without
folders, connections or a quota. Promises are data (`Capabilities`), never an `isinstance` check.
`ckpt.testing.StoreTests` checks all of it, for our stores and those of third parties.
"""

from __future__ import annotations

import enum
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ckpt.backends.bodies import (
    Body,
    BodyError,
    BytesBody,
    CheckedBody,
    Condition,
    Part,
    RawRequests,
    UploadNote,
    body_errors_unchanged,
    fill,
    open_part,
    remaining,
)
from ckpt.backends.cancellable_reads import Read, Reads
from ckpt.backends.options import redact_url, scrub, take_options
from ckpt.errors import (
    AccessDenied,
    AlreadyExists,
    ConfigurationError,
    IntegrityError,
    NotFound,
    StorageError,
    StorageUnavailable,
    Truncated,
)

__all__ = [
    "Capabilities", "Condition", "ObjectStat", "PutMode", "RawRequests", "Store", "UploadNote",
    # for stores: what they get, give and check
    "Body", "BodyError", "BytesBody", "CheckedBody", "Part", "body_errors_unchanged", "open_part",
    "Read", "Reads", "fill", "remaining",
    "check_kept", "check_stored", "is_key", "part_size_bytes", "refuse_existing", "transfer_size_bytes",
    "redact_url", "scrub", "take_options",
    # for users of any store
    "check_key", "exists", "holds", "put_bytes", "read_bytes",
]  # fmt: skip

MIB = 1 << 20
WRITE_SIZE_BYTES = 8 * MIB
"""How much of a body is opened at a time by stores that write objects from begin to end."""


class PutMode(enum.Enum):
    """How a put treats a key that exists."""

    OVERWRITE = "overwrite"
    CREATE = "create"


@dataclass(frozen=True)
class Capabilities:
    """The promises of a store. Unknown means False: the library then takes the careful path.

    Attributes:
        conditional_create: `PutMode.CREATE` is one atomic step, also between clients, for objects
            that are not sent in parts. Where a server decides, this was measured
            (`consistency.conditional_create`).
        atomic_replace: `PutMode.OVERWRITE` shows readers the old bytes or the new, nothing between.
        list_after_write: `list` shows all that any client wrote before it was called.
        cross_client_visibility: every other client sees at once what one client wrote.
        visible_is_durable: what any client sees is durable, also if its put failed or got no answer.
        parallel_parts: parts of one object can be in flight at the same time, and gain from it.
        resumes_uploads: another process can go on with the put of a large object (`put_resumable`).
        verifies_checksums: the store itself refuses bytes that do not match the checksum sent
            along.
        max_object_size_bytes, max_parts, min_part_size_bytes, max_part_size_bytes: limits of one
            object.
    """

    conditional_create: bool = False
    atomic_replace: bool = False
    list_after_write: bool = False
    cross_client_visibility: bool = False
    visible_is_durable: bool = False
    parallel_parts: bool = False
    resumes_uploads: bool = False
    verifies_checksums: bool = False
    max_object_size_bytes: int = 1 << 62
    max_parts: int = 10_000
    min_part_size_bytes: int = 1
    max_part_size_bytes: int = 1 << 62


@dataclass(frozen=True)
class ObjectStat:
    """Facts about one object.

    Attributes:
        key: relative to the store's root.
        size_bytes: its length.
        version: changes whenever the object is replaced, if the store knows such a thing (ETag).
        modified_at_s: seconds since 1970 by the store's clock, if known.
    """

    key: str
    size_bytes: int
    version: str | None = None
    modified_at_s: float | None = None


class Store(ABC):
    """One root (a bucket and prefix, a directory) of one storage system.

    Keys are relative to the root: `/`-separated, no empty, `.` or `..` segment. Every method may be
    called from many threads at once, raises only `ckpt.errors`, and is bounded in time by the
    store's own timeouts and retries. A store pickles without its connections and opens new ones in
    the other process.
    """

    url: str
    """The root, without credentials; fit for messages and records."""

    threads: int
    """The number of operations that may run at the same time."""

    directory: str | None = None
    """The root as a path of this machine, if it is one."""

    part_size_bytes: int | None = None
    """How much one transfer moves, where the user's settings say so; set by who opened this store by its URL."""

    open_parent: Callable[[], Store] | None = None
    """Opens the folder that holds the root; set by who opened this store by its URL."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities: ...

    @abstractmethod
    def put(self, key: str, body: Body, *, mode: PutMode = PutMode.OVERWRITE) -> None:
        """Store `body` under `key`; when this returns, the object is whole and durable.

        On any failure, also one that the body raises, nothing new is visible under the key, an
        object that existed before still does, and no multipart upload is left open.

        Raises:
            AlreadyExists: the mode is CREATE and the key exists. After a lost reply, the object
                there may be the caller's own; compare it if that matters.
            IntegrityError: the store acknowledged the put, but kept another number of bytes. They
                stay, as they may be another writer's.
            StorageError: the put failed; `settled` if it surely was not, and will not be, carried
                out.
        """

    @abstractmethod
    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the writable `buffers`, in order, with the object's bytes from `offset` on.

        One request for all buffers, and no copy in between if the client library allows it.

        Raises:
            NotFound: no such object.
            Truncated: the object ends before the buffers are full.
        """

    def read_version(self, stat: ObjectStat, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill buffers as `read_into` does, with bytes of the object that `stat` describes and of no other.

        Raises:
            NotFound: no such object any more.
            StorageError: another object is in its place.
        """
        try:
            self.read_into(stat.key, offset, buffers)
            is_same = self.stat(stat.key) == stat
        except Truncated:
            is_same = False
        if not is_same:
            raise other_version(self.url, stat.key)

    def read_whole(self, key: str, check: Callable[[int], None]) -> bytearray:
        """Read a whole small object. `check` is called with its size before memory is allocated, and may raise."""
        size = self.stat(key).size_bytes
        check(size)
        data = bytearray(size)
        if size:
            self.read_into(key, 0, [memoryview(data)])
        return data

    @abstractmethod
    def stat(self, key: str) -> ObjectStat:
        """Return facts about one object. Raises NotFound."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        """List objects whose key starts with `prefix`, lazily, in no set order.

        May lag: nothing correct depends on it.
        """

    @abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; a key without one is fine."""

    @abstractmethod
    def prepare(self, prefix: str) -> None:
        """Make the folder `prefix` (no trailing slash) writable, tolerating races."""

    @abstractmethod
    def abandon(self, prefix: str = "", *, choose: Callable[[ObjectStat], bool] | None = None) -> int:
        """Abort unfinished puts of any process below `prefix`; returns how many.

        `choose` is asked about each: its key is that of the object to be, `modified_at_s` is when
        it was begun or last written to, if known. Those it answers False for stay. Without it, all
        are aborted.
        """

    def put_resumable(
        self, key: str, body: Body, note: UploadNote, *, mode: PutMode = PutMode.OVERWRITE
    ) -> int:
        """Put as `put` does, and go on with the upload that `note` remembers; return the bytes that were there.

        A part that is there is used only if it has the size, and a checksum, of that part of the body; else the
        upload is aborted, and another one begun. No upload is touched but that of the note.

        A failure that may pass (StorageUnavailable, StorageError itself, an interrupt) leaves the upload and the
        note; any other neither.
        """
        self.put(key, body, mode=mode)
        return 0

    @property
    def reads(self) -> Reads | None:
        """The running reads of a store that can cancel them."""
        return None

    @property
    def retries(self) -> int:
        """The number of requests sent again because they failed; 0 if the store cannot tell."""
        return 0

    @property
    def keeps_versions(self) -> bool:
        """True once a delete by this store has left the bytes behind, as an old version that is paid for."""
        return False

    def raw_requests(self) -> RawRequests | None:
        """Return single requests to the server; None if the operations show all there is."""
        return None

    def folders(self, prefix: str = "") -> Iterator[str]:
        """List the names of the folders directly below `prefix` (empty, or a key and a slash)."""
        seen: set[str] = set()
        for stat in self.list(prefix):
            name, slash, _ = stat.key.removeprefix(prefix).partition("/")
            if slash and name not in seen:
                seen.add(name)
                yield name

    def root_is_object(self) -> bool:
        """Tell whether the root is itself an object or file, not a folder; False if unknown."""
        return self.directory is not None and os.path.isfile(self.directory)

    def links(self, prefix: str = "") -> Iterator[str]:
        """List the names of links directly below `prefix` (as for `folders`) to folders outside of the root."""
        return iter(())

    def open_link(self, path: str) -> Store | None:
        """Open the folder outside of the root to which the link `path` leads; None if `path` is no such link.

        It is a store of its own, as for a caller that opens the URL of the link; the caller closes it.
        """
        return None

    def root_is_link(self) -> bool:
        """Return True if the root is a symbolic link."""
        return False

    def unlink_root(self) -> None:  # noqa: B027 (most stores have no links)
        """Remove the symbolic link that is the root; its target stays."""

    def remove_empty(self, prefix: str = "") -> None:  # noqa: B027 (most stores have no directories)
        """Remove the directory `prefix` (as for `prepare`) if it is empty; others stay."""

    def free_bytes(self) -> int | None:
        """Return how much more this client may store here, if known."""
        return None

    def parent(self) -> Store:
        """Open the folder that holds the root, with this store's options; the caller closes it, and it first.

        Raises ConfigurationError if there is none.
        """
        if self.open_parent is None:
            raise ConfigurationError("this store cannot open the folder that holds it", url=self.url)
        return self.open_parent()

    def close(self) -> None:  # noqa: B027 (a store without connections has nothing to close)
        """Release connections and threads; harmless to call twice."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


def check_key(key: str) -> str:
    """Return `key`. Raises ConfigurationError if it could leave the root or name nothing."""
    if not is_key(key):
        raise ConfigurationError(f"not a valid object key: {key!r}")
    return key


def delete_in_batches(
    keys: Sequence[str], delete: Callable[[Sequence[str]], None], *, batch: int, threads: int
) -> None:
    """Delete `batch` keys at a time, in threads if there are more. An error lets no further ones begin."""
    batches = [keys[start : start + batch] for start in range(0, len(keys), batch)]
    if len(batches) <= 1:
        for only in batches:
            delete(only)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="ckpt-delete") as pool:
        for _ in pool.map(delete, batches):
            pass


_SHORT = 255
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*(?:/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*")


def is_key(key: str) -> bool:
    """Tell whether `key` can name an object. Other names in a listing are not this library's."""
    if len(key) <= _SHORT and _PLAIN_KEY.fullmatch(key):  # nearly all
        return True
    if not key or "\\" in key or "\0" in key:
        return False
    try:
        name = key.encode()
    except UnicodeEncodeError:  # a file name that is not UTF-8: it can be neither sent nor recorded
        return False
    # The limits of S3 for a key, and of file systems for a name.
    parts = name.split(b"/")
    return len(name) <= 1024 and all(len(part) <= 255 and part not in (b"", b".", b"..") for part in parts)


def transfer_size_bytes(threads: int) -> int:
    """Return how much each of `threads` transfers moves at a time.

    That is 32 to 64 MiB, and 256 MiB for all together if possible. Each request costs an SDK 2 to 4
    ms of CPU, a tenth of the cost of 32 MiB on the wire.
    """
    return min(max(256 * MIB // threads, 32 * MIB), 64 * MIB)


def part_size_bytes(nbytes: int, wanted_bytes: int, capabilities: Capabilities) -> int:
    """Return the size of every part but the last: a multiple of 1 MiB within the store's limits.

    Raises ConfigurationError if no part size can hold `nbytes` in this store.
    """
    if nbytes > capabilities.max_object_size_bytes:
        limit_gib = capabilities.max_object_size_bytes / 2**30
        raise ConfigurationError(
            f"an object of {nbytes} bytes is over the store's limit of {limit_gib:.0f} GiB; "
            "shard the model over more ranks"
        )
    needed = math.ceil(nbytes / capabilities.max_parts)
    size = max(wanted_bytes, capabilities.min_part_size_bytes, needed)
    size = math.ceil(size / MIB) * MIB
    if size > capabilities.max_part_size_bytes:
        raise ConfigurationError(
            f"an object of {nbytes} bytes needs parts of {size} bytes, over the store's limit of "
            f"{capabilities.max_part_size_bytes}; shard the model over more ranks"
        )
    return size


def other_version(url: str, key: str) -> StorageError:
    """Make the error of `Store.read_version` for an object that was replaced."""
    text = "was replaced after it was opened: restore the earlier object, or open the one that is there now"
    return StorageError(text, url=url, key=key)


def put_bytes(store: Store, key: str, data: bytes, *, mode: PutMode = PutMode.OVERWRITE) -> None:
    """Store a small object."""
    store.put(key, CheckedBody(data), mode=mode)


def read_bytes(
    store: Store,
    key: str,
    *,
    size_bytes: int | None = None,
    max_bytes: int = 1 << 30,
    moved: Callable[[int], None] | None = None,
) -> bytearray:
    """Read a whole small object; its size is checked before memory is allocated.

    `moved` is called with the number of bytes.

    Raises IntegrityError if it is not `size_bytes`, or over `max_bytes`.
    """

    def check(size: int) -> None:
        if size_bytes is not None and size != size_bytes:
            message = f"holds {size} bytes, expected {size_bytes}"
            raise IntegrityError(message, url=store.url, key=key, start=0, stop=size_bytes)
        if size > max_bytes:
            message = f"holds {size} bytes, more than the {max_bytes} such an object may have"
            raise IntegrityError(message, url=store.url, key=key)

    data = store.read_whole(key, check)
    if moved is not None:
        moved(len(data))
    return data


def exists(store: Store, key: str) -> bool:
    """Tell whether the store shows an object at `key`."""
    try:
        store.stat(key)
    except NotFound:
        return False
    return True


def refuse_existing(store: Store, key: str) -> None:
    """Raise AlreadyExists if the store shows an object at `key`."""
    if exists(store, key):
        raise AlreadyExists("exists already", url=store.url, key=key, settled=True)


def check_kept(kept_bytes: int, sent_bytes: int, *, url: str, key: str) -> None:
    """Raise IntegrityError unless all bytes were kept. They stay: they may be another writer's."""
    if kept_bytes != sent_bytes:
        raise IntegrityError(f"the store kept {kept_bytes} of {sent_bytes} bytes sent", url=url, key=key)


def check_stored(look: Callable[[], ObjectStat], sent_bytes: int, *, url: str, key: str) -> None:
    """Raise IntegrityError unless the store has the object that it acknowledged. That it can't be seen now is no error."""
    try:
        check_kept(look().size_bytes, sent_bytes, url=url, key=key)
    except NotFound as error:
        text = "the store acknowledged the object, and does not have it"
        raise IntegrityError(text, url=url, key=key) from error
    except (AccessDenied, StorageUnavailable):
        pass


def holds(store: Store, key: str, body: Body) -> bool:
    """Tell whether the object at `key` has the bytes of `body`: it is read and compared. Raises StorageError."""
    if store.stat(key).size_bytes != body.nbytes:
        return False
    for start in range(0, body.nbytes, WRITE_SIZE_BYTES):
        with body.part(start, min(start + WRITE_SIZE_BYTES, body.nbytes)) as part:
            found = [memoryview(bytearray(buffer.nbytes)) for buffer in part.buffers]
            store.read_into(key, start, found)
            if any(one != other for one, other in zip(found, part.buffers, strict=True)):
                return False
    return True
