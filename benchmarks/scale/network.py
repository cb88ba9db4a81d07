"""Model a network and an object store: how long messages, requests and bytes take."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.scale.counting import Counts
from ckpt.backends.base import Capabilities, ObjectStat, PutMode, Store
from ckpt.backends.bodies import Body
from ckpt.backends.cancellable_reads import Reads
from ckpt.backends.wrapper import WrappedStore
from ckpt.errors import NotFound
from ckpt.format.names import is_data_key
from ckpt.planning.requests import put_requests


@dataclass(frozen=True)
class Network:
    """Messages between ranks.

    Attributes:
        latency_s: of one message.
        bytes_per_s: that a rank can receive, and as many can it send.
    """

    latency_s: float = 50e-6
    bytes_per_s: float = 10e9 / 8

    def seconds(self, counts: Counts) -> float:
        """Return how long the busiest rank waits for its messages: step after step, byte after byte."""
        most = max(counts.sent_bytes, counts.received_bytes)
        return counts.steps * self.latency_s + most / self.bytes_per_s


@dataclass(frozen=True)
class Bucket:
    """Requests to one prefix: so many at once, then so many a second."""

    per_s: float
    burst: float

    def seconds(self, requests: float) -> float:
        """Return how long so many requests take that all come at once."""
        return max(0.0, requests - self.burst) / self.per_s


@dataclass(frozen=True)
class Storage:
    """An object store, such as S3 describes itself: a token bucket for each prefix.

    Attributes:
        latency_s: of one request.
        bytes_per_s: of one rank.
        prefixes: into which the names of one checkpoint are spread by the store; 1 is a new folder.
    """

    latency_s: float = 0.03
    bytes_per_s: float = 1e8
    writes: Bucket = Bucket(3500.0, 3500.0)
    reads: Bucket = Bucket(5500.0, 5500.0)
    prefixes: int = 1

    def seconds(self, requests: Counter[str], *, steps: int, rank_bytes: float = 0.0) -> float:
        """Return how long requests take, of which `steps` follow one another."""
        writes = requests["PUT"] + requests["LIST"] + requests["DELETE"]
        limits = (
            self.writes.seconds(writes / self.prefixes),
            self.reads.seconds(requests["GET"] / self.prefixes),
        )
        return steps * self.latency_s + max(*limits, rank_bytes / self.bytes_per_s)


@dataclass
class Requests:
    """Requests as an S3 server sees them, by phase, and the bytes of objects.

    Attributes:
        sizes: of objects that are only counted, by URL.
    """

    phase: Callable[[], str]
    sizes: dict[str, int] = field(default_factory=dict)
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def reset(self) -> None:
        self.counts = {}

    def add(self, **more: int) -> None:
        with self._lock:
            counts = self.counts.setdefault(self.phase(), Counter())
            for name, number in more.items():
                counts[name] += number

    def total(self) -> Counter[str]:
        return sum(self.counts.values(), Counter())


class CountingStore(WrappedStore):
    """Count requests as S3 would see them, where objects of more than a part are sent in parts.

    Args:
        keeps_data: the bytes of data files are taken too; otherwise they are only counted.
    """

    def __init__(self, inner: Store, requests: Requests, part_bytes: int, *, keeps_data: bool) -> None:
        super().__init__(inner)
        self._requests, self._part_bytes, self._keeps_data = requests, part_bytes, keeps_data
        self._reads = Reads()

    @property
    def reads(self) -> Reads:
        """Reads can be cancelled, as those from S3: then what reads a whole object is one request."""
        return self._reads

    @property
    def capabilities(self) -> Capabilities:
        return replace(self._inner.capabilities, parallel_parts=True, max_object_size_bytes=5 << 40)

    def put(self, key: str, body: Body, *, mode: PutMode = PutMode.OVERWRITE) -> None:
        self.count_put(key, body.nbytes)
        if self._keeps_data or not is_data_key(key):
            super().put(key, body, mode=mode)

    def count_put(self, key: str, nbytes: int) -> None:
        """Count an object that is written."""
        self._requests.sizes[f"{self.url}/{key}"] = nbytes
        puts, gets = put_requests(nbytes, self._part_bytes)
        self._requests.add(PUT=int(puts), GET=int(gets), sent_bytes=nbytes)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        self._requests.add(GET=1, read_bytes=sum(buffer.nbytes for buffer in buffers))
        super().read_into(key, offset, buffers)

    def read_whole(self, key: str, check: Callable[[int], None]) -> bytearray:
        self._requests.add(GET=1)
        data = super().read_whole(key, check)
        self._requests.add(read_bytes=len(data))
        return data

    def stat(self, key: str) -> ObjectStat:
        self._requests.add(GET=1)
        try:
            return super().stat(key)
        except NotFound:
            if (known := self._requests.sizes.get(f"{self.url}/{key}")) is None:
                raise
            return ObjectStat(key, known)

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        self._requests.add(LIST=1)
        return super().list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        names = list(keys)
        self._requests.add(DELETE=math.ceil(len(names) / 1000))
        super().delete(names)
