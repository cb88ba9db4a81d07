"""Send numbers and bytes between all ranks and the first one, of any length each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from ckpt.ranks.group import Ranks
from ckpt.ranks.point_to_point import receive_all, send_all

T = TypeVar("T")

_TAG = 0x636B7075
_NUMBER_BYTES = 8


class FirstRank:
    """What the ranks tell the first one, and hear from it.

    A group of the caller's may not be gloo's: there all goes through torch's collectives for objects.
    """

    def __init__(self, ranks: Ranks) -> None:
        ranks.connect()
        self._ranks, self._group, self._tree = ranks, ranks.group, ranks.tree
        self.rank, self.size = ranks.rank, ranks.size

    def decide(self, number: int, join: Callable[[int, int], int], decide: Callable[[int], int]) -> int:
        """Return on all ranks what `decide` on the first one makes of their joined numbers; it must not raise."""
        if self.size == 1:
            return decide(number)
        if self._tree is not None:
            return self._tree.decide(number, join, decide)
        numbers = self._gather_objects(number)
        return self.broadcast(0 if numbers is None else decide(functools.reduce(join, numbers)))

    def join(self, value: T, join: Callable[[T, T], T]) -> T:
        """Return what all ranks' values join to, on all ranks."""
        return self._ranks.join(value, join) if self._tree is None else self._tree.join(value, join)

    def gather_numbers(self, number: int) -> list[int] | None:
        """Return every rank's `number`, in order, on the first rank."""
        if self.size == 1:
            return [number]
        if not self._ranks.is_own_group:
            return self._gather_objects(number)
        if self.rank != 0:
            self._send([_bytes_of(number)], [0])
            return None
        others = range(1, self.size)
        received = self._receive([_NUMBER_BYTES] * len(others), others)
        return [number, *map(_number_of, received)]

    def first_number(self, number: int) -> int:
        """Return the first rank's `number` on all ranks."""
        return int(self.broadcast(number))

    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        """Return every rank's `data`, in order, on the first rank."""
        if self.size == 1:
            return [data]
        if not self._ranks.is_own_group:
            return self._gather_objects(data)
        sizes = self.gather_numbers(len(data))
        if sizes is None:
            self._send([data], [0])
            return None
        return [data, *self._receive(sizes[1:], range(1, self.size))]

    def scatter_bytes(self, values: Sequence[bytes] | None) -> bytes:
        """Return on each rank what the first one has for it in `values`."""
        if self.size == 1:
            assert values is not None
            return values[0]
        if not self._ranks.is_own_group:
            box: list[bytes] = [b""]
            of_all = None if values is None else list(values)
            dist.scatter_object_list(box, of_all, group=self._group, group_src=0)
            return box[0]
        if values is None:
            (size,) = self._receive([_NUMBER_BYTES], [0])
            (data,) = self._receive([_number_of(size)], [0])
            return data
        others = [*range(1, self.size)]
        sizes = [_bytes_of(len(value)) for value in values[1:]]
        self._send([*sizes, *values[1:]], [*others, *others])
        return values[0]

    def broadcast(self, value: T) -> T:
        """Return the first rank's `value` on all ranks."""
        return self._ranks.broadcast(value)  # type: ignore[no-any-return]

    def _send(self, messages: Sequence[bytes], ranks: Sequence[int]) -> None:
        send_all(self._group, messages, ranks, _TAG, self._ranks.progress)

    def _receive(self, sizes_bytes: Sequence[int], ranks: Sequence[int]) -> list[bytes]:
        return receive_all(self._group, sizes_bytes, ranks, _TAG, self._ranks.progress)

    def _gather_objects(self, value: T) -> list[T] | None:
        values = [value] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, group=self._group, group_dst=0)
        return values


def _bytes_of(number: int) -> bytes:
    return number.to_bytes(_NUMBER_BYTES, "little", signed=True)


def _number_of(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)
