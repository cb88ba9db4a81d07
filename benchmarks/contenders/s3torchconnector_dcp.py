"""Run Amazon's S3 Connector for PyTorch: its storage writer and reader for DCP."""

from __future__ import annotations

from typing import Any

from s3torchconnector import S3ClientConfig
from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

from benchmarks.contenders.through_dcp import ThroughDcp
from benchmarks.run.servers import REGION

__all__ = ["S3TorchConnector"]


class S3TorchConnector(ThroughDcp):
    """The endpoint comes from AWS_ENDPOINT_URL: its classes take none.

    The reader is `dcp_optimized`, its default.
    """

    def writer(self, place: str) -> Any:
        return S3StorageWriter(
            REGION, place, s3client_config=self._config(), thread_count=self.settings.threads or 1
        )

    def reader(self, place: str) -> Any:
        return S3StorageReader(REGION, place, s3client_config=self._config())

    def _config(self) -> Any:
        return S3ClientConfig(force_path_style=True)
