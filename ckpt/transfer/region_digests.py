"""Gather the digest of a region's bytes from the checksums of the runs in which they come."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ckpt.consistency.checksums import joined_runs

Run = tuple[int, int, int]
"""Where in a region's bytes a run begins, how many bytes it has, and their CRC64NVME."""


@dataclass(eq=False)
class RegionDigest:
    """The CRC64NVME of a region's bytes, of which threads add runs in any order.

    Attributes:
        nbytes: of the region, as it is stored.
        cast_bytes: of the region in the dtype to which it is cast; 0 if it is not.
    """

    nbytes: int
    cast_bytes: int = 0
    _runs: list[Run] = field(default_factory=list)
    _cast_runs: list[Run] = field(default_factory=list)

    def add(self, start: int, nbytes: int, crc: int) -> None:
        """Add a run of the stored bytes."""
        self._runs.append((start, nbytes, crc))

    def add_cast(self, start: int, nbytes: int, crc: int) -> None:
        """Add a run of the cast bytes."""
        self._cast_runs.append((start, nbytes, crc))

    def crc64nvme(self) -> int | None:
        """Return the checksum of the stored bytes; None as long as some have not come."""
        return _joined(self._runs, self.nbytes)

    def cast_crc64nvme(self) -> int | None:
        """Return the checksum of the cast bytes; None as long as some have not come, or none do."""
        return _joined(self._cast_runs, self.cast_bytes) if self.cast_bytes else None


def _joined(runs: Iterable[Run], nbytes: int) -> int | None:
    ordered, position = sorted(runs), 0
    for start, size, _ in ordered:
        if start != position:
            return None
        position += size
    return joined_runs(ordered) if position == nbytes else None
