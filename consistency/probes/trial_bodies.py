"""Bodies for probes: small, with checksums, and on request with wrong ones."""

from __future__ import annotations

import contextlib

from ckpt.backends.bodies import BytesBody, Part
from ckpt.consistency.checksums import crc64nvme

__all__ = ["TrialBody"]


class TrialBody(BytesBody):
    """Bytes in memory with checksums; `wrong`: with those of other bytes."""

    has_checksums = True

    def __init__(self, data: bytes | bytearray, *, wrong: bool = False) -> None:
        super().__init__(data)
        self._error = 1 if wrong else 0

    def part(self, start: int, stop: int) -> contextlib.AbstractContextManager[Part]:
        view = self._view[start:stop]
        return contextlib.nullcontext(Part([view], crc64nvme(view) ^ self._error))

    def crc64nvme(self) -> int:  # type: ignore[override]
        return crc64nvme(self._view) ^ self._error
