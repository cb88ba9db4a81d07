"""Describe a tensor as it lies in a file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class StoredTensor:
    """A dense tensor in a file.

    Attributes:
        first_byte: where in the file element (0, 0, ...) is.
        dtype, shape, strides: as of a torch tensor; strides in elements, positive.
    """

    first_byte: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def row_major(first_byte: int, dtype: torch.dtype, shape: Sequence[int]) -> StoredTensor:
        """Describe a tensor without gaps, its last dimension nearest."""
        strides = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
        return StoredTensor(first_byte, dtype, tuple(shape), tuple(strides))

    @property
    def payload_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize
