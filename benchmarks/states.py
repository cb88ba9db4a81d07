"""The states that are saved and loaded: tensors with known contents, which a load is compared with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["EMPTY", "ONE_GB", "SMALL_TENSORS", "STALL", "WARM_UP", "StateSpec"]

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
        """The tensors, with contents that differ everywhere."""
        return {self._name(number): self._expected(number) for number in range(self.tensors)}

    def blank(self) -> dict[str, torch.Tensor]:
        """Tensors to load into, their memory already touched."""
        shape = (self.rows, self.columns)
        return {self._name(number): torch.full(shape, -1.0) for number in range(self.tensors)}

    def verify(self, state: dict[str, torch.Tensor]) -> None:
        """Compare all bits.

        Raises:
            ValueError: a tensor does not hold what `filled` gave.
        """
        for number in range(self.tensors):
            found = state[self._name(number)]
            if not torch.equal(found.view(torch.int32), self._expected(number).view(torch.int32)):
                raise ValueError(f"{self._name(number)} was loaded wrong")

    def _name(self, number: int) -> str:
        return f"layers.{number:05d}.weight"

    def _expected(self, number: int) -> torch.Tensor:
        values = torch.arange(self.rows * self.columns, dtype=torch.int32)
        values.mul_(-1640531527).add_(number * 7919 + 1)  # a multiplicative hash: no two neighbours alike
        return values.view(torch.float32).view(self.rows, self.columns)


ONE_GB = StateSpec(tensors=60, rows=2048, columns=2048)  # 16 MiB each, 1.007 GB
SMALL_TENSORS = StateSpec(tensors=20_000, rows=32, columns=32)  # 4 KiB each
STALL = StateSpec(tensors=32, rows=2048, columns=2048)  # 512 MiB
WARM_UP = StateSpec(tensors=4, rows=128, columns=128)
EMPTY = StateSpec(tensors=0, rows=0, columns=0)
