"""The contract between this library and a storage system.

Seven methods are required; everything else is built once on top of them, below. What a store can and
cannot promise is data (`Capabilities`), never an `isinstance` check. `ckpt.testing.StoreTests` is the
executable form of this page: every store, ours or a third party's, runs it.
"""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ckpt.backends.bodies import (
    Body,
    BodyError,
    BytesBody,
    CheckedBody,
    Part,
    body_errors_unchanged,
    fill,
    open_part,
    remaining,
)
from ckpt.backends.cancellable_reads import Read, Reads
from ckpt.backends.options import redact_url, scrub, take_options
from ckpt.backends.raw_requests import Condition, Trials
from ckpt.errors import ConfigurationError, IntegrityError, NotFound

__all__ = [
    "Body",
    "BodyError",
    "BytesBody",
    "Capabilities",
    "CheckedBody",
    "Condition",
    "ObjectStat",
    "Part",
    "PutMode",
    "Read",
    "Reads",
    "Store",
    "Trials",
    "body_errors_unchanged",
    "check_key",
    "exists",
    "fill",
    "is_key",
    "open_part",
    "part_size_bytes",
    "put_bytes",
    "read_bytes",
    "redact_url",
    "remaining",
    "scrub",
    "take_options",
    "transfer_size_bytes",
]

MIB = 1 << 20
_IN_FLIGHT_BYTES = 256 * MIB


class PutMode(enum.Enum):
    """What a put does when the key exists."""

    OVERWRITE = "overwrite"
    CREATE = "create"


@dataclass(frozen=True)
class Capabilities:
    """What a store promises. Unknown means False: the library then takes the careful path.

    Attributes:
        conditional_create: `PutMode.CREATE` is one atomic step, also between clients, for objects that are not sent in
            parts. Where a server decides, this is what it was seen to do (`consistency.conditions`).
        atomic_replace: `PutMode.OVERWRITE` shows readers the old bytes or the new, nothing between.
        list_after_write: `list` shows what any client has written before it was called.
        cross_client_visibility: what one client wrote, every other client sees at once.
        parallel_parts: parts of one object can be in flight at the same time, and gain from it.
        verifies_checksums: the store itself refuses bytes that do not match the checksum sent along.
        max_object_size_bytes, max_parts, min_part_size_bytes, max_part_size_bytes: limits of one object.
    """

    conditional_create: bool = False
    atomic_replace: bool = False
    list_after_write: bool = False
    cross_client_visibility: bool = False
    parallel_parts: bool = False
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
        version: changes whenever the object is replaced, where the store knows such a thing (ETag).
        modified_at_s: seconds since 1970 by the store's clock, where known.
    """

    key: str
    size_bytes: int
    version: str | None = None
    modified_at_s: float | None = None


class Store(ABC):
    """One root (a bucket and prefix, a directory) of one storage system.

    Keys are relative to the root: `/`-separated, no empty, `.` or `..` segment. Every method may be called
    from many threads at once, raises only `ckpt.errors`, and is bounded in time by the store's own
    timeouts and retries. A store pickles without its connections and opens new ones in the other process.
    """

    url: str
    """The root, without credentials; fit for messages and records."""

    threads: int
    """How many operations may run at the same time."""

    directory: str | None = None
    """The root as a path of this machine, where it is one."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities: ...

    @property
    def reads(self) -> Reads | None:
        """The reads that are running, of a store that can break them off."""
        return None

    @property
    def retries(self) -> int:
        """How many requests have been sent again so far, because they failed; 0 where the store cannot tell."""
        return 0

    @abstractmethod
    def put(self, key: str, body: Body, *, mode: PutMode = PutMode.OVERWRITE) -> None:
        """Store `body` under `key`; when this returns, the object is whole and durable.

        On any failure, also one that the body raises, nothing new is visible under the key, an object that
        was there before still is, and no multipart upload is left open.

        Raises:
            AlreadyExists: the mode is CREATE and the key exists. After a lost reply the object found may be
                the caller's own; who cares compares what is there.
            IntegrityError: the store acknowledged the put, but kept another number of bytes. They are left
                where they are, as they may be another writer's.
            StorageError: the put failed; `settled` where it surely was not, and will not be, carried out.
        """

    @abstractmethod
    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the writable `buffers`, in order, with the object's bytes from `offset` on.

        One request however many buffers there are, and no copy in between where the client library allows.

        Raises:
            NotFound: no such object.
            Truncated: the object ends before the buffers are full.
        """

    @abstractmethod
    def stat(self, key: str) -> ObjectStat:
        """Facts about one object. Raises NotFound."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        """Objects whose key starts with `prefix`, lazily, in no set order. May lag: nothing correct depends on it."""

    @abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; those that are not there are fine."""

    @abstractmethod
    def prepare(self, prefix: str) -> None:
        """Make the place `prefix` (a directory's key, no trailing slash) writable for this client, tolerating races."""

    @abstractmethod
    def abandon(self, prefix: str = "", *, choose: Callable[[ObjectStat], bool] | None = None) -> int:
        """Abort unfinished puts of any process below `prefix`; returns how many.

        `choose` is asked about each: its key will be that of the object, `modified_at_s` is when it was begun or
        last written to, where known. Those it answers False for stay. Without it, all are aborted.
        """

    def folders(self, prefix: str = "") -> Iterator[str]:
        """Names of the folders directly below `prefix` (empty, or a key and a slash), as `list` would show them."""
        seen: set[str] = set()
        for found in self.list(prefix):
            name, slash, _ = found.key.removeprefix(prefix).partition("/")
            if slash and name not in seen:
                seen.add(name)
                yield name

    def remove_empty(self, prefix: str = "") -> None:  # noqa: B027 (most stores have no directories)
        """Remove the directory `prefix` (as for `prepare`) and those below it, as far as they are empty."""

    def trials(self) -> Trials | None:
        """What a probe may ask of the server; None where the operations above show all there is."""
        return None

    def free_bytes(self) -> int | None:
        """How much more this client may store here, where that is known."""
        return None

    def close(self) -> None:  # noqa: B027 (a store without connections has nothing to close)
        """Release connections and threads; harmless to call twice."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


def check_key(key: str) -> str:
    """Return `key`, or raise ConfigurationError when it could leave the store's root or name nothing."""
    if not is_key(key):
        raise ConfigurationError(f"not a valid object key: {key!r}")
    return key


def is_key(key: str) -> bool:
    """Whether `key` can name an object. What a listing finds beside such names is not ours."""
    if not key or "\\" in key or "\0" in key:
        return False
    try:
        name = key.encode()
    except UnicodeEncodeError:  # a file name that is not UTF-8: it can be neither sent nor recorded
        return False
    # Longer ones no file system takes, and S3 none of more than 1,024 bytes.
    parts = name.split(b"/")
    return len(name) <= 1024 and all(len(part) <= 255 and part not in (b"", b".", b"..") for part in parts)


def transfer_size_bytes(threads: int) -> int:
    """What one of `threads` transfers moves at a time: 32 to 64 MiB, all together 256 MiB where they can be.

    Each request costs an SDK 2 to 4 ms of CPU, a tenth of what 32 MiB cost on the wire.
    """
    return min(max(_IN_FLIGHT_BYTES // threads, 32 * MIB), 64 * MIB)


def part_size_bytes(nbytes: int, wanted_bytes: int, capabilities: Capabilities) -> int:
    """The size of every part but the last, a multiple of 1 MiB, so that no limit of the store is met.

    Raises:
        ConfigurationError: no part size can hold `nbytes` in this store.
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
            f"an object of {nbytes} bytes needs parts of {size} bytes, over the store's limit"
        )
    return size


def put_bytes(store: Store, key: str, data: bytes, *, mode: PutMode = PutMode.OVERWRITE) -> None:
    """Store a small object."""
    store.put(key, CheckedBody(data), mode=mode)


def read_bytes(
    store: Store, key: str, *, size_bytes: int | None = None, max_bytes: int = 1 << 30
) -> bytearray:
    """A whole small object. The store's own word on its size is asked for first, so nothing absurd is allocated.

    Raises:
        IntegrityError: its size is not `size_bytes`, or over `max_bytes`.
    """
    found = store.stat(key).size_bytes
    if size_bytes is not None and found != size_bytes:
        raise IntegrityError(
            f"holds {found} bytes, expected {size_bytes}", url=store.url, key=key, start=0, stop=size_bytes
        )
    if found > max_bytes:
        raise IntegrityError(
            f"holds {found} bytes, more than the {max_bytes} such an object may have", url=store.url, key=key
        )
    data = bytearray(found)
    if found:
        store.read_into(key, 0, [memoryview(data)])
    return data


def exists(store: Store, key: str) -> bool:
    try:
        store.stat(key)
    except NotFound:
        return False
    return True
