"""Read what several ranks want once: each of them reads a part, and passes it on to the others.

Ranks that want the very same regions of the same items (of a class: those whose names begin alike)
are replicas of each other. They find each other by digests, cut what they want into parts, read in
turns and pass the parts around a ring, each with its checksum.
"""

from __future__ import annotations

import hashlib
import logging
import socket
import struct
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.checkpoint.planner import ReadItem

from ckpt.consistency.checksums import crc64nvme, crc_text
from ckpt.errors import CheckpointError, IntegrityError
from ckpt.format.records import MAX_METADATA_BYTES, ObjectRef
from ckpt.ranks.group import Ranks, portable
from ckpt.ranks.lost_ranks import StoppedForAnother
from ckpt.ranks.messages import Messages
from ckpt.ranks.ring import Ring
from ckpt.reading.parcels import ALIGNMENT_BYTES, Parcel, Segment, cut_parts, part_bytes
from ckpt.torch_private import StorageInfo
from ckpt.transfer.buffer_pool import StagingPool
from ckpt.transfer.fetcher import Fetcher, StoredFile
from ckpt.transfer.pieces import Piece
from ckpt.transfer.tensor_memory import tensor_over
from ckpt.transfer.threads import in_order, workers

_logger = logging.getLogger(__name__)

MIN_BYTES = 1 << 20
"""Less is read sooner than it is passed on."""

_MAX_CLASSES = 64
_AHEAD = 3
"""Parts of its own that a rank reads at a time, or has read and not passed on."""

_BUDGET_PARTS = 16
_SLACK_BYTES = 4096
_TRAILER = struct.Struct("<QQ")
"""Behind each part: its checksum, and 1 if its reader failed."""

_RECORD_TAG = 2

