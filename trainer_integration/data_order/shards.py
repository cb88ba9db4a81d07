"""Cut documents into logical shards, each with a fixed order, and shards into sequences.

Both follow from the data, the number of shards and the seed, never from ranks or workers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import KW_ONLY, InitVar, dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from ckpt.errors import ConfigurationError
from ckpt.trainer_integration.data_order.permutation import Permutation
from ckpt.trainer_integration.sources import Source, Tokens, as_tokens


class Position(NamedTuple):
    """Where a shard's next sequence begins.

    Attributes:
        epoch: passes over the whole shard that are complete.
        document: its number in the epoch's order.
        offset: tokens of it that have been read, its delimiters included.
        sequences: the number cut from this shard, over all epochs.
    """

    epoch: int = 0
    document: int = 0
    offset: int = 0
    sequences: int = 0


class Shard(NamedTuple):
    """Shard `number` of `total` of a source: its documents from `start` to `stop`."""

    source_name: str
    number: int
    total: int
    start: int
    stop: int

    @classmethod
    def all_of(cls, source_name: str, documents: int, total: int) -> Iterator[Shard]:
        for number in range(total):
            start, stop = documents * number // total, documents * (number + 1) // total
            yield cls(source_name, number, total, start, stop)

    @property
    def documents(self) -> int:
        return self.stop - self.start


class _Order:
    """Shuffle a shard's documents for one epoch: its blocks, and the documents of each block."""

    def __init__(self, shard: Shard, source: Source, seed: int | None, epoch: int) -> None:
        self._key = None if seed is None else (seed, shard.source_name, shard.total, shard.number, epoch)
        self._edges = [shard.start, *source.cuts(shard.start, shard.stop), shard.stop]
        blocks = self._shuffled(len(self._edges) - 1)
        self._blocks = [blocks[at] for at in range(len(blocks))]
        self._starts = [0, *accumulate(map(self._size, self._blocks))]
        self._at = -1  # the place of the block in use
        self._inside: range | Permutation = range(0)  # the order of its documents

    def __getitem__(self, place: int) -> int:
        at = bisect_right(self._starts, place) - 1
        block = self._blocks[at]
        if at != self._at:
            self._inside, self._at = self._shuffled(self._size(block), block), at
        return self._edges[block] + self._inside[place - self._starts[at]]

    def _size(self, block: int) -> int:
        return self._edges[block + 1] - self._edges[block]

    def _shuffled(self, size: int, *name: int) -> range | Permutation:
        return range(size) if self._key is None else Permutation(size, *self._key, *name)


@dataclass
class Cursor:
    """Cut one shard into sequences, from a position onwards, until `epochs` have been read.

    Documents follow one another, with their delimiters, as one stream of tokens, also from epoch to
    epoch. No tokens are buffered: a position is the whole state.
    """

    shard: Shard
    source: Source
    start: InitVar[Position]
    _: KW_ONLY
    seed: int | None
    epochs: int | None
    bos_token: int | None = None
    eos_token: int | None = None

    def __post_init__(self, start: Position) -> None:
        self._order: _Order | None = None
        self._empty_documents = 0
        self._epoch, self._document, self._offset, self._sequences = start
        self._before, self._after = (
            as_tokens([] if token is None else [token], self.source.dtype)
            for token in (self.bos_token, self.eos_token)
        )

    @property
    def position(self) -> Position:
        return Position(self._epoch, self._document, self._offset, self._sequences)

    def take(self, count: int) -> Tokens:
        """Read a sequence: `count` tokens, fewer at the end of the last epoch, none after it.

        Raises ConfigurationError if the shard has no tokens, or its documents have changed.
        """
        sequence = np.empty(count, self.source.dtype)
        filled = 0
        while filled < count and (self.epochs is None or self._epoch < self.epochs):
            filled += self._copy(sequence[filled:])
        self._sequences += filled > 0
        return sequence[:filled]

    def _copy(self, room: Tokens) -> int:
        """Fill `room` from the current document; return the number of tokens copied."""
        if self._order is None:
            self._order = _Order(self.shard, self.source, self.seed, self._epoch)
        parts = (self._before, self.source.tokens(self._order[self._document]), self._after)
        start, copied, length = self._offset, 0, sum(map(len, parts))
        if start > length:
            raise ConfigurationError(
                f"{self._where()} has {length} tokens, but {start} were read before: the data changed"
            )
        for part in parts:
            tokens = part[start : start + len(room) - copied]
            room[copied : copied + len(tokens)] = tokens
            copied += len(tokens)
            start = max(0, start - len(part))
        self._offset += copied
        self._empty_documents = 0 if length else self._empty_documents + 1
        if self._offset == length:
            self._next_document()
        return copied

    def _next_document(self) -> None:
        self._document, self._offset = self._document + 1, 0
        if self._document == self.shard.documents:
            self._epoch, self._document, self._order = self._epoch + 1, 0, None
        if self._empty_documents >= self.shard.documents and self.epochs is None:
            raise ConfigurationError(
                f"{self._where()}: no document of the shard has tokens; use fewer shards"
            )

    def _where(self) -> str:
        return f"{self.shard.source_name}, shard {self.shard.number}, document {self._document}"
