"""Make the states that are saved and loaded: tensors with known contents, which a load is compared
with.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

__all__ = ["DAMAGED", "EMPTY", "LARGE_STALL", "ONE_GB", "SMALL_TENSORS", "STALL", "WARM_UP", "StateSpec"]

MIB = 1 << 20


@dataclass(frozen=True)
class StateSpec:
    """A number of equal float32 tensors of two dimensions."""

    tensors: int
    rows: int
    columns: int

    @property
    def nbytes(self) -> int:
        return 4 * self.tensors * self.rows * self.columns

    def filled(self) -> dict[str, torch.Tensor]:
        """Make the tensors, with contents that differ everywhere."""
        return {
            self._name(number): self._fill(torch.empty(self.rows, self.columns), number)
            for number in range(self.tensors)
        }

    def blank(self) -> dict[str, torch.Tensor]:
        """Make tensors to load into, their memory already touched."""
        shape = (self.rows, self.columns)
        return {self._name(number): torch.full(shape, -1.0) for number in range(self.tensors)}

    def verify(self, state: dict[str, torch.Tensor]) -> None:
        """Compare all bits.

        Raises:
            ValueError: a tensor does not hold what `filled` gave.
        """
        expected = torch.empty(self.rows, self.columns)
        for number in range(self.tensors):
            loaded = state[self._name(number)]
            if not torch.equal(loaded.view(torch.int32), self._fill(expected, number).view(torch.int32)):
                raise ValueError(f"{self._name(number)} was loaded wrong")

    def _name(self, number: int) -> str:
        return f"layers.{number:05d}.weight"

    def _fill(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        values = tensor.view(torch.int32).view(-1)
        torch.add(_hashes(values.numel()), number * 7919 + 1, out=values)
        return tensor


@functools.cache
def _hashes(count: int) -> torch.Tensor:
    """Make multiplicative hashes: no two neighbours alike, and no run of bytes that compresses."""
    return torch.arange(count, dtype=torch.int32).mul_(-1640531527)


ONE_GB = StateSpec(tensors=60, rows=2048, columns=2048)  # 16 MiB each, 1.007 GB
SMALL_TENSORS = StateSpec(tensors=20_000, rows=32, columns=32)  # 4 KiB each
STALL = StateSpec(tensors=32, rows=2048, columns=2048)  # 512 MiB
LARGE_STALL = StateSpec(tensors=128, rows=2048, columns=2048)  # 2 GiB
DAMAGED = StateSpec(tensors=8, rows=512, columns=1024)  # 2 MiB each
WARM_UP = StateSpec(tensors=4, rows=128, columns=128)
EMPTY = StateSpec(tensors=0, rows=0, columns=0)
