"""Run PyTorch's `FsspecWriter` and `FsspecReader` over s3fs."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from benchmarks.contenders.through_dcp import ThroughDcp
from benchmarks.run.servers import ACCESS_KEY, REGION, SECRET_KEY

__all__ = ["FsspecS3fs"]


class FsspecS3fs(ThroughDcp):
    """With botocore's optional work switched off: no checksums of its own and no hash of the
    payload.
    """

    def writer(self, place: str) -> Any:
        return FsspecWriter(place, thread_count=self.settings.threads or 1, **self._options())

    def reader(self, place: str) -> Any:
        return FsspecReader(place, **self._options())

    def _options(self) -> dict[str, Any]:
        assert self.settings.endpoint is not None
        return {
            "key": ACCESS_KEY,
            "secret": SECRET_KEY,
            "endpoint_url": self.settings.endpoint.url,
            "client_kwargs": {"region_name": REGION, "verify": self.settings.endpoint.certificate},
            "config_kwargs": {
                "max_pool_connections": 50,
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_required",
                "s3": {"payload_signing_enabled": False, "addressing_style": "path"},
            },
        }
