"""Compute values that follow from a tensor's name and an element's position in it.

So any rank can compute any slice. They are bits, not numbers: NaNs may appear, and bits are
compared. A run of 2^18 elements is a random table, rotated and shifted by numbers drawn from name
and run. So an element that is missing, repeated, moved, or of another tensor shows.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator

import torch

from ckpt.transfer.boxes import Box

# Small enough that the table, and what is computed to be compared, stay in a core's cache.
_RUN_ELEMENTS = 1 << 18
_SCRATCH_ELEMENTS = 1 << 18
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fill(tensor: torch.Tensor, fqn: str, shape: tuple[int, ...], box: Box, seed: int = 0) -> None:
    """Fill contiguous `tensor` with the slice `box` of the tensor `fqn` of `shape`."""
    for target, start, stop, inside in _runs(tensor, shape, box):
        if inside is None:
            _values(target, fqn, start, stop, seed)
        else:
            scratch = torch.empty(stop - start, dtype=target.dtype)
            _values(scratch, fqn, start, stop, seed)
            target.copy_(scratch.view(-1, *shape[1:])[inside])


def compare(tensor: torch.Tensor, fqn: str, shape: tuple[int, ...], box: Box, seed: int = 0) -> int:
    """Count the elements of `tensor` that differ from those of `fill`."""
    wrong = 0
    for bits, start, stop, inside in _runs(tensor, shape, box):
        scratch = torch.empty(stop - start, dtype=bits.dtype)
        _values(scratch, fqn, start, stop, seed)
        expected = scratch if inside is None else scratch.view(-1, *shape[1:])[inside]
        if not _are_equal(bits, expected):
            wrong += int((bits != expected).sum())
    return wrong


def _are_equal(bits: torch.Tensor, expected: torch.Tensor) -> bool:
    """Compare bits, eight bytes at a time if possible: then `torch.equal` is six times faster."""
    both = (bits, expected)
    if all(each.is_contiguous() and each.nbytes % 8 == each.data_ptr() % 8 == 0 for each in both):
        bits, expected = (each.view(-1).view(torch.int64) for each in both)
    return torch.equal(bits, expected)


def _runs(
    tensor: torch.Tensor, shape: tuple[int, ...], box: Box
) -> Iterator[tuple[torch.Tensor, int, int, tuple[slice, ...] | None]]:
    """Split `tensor` into pieces.

    Yield the bits of each, the range of the whole tensor's elements that contains it, and its slice
    of that range seen as rows; None if it is the whole range.
    """
    bits = tensor.view(_BITS[tensor.element_size()])
    begin, end = box
    row = math.prod(shape[1:])
    whole_rows = all((a, b) == (0, n) for a, b, n in zip(begin[1:], end[1:], shape[1:], strict=True))
    if whole_rows:
        flat, first = bits.view(-1), begin[0] * row
        for at in range(0, flat.numel(), _SCRATCH_ELEMENTS):
            piece = flat[at : at + _SCRATCH_ELEMENTS]
            yield piece, first + at, first + at + piece.numel(), None
        return
    rows = max(1, _SCRATCH_ELEMENTS // row)
    inside = (slice(None), *(slice(a, b) for a, b in zip(begin[1:], end[1:], strict=True)))
    for at in range(begin[0], end[0], rows):
        stop = min(at + rows, end[0])
        yield bits[at - begin[0] : stop - begin[0]], at * row, stop * row, inside


def _values(target: torch.Tensor, fqn: str, start: int, stop: int, seed: int) -> None:
    """Compute the bits of elements `[start, stop)`."""
    table = _table(target.dtype)
    at = start
    while at < stop:
        run, position = divmod(at, _RUN_ELEMENTS)
        count = min(_RUN_ELEMENTS - position, stop - at)
        rotation, shift = _draw(fqn, run, seed, target.dtype)
        first = rotation + position
        torch.add(table[first : first + count], shift, out=target[at - start : at - start + count])
        at += count


def _draw(fqn: str, run: int, seed: int, dtype: torch.dtype) -> tuple[int, int]:
    """Draw where in the table a run begins, and the number that is added to it."""
    digest = hashlib.blake2b(f"{seed} {run} {fqn}".encode(), digest_size=16).digest()
    shift = int.from_bytes(digest[: dtype.itemsize], "little", signed=dtype != torch.uint8)
    return int.from_bytes(digest[8:], "little") % _RUN_ELEMENTS, shift


@functools.cache
def _table(dtype: torch.dtype) -> torch.Tensor:
    """Make the random table: two equal halves, so that a run may begin anywhere in the first."""
    generator = torch.Generator().manual_seed(20)
    table = torch.randint(0, 256, (_RUN_ELEMENTS * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return table.view(dtype).repeat(2)
