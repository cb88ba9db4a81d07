"""Measure a compiled client: s3dlio puts and gets the tensors' bytes, and nothing else."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks.contenders import Settings

__all__ = ["S3dlio"]


class S3dlio:
    """An object per tensor, `threads` at a time (8): no metadata, no commit, no checksum of its own.

    Endpoint and credentials come from the environment: its functions take none.
    """

    def __init__(self, settings: Settings) -> None:
        assert settings.endpoint is not None
        self._threads = settings.threads or 8
        if settings.endpoint.certificate is not None:
            os.environ["AWS_CA_BUNDLE"] = os.environ["SSL_CERT_FILE"] = settings.endpoint.certificate
        import s3dlio  # reads the environment

        self._s3dlio = s3dlio

    def save(self, state: dict[str, torch.Tensor], place: str) -> None:
        items = [(f"{place}/{name}", tensor.numpy().data.cast("B")) for name, tensor in state.items()]
        self._s3dlio.put_many(items, max_in_flight=self._threads)

    def load(self, state: dict[str, torch.Tensor], place: str) -> None:
        def get(name: str) -> None:
            received = self._s3dlio.get(f"{place}/{name}")
            state[name].numpy().data.cast("B")[:] = memoryview(received).cast("B")

        with ThreadPoolExecutor(self._threads) as threads:
            list(threads.map(get, state))
