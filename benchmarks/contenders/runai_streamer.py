"""Run Run:ai's model streamer: safetensors files, from a file system or S3."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

import torch
from safetensors.torch import save, save_file

from benchmarks.contenders import Settings
from benchmarks.run.servers import ACCESS_KEY, REGION, SECRET_KEY

__all__ = ["RunaiStreamer"]

_FILES = 8


class RunaiStreamer:
    """Only loads; eight files are written by safetensors, and put with boto3. Tensors are copied into the trainer's.

    Option `concurrency`: its RUNAI_STREAMER_CONCURRENCY.
    """

    def __init__(self, settings: Settings) -> None:
        self._endpoint = settings.endpoint
        os.environ["RUNAI_STREAMER_CONCURRENCY"] = str(settings.options.get("concurrency", 8))
        os.environ["RUNAI_STREAMER_LOG_LEVEL"] = "ERROR"
        if settings.endpoint is not None:
            os.environ["RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING"] = "0"
            if settings.endpoint.certificate is not None:
                os.environ["AWS_CA_BUNDLE"] = settings.endpoint.certificate

    def save(self, state: dict[str, torch.Tensor], place: str) -> None:
        if self._endpoint is None:
            os.makedirs(place)
        for number, path in enumerate(_paths(place)):
            part = dict(list(state.items())[number::_FILES])
            if self._endpoint is None:
                save_file(part, path)
            else:
                self._put(path, save(part))

    def load(self, state: dict[str, torch.Tensor], place: str) -> None:
        from runai_model_streamer import SafetensorsStreamer

        with SafetensorsStreamer() as streamer:
            # Its buffers are used again: each tensor is copied before the next.
            streamer.stream_files(_paths(place), owned=False)
            for name, tensor in streamer.get_tensors():
                state[name].copy_(tensor)

    def _put(self, path: str, data: bytes) -> None:
        import boto3

        assert self._endpoint is not None
        client = boto3.client(
            "s3", endpoint_url=self._endpoint.url, region_name=REGION, verify=self._endpoint.certificate,
            aws_access_key_id=ACCESS_KEY, aws_secret_access_key=SECRET_KEY,
        )  # fmt: skip
        parts = urlsplit(path)
        client.put_object(Bucket=parts.netloc, Key=parts.path.lstrip("/"), Body=data)


def _paths(place: str) -> list[str]:
    return [f"{place}/model-{number}.safetensors" for number in range(_FILES)]
