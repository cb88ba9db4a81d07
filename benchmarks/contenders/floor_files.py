"""Measure the floor of files: `os.write` and `readv` of the same bytes, as many files and threads
as this library takes.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks.contenders import Settings
from benchmarks.contenders.floor_checksums import block_checksums

__all__ = ["Files"]

_WRITE_BYTES = 8 << 20


class Files:
    """Options: `fsync` makes the files and their directory durable, as this library does;
    `checksums` computes those that it computes, and does nothing with them.
    """

    def __init__(self, settings: Settings) -> None:
        self._count = settings.threads
        self._fsync = settings.options.get("fsync", False)
        self._checksums = settings.options.get("checksums", False)

    def save(self, state: dict[str, torch.Tensor], place: str) -> None:
        os.makedirs(place)
        with ThreadPoolExecutor(self._count) as threads:
            list(threads.map(lambda number: self._write(state, place, number), range(self._count)))
        if self._fsync:
            _sync(place)

    def load(self, state: dict[str, torch.Tensor], place: str) -> None:
        with ThreadPoolExecutor(self._count) as threads:
            list(threads.map(lambda number: self._read(state, place, number), range(self._count)))

    def _write(self, state: dict[str, torch.Tensor], place: str, number: int) -> None:
        file = os.open(os.path.join(place, str(number)), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            for view in self._share(state, number):
                while view.nbytes:
                    self._check(view[:_WRITE_BYTES])
                    view = view[os.write(file, view[:_WRITE_BYTES]) :]
            if self._fsync:
                os.fsync(file)
        finally:
            os.close(file)

    def _read(self, state: dict[str, torch.Tensor], place: str, number: int) -> None:
        with open(os.path.join(place, str(number)), "rb", buffering=0) as file:
            for whole in self._share(state, number):
                view = whole
                while view.nbytes:
                    received = file.readinto(view)
                    if not received:
                        raise EOFError(f"{place}/{number} is too short")
                    view = view[received:]
                self._check(whole)

    def _check(self, view: memoryview) -> None:
        if self._checksums:
            block_checksums([view])

    def _share(self, state: dict[str, torch.Tensor], number: int) -> list[memoryview]:
        """List the tensors of one file."""
        tensors = list(state.values())[number :: self._count]
        return [tensor.numpy().data.cast("B") for tensor in tensors]


def _sync(directory: str) -> None:
    file = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
