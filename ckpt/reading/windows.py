"""Batch reads: enough items at a time to keep storage busy, few enough to keep memory bounded."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

import torch

from ckpt.torch_private import StorageInfo
from ckpt.transfer.boxes import span
from ckpt.transfer.fetcher import StoredFile
from ckpt.transfer.pieces import MemorySink, Piece

_TENSOR_BYTES = 4 << 30
"""Of targets in one window, so that a planner that allocates for each item stays bounded."""

_EXTRA_BYTES = 64 << 20


class TargetMemory:
    """Keep track of the memory that the targets of a window fill: no two may fill the same.

    A planner may return one buffer for many items and empty it whenever an item is committed, and
    tied weights are two names for one memory.
    """

    def __init__(self) -> None:
        # By device: disjoint runs of addresses in order, and their owners.
        self._starts: dict[torch.device, list[int]] = defaultdict(list)
        self._runs: dict[torch.device, list[tuple[int, int, Hashable]]] = defaultdict(list)

    def add(self, tensor: torch.Tensor, owner: Hashable) -> bool:
        """Add the memory of `tensor`, or return False if some of it is another target's already.

        Targets of one `owner` (unless None) share no element, even where they interleave.
        """
        begin, end = _extent(tensor)
        if begin == end:
            return True
        starts, runs = self._starts[tensor.device], self._runs[tensor.device]
        first = bisect.bisect_right(starts, begin)
        if first and runs[first - 1][1] > begin:
            first -= 1
        last = bisect.bisect_left(starts, end)
        touched = runs[first:last]
        if any(owner is None or neighbour != owner for _, _, neighbour in touched):
            return False
        if touched:
            begin, end = min(begin, touched[0][0]), max(end, touched[-1][1])
        starts[first:last], runs[first:last] = [begin], [(begin, end, owner)]
        return True


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of the first element, and the one behind the last."""
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return 0, 0
    begin = tensor.data_ptr()
    return begin, begin + span(tensor.shape, tensor.stride()) * tensor.element_size()


@dataclass
class Window:
    """Hold the items that are read together; `then` is called in order once all pieces are read.

    `pieces` are those that `take` has not given yet.

    `extra_bytes` is memory that the window itself takes, beyond the targets.
    """

    pieces: dict[StoredFile, list[Piece]] = field(default_factory=lambda: defaultdict(list))
    then: list[Callable[[], None]] = field(default_factory=list)
    memory: TargetMemory = field(default_factory=TargetMemory)
    tensor_bytes: int = 0
    extra_bytes: int = 0

    @property
    def is_full(self) -> bool:
        return self.extra_bytes > _EXTRA_BYTES or self.tensor_bytes > _TENSOR_BYTES

    def take(self) -> Iterator[tuple[StoredFile, list[Piece]]]:
        """Give the pieces that were not given yet."""
        pieces, self.pieces = self.pieces, defaultdict(list)
        yield from pieces.items()

    def read_whole(self, file: StoredFile, info: StorageInfo, then: Callable[[bytearray], None]) -> None:
        """Read an item as it is stored."""
        data = bytearray(info.length)
        sink = MemorySink(memoryview(data))
        self.pieces[file].append(Piece(info.offset, info.offset + info.length, sink))
        self.then.append(lambda: then(data))
        self.extra_bytes += info.length

    def scratch(self, target: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Make a tensor to read into, for a target without memory of its own; it is copied later."""
        memory = torch.empty(target.size(), dtype=dtype, device="cpu")

        def copy() -> None:
            with torch.no_grad():
                target.copy_(memory)

        self.then.append(copy)
        self.extra_bytes += memory.numel() * memory.element_size()
        return memory
