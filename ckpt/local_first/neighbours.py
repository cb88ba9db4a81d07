"""Read files of a checkpoint that lie on other nodes' disks: their ranks read them, and send them over the group.

A rank tells all others which ranks' files it wants and does not have; the ranks that have some say
so. What none has, one of those that want it reads from the durable place for all. Then each asks whom it has chosen for the bytes it needs, when it needs them; a thread answers
until all that may ask have said farewell.
"""

from __future__ import annotations

import itertools
import logging
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor

import torch

from ckpt.backends.base import Capabilities, ObjectStat, Store
from ckpt.consistency import environment
from ckpt.errors import CheckpointError, NotFound, StorageError, Truncated
from ckpt.format.names import ObjectName, owned_path, split_path
from ckpt.format.records import ObjectRef
from ckpt.local_first.near_store import OnceStore, ReadOnlyStore
from ckpt.ranks.group import Ranks
from ckpt.ranks.messages import MAX_TAGS, Messages
from ckpt.reading.parcels import Parcel
from ckpt.reading.read_once import Wanted
from ckpt.siblings.sibling_objects import SiblingObjects
from ckpt.transfer.buffer_pool import StagingPool
from ckpt.transfer.fetcher import Fetcher
from ckpt.transfer.tensor_memory import memory_of, tensor_over
from ckpt.transfer.threads import workers

_logger = logging.getLogger(__name__)

_WINDOW_BYTES = 4 << 20
_AT_ONCE = 4
_MAX_HOLDERS = 16
"""Ranks that are known to have one file: of more, the others are not asked."""

_KEY_BYTES = 1024
_WORDS = 4 + _KEY_BYTES // 8
"""Of a request: the rank that asks, where the bytes begin, how many (or _FAREWELL), the tag of the answer; the key."""

_FAREWELL = -1
_SIZE = -1
"""Where the bytes begin, of a request for the object's size."""


_ASK, _FIRST_ANSWER = 0, 2
_FAILED, _READ, _ENDS, _GONE = range(4)
"""How an answer went. `_ENDS`: the file ends before the bytes that are asked for; `_GONE`: it was removed meanwhile."""

_ANSWERS = (MAX_TAGS - _FIRST_ANSWER) // 2


class Neighbours:
    """The ranks of a load, each of which can read what lies on the other nodes' disks.

    Stands where `read_once.Replicas` does: ranks that want the same ask the one that has it.

    Args:
        ranks: of the load, over a group of this library's own.
        here: the checkpoint on this node's disk.
        far: the checkpoint in the durable place; None if it is not there.
        work: what the ranks do with what they ask for, for texts.
    """

    def __init__(self, ranks: Ranks, here: Store, far: Store | None, *, work: str = "loading") -> None:
        self._ranks, self._here, self._work = ranks, SiblingObjects(here), work
        self._far = None if far is None else OnceStore(SiblingObjects(far))
        self._holder: dict[str, int] = {}
        self._have_asked = False
        self._messages: Messages | None = None
        self._tags = itertools.count()

    # -- in place of Replicas ------------------------------------------------------------------------------

    def records(
        self, refs: Sequence[ObjectRef], read: Callable[[ObjectRef], bytearray], threads: Executor
    ) -> list[bytearray]:
        """Find out who has the files of these manifests; return the manifests. All ranks call it, or `leave`."""
        self._ask(refs)
        return list(threads.map(read, refs))

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
            messages.send(_request(messages.rank, 0, _FAREWELL, 0, ""), holder, _ASK)

    # -- who has what --------------------------------------------------------------------------------------

    def _ask(self, refs: Collection[ObjectRef]) -> None:
        if self._have_asked or self._ranks.size == 1:
            return
        self._have_asked = True
        self._ranks.progress.wait_for("all ranks to tell which files they lack")
        try:
            self._agree({ref.path for ref in refs})
        except BaseException as error:
            if not isinstance(error, Exception):
                self._ranks.roll_call(error)
            raise
        self._ranks.progress.begin(self._work)

    def _agree(self, paths: Collection[str]) -> None:
        rank = self._ranks.rank
        wanted = self._ranks.join({path: [rank] for path in paths if not self._has(path)}, _joined)
        if not wanted:
            return
        holders = self._ranks.join({path: [rank] for path in wanted if self._has(path)}, _some)
        asking = set[int]()
        for path, askers in wanted.items():
            having = holders.get(path, [])
            if not having and self._far is not None:
                having = [askers[zlib.crc32(path.encode()) % len(askers)]]
            for asker in askers if having else ():
                holder = having[asker % len(having)]
                if asker == rank:
                    self._holder[_stem(path)] = holder
                if holder == rank != asker:
                    asking.add(asker)
        if asking or self._holder:
            self._messages = Messages(self._ranks)
        if asking:
            messages = self._messages
            assert messages is not None
            environment.start_thread(lambda: _Answers(messages, self._read).run(asking), "ckpt-near")

    def _read(self, key: str, offset: int, memory: memoryview) -> None:
        """Read for another rank, or what this one reads for all."""
        try:
            store: Store = self._here
            if self._far is not None and not self._has(key):
                store = self._far
            if offset == _SIZE:
                memory[:] = store.stat(key).size_bytes.to_bytes(8, "little")
            else:
                store.read_into(key, offset, [memory])
        finally:
            self._ranks.progress.moved()

    @property
    def far_bytes(self) -> int:
        """How many bytes this rank has read from the durable place for all that want them."""
        return 0 if self._far is None else self._far.read_bytes

    def _has(self, path: str) -> bool:
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
        holder, messages = self._holder.get(_stem(key)), self._messages
        if holder is None or messages is None:
            raise NotFound("no other node has it", url=self._here.url, key=key)
        if holder == messages.rank:
            self._read(key, offset, memory)
            return lambda: None
        tag = _FIRST_ANSWER + 2 * (next(self._tags) % _ANSWERS)
        status = torch.zeros(1, dtype=torch.int64)
        try:
            received = messages.receive(tensor_over(memory), holder, tag)
            settled = messages.receive(status, holder, tag + 1)
            messages.send(_request(messages.rank, offset, memory.nbytes, tag, key), holder, _ASK)
        except RuntimeError as error:
            raise self._lost(holder, key, error) from error

        def wait() -> None:
            try:
                received()
                settled()
            except (RuntimeError, ConnectionError) as error:
                raise self._lost(holder, key, error) from error
            _check_outcome(int(status.item()), holder, self._here.url, key)
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
            for start, pieces in _windows(offset, buffers):
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
        size = torch.zeros(1, dtype=torch.int64)
        self._neighbours.fetch(key, _SIZE, memory_of(size))()
        return ObjectStat(key, int(size.item()))

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        return iter(())


