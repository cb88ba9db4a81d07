"""Deal documents to logical shards, and cut shards into sequences, for sources whose lengths are not known.

Both follow from the data, the number of shards and the seed, never from ranks or workers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from ckpt.errors import ConfigurationError, FormatError
from ckpt.trainer_integration.data_order.permutation import Permutation
from ckpt.trainer_integration.data_order.plan import Plan, copy_parts
from ckpt.trainer_integration.sources import Source, Tokens

_MAX_EMPTY = 8
"""Times the documents of a source: that many without tokens in a row are no chance."""


class Position(NamedTuple):
    """Where a shard's next sequence begins.

    Attributes:
        epoch: passes over the whole shard that are complete.
        document: its number in the epoch's order.
        offset: tokens of it that have been read, its delimiters included.
        sequences: the number cut from this shard since the weights last changed.
        tokens: read in the epoch.
    """

    epoch: int = 0
    document: int = 0
    offset: int = 0
    sequences: int = 0
    tokens: int = 0


class Shard(NamedTuple):
    """Shard `number` of `total` of a source."""

    source_name: str
    number: int
    total: int


Order = Callable[[int], int]
"""From the place of a document in a shard's epoch to its number."""

_DOCUMENTS_AHEAD = 16
_SEQUENCES_AHEAD = 4
"""Of a document that is being read."""


class Dealt(NamedTuple):
    """The documents of a shard in an epoch.

    Attributes:
        starts: the places at which blocks begin; none if documents are dealt one by one.
    """

    documents: int
    order: Order
    starts: Sequence[int] = ()


class DealtShards:
    """Deal a source's documents, again for each epoch, to its shards: as a whole a random order of all of them.

    Blocks that are cheap to read as a whole (`Source.cuts`) are dealt in the place of documents, and their documents are
    shuffled. Without a seed documents are dealt one by one, as they are stored.
    """

    def __init__(self, source: Source, total: int, seed: int | None, name: str) -> None:
        self._documents, self._total, self._key = source.documents, total, (seed, name)
        self._is_stored_order = seed is None
        self._edges = _edges(source, total) if source.cuts(0, source.documents) else None

    def of(self, number: int, epoch: int) -> Dealt:
        """Return the documents of a shard in an epoch."""
        if self._is_stored_order:
            own = range(number, self._documents, self._total)
            return Dealt(len(own), own.__getitem__)
        units = self._documents if self._edges is None else len(self._edges) - 1
        start, stop = units * number // self._total, units * (number + 1) // self._total
        dealt = Permutation(units, *self._key, "dealt", epoch)
        if self._edges is None:
            return Dealt(stop - start, lambda place: dealt[start + place])
        blocks = [dealt[at] for at in range(start, stop)]
        return _in_blocks(blocks, self._edges, (*self._key, epoch))


class ContiguousShards:
    """The shards of runs that began before documents were dealt: each is a range of the documents, shuffled by itself."""

    def __init__(self, source: Source, total: int, seed: int | None, name: str) -> None:
        self._source, self._total, self._seed, self._name = source, total, seed, name

    def of(self, number: int, epoch: int) -> Dealt:
        """Return the documents of a shard in an epoch."""
        documents = self._source.documents
        start, stop = documents * number // self._total, documents * (number + 1) // self._total
        edges = [start, *self._source.cuts(start, stop), stop]
        if self._seed is None:
            return Dealt(stop - start, lambda place: start + place)
        key = (self._seed, self._name, self._total, number, epoch)
        shuffled = Permutation(len(edges) - 1, *key)
        return _in_blocks([shuffled[at] for at in range(len(edges) - 1)], edges, key)


