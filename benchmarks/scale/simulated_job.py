"""Run rank 0 of a job of any size: its code is the product's, the other ranks and the store are made up."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.scale.counting import Phases, watched
from benchmarks.scale.network import CountingStore, Requests
from benchmarks.scale.other_ranks import FEW_RANKS, OtherRanks, token_of
from ckpt import dcp_storage
from ckpt.backends.base import read_bytes
from ckpt.backends.registry import open_store
from ckpt.consistency import environment
from ckpt.format.names import last_segment, rank_of
from ckpt.ranks import group
from ckpt.ranks.first_rank import FirstRank
from ckpt.ranks.many_failures import Outcome
from ckpt.ranks.tree import FAN, Tree
from ckpt.reading import read_once
from ckpt.reading.parcels import part_bytes
from ckpt.save_plans.exchange import FEW_RANKS as FEW_RANKS_THAT_TELL
from ckpt.save_plans.receipt_messages import ReceiptStep, message_of
from ckpt.state.rank_agreement import Compared
from ckpt.state.rank_digests import GROUPS, PLACED
from ckpt.transfer import fetcher
from ckpt.transfer.pieces import Piece
from ckpt.transfer.read_requests import plan_requests
from ckpt.writing import column_save

T = TypeVar("T")

_MESSAGE_TAG = 1 << 30
_TELL, _SEND_SECTIONS, _ANSWER = 1, 2, 3
"""Steps of `ckpt.save_plans.exchange`."""


class Tokens(environment.Environment):
    """Tokens and a clock that a simulation and a job have in common: both are in what is compressed."""

    def __init__(self, rank: int) -> None:
        self._token = token_of(rank)

    def token(self) -> str:
        return self._token

    def now(self) -> float:
        return 1_800_000_000.0


class _Done:
    """A message that is there."""

    def wait(self, timeout: object = None) -> bool:
        return True


class _NoWatch:
    """Heartbeats are measured by `benchmarks.scale.control`."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def start(self) -> None: ...

    def close(self) -> None: ...

    def roll_call(self, *args: object) -> None:
        """Nobody answers: the error of this rank alone is shown."""


@dataclass
class Wire:
    """What the other ranks have sent, and the first one has not received yet."""

    phases: Phases
    sent: dict[int, bytes] = field(default_factory=dict)
    sent_in_tree: dict[int, bytes] = field(default_factory=dict)

    def irecv(self, memory: torch.Tensor, *, group_src: int, tag: int, **_: object) -> _Done:
        sent = self.sent_in_tree if tag < _MESSAGE_TAG else self.sent
        data, nbytes = sent[group_src], memory.nbytes
        sent[group_src] = data[nbytes:]
        memory.numpy()[:] = np.frombuffer(data, dtype=np.uint8, count=nbytes)
        return _Done()

    def isend(self, memory: torch.Tensor, **_: object) -> _Done:
        return _Done()


