"""Read files of a checkpoint that lie on other nodes' disks: their ranks read them, and send them over the group.

A rank tells all others which ranks' files it wants and does not have; the ranks that have some say
so. What none has, one of those that want it reads from the durable place for all. Then each asks whom it has chosen for the bytes it needs, when it needs them; a thread answers
until all that may ask have said farewell.
"""

from __future__ import annotations

import itertools
import logging
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor

import torch

from ckpt.backends.base import Capabilities, ObjectStat, Store
from ckpt.consistency import environment
from ckpt.errors import CheckpointError, IntegrityError, NotFound, StorageError
from ckpt.format.names import ObjectName, owned_path, split_path
from ckpt.format.records import ObjectRef
from ckpt.local_first.answers import (
    ANSWERS,
    ASK,
    FAREWELL,
    FIRST_ANSWER,
    SIZE,
    Answers,
    check_outcome,
    request_of,
)
from ckpt.local_first.near_store import OnceStore, ReadOnlyStore, windows
from ckpt.ranks.group import Ranks
from ckpt.ranks.messages import Messages
from ckpt.reading.parcels import Parcel
from ckpt.reading.read_once import Wanted
from ckpt.siblings.sibling_objects import SiblingObjects
from ckpt.transfer.buffer_pool import StagingPool
from ckpt.transfer.fetcher import Fetcher
from ckpt.transfer.tensor_memory import memory_of, tensor_over

_logger = logging.getLogger(__name__)

_WINDOW_BYTES = 4 << 20
_AT_ONCE = 4
_MAX_HOLDERS = 16
"""Ranks that are known to have one file: of more, the others are not asked."""

_PLACES = 3
"""Where an object may be: what is asked for again, as it was damaged, comes from the next one."""

_PASSED_ON_BYTES = 256 << 10
"""Manifests of so many bytes in all, that ranks lack, are told with who has them: each rank waits for one message less."""


