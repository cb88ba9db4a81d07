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
"""Times the documents of a source: so many without tokens one after the other are no chance."""


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


class DealtShards:
    """Deal a source's documents, again for each epoch, to its shards: as a whole a random order of all of them.

    Blocks that are cheap to read as a whole (`Source.cuts`) are dealt in the place of documents, and their documents are
    shuffled. Without a seed documents are dealt one by one, as they are stored.
    """

    def __init__(self, source: Source, total: int, seed: int | None, name: str) -> None:
        self._documents, self._total, self._key = source.documents, total, (seed, name)
        self._is_stored_order = seed is None
        self._edges = _edges(source, total) if source.cuts(0, source.documents) else None

    def of(self, number: int, epoch: int) -> tuple[int, Order]:
        """Return how many documents a shard has in an epoch, and their order."""
        if self._is_stored_order:
            return len(
                range(number, self._documents, self._total)
            ), lambda place: number + place * self._total
        units = self._documents if self._edges is None else len(self._edges) - 1
        start, stop = units * number // self._total, units * (number + 1) // self._total
        dealt = Permutation(units, *self._key, "dealt", epoch)
        if self._edges is None:
            return stop - start, lambda place: dealt[start + place]
        blocks = [dealt[at] for at in range(start, stop)]
        return _in_blocks(blocks, self._edges, (*self._key, epoch))


class ContiguousShards:
    """The shards of runs that began before documents were dealt: each is a range of the documents, shuffled by itself."""

    def __init__(self, source: Source, total: int, seed: int | None, name: str) -> None:
        self._source, self._total, self._seed, self._name = source, total, seed, name

    def of(self, number: int, epoch: int) -> tuple[int, Order]:
        """Return how many documents a shard has in an epoch, and their order."""
        documents = self._source.documents
        start, stop = documents * number // self._total, documents * (number + 1) // self._total
        edges = [start, *self._source.cuts(start, stop), stop]
        if self._seed is None:
            return stop - start, lambda place: start + place
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


def _in_blocks(
    blocks: Sequence[int], edges: Sequence[int], key: tuple[int | str | None, ...]
) -> tuple[int, Order]:
    """Return how many documents some blocks have, and an order: block by block, shuffled inside of each."""
    starts = [0, *accumulate(edges[block + 1] - edges[block] for block in blocks)]
    inside: dict[int, Permutation] = {}

    def order(place: int) -> int:
        at = bisect_right(starts, place) - 1
        block = blocks[at]
        if block not in inside:
            inside.clear()
            inside[block] = Permutation(edges[block + 1] - edges[block], *key, block)
        return edges[block] + inside[block][place - starts[at]]

    return starts[-1], order


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
        self._documents, self._order = self._dealt()
        self._empty_documents = 0

    @property
    def position(self) -> Position:
        return Position(self._epoch, self._document, self._offset, self._sequences, self._tokens)

    @property
    def documents_left(self) -> int:
        """Count the documents of the epoch that are not read to their end."""
        return self._documents - self._document

    def take(self, count: int) -> Tokens:
        """Read a sequence: `count` tokens, fewer at the end of the last epoch, none after it.

        Raises FormatError if a document cannot be read, ConfigurationError if the shard has no tokens, or its documents
        have changed.
        """
        sequence = np.empty(count, self._plan.sources[self._shard.source_name].dtype)
        filled = 0
        while filled < count and not self._plan.ends_at(self._epoch):
            filled += self._copy(sequence[filled:])
        self._sequences += filled > 0
        return sequence[:filled]

    def _copy(self, room: Tokens) -> int:
        """Fill `room` from the current document; return the number of tokens copied."""
        name = self._shard.source_name
        number = self._order(self._document)
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
        if self._document == self._documents:
            self._epoch += 1
            self._document = 0
            self._tokens = 0
            self._documents, self._order = self._dealt()

    def _dealt(self) -> tuple[int, Order]:
        return self._shards.of(self._shard.number, self._epoch)

    def _where(self) -> str:
        return f"{self._shard.source_name}, shard {self._shard.number}, document {self._document}"