_nodes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""On how many nodes the ranks of a group are: a job on one node asks once, not in each load."""

K = TypeVar("K")
V = TypeVar("V")
Wanted = tuple[ReadItem, StorageInfo]


class _Member(NamedTuple):
    rank: int
    node: int


class Replicas:
    """Ranks that want the same of a checkpoint, and read it once.

    Args:
        ranks: of the load, over a group of this library's own.
        is_local: the storage is a file system: a node keeps in memory what one of its ranks has read,
            so nothing is passed on within one node.
    """

    def __init__(self, ranks: Ranks, *, is_local: bool) -> None:
        self._ranks, self._have_asked, self._have_told, self._is_off = ranks, False, False, False
        self._is_local = is_local
        self._node = zlib.crc32(socket.gethostname().encode()) if is_local else ranks.rank

    def turn_off(self) -> None:
        """Let each rank read for itself; all ranks call it."""
        self._is_off = True

    def records(
        self, refs: Sequence[ObjectRef], read: Callable[[ObjectRef], bytearray], threads: Executor
    ) -> list[bytearray]:
        """Return objects that the commit lists: of what several ranks want, the first reads it for all.

        All ranks call it. If the first could not read an object, the others stop: the load fails on all ranks.
        """
        small = [ref for ref in refs if ref.size_bytes <= MAX_METADATA_BYTES]
        wanted = self._ask([ref.path for ref in small])
        if wanted is None:
            return list(threads.map(read, refs))
        messages, found = Messages(self._ranks), dict[str, bytearray]()
        first = {ref.path: min(wanted[ref.path]) for ref in small}
        coming = [
            (ref, *_receive(messages, ref.size_bytes + 1, first[ref.path]))
            for ref in small
            if first[ref.path] != self._ranks.rank
        ]
        own = [ref for ref in small if first[ref.path] == self._ranks.rank]
        failure: Exception | None = None
        try:
            for ref, data in zip(own, threads.map(read, own), strict=True):
                found[ref.path] = data
        except Exception as error:  # the others hear of it with each object that is not found here
            failure = error
        waits = [is_there for _, _, is_there in coming]
        for ref in own:
            data = found.get(ref.path, bytearray(ref.size_bytes))
            message = torch.frombuffer(data + bytes([ref.path in found]), dtype=torch.uint8)
            others = [rank for rank in wanted[ref.path] if rank != self._ranks.rank]
            waits += [messages.begin_send(message, rank, _RECORD_TAG) for rank in others]
        self._ranks.progress.wait_for("the other ranks to pass on manifests")
        for wait in waits:
            wait()
        if failure is not None:
            raise failure
        self._ranks.progress.begin("loading")
        for ref, memory, _ in coming:
            data = bytearray(memory[:-1].numpy())
            if not memory[-1]:  # to try it too would take as long again
                raise StoppedForAnother("stopped: another rank could not read a manifest for this one")
            if crc_text(crc64nvme(data)) == ref.crc64nvme:
                found[ref.path] = data
        return [found[ref.path] if ref.path in found else read(ref) for ref in refs]

    def _ask(self, paths: Sequence[str]) -> dict[str, list[int]] | None:
        """Ask all ranks which of them want which objects; None if nothing is passed on."""
        if self._have_asked or not self._are_possible():
            return None
        self._have_asked = True
        return self._join({path: [self._ranks.rank] for path in paths})

    def leave(self) -> None:
        """Answer what the other ranks still ask, if this one failed or had nothing to ask."""
        self._tell([])

    def _tell(self, digests: Iterable[bytes]) -> dict[bytes, list[_Member]]:
        """Tell all ranks what this one wants, as digests; return who wants what."""
        self._ask([])  # of all ranks or of none: here are those that read no records
        if self._have_told or not self._are_possible():
            return {}
        self._have_told = True
        member = _Member(self._ranks.rank, self._node)
        return self._join({digest: [member] for digest in digests})

    def _join(self, own: dict[K, list[V]]) -> dict[K, list[V]]:
        self._ranks.progress.wait_for("all ranks to tell what they read")
        try:
            joined = self._ranks.join(own, _joined)
        except BaseException as error:
            self._have_asked = self._have_told = True  # nobody waits for more
            self._break_off(error)
            raise
        self._ranks.progress.begin("loading")
        return joined

    def _break_off(self, error: BaseException) -> None:
        """Free the other ranks from waiting for this one, if it was interrupted."""
        if not isinstance(error, Exception):
            self._ranks.roll_call(error)

    def _are_possible(self) -> bool:
        """Tell, the same on all ranks, whether something can be passed on; the first call is asked of all."""
        if self._is_off or self._ranks.size == 1 or not self._ranks.is_own_group:
            return False
        group = self._ranks.group
        if self._is_local and group not in _nodes:
            _nodes[group] = len(self._join({self._node: [self._ranks.rank]}))
        return not self._is_local or _nodes[group] > 1

    def read(
        self,
        prepare: Callable[[], list[Wanted]],
        parcel_of: Callable[[Wanted], Parcel | None],
        fetcher: Fetcher,
        pool: StagingPool,
        threads: Executor,
    ) -> list[Wanted]:
        """Read together with the others what they want too; return the rest of what this rank wants.

        Args:
            prepare: lists all that this rank wants, in order.
            parcel_of: makes the parcel of an item; None if it cannot be shared.

        Raises what `prepare` raises; on all replicas the error of the first that could not read its part.
        """
        if not self._are_possible():
            return prepare()
        wanted: list[Wanted] = []
        offers: dict[str, dict[int, Parcel]] = {}

        def digests() -> dict[bytes, str]:
            wanted.extend(prepare())
            found: dict[bytes, str] = {}
            for name, some in _classes(wanted).items():
                parcels = {number: p for number in some if (p := parcel_of(wanted[number])) and p.nbytes}
                if parcels:
                    offers[name] = parcels
                    settings = name, pool.budget_bytes, fetcher.store.url
                    found[_digest((wanted[number] for number in parcels), settings)] = name
            return found

        done: set[int] = set()
        for members, names in self._find(digests()):
            shared = {number: parcel for name in names for number, parcel in offers[name].items()}
            parcels = [shared[number] for number in sorted(shared)]
            if sum(parcel.nbytes for parcel in parcels) < MIN_BYTES:
                continue
            try:
                _Exchange(self._ranks, members, parcels, fetcher, pool, threads).run()
            except BaseException as error:
                self._break_off(error)
                raise
            done.update(shared)
        return [each for number, each in enumerate(wanted) if number not in done]

    def _find(self, own: Mapping[bytes, str]) -> list[tuple[list[int], list[str]]]:
        """Tell who shares which classes with this rank, in an order in which no two rings wait for each other.

        All ranks call it; one that cannot has to `leave`.

        Args:
            own: this rank's classes by digest.
        """
        members = self._tell(own)
        groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for digest, name in own.items():
            those = sorted(members[digest])
            if len({member.node for member in those}) > 1:
                groups[tuple(member.rank for member in those)].append(name)
        # A ring is known by its first class, and no rank is in two rings of one class.
        return sorted(((list(ranks), sorted(names)) for ranks, names in groups.items()), key=lambda g: g[1])


class _Exchange:
    def __init__(
        self,
        ranks: Ranks,
        members: Sequence[int],
        parcels: Sequence[Parcel],
        fetcher: Fetcher,
        pool: StagingPool,
        threads: Executor,
    ) -> None:
        self._ring = Ring(Messages(ranks), members, ranks.progress)
        self._ranks, self._fetcher, self._pool, self._threads = ranks, fetcher, pool, threads
        largest_bytes = pool.budget_bytes // _BUDGET_PARTS
        self._turns = -(-sum(parcel.nbytes for parcel in parcels) // (largest_bytes * len(members)))
        self._parts = cut_parts(parcels, self._turns * len(members))
        most = max(map(part_bytes, self._parts)) + _TRAILER.size
        self._buffer_bytes = -(-most // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._failure: CheckpointError | None = None
        self._failed: set[int] = set()

    def run(self) -> None:
        count = len(self._ring.members)
        buffers = min(_AHEAD, self._turns)
        with (
            self._pool.take((buffers + 2) * self._buffer_bytes) as memory,
            workers(min(buffers, self._fetcher.store.threads), "ckpt-part") as readers,
        ):
            places = [
                memory[number * self._buffer_bytes :][: self._buffer_bytes] for number in range(buffers + 2)
            ]
            incoming = [tensor_over(place) for place in places[buffers:]]

            def read(turn: int) -> torch.Tensor:
                number = turn * count + self._ring.position
                return self._read(self._parts[number], places[turn % buffers])

            with closing(in_order(readers, read, range(self._turns), ahead=buffers)) as own_parts:
                for turn, own in enumerate(own_parts):
                    parts = self._parts[turn * count :][:count]
                    sizes = [part_bytes(part) + _TRAILER.size for part in parts]
                    self._ring.turn(own, sizes, incoming, partial(self._see, parts))
                    self._raise_failure()
        if self._failure is not None:
            raise self._failure

    def _read(self, part: Sequence[Segment], place: memoryview) -> torch.Tensor:
        """Read a part of this rank's own; what fails is told to all."""
        size, crc = part_bytes(part), 0
        data = place[:size]
        try:
            if self._failure is None:
                self._fetcher.run(_pieces(part, data).items(), self._threads)
                crc = crc64nvme(data)
        except Exception as error:
            self._failure = portable(error, self._ranks.rank)
        place[size : size + _TRAILER.size] = _TRAILER.pack(crc, self._failure is not None)
        return tensor_over(place[: size + _TRAILER.size])

    def _see(self, parts: Sequence[Sequence[Segment]], position: int, sent: torch.Tensor) -> None:
        """Take the part of the member at `position` into the targets of this rank."""
        message = sent.numpy().data
        data, (crc, has_failed) = message[: -_TRAILER.size], _TRAILER.unpack(message[-_TRAILER.size :])
        if has_failed:
            self._failed.add(position)
            return
        try:
            if position != self._ring.position and crc != crc64nvme(data):
                sender = self._ring.members[position]
                raise IntegrityError(f"a part that rank {sender} read was damaged on its way to this rank")
            for segment in parts[position]:
                at = segment.at
                segment.parcel.take(segment.start, data[at : at + segment.stop - segment.start])
        except Exception as error:  # the others learn of it with the next part, or at the end of the load
            self._failure = self._failure or portable(error, self._ranks.rank)

    def _raise_failure(self) -> None:
        if self._failed:
            first = min(self._failed)
            raise self._ring.tell(first, self._failure if first == self._ring.position else None)


