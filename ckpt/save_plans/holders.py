"""Know which ranks hold which chunk of a tensor, and choose who writes it."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from ckpt.format.columns import Integers


class Holders:
    """The ranks that hold the chunks of a tensor.

    Attributes:
        ranks, rows: who holds which chunk, in the order of chunks, then ranks.
        count: chunks that someone holds.
    """

    def __init__(self, ranks: Integers, rows: Integers) -> None:
        order = np.lexsort((ranks, rows))
        self.ranks, self.rows = ranks[order], rows[order]
        self._starts = np.flatnonzero(np.r_[True, self.rows[1:] != self.rows[:-1]])
        self.count = len(self._starts)

    @cached_property
    def lowest(self) -> Integers:
        """The first rank that holds each chunk."""
        return self.ranks[self._starts]

    @cached_property
    def replicated(self) -> list[tuple[Integers, Integers]]:
        """Chunks that more than one rank holds, and their ranks, one chunk a row: those with as many together."""
        counts = np.diff(np.r_[self._starts, len(self.rows)])
        groups = []
        for count in np.unique(counts[counts > 1]).tolist():
            chunks = np.flatnonzero(counts == count)
            groups.append((chunks, self.ranks[self._starts[chunks][:, None] + np.arange(count)]))
        return groups


class Loads:
    """The bytes that each rank is to write."""

    def __init__(self, size: int) -> None:
        self.nbytes = np.zeros(size, dtype=np.int64)

    def add(self, writers: Integers, nbytes: Integers) -> None:
        np.add.at(self.nbytes, writers, nbytes)

    def spread(self, holders: Holders, nbytes: Integers) -> Integers:
        """Choose a writer for each chunk: of its replicas the one with the fewest bytes so far."""
        writers = holders.lowest
        for chunks, ranks in holders.replicated:
            has_bytes = nbytes[chunks] > 0
            if not has_bytes.any():
                continue
            chunks, ranks = chunks[has_bytes], ranks[has_bytes]
            if writers is holders.lowest:
                writers = writers.copy()
            best = self.nbytes[ranks].argmin(axis=1)
            writers[chunks] = ranks[np.arange(len(chunks)), best]
        self.add(writers, nbytes)
        return writers
