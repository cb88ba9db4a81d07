"""Digest tensors where they are: in all cores, and in bounded memory where there is none to look at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ckpt.consistency.checksums import crc64nvme, joined_runs
from ckpt.transfer.buffer_pool import MIN_MEMORY_BUDGET_BYTES, StagingPool
from ckpt.transfer.tensor_memory import copy_flat, has_memory_view, memory_of, tensor_over
from ckpt.transfer.threads import share

_STEP_BYTES = 4 << 20
"""Of one tensor, by one thread at a time: few enough for a cache to hold the copy."""


@dataclass(frozen=True, eq=False)
class LiveElements:
    """The elements of an ordinary tensor, in row-major order.

    Attributes:
        back: the dtype to which they are cast before their bytes are digested; None for their own.
    """

    tensor: torch.Tensor
    back: torch.dtype | None = None


@dataclass(frozen=True)
class LiveDigest:
    """The CRC64NVME of elements.

    Attributes:
        returns: each element that was cast back, and cast again, has its bytes as before.
    """

    crc64nvme: int
    returns: bool = True


def live_digests(elements: Sequence[LiveElements]) -> list[LiveDigest]:
    """Return the digest of each; nothing of them is changed, and they must not change meanwhile."""
    pool = StagingPool(MIN_MEMORY_BUDGET_BYTES, for_device=True)
    with torch.no_grad():
        steps = [(number, *step) for number, each in enumerate(elements) for step in _steps(each.tensor)]
        results = share(lambda step: _digest(elements[step[0]], *step[1:], pool), steps, "ckpt-digest")
    runs: list[list[tuple[int, int, int]]] = [[] for _ in elements]
    returns = [True] * len(elements)
    for (number, start, _), (nbytes, digest) in zip(steps, results, strict=True):
        runs[number].append((start, nbytes, digest.crc64nvme))
        returns[number] &= digest.returns
    return [LiveDigest(joined_runs(of_one), same) for of_one, same in zip(runs, returns, strict=True)]


def _steps(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Cut the elements of a tensor into runs."""
    step, count = max(1, _STEP_BYTES // tensor.element_size()), tensor.numel()
    return ((start, min(start + step, count)) for start in range(0, count, step))


def _digest(elements: LiveElements, start: int, stop: int, pool: StagingPool) -> tuple[int, LiveDigest]:
    """Digest a run; return how many bytes were digested, too."""
    tensor, back = elements.tensor, elements.back
    if back is None and has_memory_view(tensor):
        data = memory_of(tensor.view(-1)[start:stop])
        return data.nbytes, LiveDigest(crc64nvme(data))
    with pool.take((stop - start) * tensor.element_size()) as scratch:
        copy_flat(tensor, start, stop, scratch)
        if back is None:
            return scratch.nbytes, LiveDigest(crc64nvme(scratch))
        run = tensor_over(scratch).view(tensor.dtype)
        before = run.to(back)
        again = before.to(tensor.dtype)
        data = memory_of(before)
        same = torch.equal(again.view(torch.uint8), run.view(torch.uint8))
        return data.nbytes, LiveDigest(crc64nvme(data), same)
