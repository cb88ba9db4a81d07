"""Mend DLIO's own mechanisms, so that there is something to compare with. DLIO takes them by their names."""

from __future__ import annotations

from typing import Any

from dlio_benchmark.checkpointing.pytorch_checkpointing import PyTorchCheckpointing
from dlio_benchmark.checkpointing.pytorch_s3_checkpointing import PyTorchS3Checkpointing
from dlio_benchmark.storage.s3_torch_storage import S3PyTorchConnectorStorage

from benchmarks.mlperf_storage.back_end import OfProcess

__all__ = ["ListedS3", "SyncedFiles", "mend_listing"]


def mend_listing() -> None:
    """Let DLIO find the checkpoints in a bucket: it looks for keys that begin with `s3://`, and loads none then."""

    def list_objects(self: Any, bucket: str, prefix: str = "") -> list[str]:
        pages = self.s3_client.list_objects(bucket, f"{prefix.strip('/')}/")
        return [found.key for page in pages for found in page.object_info]

    S3PyTorchConnectorStorage.list_objects = list_objects


class SyncedFiles(OfProcess, PyTorchCheckpointing):
    """torch.save with the fsync that the workloads ask for: DLIO reads `checkpoint.fsync` into a name that nobody reads."""

    def save_state(self, suffix: str, state: dict[str, Any], fsync: bool = False) -> None:
        super().save_state(suffix, state, fsync=True)


class ListedS3(OfProcess, PyTorchS3Checkpointing):
    """s3torchconnector, whose checkpoints DLIO then finds."""

    def __init__(self) -> None:
        mend_listing()
        super().__init__()
