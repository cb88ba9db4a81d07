"""Compute this library's checksums, for floors that show their cost."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt.consistency.checksums import BLOCK_SIZE_BYTES, block_crcs

__all__ = ["block_checksums"]


def block_checksums(views: Sequence[memoryview]) -> None:
    """Compute the CRC64NVME of every block of these bytes."""
    block_crcs(views, BLOCK_SIZE_BYTES)
