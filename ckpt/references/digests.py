"""Compare tensors with digests that were stored of them: all bytes, but no more than it takes to see a difference."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from ckpt.consistency.digests import PayloadDigest, StoredDigest, probe_of
from ckpt.gc_pause import no_gc
from ckpt.transfer.buffer_pool import StagingPool
from ckpt.transfer.tensor_memory import copy_flat, has_memory_view, memory_of
from ckpt.transfer.threads import share

_STEP_BYTES = 8 << 20
_BATCH_BYTES = 8 << 20
_BATCH_ITEMS = 256


class Comparison(NamedTuple):
    """A tensor, asked for when it is due (None: it is not plain), and what is stored of one under its name."""

    resolve: Callable[[], torch.Tensor | None]
    stored: StoredDigest


def compare(todo: Sequence[Comparison], pool: StagingPool, moved: Callable[[], None]) -> list[bool]:
    """Tell of each tensor whether it has the digest that is stored; `moved` is called as this gets on."""
    # In this thread: most tensors that have changed cost some microseconds each.
    with no_gc():
        likely = [number for number, each in enumerate(todo) if _may_be_equal(each, pool, moved)]
    batches = list(_batches(likely, todo))
    found = share(lambda batch: [n for n in batch if _is_equal(todo[n], pool, moved)], batches, "ckpt-digest")
    equal = {number for numbers in found for number in numbers}
    return [number in equal for number in range(len(todo))]


def _batches(numbers: Sequence[int], todo: Sequence[Comparison]) -> Iterator[list[int]]:
    """Cut a list into runs, each enough work for a thread to take."""
    batch: list[int] = []
    nbytes = 0
    for number in numbers:
        batch.append(number)
        nbytes += todo[number].stored.nbytes
        if nbytes >= _BATCH_BYTES or len(batch) == _BATCH_ITEMS:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _may_be_equal(comparison: Comparison, pool: StagingPool, moved: Callable[[], None]) -> bool:
    """Tell whether a tensor fits, and begins as it did."""
    tensor, stored = comparison.resolve(), comparison.stored
    if tensor is None:
        return False
    size, nbytes = tensor.element_size(), stored.nbytes
    if tensor.numel() * size != nbytes:
        return False
    if nbytes and (stored.start % size or stored.block_size_bytes % size):
        return False
    if not nbytes or not stored.probe:
        return True
    if has_memory_view(tensor):
        return (
            probe_of(memory_of(tensor)[: stored.probed_bytes]) == stored.probe
        )  # as below, but in less time
    moved()
    with _bytes_of(tensor, 0, stored.probed_bytes, pool) as first:
        return probe_of(first) == stored.probe


def _is_equal(comparison: Comparison, pool: StagingPool, moved: Callable[[], None]) -> bool:
    tensor, stored = comparison.resolve(), comparison.stored
    if tensor is None or tensor.numel() * tensor.element_size() != stored.nbytes:
        return False  # a planner may return another one
    block = stored.block_size_bytes
    digest = PayloadDigest(stored.start, stored.nbytes, block)
    begin, step = 0, max(_STEP_BYTES // block, 1) * block
    while begin < stored.nbytes:
        end = min(begin + step - (stored.start + begin) % block, stored.nbytes)
        with _bytes_of(tensor, begin, end, pool) as data:
            for at, part in _cut(data, stored.start + begin, block):
                digest.add(at, part)
        begin = end
        moved()
    return digest.digest() == stored.digest


@contextlib.contextmanager
def _bytes_of(tensor: torch.Tensor, begin: int, end: int, pool: StagingPool) -> Iterator[memoryview]:
    """Yield bytes `[begin, end)` of a tensor, where they are or copied; both are at elements."""
    if has_memory_view(tensor):
        yield memory_of(tensor)[begin:end]
        return
    with pool.take(end - begin) as scratch:
        copy_flat(tensor, begin // tensor.element_size(), end // tensor.element_size(), scratch)
        yield scratch


def _cut(data: memoryview, position: int, block: int) -> Iterator[tuple[int, memoryview]]:
    """Cut bytes that lie at `position` in a file where its blocks end."""
    begin = 0
    while begin < data.nbytes:
        end = begin + block - (position + begin) % block
        yield position + begin, data[begin:end]
        begin = end
