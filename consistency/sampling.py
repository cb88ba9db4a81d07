"""Draw some of very many blocks, evenly, and say how probably damage among the others was missed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction

_MAX_DENOMINATOR = 1_000_000


@dataclass(frozen=True)
class Sampled:
    """Say which blocks a check has read, and what it can have missed.

    Attributes:
        fraction: the share of the blocks that was asked for, or more where the checkpoint is small.
        seed: draws the same blocks again.
        blocks, read_blocks: blocks that the readable records list, and those of them that were drawn.
        missed_one, missed_percent: the probability that damage of one block was missed, or of one percent of
            the blocks: no larger than this, wherever they are.
    """

    fraction: float
    seed: int
    blocks: int
    read_blocks: int
    missed_one: float
    missed_percent: float


@dataclass
class BlockSample:
    """Draws one block out of each `1 / fraction` that follow one another.

    So each file gives as many as its size deserves, a run of damaged blocks twice that long is always hit, and the
    limit that `missed` returns holds wherever damage is. The draw depends on the seed and the order of the blocks alone: not on names, nor on the version of Python.
    """

    fraction: Fraction
    seed: int
    blocks: int = 0  # seen so far
    read_blocks: int = field(default=0, init=False)

    @classmethod
    def of(cls, fraction: float, seed: int) -> BlockSample:
        """Make one of a share above 0 and at most 1."""
        exact = Fraction(fraction).limit_denominator(_MAX_DENOMINATOR)
        return cls(max(exact, Fraction(1, _MAX_DENOMINATOR)), seed)

    def draw(self, count: int) -> Iterator[int]:
        """Yield which of the next `count` blocks are drawn, counted from 0, in order."""
        first, self.blocks = self.blocks, self.blocks + count
        p, q = self.fraction.numerator, self.fraction.denominator
        number = -(-(first + 1) * p // q) - 1  # of the group that holds `first`
        while (begin := number * q // p) < first + count:
            end = (number + 1) * q // p
            block = begin + self._below(number, end - begin)
            if first <= block < first + count:
                self.read_blocks += 1
                yield block - first
            number += 1

    def ranges(self, size_bytes: int, block_size_bytes: int, at_once_bytes: int) -> Iterator[tuple[int, int]]:
        """Draw blocks of the next file; yield their bytes in it, neighbours as one range of `at_once_bytes` at most."""
        at_once = max(at_once_bytes // block_size_bytes, 1)
        first, number = 0, 0
        for block in self.draw(-(-size_bytes // block_size_bytes)):
            if number and (block != first + number or number == at_once):
                yield first * block_size_bytes, (first + number) * block_size_bytes
                number = 0
            first, number = block if number == 0 else first, number + 1
        if number:
            yield first * block_size_bytes, min((first + number) * block_size_bytes, size_bytes)

    def at_least(self, nbytes: int, total_bytes: int) -> BlockSample:
        """Return a sample that draws `nbytes` or more of so many, if this one does not, or all of them."""
        least = Fraction(1, max(1, total_bytes // nbytes))
        return BlockSample(max(self.fraction, least), self.seed)

    def missed(self, damaged_blocks: int) -> float:
        """Return the highest probability that none of `damaged_blocks` was drawn."""
        group = -(-self.fraction.denominator // self.fraction.numerator)  # the largest one
        return (1 - 1 / group) ** damaged_blocks

    def summary(self) -> Sampled:
        """Say what was drawn."""
        percent = max(1, round(self.blocks / 100))
        return Sampled(
            float(self.fraction),
            self.seed,
            self.blocks,
            self.read_blocks,
            self.missed(1),
            self.missed(percent),
        )

    def _below(self, group: int, size: int) -> int:
        digest = hashlib.blake2b(b"%d:%d" % (self.seed, group), digest_size=8).digest()
        return int.from_bytes(digest, "little") % size