def _edges(source: Source, total: int) -> list[int]:
    """Cut blocks further, if there are fewer than shards: each by its share of the documents."""
    whole = [0, *source.cuts(0, source.documents), source.documents]
    if len(whole) > total:
        return whole
    edges = [0]
    for begin, end in pairwise(whole):
        parts = -(-(end - begin) * total // source.documents)
        edges += [begin + (end - begin) * part // parts for part in range(1, parts + 1)]
    return edges


def _in_blocks(blocks: Sequence[int], edges: Sequence[int], key: tuple[int | str | None, ...]) -> Dealt:
    """Return the documents of some blocks: block by block, shuffled inside of each."""
    starts = [0, *accumulate(edges[block + 1] - edges[block] for block in blocks)]
    inside: dict[int, Permutation] = {}

    def order(place: int) -> int:
        at = bisect_right(starts, place) - 1
        block = blocks[at]
        if block not in inside:
            inside.clear()
            inside[block] = Permutation(edges[block + 1] - edges[block], *key, block)
        return edges[block] + inside[block][place - starts[at]]

    return Dealt(starts[-1], order, starts[:-1])


class Cursor:
    """Cut one shard into sequences, from a position onwards, until all epochs have been read.

    Documents follow one another, with their delimiters, as one stream of tokens, also from epoch to
    epoch. No tokens are buffered: a position is the whole state.
    """

    def __init__(
        self, plan: Plan, shard: Shard, shards: DealtShards | ContiguousShards, start: Position
    ) -> None:
        self._plan, self._shard, self._shards = plan, shard, shards
        self._epoch, self._document, self._offset, self._sequences, self._tokens = start
        self._dealt = self._deal()
        self._empty_documents = 0
        self._announced_at: Position | None = None
        self._announced = start.epoch, start.document + 1  # the next place of an epoch that was not announced

    @property
    def position(self) -> Position:
        return Position(self._epoch, self._document, self._offset, self._sequences, self._tokens)

    @property
    def documents_left(self) -> int:
        """Count the documents of the epoch that are not read to their end."""
        return self._dealt.documents - self._document

    def announce(self) -> None:
        """Have the source fetch what is read next, if it wants to: tokens of this document, and the documents after it."""
        name = self._shard.source_name
        documents, order, starts = self._dealt
        if not self._plan.sources[name].reads_ahead or not documents or self._plan.ends_at(self._epoch):
            return
        if self._announced_at == self.position:
            return
        self._announced_at = self.position
        tokens = _SEQUENCES_AHEAD * self._plan.sequence_length
        self._plan.ahead(name, order(self._document), self._offset, self._offset + tokens)
        if self._announced[0] != self._epoch:
            self._announced = self._epoch, self._document + 1
        if starts:
            at = bisect_right(starts, self._document)
            places: Sequence[int] = starts[at : at + 1]
        else:
            places = range(self._document + 1, min(self._document + 1 + _DOCUMENTS_AHEAD, documents))
        for place in places:
            if place >= self._announced[1]:
                self._plan.ahead(name, order(place), 0, tokens)
                self._announced = self._epoch, place + 1

    def take(self, count: int) -> Tokens:
        """Read a sequence: `count` tokens, fewer at the end of the last epoch, none after it.

        Raises FormatError if a document cannot be read, ConfigurationError if the shard has no tokens, or its documents
        have changed.
        """
        sequence = np.empty(count, self._plan.sources[self._shard.source_name].dtype)
        filled = 0
        self.announce()
        while filled < count and not self._plan.ends_at(self._epoch):
            filled += self._copy(sequence[filled:])
        self._sequences += filled > 0
        return sequence[:filled]

    def _copy(self, room: Tokens) -> int:
        """Fill `room` from the current document; return the number of tokens copied."""
        name = self._shard.source_name
        number = self._dealt.order(self._document)
        try:
            parts = self._plan.document(name, number, f" (shard {self._shard.number})")
        except FormatError as error:
            if not self._plan.skips(name, number, error):
                raise
            parts = (np.empty(0, room.dtype),) * 3
            self._offset = 0
        length = sum(map(len, parts))
        if self._offset > length and self._plan.options.allow_other_data:
            self._offset = length
        if self._offset > length:
            raise ConfigurationError(
                f"{self._where()} has {length} tokens, but {self._offset} were read before: the data changed"
            )
        copied = copy_parts(parts, self._offset, room)
        self._offset += copied
        self._tokens += copied
        self._empty_documents = 0 if length else self._empty_documents + 1
        if self._offset == length:
            self._plan.sources[name].finished(number)
            self._next_document()
        return copied

    def _next_document(self) -> None:
        self._document += 1
        self._offset = 0
        documents = self._plan.sources[self._shard.source_name].documents
        if self._empty_documents >= _MAX_EMPTY * documents and self._plan.epochs is None:
            raise ConfigurationError(
                f"{self._where()}: no document of the shard has tokens; use fewer shards"
            )
        if self._document == self._dealt.documents:
            self._epoch += 1
            self._document = 0
            self._tokens = 0
            self._dealt = self._deal()

    def _deal(self) -> Dealt:
        return self._shards.of(self._shard.number, self._epoch)

    def _where(self) -> str:
        return f"{self._shard.source_name}, shard {self._shard.number}, document {self._document}"