class Neighbours:
    """The ranks of a load, each of which can read what lies on the other nodes' disks.

    Stands where `read_once.Replicas` does: ranks that want the same ask the one that has it. `damaged` are the
    manifests that this rank has read damaged.

    Args:
        ranks: of the load, over a group of this library's own.
        here: the checkpoint on this node's disk.
        far: the checkpoint in the durable place; None if it is not there.
        work: what the ranks do with what they ask for, for texts.
        distrusted: ranks on whose disks files are damaged or missing, and their stems (`stem_of`), the same on all ranks.
    """

    def __init__(
        self,
        ranks: Ranks,
        here: Store,
        far: Store | None,
        *,
        work: str = "loading",
        distrusted: Collection[tuple[int, str]] = (),
    ) -> None:
        self._ranks, self._here, self._work = ranks, SiblingObjects(here), work
        self._distrusted = {stem for rank, stem in distrusted if rank == ranks.rank}
        self._far = None if far is None else OnceStore(SiblingObjects(far))
        self._holder: dict[str, int] = {}
        self._passed_on: dict[str, tuple[int, bytes]] = {}
        self._passed_by: dict[str, int] = {}
        self.damaged: set[str] = set()
        self._have_asked = False
        self._messages: Messages | None = None
        self._tags = itertools.count()

    # -- in place of Replicas ------------------------------------------------------------------------------

    def records(
        self, refs: Sequence[ObjectRef], read: Callable[[ObjectRef], bytearray], threads: Executor
    ) -> list[bytearray]:
        """Find out who has the files of these manifests; return the manifests. All ranks call it, or `leave`."""
        self._ask(refs)

        def read_undamaged(ref: ObjectRef) -> bytearray:
            for left in reversed(range(_PLACES)):
                try:
                    return read(ref)
                except IntegrityError:
                    self.damaged.add(ref.path)
                    if not left:
                        raise
            raise AssertionError

        return list(threads.map(read_undamaged, refs))

    def read(
        self,
        prepare: Callable[[], list[Wanted]],
        parcel_of: Callable[[Wanted], Parcel | None],
        fetcher: Fetcher,
        pool: StagingPool,
        threads: Executor,
    ) -> list[Wanted]:
        """Return what this rank wants: its store knows the neighbours."""
        return prepare()

    def leave(self) -> None:
        """Tell those whom this rank may have asked that it asks no more."""
        self._ask([])
        messages, self._messages = self._messages, None
        if messages is None:
            return
        self._ranks.progress.wait_for("other nodes to hear that this rank has read")
        for holder in sorted({*self._holder.values()} - {messages.rank}):
            messages.send(request_of(messages.rank, 0, FAREWELL, 0, ""), holder, ASK)

    # -- who has what --------------------------------------------------------------------------------------

    def _ask(self, refs: Collection[ObjectRef]) -> None:
        if self._have_asked or self._ranks.size == 1:
            return
        self._have_asked = True
        self._ranks.progress.wait_for("all ranks to tell which files they lack")
        try:
            self._agree({ref.path: ref.size_bytes for ref in refs})
        except BaseException as error:
            if not isinstance(error, Exception):
                self._ranks.roll_call(error)
            raise
        self._ranks.progress.begin(self._work)

    def _agree(self, sizes: Mapping[str, int]) -> None:
        rank = self._ranks.rank
        lacked = {path: size for path, size in sizes.items() if not self._has(path)}
        wanted, size_bytes = self._ranks.join(({path: [rank] for path in lacked}, lacked), _joined_with_sizes)
        if not wanted:
            return
        own = {path: [rank] for path in wanted if self._has(path)}
        passed_on: dict[str, tuple[int, bytes]] = {}
        if sum(size_bytes.values()) <= _PASSED_ON_BYTES:  # each would else be asked for, by all that want it
            passed_on = {
                path: (rank, data) for path in own if (data := self._bytes_of(path, size_bytes[path]))
            }
        holders, self._passed_on = self._ranks.join((own, passed_on), _some_with_bytes)
        asking = set[int]()
        for path, askers in wanted.items():
            having = holders.get(path, [])
            if not having and self._far is not None:
                having = [askers[zlib.crc32(path.encode()) % len(askers)]]
            for asker in askers if having else ():
                holder = having[asker % len(having)]
                if asker == rank:
                    self._holder[stem_of(path)] = holder
                if holder == rank != asker:
                    asking.add(asker)
        if asking or self._holder:
            self._messages = Messages(self._ranks)
        if asking:
            messages = self._messages
            assert messages is not None
            environment.start_thread(lambda: Answers(messages, self._read).run(asking), "ckpt-near")

    def _read(self, key: str, offset: int, memory: memoryview) -> None:
        """Read for another rank, or what this one reads for all."""
        try:
            store: Store = self._here
            if self._far is not None and not self._has(key):
                store = self._far
            if offset == SIZE:
                memory[:] = store.stat(key).size_bytes.to_bytes(8, "little")
            else:
                store.read_into(key, offset, [memory])
        finally:
            self._ranks.progress.moved()

    def _bytes_of(self, path: str, size_bytes: int) -> bytes:
        data = bytearray(size_bytes)
        try:
            self._here.read_into(path, 0, [memoryview(data)])
        except CheckpointError:  # who asks for it hears more
            return b""
        return bytes(data)

    @property
    def far_bytes(self) -> int:
        """How many bytes this rank has read from the durable place for all that want them."""
        return 0 if self._far is None else self._far.read_bytes

    def holder_of(self, key: str) -> int | None:
        """Return the rank that this one asks for an object; None if no other node has it."""
        return self._holder.get(stem_of(key))

    def source_of(self, key: str) -> int | None:
        """Return the rank whose bytes of an object this one was given first: who passed them on, or was asked."""
        return self._passed_by.get(key, self.holder_of(key))

    def known_size(self, key: str) -> int | None:
        """Return the size of what has been passed on, and not read yet."""
        return len(self._passed_on[key][1]) if key in self._passed_on else None

    def _has(self, path: str) -> bool:
        if stem_of(path) in self._distrusted:
            return False
        try:
            self._here.stat(path)
        except (StorageError, CheckpointError):
            return False
        return True

    # -- what this rank asks for ---------------------------------------------------------------------------

    def fetch(self, key: str, offset: int, memory: memoryview) -> Callable[[], None]:
        """Begin to read bytes of an object that another node has; call what is returned to wait for them.

        Raises NotFound if none has it; the wait also raises Truncated, and StorageError if it could not be read.
        """
        holder, messages = self.holder_of(key), self._messages
        if holder is None or messages is None:
            raise NotFound("no other node has it", url=self._here.url, key=key)
        if holder == messages.rank:
            self._read(key, offset, memory)
            return lambda: None
        passed_by, data = self._passed_on.pop(key, (holder, b""))  # once: what is asked for again was damaged
        if offset == 0 and len(data) == memory.nbytes:
            memory[:], self._passed_by[key] = data, passed_by
            return lambda: None
        tag = FIRST_ANSWER + 2 * (next(self._tags) % ANSWERS)
        status = torch.zeros(1, dtype=torch.int64)
        try:
            received = messages.receive(tensor_over(memory), holder, tag)
            settled = messages.receive(status, holder, tag + 1)
            messages.send(request_of(messages.rank, offset, memory.nbytes, tag, key), holder, ASK)
        except RuntimeError as error:
            raise self._lost(holder, key, error) from error

        def wait() -> None:
            try:
                received()
                settled()
            except (RuntimeError, ConnectionError) as error:
                raise self._lost(holder, key, error) from error
            check_outcome(int(status.item()), holder, self._here.url, key)
            self._ranks.progress.moved()

        return wait

    def _lost(self, holder: int, key: str, error: Exception) -> StorageError:
        return StorageError(
            f"rank {holder}, which has it, gave no answer: {error}", url=self._here.url, key=key
        )


