"""A plain and slow model of the order in which `ShardedDataset` promises to read, written from docs/dataloader.md.

It holds whole epochs as lists of tokens. It shares no code with the library: a state that was saved has to mean the same
documents in later versions too.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = list[int]


@dataclass(frozen=True)
class Mix:
    """How a stint reads, which may change from stint to stint."""

    weights: Mapping[str, float]
    sequence_length: int
    epochs: int | None
    on_exhausted: str = "drop"


@dataclass(frozen=True)
class Corpus:
    """Documents by source, and what is fixed for the life of a run.

    Attributes:
        cut_every: documents in a block that is dealt as a whole, where lengths are not known; None: one by one.
    """

    documents: Mapping[str, Sequence[Row]]
    seed: int | None
    shards: int
    bos: Sequence[int] = ()
    eos: Sequence[int] = ()
    cut_every: int | None = None

    def tokens(self, name: str, order: Sequence[int]) -> Row:
        """Join some documents with their delimiters."""
        return [t for n in order for t in (*self.bos, *self.documents[name][n], *self.eos)]


def shuffled(size: int, *key: Any) -> list[int]:
    """Shuffle `range(size)` as saved states mean it."""
    bits = max(1, (size - 1).bit_length())
    drawn = hashlib.blake2b(repr(key).encode(), digest_size=64).digest()
    words = [int.from_bytes(drawn[at : at + 8], "little") for at in range(0, 64, 8)]

    def moved(number: int) -> int:
        for factor, addend in zip(words[::2], words[1::2], strict=True):
            number = (number * (factor | 1) + addend) % 2**bits
            number ^= number >> (bits + 1) // 2
        return number

    order = []
    for place in range(size):
        number = moved(place)
        while number >= size:
            number = moved(number)
        order.append(number)
    return order


# -- lengths are known: all ranks read in one order --------------------------------------------------------


class Stream:
    """The tokens of one source in the order in which they are read, epoch after epoch."""

    def __init__(self, corpus: Corpus, name: str) -> None:
        self._corpus = corpus
        self._name = name
        self.sequences = 0  # read since the weights last changed
        self._epoch = 0
        self._read = 0
        self._begin(head=0, length=0)

    def _begin(self, *, head: int, length: int) -> None:
        """Cut the epoch after `head` tokens; runs of neighbouring sequences are read in turn."""
        corpus = self._corpus
        name = self._name
        documents: Sequence[int] = range(len(corpus.documents[name]))
        if corpus.seed is not None:
            documents = shuffled(len(documents), corpus.seed, name, "documents", self._epoch)
        stored = corpus.tokens(name, documents)
        self._head = head
        self._length = length
        cuts = range(head, len(stored), length) if length else ()
        sequences = [stored[at : at + length] for at in cuts]
        runs = min(len(sequences), corpus.shards if corpus.seed is not None else 1)
        edges = [len(sequences) * run // max(1, runs) for run in range(runs + 1)]
        in_runs = [sequences[begin:end] for begin, end in itertools.pairwise(edges)]
        turns = itertools.zip_longest(*in_runs, fillvalue=[])
        self._order = stored[:head] + [t for turn in turns for sequence in turn for t in sequence]
        self._tokens = len(stored)

    def resume(self, length: int) -> None:
        """The rest of an epoch is read on in its order; only an epoch of which no sequence was read is cut again."""
        if self._read <= self._head:
            self._begin(head=self._read, length=length)

    def left(self, length: int, epochs: int) -> int:
        """Count the sequences up to the end of some epochs."""
        return -(-max(0, (epochs - self._epoch) * self._tokens - self._read) // length)

    def take(self, length: int, epochs: int | None) -> Row:
        """Read the next sequence."""
        row: Row = []
        while len(row) < length and (epochs is None or self._epoch < epochs):
            part = self._order[self._read : self._read + length - len(row)]
            row += part
            self._read += len(part)
            if self._read == self._tokens:
                self._epoch += 1
                self._read = 0
                self._begin(head=length - len(row), length=length)
        self.sequences += 1
        return row


class Known:
    """The sequences of all ranks have numbers: rank r of W reads r, r + W, r + 2W, ... of those that were not read."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self._streams: dict[str, Stream] = {}
        self._weights: Mapping[str, float] = {}
        self._ahead: set[int] = set()

    def resume(self, mix: Mix, world_size: int) -> None:
        """Begin a stint. Sources that are gone lose their place; other weights count from here."""
        is_same = self._weights == mix.weights
        streams = self._streams
        self._streams = {name: streams.get(name) or Stream(self._corpus, name) for name in mix.weights}
        for name, stream in self._streams.items():
            stream.sequences = stream.sequences if is_same else 0
            if mix.weights[name]:
                stream.resume(mix.sequence_length)
        self._mix = mix
        self._weights = mix.weights
        self._world_size = world_size
        self._rows: list[Row] = []
        self._more = self._sequences(copy.deepcopy(self._streams))

    def _has(self, number: int) -> bool:
        """Whether there is a sequence of this number, and those before it."""
        self._rows += itertools.islice(self._more, max(0, number + 1 - len(self._rows)))
        return number < len(self._rows)

    def _sequences(self, streams: dict[str, Stream]) -> Iterator[Row]:
        """Read of each source as many as its weight says, at each moment; `streams` move."""
        mix = self._mix
        used = {name: weight for name, weight in mix.weights.items() if weight}

        def due(name: str, sequence: int) -> float:
            return (sequence + 0.5) / used[name]

        ends: dict[str, int] = {}
        stop: float | None = None
        if mix.epochs is not None:
            ends = {
                name: streams[name].sequences + streams[name].left(mix.sequence_length, mix.epochs)
                for name in used
            }
            last = [due(name, end - 1) for name, end in ends.items()]
            stop = {"stop": min(last), "repeat": max(last), "drop": None}[mix.on_exhausted]
        is_repeated = mix.on_exhausted == "repeat"
        epochs = None if is_repeated else mix.epochs
        while True:
            left = [
                name
                for name in sorted(used)
                if is_repeated or not ends or streams[name].sequences < ends[name]
            ]
            if not left:
                return
            name = min(left, key=lambda name: due(name, streams[name].sequences))
            if stop is not None and due(name, streams[name].sequences) > stop:
                return
            yield streams[name].take(mix.sequence_length, epochs)

    def check(self, rank: int, rows: Sequence[Row]) -> None:
        """Compare the rows that a rank has read in this stint, without padding."""
        numbers = self._numbers(rank)
        for at, row in enumerate(rows):
            number = next(numbers)
            expected = self._rows[number] if self._has(number) else []
            assert row == expected, f"rank {rank}, row {at}, sequence {number}"
            if not (
                expected or self._ahead
            ):  # in step a row is padding only where another rank has a sequence
                assert self._has(number // self._world_size * self._world_size)

    def ended(self, rank: int, rows: int) -> bool:
        """Whether a rank that has read some rows has no sequence left."""
        return not self._has(next(itertools.islice(self._numbers(rank), rows, None)))

    def _numbers(self, rank: int) -> Iterator[int]:
        return (n for n in itertools.count(rank, self._world_size) if n not in self._ahead)

    def save(self, counts: Sequence[int]) -> None:
        """End the stint: of each rank some rows were used."""
        size = self._world_size
        read = self._ahead.union(*(itertools.islice(self._numbers(r), n) for r, n in enumerate(counts)))
        first_unread = [next(n for n in itertools.count(rank, size) if n not in read) for rank in range(size)]
        begin = min(number // size for number in first_unread) * size
        for _ in itertools.islice(self._sequences(self._streams), begin):
            pass
        self._ahead = {number - begin for number in read if number >= begin}

    @property
    def is_in_step(self) -> bool:
        """Whether the next stint may change weights and lengths."""
        return not self._ahead


# -- lengths are not known: each rank reads shards of its own ----------------------------------------------


@dataclass
class Shard:
    """The documents of a shard are one stream of tokens, from epoch to epoch.

    Attributes:
        read: tokens of the stream.
        sequences: read since the weights last changed.
    """

    name: str
    number: int
    stream: Row = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    read: int = 0
    sequences: int = 0

    def next(self, corpus: Corpus, mix: Mix) -> Row:
        """Return the next sequence; it is empty at the end."""
        stop = self.read + mix.sequence_length
        while len(self.stream) < stop or len(self.ends) < (mix.epochs or 0):
            self.stream += corpus.tokens(self.name, _dealt(corpus, self.name, self.number, len(self.ends)))
            self.ends.append(len(self.stream))
        if mix.epochs is not None:
            stop = min(stop, self.ends[mix.epochs - 1])
        return self.stream[self.read : max(self.read, stop)]

    def use(self, row: Row) -> None:
        self.read += len(row)
        self.sequences += 1


def _dealt(corpus: Corpus, name: str, number: int, epoch: int) -> list[int]:
    """List the documents of a shard in an epoch."""
    documents = len(corpus.documents[name])
    total = min(corpus.shards, documents)
    if corpus.seed is None:
        return [*range(number, documents, total)]
    edges = [*range(documents + 1)]
    if corpus.cut_every is not None and corpus.cut_every < documents:
        whole = [*range(0, documents, corpus.cut_every), documents]
        parts = -(-total // (len(whole) - 1))
        cuts = [a + (b - a) * part // parts for a, b in itertools.pairwise(whole) for part in range(parts)]
        edges = sorted({*cuts, documents})
    blocks = shuffled(len(edges) - 1, corpus.seed, name, "dealt", epoch)
    own = blocks[len(blocks) * number // total : len(blocks) * (number + 1) // total]
    if corpus.cut_every is None or corpus.cut_every >= documents:
        return own
    sizes = {block: edges[block + 1] - edges[block] for block in own}
    return [
        edges[block] + at for block in own for at in shuffled(sizes[block], corpus.seed, name, epoch, block)
    ]


class Unknown:
    """Rank r of W reads shards r, r + W, ... of each source: of the source that is furthest behind its weight."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self._shards: dict[str, list[Shard]] = {}
        self._weights: Mapping[str, float] = {}

    is_in_step = True

    def resume(self, mix: Mix, world_size: int) -> None:
        """Begin a stint."""
        is_same = self._weights == mix.weights
        shards = self._shards
        self._shards = {name: shards.get(name) or self._new(name) for name in mix.weights}
        for shard in itertools.chain.from_iterable(self._shards.values()):
            shard.sequences = shard.sequences if is_same else 0
        self._mix = mix
        self._weights = mix.weights
        self._world_size = world_size
        self._read: dict[int, list[tuple[str, int]]] = {}

    def _new(self, name: str) -> list[Shard]:
        total = min(self._corpus.shards, len(self._corpus.documents[name]))
        return [Shard(name, number) for number in range(total)]

    def check(self, rank: int, rows: Sequence[Row]) -> None:
        """Compare the rows that a rank has read in this stint: each is the next one of one of its shards."""
        corpus = self._corpus
        mix = self._mix
        own = {name: self._own(rank, name) for name, weight in mix.weights.items() if weight}
        counts = {name: sum(shard.sequences for shard in shards) for name, shards in own.items()}
        following = {name: [shard.next(corpus, mix) for shard in shards] for name, shards in own.items()}

        def lag(name: str) -> tuple[float, str]:
            return (counts[name] + 0.5) / mix.weights[name], name

        self._read[rank] = []
        for at, row in enumerate(rows):
            left = [name for name, each in following.items() if any(each)]
            assert left, f"rank {rank}, row {at}: {row} after the end"
            name = min(left, key=lag)
            assert row in following[name], (
                f"rank {rank}, row {at}: {row} is not the next one of a shard of {name!r}"
            )
            place = following[name].index(row)
            shard = own[name][place]
            shard.use(row)
            counts[name] += 1
            following[name][place] = shard.next(corpus, mix)
            self._read[rank].append((name, shard.number))

    def _own(self, rank: int, name: str) -> list[Shard]:
        return [dataclasses.replace(shard) for shard in self._shards[name][rank :: self._world_size]]

    def ended(self, rank: int, rows: int) -> bool:
        """Whether a rank that has read some rows has no sequence left."""
        own = [
            shard for name, weight in self._mix.weights.items() if weight for shard in self._own(rank, name)
        ]
        for shard in own:
            for _ in range(self._read[rank][:rows].count((shard.name, shard.number))):
                shard.use(shard.next(self._corpus, self._mix))
        return not any(shard.next(self._corpus, self._mix) for shard in own)

    def save(self, counts: Sequence[int]) -> None:
        """End the stint: of each rank some rows were used."""
        for rank, count in enumerate(counts):
            for name, number in self._read[rank][:count]:
                shard = self._shards[name][number]
                shard.use(shard.next(self._corpus, self._mix))
