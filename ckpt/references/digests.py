"""Digest the bytes of tensors, and see that they stay as they were digested."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import xxhash

from ckpt.torch_private import changes_of
from ckpt.transfer.buffer_pool import StagingPool
from ckpt.transfer.file_body import changed_while_saved
from ckpt.transfer.tensor_memory import copy_flat, has_memory_view, memory_of
from ckpt.transfer.threads import run_all, workers

_STEP_BYTES = 64 << 20
_COPY_BYTES = 8 << 20
_MAX_THREADS = 8
_SPOT_BYTES = 64

Chunk = tuple[str, tuple[int, ...]]
"""A tensor's name, and the offsets of a chunk of it."""


@dataclass(frozen=True)
class _State:
    """How a tensor looked, where that can be told: torch counts its changes, and some bytes of it."""

    address: int
    version: int
    spots: bytes

    @staticmethod
    def of(tensor: torch.Tensor) -> _State | None:
        if tensor.is_inference() or not tensor.numel():
            return None
        spots = b""
        if has_memory_view(tensor):
            view = memory_of(tensor)
            middle = view.nbytes // 2
            spots = b"".join((view[:_SPOT_BYTES], view[middle : middle + _SPOT_BYTES], view[-_SPOT_BYTES:]))
        return _State(tensor.data_ptr(), changes_of(tensor), spots)


class Digests:
    """The digests of chunks that one save has made: XXH3-128 of the dense row-major bytes."""

    def __init__(self, pool: StagingPool, moved: Callable[[], None]) -> None:
        """`moved` is called as it gets on."""
        self._pool, self._moved = pool, moved
        self._made: dict[Chunk, bytes] = {}
        self._states: dict[Chunk, _State | None] = {}

    def make(self, wanted: Iterable[tuple[Chunk, Callable[[], torch.Tensor]]]) -> None:
        """Digest chunks, asking for the tensor of each when it is due; not those that have been."""
        todo = [(chunk, resolve) for chunk, resolve in wanted if chunk not in self._made]
        with workers(max(1, min(_MAX_THREADS, os.cpu_count() or 1, len(todo))), "ckpt-digest") as threads:
            run_all(threads, lambda each: self._make(*each), todo)

    def of(self, chunk: Chunk) -> bytes:
        """Return a digest; empty if none was made."""
        return self._made.get(chunk, b"")

    def check(self, chunk: Chunk, resolve: Callable[[], torch.Tensor]) -> None:
        """Raise CheckpointError if a tensor has changed since it was digested, as far as that can be told."""
        state = self._states.get(chunk)
        if state is None:
            return
        now = _State.of(resolve())
        # At another address it is a copy that the planner made.
        if now is not None and now.address == state.address and now != state:
            raise changed_while_saved(chunk[0])

    def _make(self, chunk: Chunk, resolve: Callable[[], torch.Tensor]) -> None:
        tensor = resolve()
        state = _State.of(tensor)
        digest = xxhash.xxh3_128()
        nbytes = tensor.numel() * tensor.element_size()
        if has_memory_view(tensor):
            view = memory_of(tensor)
            for start in range(0, nbytes, _STEP_BYTES):
                digest.update(view[start : start + _STEP_BYTES])
                self._moved()
        elif nbytes:
            size = tensor.element_size()
            with self._pool.take(min(nbytes, _COPY_BYTES)) as scratch:
                step = len(scratch) // size
                for start in range(0, tensor.numel(), step):
                    stop = min(start + step, tensor.numel())
                    part = scratch[: (stop - start) * size]
                    copy_flat(tensor, start, stop, part)
                    digest.update(part)
                    self._moved()
        self._made[chunk], self._states[chunk] = digest.digest(), state
