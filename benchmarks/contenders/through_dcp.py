"""Run the peers that plug into DCP."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.contenders import Settings, as_trained

__all__ = ["ThroughDcp"]


class ThroughDcp(ABC):
    """A peer with a storage writer and a storage reader, used as its documentation says: by
    `dcp.save`.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @abstractmethod
    def writer(self, place: str) -> Any:
        """Make a storage writer for one checkpoint."""

    @abstractmethod
    def reader(self, place: str) -> Any:
        """Make a storage reader for one checkpoint."""

    def save(self, state: dict[str, torch.Tensor], place: str) -> None:
        dcp.save(as_trained(state), storage_writer=self.writer(place), no_dist=True)

    def load(self, state: dict[str, torch.Tensor], place: str) -> None:
        dcp.load(as_trained(state), storage_reader=self.reader(place), no_dist=True)
