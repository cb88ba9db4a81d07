"""Cut one epoch of a source whose lengths are known into sequences, in an order that is computed, not stored."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from ckpt.trainer_integration.data_order.permutation import Numbers, Permutation

_BLOCK = 256
"""Documents between two places of which the tokens before them are kept."""
_AT_ONCE = 1 << 16
_MAX_BLOCKS = 1 << 13

Lengths = Callable[[Numbers], Numbers]
"""From numbers of documents to their numbers of tokens, delimiters included."""


class Piece(NamedTuple):
    """Tokens of a document, its delimiters included: a number of them from `offset` on."""

    document: int
    offset: int
    tokens: int


class Cut(NamedTuple):
    """How an epoch is cut: after `head` tokens, which the last sequence before it took, every `sequence_length`.

    The sequences are dealt to `streams` streams of neighbours, which are read in turn: neighbours, and the parts of a long
    document, are `streams` sequences apart, and each document is read from its begin to its end.
    """

    head: int
    sequence_length: int
    streams: int


class EpochStream:
    """The tokens of an epoch: its documents one after the other, in the order of `permutation` (None: as stored).

    They are read in an order of their own, `pieces`, which follows from a `Cut`.

    Attributes:
        tokens: in the epoch.
    """

    def __init__(self, documents: int, lengths: Lengths, permutation: Permutation | None) -> None:
        self._documents, self._lengths, self._permutation = documents, lengths, permutation
        counts = [self._block_tokens(start) for start in range(0, documents, _AT_ONCE)]
        # Lists, as looking for a few numbers one by one is several times faster than in arrays.
        self._starts: list[int] = [0, *np.cumsum(np.concatenate(counts)).tolist()]
        self.tokens = self._starts[-1]
        self._blocks: OrderedDict[int, tuple[list[int], list[int]]] = OrderedDict()

    def pieces(self, cut: Cut, start: int, count: int) -> Iterator[Piece]:
        """List what `count` tokens from `start` on are, in the order in which they are read."""
        while count > 0:
            at, length = self._run(cut, start, count)
            yield from self._stored(at, length)
            start += length
            count -= length

    def _run(self, cut: Cut, start: int, count: int) -> tuple[int, int]:
        """Return where tokens lie in the stream, and how many of them lie there in one run."""
        if start < cut.head:
            return start, min(count, cut.head - start)
        number, offset = divmod(start - cut.head, cut.sequence_length)
        sequences = -(-(self.tokens - cut.head) // cut.sequence_length)
        begin = cut.head + _place(number, sequences, cut.streams) * cut.sequence_length
        room = min(cut.sequence_length, self.tokens - begin)
        return begin + offset, min(count, room - offset)

    def _stored(self, start: int, count: int) -> Iterator[Piece]:
        block = bisect_right(self._starts, start) - 1
        while count > 0:
            documents, ends = self._block(block)
            at = bisect_right(ends, start)
            while count > 0 and at < len(ends):
                begin = ends[at - 1] if at else self._starts[block]
                length = min(count, ends[at] - start)
                if length > 0:
                    yield Piece(documents[at], start - begin, length)
                start += length
                count -= length
                at += 1
            block += 1

    def _block(self, block: int) -> tuple[list[int], list[int]]:
        """Return the documents of a block, and where each ends in the stream."""
        if block in self._blocks:
            self._blocks.move_to_end(block)
            return self._blocks[block]
        ordered = self._ordered(block * _BLOCK, _BLOCK)
        ends = np.cumsum(self._lengths(ordered)) + self._starts[block]
        found = self._blocks[block] = ordered.tolist(), ends.tolist()
        if len(self._blocks) > _MAX_BLOCKS:
            self._blocks.popitem(last=False)
        return found

    def _ordered(self, start: int, count: int) -> Numbers:
        places = np.arange(start, min(start + count, self._documents), dtype=np.int64)
        return places if self._permutation is None else self._permutation.many(places)

    def _block_tokens(self, start: int) -> Numbers:
        lengths = self._lengths(self._ordered(start, _AT_ONCE))
        return np.add.reduceat(lengths, np.arange(0, len(lengths), _BLOCK))


def _place(number: int, sequences: int, streams: int) -> int:
    """Return where the sequence that is read as `number` lies among all: `streams` runs of them are read in turn.

    The last of all is read last: it can be shorter.
    """
    streams = min(streams, sequences)
    rounds = sequences // streams
    if number < rounds * streams:
        stream, at = number % streams, number // streams
    else:  # only the longer ones have one more
        longer = number - rounds * streams
        more = sequences - rounds * streams
        # The stream that ends with the (longer + 1)th sequence that is over.
        stream, at = -(-(longer + 1) * streams // more) - 1, rounds
    return sequences * stream // streams + at
