"""Send numbers and bytes between all ranks and the first one, of any length each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ckpt.ranks.group import LONGEST_WAIT, Ranks

T = TypeVar("T")

_TAG = 0x636B7075


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
        own = torch.tensor([number], dtype=torch.int64, device="cpu")
        if self.rank != 0:
            dist.gather(own, None, group=self._group, group_dst=0)
            return None
        numbers = torch.empty((self.size, 1), dtype=torch.int64, device="cpu")
        dist.gather(own, list(numbers.unbind()), group=self._group, group_dst=0)
        return numbers.flatten().tolist()

    def first_number(self, number: int) -> int:
        """Return the first rank's `number` on all ranks."""
        if self.size == 1 or not self._ranks.is_own_group:
            return int(self.broadcast(number))
        box = torch.tensor([number], dtype=torch.int64, device="cpu")
        dist.broadcast(box, group=self._group, group_src=0)
        return int(box[0])

    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        """Return every rank's `data`, in order, on the first rank."""
        if self.size == 1:
            return [data]
        if not self._ranks.is_own_group:
            return self._gather_objects(data)
        sizes = self.gather_numbers(len(data))
        if sizes is None:
            self._send(data, 0)
            return None
        buffers = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes]
        waits = [self._receive(buffer, rank) for rank, buffer in enumerate(buffers) if rank != 0]
        for wait in waits:
            if wait is not None:
                wait.wait(LONGEST_WAIT)
        return [data, *(buffer.numpy().tobytes() for buffer in buffers[1:])]

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
        size = torch.empty(1, dtype=torch.int64, device="cpu")
        if values is None:
            dist.scatter(size, None, group=self._group, group_src=0)
            buffer = torch.empty(int(size[0]), dtype=torch.uint8, device="cpu")
            wait = self._receive(buffer, 0)
            if wait is not None:
                wait.wait(LONGEST_WAIT)
            return buffer.numpy().tobytes()
        sizes = torch.tensor([[len(value)] for value in values], dtype=torch.int64, device="cpu")
        dist.scatter(size, list(sizes.unbind()), group=self._group, group_src=0)
        for rank, value in enumerate(values):
            if rank != 0:
                self._send(value, rank)
        return values[0]

    def broadcast(self, value: T) -> T:
        """Return the first rank's `value` on all ranks."""
        return self._ranks.broadcast(value)  # type: ignore[no-any-return]

    def _send(self, data: bytes, rank: int) -> None:
        if data:
            tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            work = dist.isend(tensor, group=self._group, group_dst=rank, tag=_TAG)
            if work is not None:
                work.wait(LONGEST_WAIT)

    def _receive(self, buffer: torch.Tensor, rank: int) -> Any:
        if not buffer.numel():
            return None
        return dist.irecv(buffer, group=self._group, group_src=rank, tag=_TAG)

    def _gather_objects(self, value: T) -> list[T] | None:
        values = [value] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, group=self._group, group_dst=0)
        return values
