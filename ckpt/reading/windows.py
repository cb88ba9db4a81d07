"""What is read at the same time: enough items to keep storage busy, few enough to keep memory bounded."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch

from ckpt.torch_private import StorageInfo
from ckpt.transfer.fetcher import StoredFile
from ckpt.transfer.read_pieces import MemorySink, Piece

__all__ = ["TargetMemory", "Window"]

_TENSOR_BYTES = 4 << 30
"""Reads are planned for this much at a time, so that a planner that allocates per item stays bounded."""

_EXTRA_BYTES = 64 << 20


class TargetMemory:
    """The memory that the targets of a window fill.

    A planner may return one buffer for many items and empty it whenever an item is committed, and tied weights
    are two names for one memory. Such targets must not be open at the same time.
    """

    def __init__(self) -> None:
        # By device: disjoint runs of addresses in order, and whose they are.
        self._starts: dict[torch.device, list[int]] = defaultdict(list)
        self._runs: dict[torch.device, list[tuple[int, int, Hashable]]] = defaultdict(list)

    def add(self, tensor: torch.Tensor, owner: Hashable) -> bool:
        """Take in `tensor`'s memory, or return False because some of it is another target's already.

        Targets of one `owner` (unless None) are known to share no element, even where they interleave.
        """
        begin, end = _extent(tensor)
        if begin == end:
            return True
        starts, runs = self._starts[tensor.device], self._runs[tensor.device]
        first = bisect.bisect_right(starts, begin)
        if first and runs[first - 1][1] > begin:
            first -= 1
        last = bisect.bisect_left(starts, end)
        met = runs[first:last]
        if any(owner is None or other != owner for _, _, other in met):
            return False
        if met:
            begin, end = min(begin, met[0][0]), max(end, met[-1][1])
        starts[first:last], runs[first:last] = [begin], [(begin, end, owner)]
        return True


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses from the first element to behind the last."""
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return 0, 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in steps)
    return tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size()


@dataclass
class Window:
    """Items that are read together: their pieces by file, and what to do once all have arrived."""

    pieces: dict[StoredFile, list[Piece]] = field(default_factory=lambda: defaultdict(list))
    then: list[Callable[[], None]] = field(default_factory=list)
    memory: TargetMemory = field(default_factory=TargetMemory)
    tensor_bytes: int = 0
    extra_bytes: int = 0
    """Memory that the window itself takes, beyond the targets."""

    @property
    def is_full(self) -> bool:
        return self.extra_bytes > _EXTRA_BYTES or self.tensor_bytes > _TENSOR_BYTES

    def read_whole(self, file: StoredFile, info: StorageInfo, then: Callable[[bytearray], None]) -> None:
        """Read an item as it is stored."""
        data = bytearray(info.length)
        sink = MemorySink(memoryview(data), data)
        self.pieces[file].append(Piece(info.offset, info.offset + info.length, sink))
        self.then.append(lambda: then(data))
        self.extra_bytes += info.length

    def scratch(self, target: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A tensor to read into for a target without memory of its own, which gets a copy."""
        memory = torch.empty(target.size(), dtype=dtype, device="cpu")

        def copy() -> None:
            with torch.no_grad():
                target.copy_(memory)

        self.then.append(copy)
        self.extra_bytes += memory.numel() * memory.element_size()
        return memory
