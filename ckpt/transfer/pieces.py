"""Name runs of bytes in files, and who takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Sink(Protocol):
    """Takes the bytes of a piece."""

    @property
    def unit_bytes(self) -> int:
        """The piece may be cut after any multiple of it and delivered in parts; 0 if it must come whole."""

    def deliver(self, start: int, data: memoryview) -> None:
        """Take `data`, the piece's bytes from `start` on."""


@dataclass(frozen=True)
class Piece:
    """Bytes `[start, stop)` of a file and their sink."""

    start: int
    stop: int
    sink: Sink


@dataclass(frozen=True, eq=False)
class MemorySink:
    """The destination's own memory: storage can write straight into it."""

    memory: memoryview
    unit_bytes = 1

    def deliver(self, start: int, data: memoryview) -> None:
        self.memory[start : start + data.nbytes] = data


class NoSink:
    """Bytes that are read only to be verified."""

    unit_bytes = 1

    def deliver(self, start: int, data: memoryview) -> None:
        pass
