"""Run NVIDIA's Multi-Storage Client: its storage writer and reader for DCP."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.contenders import Settings
from benchmarks.contenders.through_dcp import ThroughDcp
from benchmarks.run.servers import ACCESS_KEY, BUCKET, REGION, SECRET_KEY

__all__ = ["MultiStorageClient"]


class MultiStorageClient(ThroughDcp):
    """A profile with an S3 provider; `s3://bucket/key` becomes `msc://bench/key`.

    Option `provider`: more options of the provider.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        assert settings.endpoint is not None
        provider = {
            "type": "s3",
            "options": {
                "base_path": BUCKET,
                "region_name": REGION,
                "endpoint_url": settings.endpoint.url,
                **settings.options.get("provider", {}),
            },
        }
        credentials = {
            "type": "S3Credentials",
            "options": {"access_key": ACCESS_KEY, "secret_key": SECRET_KEY},
        }
        profile = {"storage_provider": provider, "credentials_provider": credentials}
        self._folder = tempfile.TemporaryDirectory(prefix="msc-")
        path = Path(self._folder.name) / "config.json"
        path.write_text(json.dumps({"profiles": {"bench": profile}}))
        # Read when the package is first used.
        os.environ["MSC_CONFIG"] = str(path)

    def writer(self, place: str) -> Any:
        from multistorageclient.contrib.torch import MultiStorageFileSystemWriter

        return MultiStorageFileSystemWriter(_msc(place), thread_count=self.settings.threads or 1)

    def reader(self, place: str) -> Any:
        from multistorageclient.contrib.torch import MultiStorageFileSystemReader

        return MultiStorageFileSystemReader(_msc(place), thread_count=1)


def _msc(place: str) -> str:
    return place.replace(f"s3://{BUCKET}/", "msc://bench/")