class NeighbourStore(ReadOnlyStore):
    """What the neighbours have, as a store."""

    def __init__(self, neighbours: Neighbours, here: Store) -> None:
        self.url, self.threads = here.url, here.threads
        self._neighbours, self._capabilities = neighbours, here.capabilities

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        begun: list[Callable[[], None]] = []
        try:
            for start, pieces in windows(offset, buffers, _WINDOW_BYTES):
                if len(begun) == _AT_ONCE:
                    begun.pop(0)()
                begun.append(self._fetch(key, start, pieces))
        finally:
            # The memory is the caller's: nothing may arrive in it later.
            _wait_for_all(begun)

    def _fetch(self, key: str, offset: int, pieces: Sequence[memoryview]) -> Callable[[], None]:
        if len(pieces) == 1:
            return self._neighbours.fetch(key, offset, pieces[0])
        memory = memory_of(torch.empty(sum(piece.nbytes for piece in pieces), dtype=torch.uint8))
        arrived = self._neighbours.fetch(key, offset, memory)

        def wait() -> None:
            arrived()
            begin = 0
            for piece in pieces:
                piece[:] = memory[begin : begin + piece.nbytes]
                begin += piece.nbytes

        return wait

    def stat(self, key: str) -> ObjectStat:
        if (known := self._neighbours.known_size(key)) is not None:
            return ObjectStat(key, known)
        size = torch.zeros(1, dtype=torch.int64)
        self._neighbours.fetch(key, SIZE, memory_of(size))()
        return ObjectStat(key, int(size.item()))

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        return iter(())


def _wait_for_all(begun: Sequence[Callable[[], None]]) -> None:
    failure: Exception | None = None
    for wait in begun:
        try:
            wait()
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure


def stem_of(path: str) -> str:
    """Name what a manifest and its data files have in common: they lie on one disk."""
    owner, key = split_path(path)
    name = ObjectName.parse(key)
    return path if name is None else owned_path(owner, name.stem)


def _joined(some: dict[str, list[int]], others: dict[str, list[int]]) -> dict[str, list[int]]:
    both = {path: [*ranks] for path, ranks in some.items()}
    for path, ranks in others.items():
        both[path] = sorted({*both.get(path, ()), *ranks})
    return both


_Named = dict[str, list[int]]
_PassedOn = dict[str, tuple[int, bytes]]


def _joined_with_sizes(
    some: tuple[_Named, dict[str, int]], others: tuple[_Named, dict[str, int]]
) -> tuple[_Named, dict[str, int]]:
    return _joined(some[0], others[0]), some[1] | others[1]


def _some_with_bytes(
    some: tuple[_Named, _PassedOn], others: tuple[_Named, _PassedOn]
) -> tuple[_Named, _PassedOn]:
    holders = {path: ranks[:_MAX_HOLDERS] for path, ranks in _joined(some[0], others[0]).items()}
    return holders, others[1] | some[1]
