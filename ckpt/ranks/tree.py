"""Join small values of all ranks into one, up a tree of ranks, and tell all of them the outcome."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ckpt.ranks.progress import Progress
from ckpt.ranks.waits import finish

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
        self._parent = (rank - 1) // FAN if rank else None
        self.neighbours = [*self._children] if self._parent is None else [self._parent, *self._children]

    def join(self, value: T, join: Callable[[T, T], T], tag: int = 0) -> T:
        """Return what the values of all ranks join to, in any order; the same on all ranks.

        Calls with one `tag` are in one order on all ranks; others may run at the same time.
        """
        for child in self._children:
            value = join(value, self._receive(child, tag))
        if self._parent is not None:
            self._send(value, self._parent, tag)
            value = self._receive(self._parent, tag)
        self._send_to_children(value, tag)
        return value

    def broadcast(self, value: T) -> T:
        """Return the first rank's `value` on all ranks."""
        if self._parent is not None:
            value = self._receive(self._parent, 0)
        self._send_to_children(value, 0)
        return value

    def gather(self, value: T) -> list[T]:
        """Return every rank's `value`, in order, on all ranks."""
        found = self.join({self._rank: value}, operator.or_)
        return [found[rank] for rank in sorted(found)]

    def decide(self, number: int, join: Callable[[int, int], int], decide: Callable[[int], int]) -> int:
        """Return what the first rank decides when it has joined the numbers of all: in messages of eight bytes."""
        for child in self._children:
            number = join(number, self._take_number(child))
        if self._parent is None:
            number = decide(number)
        else:
            self._put_number(number, self._parent)
            number = self._take_number(self._parent)
        for child in self._children:
            self._put_number(number, child)
        return number

    def _put_number(self, number: int, rank: int) -> None:
        self._put(bytearray(number.to_bytes(_LENGTH_BYTES, "little", signed=True)), rank, 0)

    def _take_number(self, rank: int) -> int:
        return int.from_bytes(self._take(_LENGTH_BYTES, rank, 0), "little", signed=True)

    def _send(self, value: object, rank: int, tag: int) -> None:
        self._send_message(_message(value), rank, tag)

    def _send_to_children(self, value: object, tag: int) -> None:
        if self._children:
            message = _message(value)
            for child in self._children:
                self._send_message(message, child, tag)

    def _send_message(self, message: bytes, rank: int, tag: int) -> None:
        self._put(bytearray(message[:_FIRST_BYTES].ljust(_FIRST_BYTES, b"\0")), rank, tag)
        if len(message) > _FIRST_BYTES:
            self._put(bytearray(message[_FIRST_BYTES:]), rank, tag)

    def _receive(self, rank: int, tag: int) -> Any:
        first = self._take(_FIRST_BYTES, rank, tag)
        length = _LENGTH_BYTES + int.from_bytes(first[:_LENGTH_BYTES], "little")
        message = first if length <= _FIRST_BYTES else first + self._take(length - _FIRST_BYTES, rank, tag)
        return pickle.loads(message[_LENGTH_BYTES:length])  # of another rank of this program, as torch's own

    def _put(self, data: bytearray, rank: int, tag: int) -> None:
        memory = torch.frombuffer(data, dtype=torch.uint8)
        work = dist.isend(memory, group=self._group, group_dst=rank, tag=_FIRST_TAG + tag)
        assert work is not None  # this rank is in the group
        finish([work], self._progress, self._longest_wait)

    def _take(self, nbytes: int, rank: int, tag: int) -> bytes:
        memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        work = dist.irecv(memory, group=self._group, group_src=rank, tag=_FIRST_TAG + tag)
        assert work is not None  # this rank is in the group
        work.wait(self._longest_wait)
        return memory.numpy().tobytes()


def _message(value: object) -> bytes:
    data = pickle.dumps(value)
    return len(data).to_bytes(_LENGTH_BYTES, "little") + data
