"""Run stock PyTorch: `FileSystemWriter` and `FileSystemReader`."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from benchmarks.contenders.through_dcp import ThroughDcp

__all__ = ["Stock"]


class Stock(ThroughDcp):
    """Option `fsync` (True, as by default)."""

    def writer(self, place: str) -> Any:
        return FileSystemWriter(
            place,
            thread_count=self.settings.threads or 1,
            sync_files=self.settings.options.get("fsync", True),
        )

    def reader(self, place: str) -> Any:
        return FileSystemReader(place)
