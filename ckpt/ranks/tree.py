"""Join small values of all ranks into one, up a tree of ranks, and tell all of them the outcome."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from ckpt.ranks.point_to_point import receive_all, send_all
from ckpt.ranks.progress import Progress

FAN = 16
"""So many ranks report to one: three steps for 4,096 ranks, four for 16,384."""

_FIRST_BYTES = 1024
"""In the first message; what is longer takes a second one."""

_LENGTH_BYTES = 8
_FIRST_TAG = 1 << 29

T = TypeVar("T")


class Tree:
    """A tree of the ranks of a gloo group: a rank talks to its parent and its children only.

    Args:
        longest_wait: for one message; without it gloo waits as long as the group had time to connect.
        progress: of this save or load, of which a failure elsewhere ends a wait.

    Attributes:
        neighbours: the ranks to which this one is connected after the first call.
    """

    def __init__(
        self,
        group: Any,
        rank: int,
        size: int,
        longest_wait: timedelta,
        progress: Progress,
    ) -> None:
        self._group = group
        self._rank = rank
        self._longest_wait = longest_wait
        self._progress = progress
        self._children = range(min(FAN * rank + 1, size), min(FAN * rank + FAN + 1, size))
        self._parents = [(rank - 1) // FAN] if rank else []  # one, or none
        self.neighbours = [*self._parents, *self._children]

    def join(self, value: T, join: Callable[[T, T], T], tag: int = 0) -> T:
        """Return what the values of all ranks join to, in any order; the same on all ranks.

        Calls with one `tag` are in one order on all ranks; others may run at the same time.
        """
        for other in self._receive(self._children, tag):
            value = join(value, other)
        if self._parents:
            self._send(value, self._parents, tag)
            (value,) = self._receive(self._parents, tag)
        self._send(value, self._children, tag)
        return value

    def broadcast(self, value: T) -> T:
        """Return the first rank's `value` on all ranks."""
        if self._parents:
            (value,) = self._receive(self._parents, 0)
        self._send(value, self._children, 0)
        return value

    def gather(self, value: T) -> list[T]:
        """Return every rank's `value`, in order, on all ranks."""
        found = self.join({self._rank: value}, operator.or_)
        return [found[rank] for rank in sorted(found)]

    def decide(self, number: int, join: Callable[[int, int], int], decide: Callable[[int], int]) -> int:
        """Return what the first rank decides when it has joined the numbers of all: in messages of eight bytes."""
        for other in self._take_numbers(self._children):
            number = join(number, other)
        if self._parents:
            self._put_number(number, self._parents)
            (number,) = self._take_numbers(self._parents)
        else:
            number = decide(number)
        self._put_number(number, self._children)
        return number

    def _put_number(self, number: int, ranks: Sequence[int]) -> None:
        self._put(number.to_bytes(_LENGTH_BYTES, "little", signed=True), ranks, 0)

    def _take_numbers(self, ranks: Sequence[int]) -> list[int]:
        received = self._take([_LENGTH_BYTES] * len(ranks), ranks, 0)
        return [int.from_bytes(data, "little", signed=True) for data in received]

    def _send(self, value: object, ranks: Sequence[int], tag: int) -> None:
        if ranks:
            data = pickle.dumps(value)
            message = len(data).to_bytes(_LENGTH_BYTES, "little") + data
            self._put(message[:_FIRST_BYTES].ljust(_FIRST_BYTES, b"\0"), ranks, tag)
            self._put(message[_FIRST_BYTES:], ranks, tag)

    def _receive(self, ranks: Sequence[int], tag: int) -> list[Any]:
        firsts = self._take([_FIRST_BYTES] * len(ranks), ranks, tag)
        lengths = [_LENGTH_BYTES + int.from_bytes(first[:_LENGTH_BYTES], "little") for first in firsts]
        rests = self._take([max(0, length - _FIRST_BYTES) for length in lengths], ranks, tag)
        # Of other ranks of this program, as torch's own.
        return [
            pickle.loads((first + rest)[_LENGTH_BYTES:length])
            for first, rest, length in zip(firsts, rests, lengths, strict=True)
        ]

    def _put(self, data: bytes, ranks: Sequence[int], tag: int) -> None:
        messages = [data] * len(ranks)
        send_all(self._group, messages, ranks, _FIRST_TAG + tag, self._progress, self._longest_wait)

    def _take(self, sizes_bytes: Sequence[int], ranks: Sequence[int], tag: int) -> list[bytes]:
        return receive_all(
            self._group, sizes_bytes, ranks, _FIRST_TAG + tag, self._progress, self._longest_wait
        )
