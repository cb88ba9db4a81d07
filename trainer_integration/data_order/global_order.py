"""Read sources whose lengths are known in one order for all ranks: that of the numbers of their sequences."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ckpt.errors import ConfigurationError, FormatError
from ckpt.format.bounds import MAX_RANKS
from ckpt.trainer_integration.data_order.epoch_stream import Cut, EpochStream, Piece
from ckpt.trainer_integration.data_order.permutation import Permutation
from ckpt.trainer_integration.data_order.plan import Plan, Sample
from ckpt.trainer_integration.data_order.schedule import Schedule
from ckpt.trainer_integration.sources import Tokens

SEQUENCES_AHEAD = 32
"""Sequences that each process that reads has fetched ahead, where documents are in a store."""
_AT_ONCE = 1 << 12
"""Sequences of all ranks that are planned at a time."""
_MAX_AHEAD = 1 << 24
"""Sequences that all ranks together may have read further than the last of them."""


class SourcePosition(NamedTuple):
    """Where the next sequence of a source begins.

    Attributes:
        epoch: passes over the source that are complete.
        tokens: read in the epoch.
        head, sequence_length: how the epoch is cut (`Cut`); a length of 0: it is not cut yet.
        sequences: read since the weights last changed.
    """

    epoch: int = 0
    tokens: int = 0
    head: int = 0
    sequence_length: int = 0
    sequences: int = 0


class _Reader:
    """The sequences of one source, by number from `start` on."""

    def __init__(self, plan: Plan, name: str, start: SourcePosition, streams: dict[int, EpochStream]) -> None:
        self._plan, self._name, self._streams = plan, name, streams
        self._length = plan.sequence_length
        self._cuts: dict[int, Cut] = {}
        if start.tokens <= start.head or not start.sequence_length:  # no sequence of the cut was read
            start = start._replace(head=start.tokens, sequence_length=self._length)
        self.start = start
        self._tokens = self._epoch(start.epoch).tokens
        if not self._tokens:
            raise ConfigurationError(f"no document of source {name!r} has tokens")

    def remaining(self, epochs: int) -> int:
        """Count the sequences up to the end of a number of epochs."""
        tokens = (epochs - self.start.epoch) * self._tokens - self.start.tokens
        return max(0, -(-tokens // self._length))

    def position(self, count: int) -> SourcePosition:
        """Return where the sequence begins that follows `count` others."""
        tokens = self.start.tokens + count * self._length
        if self._plan.epochs is not None and self._plan.options.on_exhausted != "repeat":
            end = (self._plan.epochs - self.start.epoch) * self._tokens
            # A run can have read more epochs than it has now.
            tokens = min(tokens, max(end, self.start.tokens))
        epochs, tokens = divmod(tokens, self._tokens)
        cut = self._cut(self.start.epoch + epochs)
        sequences = self.start.sequences + count
        return SourcePosition(self.start.epoch + epochs, tokens, cut.head, cut.sequence_length, sequences)

    def pieces(self, number: int) -> Iterator[Piece]:
        """List what a sequence is made of; the last one of all epochs can be shorter."""
        filled = 0
        while filled < self._length:
            epochs, start = divmod(self.start.tokens + number * self._length + filled, self._tokens)
            epoch = self.start.epoch + epochs
            if self._plan.ends_at(epoch):
                return
            count = min(self._length - filled, self._tokens - start)
            yield from self._epoch(epoch).pieces(self._cut(epoch), start, count)
            filled += count

    def read(self, pieces: Iterable[Piece]) -> Tokens:
        """Read a sequence; it is shorter where a document is skipped."""
        sequence = np.empty(self._length, self._plan.sources[self._name].dtype)
        filled = 0
        for piece in pieces:
            filled += self._copy(piece, sequence[filled:])
        return sequence[:filled]

    def ahead(self, pieces: Iterable[Piece]) -> None:
        """Begin to fetch a sequence."""
        if not self._plan.sources[self._name].reads_ahead:
            return
        for piece in pieces:
            self._plan.ahead(self._name, piece.document, piece.offset, piece.offset + piece.tokens)

    def _copy(self, piece: Piece, room: Tokens) -> int:
        """Copy a piece of a document; return how many tokens, 0 if it is skipped."""
        try:
            self._plan.copy(self._name, piece, room)
        except FormatError as error:
            if not self._plan.skips(self._name, piece.document, error):
                raise
            return 0
        return piece.tokens

    def _cut(self, epoch: int) -> Cut:
        if epoch not in self._cuts:
            self._cuts = {epoch: self._made_cut(epoch)}
        return self._cuts[epoch]

    def _made_cut(self, epoch: int) -> Cut:
        streams = self._plan.shards if self._plan.seed is not None else 1
        if epoch == self.start.epoch:
            return Cut(self.start.head, self.start.sequence_length, streams)
        begin = self._tokens * (epoch - self.start.epoch)
        return Cut((self.start.tokens - begin) % self._length, self._length, streams)

    def _epoch(self, epoch: int) -> EpochStream:
        if epoch not in self._streams:
            documents = self._plan.sources[self._name].documents
            key = (self._plan.seed, self._name, "documents", epoch)
            permutation = None if self._plan.seed is None else Permutation(documents, *key)
            for other in self._streams.keys() - {epoch - 1}:
                del self._streams[other]
            self._streams[epoch] = EpochStream(documents, self._plan.lengths(self._name), permutation)
        return self._streams[epoch]


class _Turn(NamedTuple):
    """A sequence that is read; without a reader, one that other ranks have and this one lacks."""

    turn: int
    source: int = 0
    reader: _Reader | None = None
    pieces: Iterable[Piece] = ()


def _read_ahead(turns: Iterator[_Turn]) -> Iterator[_Turn]:
    """Yield turns; the next ones are being fetched."""
    waiting: deque[_Turn] = deque()
    for turn in turns:
        if (reader := turn.reader) is not None:
            turn = turn._replace(pieces=[*turn.pieces])
            reader.ahead(turn.pieces)
        waiting.append(turn)
        if len(waiting) > SEQUENCES_AHEAD:
            yield waiting.popleft()
    yield from waiting


@dataclass
class _Base:
    """Where reading begins: a position of each source, and sequences from it on that were read already, by number.

    Attributes:
        turns: of this rank between the last load and here: the number of its first one here.
    """

    positions: dict[str, SourcePosition]
    ahead: frozenset[int] = frozenset()
    turns: int = 0


class GlobalOrder:
    """The sequences of all sources, numbered: rank r of W reads numbers r, r + W, r + 2W, ...

    Number n of all ranks is the same sequence on any number of ranks. So the state is where each source is, and how many
    turns each rank had: ranks need not be in step.
    """

    kind = "global"

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._streams: dict[str, dict[int, EpochStream]] = {name: {} for name in plan.sources}
        self._begin(_Base({name: SourcePosition() for name in plan.sources}))

    def _begin(self, base: _Base) -> None:
        self._base = base
        self._read_to = base.turns  # turns of this rank since the last load, all of which have been used
        self._read_ahead: set[int] = set()
        self._readers: dict[str, _Reader] | None = None
        self._frontier: tuple[int, Schedule] | None = None
        self._move()

    @property
    def readers(self) -> dict[str, _Reader]:
        if self._readers is None:
            # In one order on all ranks, whatever theirs is: it decides between sequences that are due at the same time.
            names = sorted(name for name, weight in self._plan.weights.items() if weight)
            begin = self._base.positions
            self._readers = {
                name: _Reader(self._plan, name, begin[name], self._streams[name]) for name in names
            }
        return self._readers

    def _schedule(self) -> Schedule:
        plan = self._plan
        names = [*self.readers]
        read = [reader.start.sequences for reader in self.readers.values()]
        limits = None
        if plan.epochs is not None:
            limits = [n + r.remaining(plan.epochs) for n, r in zip(read, self.readers.values(), strict=True)]
        return Schedule([plan.weights[name] for name in names], read, limits, plan.options.on_exhausted)

    def _slot(self, turn: int) -> int:
        """Return the number of a turn's sequence, counted from the base."""
        return (turn - self._base.turns) * self._plan.world_size + self._plan.rank

    parts: int | None = None
    """Any number can read at the same time."""

    def part(self, first: int, step: int) -> dict[str, Any]:
        """Return where every `step`-th turn of this rank from the `first` on is: plain values, which `note` moves on."""
        return {"turn": self._read_to + first}

    def note(self, part: dict[str, Any], sample: Sample) -> None:
        part["turn"] = sample.position[0] + 1

    def taken(self) -> torch.Tensor | None:
        """Workers read in the order of all: none has to know what was taken."""
        return None

    def samples(
        self, part: Mapping[str, Any], first: int, step: int, taken: torch.Tensor | None = None
    ) -> Iterator[Sample]:
        """Read the sequences of a part."""
        turns = self._turns(part["turn"], first, step)
        if self._plan.reads_ahead:
            turns = _read_ahead(turns)
        for each in turns:
            if each.reader is None:
                yield Sample(0, (each.turn,), np.empty(0, np.int64), is_filler=True)
            else:
                tokens = each.reader.read(each.pieces)
                yield Sample(each.source, (each.turn,), tokens, is_filler=not len(tokens))

    def _turns(self, begin: int, first: int, step: int) -> Iterator[_Turn]:
        """List the sequences of a part from a turn on."""
        plan = self._plan
        readers = [*self.readers.values()]
        turn = begin + (self._read_to + first - begin) % step
        if turn < self._base.turns:
            raise ConfigurationError(
                "the data set has read further than this state of torchdata's says: make a new one"
            )
        last = 0
        for start, sources, numbers in self._blocks():
            end = start + len(sources)
            while (slot := self._slot(turn)) < end:
                if turn not in self._read_ahead and slot not in self._base.ahead:
                    source = int(sources[slot - start])
                    reader = readers[source]
                    number = int(numbers[slot - start]) - reader.start.sequences
                    yield _Turn(turn, source, reader, reader.pieces(number))
                turn += step
            last = end
        if (
            self._slot(turn) - plan.rank < last
        ):  # other ranks have one more sequence: all make the same number of steps
            yield _Turn(turn)

    def _blocks(self) -> Iterator[tuple[int, Any, Any]]:
        """Yield the first number of some sequences of all ranks, their sources and their numbers there."""
        schedule = self._schedule()
        start = 0
        while True:
            sources, numbers = schedule.take(max(_AT_ONCE, self._plan.world_size))
            yield start, sources, numbers
            if not len(sources):
                return
            start += len(sources)

    def joined(
        self, streams: Sequence[Iterator[Sample]], taken: Sequence[torch.Tensor | None]
    ) -> Iterator[Sample]:
        """Yield the samples of all parts in the order of their turns."""
        number = 0
        waiting: list[Sample | None] = [next(stream, None) for stream in streams]
        while any(sample is not None for sample in waiting):
            turns = [sample.position[0] if sample is not None else None for sample in waiting]
            number = min((turn, at) for at, turn in enumerate(turns) if turn is not None)[1]
            sample = waiting[number]
            assert sample is not None
            yield sample
            waiting[number] = next(streams[number], None)

    # -- the state -------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """Begin an iteration: turns are counted from where this rank has read to."""
        self._begin(_Base(self._positions(), frozenset(self._ahead()), self._read_to))

    def record(self, moves: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Note turns of this rank that were used."""
        used = {int(position[0]) for _, position in moves}
        self._read_ahead |= {turn for turn in used if turn >= self._read_to}
        self._move()

    def _move(self) -> None:
        """Move to the first turn whose sequence was not read."""
        while self._read_to in self._read_ahead or self._slot(self._read_to) in self._base.ahead:
            self._read_ahead.discard(self._read_to)
            self._read_to += 1

    @property
    def epoch(self) -> int:
        positions = self._positions()
        return min(positions[name].epoch for name in self.readers)

    def state(self) -> dict[str, Any]:
        """Return one tensor of int64: this rank's turns, how many sequences it read ahead, these, and all positions."""
        plan = self._plan
        ahead = sorted(self._ahead())
        positions = self._positions()
        values = [self._read_to, len(ahead), *ahead]
        for name in sorted(positions):
            values += positions[name]
        own = f"{plan.rank:05d}-of-{plan.world_size:05d}"
        return {"ranks": {own: torch.tensor(values, dtype=torch.int64)}}

    def _ahead(self) -> set[int]:
        """Return which of its sequences this rank has read after some that it has not, counted from these on."""
        size, rank = self._plan.world_size, self._plan.rank
        begin = self._slot(self._read_to) - rank
        ahead = {self._slot(turn) - begin for turn in self._read_ahead}
        return ahead | {slot - begin for slot in self._base.ahead if slot >= begin and slot % size == rank}

    def _positions(self) -> dict[str, SourcePosition]:
        done, schedule = self._frontier or (0, self._schedule())
        slots = self._slot(self._read_to) - self._plan.rank
        if slots > done:
            schedule.skip(slots - done)
        self._frontier = slots, schedule
        positions = dict(self._base.positions)
        for (name, reader), read in zip(self.readers.items(), schedule.read, strict=True):
            positions[name] = reader.position(read - reader.start.sequences)
        return positions

    def load(self, state: Mapping[str, Any], *, saved: Mapping[str, Any], is_same_mix: bool) -> None:
        """Continue from `state`, which was saved with the settings `saved`. `is_same_mix`: sources and weights are the same.

        Raises FormatError if it is no state, ConfigurationError if it cannot be gone on with.
        """
        positions, ahead = _united(state, sorted(saved["sources"]))
        here = {name: positions.get(name, SourcePosition()) for name in self._plan.sources}
        if not is_same_mix:
            here = {name: position._replace(sequences=0) for name, position in here.items()}
        if ahead and (not is_same_mix or saved.get("sequence_length") != self._plan.sequence_length):
            raise ConfigurationError(
                "the state was saved when some ranks or workers had read further than others: resume it once with the same "
                "sequence_length, sources and weights"
            )
        self._begin(_Base(here, ahead))


@dataclass
class _OfRank:
    """What one rank has saved."""

    rank: int
    turns: int
    ahead: list[int]
    positions: dict[str, SourcePosition]


def _united(
    state: Mapping[str, Any], names: Sequence[str]
) -> tuple[dict[str, SourcePosition], frozenset[int]]:
    """Return where all ranks have read to, and the sequences that some have read from there on.

    A rank whose state is not there is where the first one is.
    """
    saved: list[_OfRank] = []
    size = 0
    try:
        for key, values in state["ranks"].items():
            rank, size = (int(number) for number in key.split("-of-"))
            saved.append(_of_rank(rank, values, names))
        if not len(saved) <= size <= MAX_RANKS:
            raise ValueError(f"{len(saved)} of {size} ranks")
        first = saved[0]
        known = {each.rank for each in saved}
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise FormatError(f"the loader's state is not of ranks ({type(error).__name__}: {error})") from error
    for rank in set(range(size)) - known:
        ahead = [slot - first.rank + rank for slot in first.ahead]
        saved.append(_OfRank(rank, first.turns, ahead, first.positions))
    last = min(saved, key=lambda each: each.turns)
    ahead_of_last = sum(each.turns - last.turns + len(each.ahead) for each in saved)
    if ahead_of_last > _MAX_AHEAD:
        raise FormatError(
            f"the loader's state says that some ranks are {ahead_of_last} sequences ahead of others"
        )
    read: set[int] = set()
    for each in saved:
        further = each.turns - last.turns
        read |= {turn * size + each.rank for turn in range(further)}
        read |= {slot + further * size for slot in each.ahead}
    return last.positions, frozenset(read)


def _of_rank(rank: int, values: Any, names: Sequence[str]) -> _OfRank:
    turns, count, *rest = torch.as_tensor(values, dtype=torch.int64).reshape(-1).tolist()
    rows = rest[count:]
    width = len(SourcePosition._fields)
    if min(turns, count) < 0 or len(rows) != width * len(names):
        raise FormatError(f"loader state of rank {rank}: {len(rows)} numbers for {len(names)} sources")
    positions = {name: SourcePosition(*rows[width * at : width * (at + 1)]) for at, name in enumerate(names)}
    for name, position in positions.items():
        if min(position) < 0:
            raise FormatError(f"loader state of source {name!r}: impossible {position}")
    return _OfRank(rank, turns, rest[:count], positions)