class Simulation:
    """Saves and loads of rank 0.

    Args:
        part_bytes: of the parts in which large objects are sent.
        keeps_data: files are written too, and their checksums are real ones.
    """

    def __init__(self, others: OtherRanks, *, part_bytes: int, keeps_data: bool) -> None:
        self.phases = Phases()
        self.requests = Requests(lambda: self.phases.name)
        self.others, self.store = others, None
        self.wanted: list[list[str]] = []
        self._hashes: dict[str, Any] = {}
        self._classes: dict[bytes, str] = {}
        self.question = ""
        self.wire, self._part_bytes, self._keeps_data = Wire(self.phases), part_bytes, keeps_data

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Put the made-up ranks and store in the place of real ones."""
        wire = self.wire

        def open_counted(*args: Any, **kwargs: Any) -> Any:
            store = open_store(*args, **kwargs)
            return CountingStore(store, self.requests, self._part_bytes, keeps_data=self._keeps_data)

        with contextlib.ExitStack() as stack:
            for target, name, value in (
                (environment, "_current", Tokens(0)),
                (dist, "get_backend", lambda group=None: "gloo"),
                (dist, "irecv", wire.irecv),
                (dist, "isend", wire.isend),
                (group, "Watch", _NoWatch),
                (group, "Tree", _tree_of(self)),
                (group.Ranks, "_own_group", lambda ranks: dist.group.WORLD),
                (column_save, "FirstRank", _first_rank_of(self)),
                (dcp_storage, "open_store", open_counted),
                (fetcher.Fetcher, "run", lambda of, wanted, threads: self._fetch(wanted)),
                (read_once._Exchange, "run", lambda exchange: self._exchange(exchange)),
                (read_once.Replicas, "_find", _noting(self, read_once.Replicas._find)),
                (read_once.Replicas, "_ask", _asking(self, "_ask")),
                (read_once.Replicas, "_tell", _asking(self, "_tell")),
                (read_once.Replicas, "records", _handing_out(self, read_once.Replicas.records)),
            ):
                stack.enter_context(mock.patch.object(target, name, value))
            stack.enter_context(watched(self.phases))
            yield

    def begin(self, url: str) -> None:
        """Begin a save to, or a load from, another place."""
        self._url = url
        self._store = CountingStore(
            open_store(url), self.requests, self._part_bytes, keeps_data=self._keeps_data
        )
        self.phases.reset()
        self.requests.reset()

    # -- what the other ranks say ----------------------------------------------------------------------------

    def sent_after(self, step: int) -> Iterator[bytes]:
        """Say to the first rank what it waits for after a step."""
        if step == _TELL:
            return self.others.messages(with_contents=self.others.size <= FEW_RANKS_THAT_TELL)
        if step == _SEND_SECTIONS:
            return self.others.contents()
        if step == ReceiptStep.SEND_LAYOUTS:
            return self.others.layouts()
        plan = next(reversed(column_save.PLANS.central.values()))
        self.wanted, self._hashes = self.others.manifests(plan), self.others.classes(plan)
        if self.others.size > FEW_RANKS:
            self.others.exact = {rank for path in self.wanted[0] if (rank := rank_of(path)) is not None}
        written = self.others.write(self._store, last_segment(self._url))
        return (message_of(each, with_layout=self.others.size <= FEW_RANKS_THAT_TELL) for each in written)

    def subtree(self, rank: int, own: T, join: Callable[[T, T], T]) -> T:
        """Return what the values of a rank and of those below it in the tree join to."""
        value: T = self._value(rank, own)
        for child in range(FAN * rank + 1, min(FAN * rank + FAN + 1, self.others.size)):
            value = join(value, self.subtree(child, own, join))
        return value

    def _value(self, rank: int, own: Any) -> Any:
        if isinstance(own, Outcome):
            return Outcome.of(rank, next(iter(own.calls)), None)
        stage = rank // self.others.stage_size
        if stage and isinstance(own, Mapping) and (GROUPS, 0, 0) in own:  # of other names, by kind
            return {_of_stage(key, stage): found for key, found in own.items()}
        if stage and isinstance(own, Mapping) and own and all(isinstance(key, int) for key in own):
            return {number ^ stage: names ^ stage for number, names in own.items()}
        if stage and isinstance(own, Compared):
            return Compared({number ^ stage: found for number, found in own.digests.items()}, {})
        if self.question == "_ask":
            return {path: [rank] for path in self.wanted[rank]}
        if self.question != "_tell":
            return own  # the same on all ranks
        member = read_once._Member(rank, rank)
        return {self._digest(rank, digest, name): [member] for digest, name in self._classes.items()}

    def _digest(self, rank: int, own: bytes, name: str) -> bytes:
        number = self._hashes[name][rank]
        if number == self._hashes[name][0]:
            return own
        return hashlib.blake2b(number.tobytes() + name.encode(), digest_size=16).digest()

    # -- reading ---------------------------------------------------------------------------------------------

    def _fetch(self, wanted: Iterable[tuple[Any, Iterable[Piece]]]) -> None:
        """Count the requests for pieces of files."""
        for file, pieces in wanted:
            for request in plan_requests(
                pieces,
                grid_bytes=file.block_size_bytes,
                file_bytes=file.size_bytes,
                gap_bytes=fetcher._GAP_BYTES if file.block_crcs is None else file.block_size_bytes // 2,
                request_bytes=self._part_bytes,
            ):
                self.requests.add(GET=1, read_bytes=request.stop - request.start)

    def _exchange(self, of: read_once._Exchange) -> None:
        """Read this rank's parts, and count what goes around the ring."""
        count, position = len(of._ring.members), of._ring.position
        counts = self.phases.now()
        for turn in range(of._turns):
            parts = of._parts[turn * count :][:count]
            own = torch.empty(of._buffer_bytes, dtype=torch.uint8).numpy().data
            of._fetcher.run(read_once._pieces(parts[position], own).items(), of._threads)
            sizes = [part_bytes(part) + read_once._TRAILER.size for part in parts]
            for step in range(count - 1):
                counts.sent_bytes += sizes[(position - step) % count]
                counts.received_bytes += sizes[(position - step - 1) % count]
            counts.messages += 2 * (count - 1)
            counts.steps += count - 1