class _Answers:
    """Answers what other ranks ask, until all have said farewell."""

    def __init__(self, messages: Messages, read: Callable[[str, int, memoryview], None]) -> None:
        self._messages, self._read = messages, read

    def run(self, asking: set[int]) -> None:
        try:
            with workers(_AT_ONCE, "ckpt-answer") as threads:
                while asking:
                    request = torch.zeros(_WORDS, dtype=torch.int64)
                    self._messages.receive_any(request, _ASK)
                    rank, offset, nbytes, tag = request[:4].tolist()
                    if nbytes == _FAREWELL:
                        asking.discard(rank)
                        continue
                    key = request[4:].numpy().tobytes().rstrip(b"\0").decode()
                    threads.submit(self._answer, rank, key, offset, nbytes, tag)
        except Exception as error:  # the group is broken: all ranks hear of that where they wait
            _logger.debug("no more answers to other nodes: %s", error)

    def _answer(self, rank: int, key: str, offset: int, nbytes: int, tag: int) -> None:
        memory, outcome = torch.zeros(nbytes, dtype=torch.uint8), _READ
        try:
            self._read(key, offset, memory_of(memory))
        except Exception as error:
            outcome = _outcome_of(error)
            if outcome != _GONE:  # room was made meanwhile
                _logger.warning("rank %d asked for %s, which could not be read: %s", rank, key, error)
        try:
            sent = self._messages.begin_send(memory, rank, tag)
            self._messages.send(torch.tensor([outcome]), rank, tag + 1)
            sent()
        except Exception as error:
            _logger.debug("rank %d was not answered: %s", rank, error)


def _windows(offset: int, buffers: Sequence[memoryview]) -> Iterator[tuple[int, list[memoryview]]]:
    """Cut a read at the same bytes of the file for all ranks: where each window begins, and its memory."""
    pieces: list[memoryview] = []
    begin = offset
    for buffer in buffers:
        while buffer.nbytes:
            room = _WINDOW_BYTES - offset % _WINDOW_BYTES
            piece, buffer = buffer[:room], buffer[room:]
            pieces.append(piece)
            offset += piece.nbytes
            if piece.nbytes == room:
                yield begin, pieces
                pieces, begin = [], offset
    if pieces:
        yield begin, pieces


def _wait_for_all(begun: Sequence[Callable[[], None]]) -> None:
    failure: Exception | None = None
    for wait in begun:
        try:
            wait()
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure


def _request(rank: int, offset: int, nbytes: int, tag: int, key: str) -> torch.Tensor:
    request = torch.zeros(_WORDS, dtype=torch.int64)
    request[:4] = torch.tensor([rank, offset, nbytes, tag])
    encoded = key.encode()
    request[4:].view(torch.uint8)[: len(encoded)] = (
        torch.frombuffer(bytearray(encoded), dtype=torch.uint8) if encoded else 0
    )
    return request


def _outcome_of(error: Exception) -> int:
    if isinstance(error, Truncated):
        return _ENDS
    return _GONE if isinstance(error, NotFound) else _FAILED


def _check_outcome(outcome: int, holder: int, url: str, key: str) -> None:
    """Raise the error of an answer that has none of the bytes: with damage another checkpoint may be tried."""
    if outcome == _ENDS:
        raise Truncated(f"ends too soon on the disk of rank {holder}", url=url, key=key)
    if outcome == _GONE:
        raise NotFound(f"rank {holder} does not have it any more", url=url, key=key)
    if outcome != _READ:
        raise StorageError(f"rank {holder} could not read it", url=url, key=key)


def _stem(path: str) -> str:
    """Name what a manifest and its data files have in common: they lie on one disk."""
    owner, key = split_path(path)
    name = ObjectName.parse(key)
    return path if name is None else owned_path(owner, name.stem)


def _joined(some: dict[str, list[int]], others: dict[str, list[int]]) -> dict[str, list[int]]:
    both = {path: [*ranks] for path, ranks in some.items()}
    for path, ranks in others.items():
        both[path] = sorted({*both.get(path, ()), *ranks})
    return both


def _some(some: dict[str, list[int]], others: dict[str, list[int]]) -> dict[str, list[int]]:
    return {path: ranks[:_MAX_HOLDERS] for path, ranks in _joined(some, others).items()}
