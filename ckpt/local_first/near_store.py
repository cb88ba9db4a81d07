"""Read each object from the nearest place that has it: this node, another node, the durable place."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import NoReturn, TypeVar

from ckpt.backends.base import Capabilities, ObjectStat, PutMode, Store
from ckpt.backends.bodies import Body, WatchedBuffers
from ckpt.consistency.checksums import BLOCK_SIZE_BYTES
from ckpt.errors import ConfigurationError, NotFound, StorageError, Truncated

_REMEMBERED = 4096
_KEPT_BLOCKS = 128

T = TypeVar("T")


class ReadOnlyStore(Store):
    """A store that refuses to write."""

    def put(self, key: str, body: Body, *, mode: PutMode = PutMode.OVERWRITE) -> NoReturn:
        self._refuse(key)

    def delete(self, keys: Iterable[str]) -> NoReturn:
        self._refuse(next(iter(keys), ""))

    def prepare(self, prefix: str) -> NoReturn:
        self._refuse(prefix)

    def abandon(self, prefix: str = "", *, choose: Callable[[ObjectStat], bool] | None = None) -> NoReturn:
        self._refuse(prefix)

    def _refuse(self, key: str) -> NoReturn:
        raise StorageError("this store only reads", url=self.url, key=key)


class NearStore(ReadOnlyStore):
    """Reads from the first of `layers` that has an object.

    Bytes that are asked for a second time were damaged the first time: they come from the next layer
    then, if that has them. It writes nothing.

    Args:
        layers: by name, the nearest first.

    Attributes:
        read_bytes: that were read, by the name of the layer.
        failed: layers that could not give an object, or gave it damaged, and its key; the first few thousand.
    """

    def __init__(self, layers: Sequence[tuple[str, Store]]) -> None:
        if not layers:
            raise ConfigurationError("no place to read from")
        self._layers = [*layers]
        nearest, farthest = layers[0][1], layers[-1][1]
        self.url = nearest.url
        self.threads = max(store.threads for _, store in layers)
        self.part_size_bytes = farthest.part_size_bytes
        self.read_bytes: Counter[str] = Counter()
        self.failed: set[tuple[str, str]] = set()
        self._asked: OrderedDict[tuple[str, int, int], int] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def capabilities(self) -> Capabilities:
        return self._layers[0][1].capabilities

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        nbytes = sum(buffer.nbytes for buffer in buffers)
        asked = (key, offset, nbytes)
        with self._lock:
            skipped = self._asked.pop(asked, 0)
            if skipped:
                self._note(self._layers[skipped - 1][0], key)
        first = skipped % len(self._layers)
        order = self._layers[first:] + self._layers[:first]

        def read(number: int, name: str, store: Store) -> None:
            if isinstance(buffers, WatchedBuffers):
                buffers.begin()  # what another layer has shown does not count
            store.read_into(key, offset, buffers)
            with self._lock:
                self.read_bytes[name] += nbytes
                self._asked[asked] = (skipped + number) % len(self._layers) + 1
                if len(self._asked) > _REMEMBERED:
                    self._asked.popitem(last=False)

        self._first(key, order, read)

    def stat(self, key: str) -> ObjectStat:
        return self._first(key, self._layers, lambda _, __, store: store.stat(key))

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        seen: set[str] = set()
        for stat in itertools.chain.from_iterable(store.list(prefix) for _, store in self._layers):
            if stat.key not in seen:
                seen.add(stat.key)
                yield stat

    def parent(self) -> Store:
        parents: list[tuple[str, Store]] = []
        for name, store in self._layers:
            with contextlib.suppress(ConfigurationError):
                parents.append((name, store.parent()))
        return NearStore(parents)

    def close(self) -> None:
        for _, store in self._layers:
            store.close()

    def _note(self, layer: str, key: str) -> None:
        if len(self.failed) < _REMEMBERED:
            self.failed.add((layer, key))

    def _first(
        self, key: str, order: Sequence[tuple[str, Store]], operation: Callable[[int, str, Store], T]
    ) -> T:
        """Return what the first layer returns that has the object; raise the error that tells most."""
        failure: StorageError | Truncated | None = None
        for number, (name, store) in enumerate(order):
            try:
                return operation(number, name, store)
            except (StorageError, Truncated) as error:
                with self._lock:
                    self._note(name, key)
                if failure is None or isinstance(failure, NotFound):
                    failure = error
        assert failure is not None
        raise failure


class OnceStore(ReadOnlyStore):
    """Reads blocks that several ranks ask for once, if they ask within some time."""

    def __init__(self, inner: Store) -> None:
        self.url, self.threads, self._inner = inner.url, inner.threads, inner
        self.read_bytes = 0
        self._blocks: OrderedDict[tuple[str, int, int], Future[bytes]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        (buffer,) = buffers
        blocks: list[tuple[int, int, Future[bytes]]] = []
        own: list[tuple[int, int, Future[bytes]]] = []
        with self._lock:
            for start, stop in _cut(offset, offset + buffer.nbytes, BLOCK_SIZE_BYTES):
                block = self._blocks.get((key, start, stop))
                if block is None:
                    block = self._blocks[key, start, stop] = Future()
                    own.append((start, stop, block))
                blocks.append((start, stop, block))
            while len(self._blocks) > _KEPT_BLOCKS:
                self._blocks.popitem(last=False)
        self._read(key, own)
        for start, stop, block in blocks:
            buffer[start - offset : stop - offset] = block.result()

    def _read(self, key: str, blocks: Sequence[tuple[int, int, Future[bytes]]]) -> None:
        """Read blocks, those that follow each other by one request."""
        runs: list[list[tuple[int, int, Future[bytes]]]] = []
        for block in blocks:
            if runs and runs[-1][-1][1] == block[0]:
                runs[-1].append(block)
            else:
                runs.append([block])
        for run in runs:
            first, last = run[0][0], run[-1][1]
            data = bytearray(last - first)
            try:
                self._inner.read_into(key, first, [memoryview(data)])
            except BaseException as error:
                with self._lock:
                    for start, stop, _ in blocks:
                        self._blocks.pop((key, start, stop), None)
                for _, _, waited_for in blocks:
                    if not waited_for.done():
                        waited_for.set_exception(error)
                raise
            with self._lock:
                self.read_bytes += len(data)
            for start, stop, arrived in run:
                arrived.set_result(bytes(data[start - first : stop - first]))

    def stat(self, key: str) -> ObjectStat:
        return self._inner.stat(key)

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        return self._inner.list(prefix)


def _cut(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Cut `[start, stop)` at the multiples of `size`."""
    while start < stop:
        end = min(stop, (start // size + 1) * size)
        yield start, end
        start = end


def windows(offset: int, buffers: Sequence[memoryview], size: int) -> Iterator[tuple[int, list[memoryview]]]:
    """Cut a read at the same bytes of the file for all ranks: where each window begins, and its memory."""
    pieces: list[memoryview] = []
    begin = offset
    for buffer in buffers:
        while buffer.nbytes:
            room = size - offset % size
            piece, buffer = buffer[:room], buffer[room:]
            pieces.append(piece)
            offset += piece.nbytes
            if piece.nbytes == room:
                yield begin, pieces
                pieces, begin = [], offset
    if pieces:
        yield begin, pieces