def _classes(wanted: Sequence[Wanted]) -> dict[str, list[int]]:
    """Sort items by the first part of their names: those of a model are often replicated, of an optimizer not."""
    named: dict[str, list[int]] = defaultdict(list)
    for number, (item, _) in enumerate(wanted):
        named[item.dest_index.fqn.partition(".")[0]].append(number)
    return named if len(named) <= _MAX_CLASSES else {"": [*range(len(wanted))]}


def _digest(wanted: Iterable[Wanted], settings: object) -> bytes:
    """Hash what a rank wants: equal only if it is the same, and will be cut in the same way."""
    digest = hashlib.blake2b(repr(settings).encode(), digest_size=16)
    for item, info in wanted:
        index = item.storage_index
        place = (info.relative_path, info.offset, info.length, index.fqn, index.offset)
        digest.update(repr((place, item.storage_offsets, item.lengths, item.type)).encode())
    return digest.digest()


def _pieces(part: Sequence[Segment], memory: memoryview) -> Mapping[StoredFile, list[Piece]]:
    pieces: dict[StoredFile, list[Piece]] = defaultdict(list)
    for segment in part:
        nbytes = segment.stop - segment.start
        own = memory[segment.at : segment.at + nbytes]
        pieces[segment.parcel.file] += segment.parcel.pieces(segment.start, segment.stop, own)
    return pieces


def _receive(messages: Messages, nbytes: int, rank: int) -> tuple[torch.Tensor, Callable[[], None]]:
    memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    return memory, messages.receive(memory, rank, _RECORD_TAG)


def _joined(some: dict[K, list[V]], others: dict[K, list[V]]) -> dict[K, list[V]]:
    # In an order that is the same in each run, and so are the bytes that are sent.
    return {key: some.get(key, []) + others.get(key, []) for key in {**some, **others}}