def _first_rank_of(job: Simulation) -> type[FirstRank]:
    wire = job.wire

    class OneRank(FirstRank):
        """The first rank, whose partners are made up."""

        _step = -1

        def decide(self, number: int, join: Callable[[int, int], int], decide: Callable[[int], int]) -> int:
            self._step = super().decide(number, join, decide)
            return self._step

        def first_number(self, number: int) -> int:
            self._step = number
            return super().first_number(number)

        def gather_bytes(self, data: bytes) -> list[bytes] | None:
            with job.phases.outside():
                messages = enumerate(job.sent_after(self._step), 1)
                wire.sent = {rank: len(each).to_bytes(8, "little") + each for rank, each in messages}
            return super().gather_bytes(data)

        def scatter_bytes(self, values: Sequence[bytes] | None) -> bytes:
            if self._step == _ANSWER:
                job.others.answers = list(values or ())
            else:
                job.others.wanted = list(values or ())
            return super().scatter_bytes(values)

    return OneRank


def _tree_of(job: Simulation) -> type[Tree]:
    class OneTree(Tree):
        """The tree of all ranks, whose other ranks are made up."""

        def join(self, value: T, join: Callable[[T, T], T], tag: int = 0) -> T:
            with job.phases.outside():
                for child in self._children:
                    data = pickle.dumps(job.subtree(child, value, join))
                    message = len(data).to_bytes(8, "little") + data
                    job.wire.sent_in_tree[child] = message.ljust(1024, b"\0")
            return super().join(value, join, tag)

        def decide(self, number: int, join: Callable[[int, int], int], decide: Callable[[int], int]) -> int:
            for child in self._children:
                job.wire.sent_in_tree[child] = number.to_bytes(8, "little", signed=True)
            return super().decide(number, join, decide)

    return OneTree


def _noting(job: Simulation, find: Callable[..., Any]) -> Callable[..., Any]:
    """Note which classes of names rank 0 shares."""

    def run(replicas: Any, own: Mapping[bytes, str]) -> Any:
        job._classes = dict(own)
        return find(replicas, own)

    return run


def _of_stage(key: Any, stage: int) -> Any:
    """Return the key of another stage in place of this one's: it has other names, at places of its own."""
    kind, names, places = key
    return (kind, names ^ stage, places ^ stage) if kind in PLACED else key


def _asking(job: Simulation, question: str) -> Callable[..., Any]:
    """Note what all ranks are asked."""
    ask = getattr(read_once.Replicas, question)

    def run(*args: Any) -> Any:
        before, job.question = job.question, question
        try:
            return ask(*args)
        finally:
            job.question = before

    return run


def _handing_out(job: Simulation, records: Callable[..., Any]) -> Callable[..., Any]:
    """Let the other ranks send the manifests that they read."""

    def run(replicas: Any, refs: Sequence[Any], *args: Any) -> Any:
        with job.phases.outside():
            first: dict[str, int] = {}
            for rank, paths in enumerate(job.wanted):
                for path in paths:
                    first.setdefault(path, rank)
            job.wire.sent = defaultdict(bytes)
            for ref in refs:
                if first[ref.path] != 0:
                    job.wire.sent[first[ref.path]] += bytes(read_bytes(job._store, ref.path)) + b"\1"
        return records(replicas, refs, *args)

    return run
