"""Measure a compiled client: obstore (Rust's object_store) puts and gets the tensors' bytes, and nothing else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import obstore
import torch
from obstore.store import S3Store

from benchmarks.contenders import Settings
from benchmarks.run.servers import ACCESS_KEY, BUCKET, REGION, SECRET_KEY

__all__ = ["Obstore"]


class Obstore:
    """An object per tensor, `threads` at a time (8): no metadata, no commit, no checksum of its own."""

    def __init__(self, settings: Settings) -> None:
        assert settings.endpoint is not None
        self._threads = settings.threads or 8
        self._store = S3Store(
            BUCKET,
            endpoint=settings.endpoint.url,
            region=REGION,
            access_key_id=ACCESS_KEY,
            secret_access_key=SECRET_KEY,
            virtual_hosted_style_request=False,
            client_options={
                "allow_http": True,
                "allow_invalid_certificates": settings.endpoint.certificate is not None,
            },
        )

    def save(self, state: dict[str, torch.Tensor], place: str) -> None:
        def put(name: str) -> None:
            obstore.put(
                self._store, _key(place, name), state[name].numpy().data.cast("B"), use_multipart=False
            )

        with ThreadPoolExecutor(self._threads) as threads:
            list(threads.map(put, state))

    def load(self, state: dict[str, torch.Tensor], place: str) -> None:
        def get(name: str) -> None:
            received = obstore.get(self._store, _key(place, name)).bytes()
            state[name].numpy().data.cast("B")[:] = memoryview(received)

        with ThreadPoolExecutor(self._threads) as threads:
            list(threads.map(get, state))


def _key(place: str, name: str) -> str:
    return f"{place.removeprefix(f's3://{BUCKET}/')}/{name}"
