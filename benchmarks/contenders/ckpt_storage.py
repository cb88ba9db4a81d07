"""Run this library through its own functions."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import awscrt.checksums
import torch

import ckpt
from benchmarks.contenders import Settings, as_trained
from benchmarks.run.servers import ACCESS_KEY, REGION, SECRET_KEY
from ckpt.content.memory import note_written

__all__ = ["Ours", "storage_options_of"]


class Ours:
    """Default settings.

    Options: `storage` (more storage options), `verify`, `checksums` (False: what they cost), `first` (the first save of a
    process to a run, which looks at all it writes; later ones look at a sample).
    """

    def __init__(self, settings: Settings) -> None:
        self._checksums = settings.options.get("checksums", True)
        self._verify = settings.options.get("verify", True)
        self._is_first = settings.options.get("first", False)
        self._storage = storage_options_of(settings)
        if settings.endpoint is not None and not self._checksums:
            self._storage["checksum"] = "none"
        if not self._checksums:
            _compute_no_checksums()

    def save(self, state: dict[str, torch.Tensor], place: str) -> None:
        if not self._is_first:
            note_written(place)
        ckpt.save(as_trained(state), place, storage_options=self._storage, no_dist=True)

    def load(self, state: dict[str, torch.Tensor], place: str) -> None:
        ckpt.load(as_trained(state), place, storage_options=self._storage, verify=self._verify, no_dist=True)

    def async_save(self, state: dict[str, torch.Tensor], place: str) -> Future[Any]:
        return ckpt.async_save(
            as_trained(state),
            place,
            storage_options=self._storage,
            no_dist=True,
        )

    def writer(self, place: str) -> ckpt.CheckpointWriter:
        return ckpt.CheckpointWriter(place, storage_options=self._storage)

    def reader(self, place: str) -> ckpt.CheckpointReader:
        return ckpt.CheckpointReader(place, storage_options=self._storage)


def storage_options_of(settings: Settings) -> dict[str, Any]:
    """Make the storage options of the endpoint for `ckpt.save` and the manager."""
    options = dict(settings.options.get("storage", {}))
    if settings.endpoint is not None:
        options |= {"endpoint_url": settings.endpoint.url, "region": REGION}
        options |= {"key": ACCESS_KEY, "secret": SECRET_KEY}
        if settings.endpoint.certificate is not None:
            options["client_kwargs"] = {"verify": settings.endpoint.certificate}
    return options


def _compute_no_checksums() -> None:
    """Replace checksums, which the library always computes, for a figure to compare with."""
    awscrt.checksums.crc64nvme = lambda data, previous=0: 0
    awscrt.checksums.combine_crc64nvme = lambda first, second, nbytes: 0
