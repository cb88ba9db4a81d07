"""Measure the floor of files: `os.write` and `readv` of the same bytes, as many files and threads
as this library takes.
"""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks.contenders import Settings
from benchmarks.contenders.floors.checksums import block_checksums

__all__ = ["Files"]

_WRITE_BYTES = 8 << 20


class Files:
    """Options: `fsync` makes the files and their directory durable, as this library does;
    `checksums` computes those that it computes, and does nothing with them; `direct` reads past the page cache.
    """

    def __init__(self, settings: Settings) -> None:
        self._count = settings.threads
        self._fsync = settings.options.get("fsync", False)
        self._checksums = settings.options.get("checksums", False)
        self._direct = settings.options.get("direct", False)

    def save(self, state: dict[str, torch.Tensor], place: str) -> None:
        os.makedirs(place)
        with ThreadPoolExecutor(self._count) as threads:
            list(threads.map(lambda number: self._write(state, place, number), range(self._count)))
        if self._fsync:
            _sync(place)

    def load(self, state: dict[str, torch.Tensor], place: str) -> None:
        with ThreadPoolExecutor(self._count) as threads:
            read = self._read_direct if self._direct else self._read
            list(threads.map(lambda number: read(state, place, number), range(self._count)))

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

    def _read_direct(self, state: dict[str, torch.Tensor], place: str, number: int) -> None:
        """Read into a buffer that is aligned, and copy: the state's memory is not."""
        file = os.open(os.path.join(place, str(number)), os.O_RDONLY | os.O_DIRECT)
        at, buffer = 0, mmap.mmap(-1, _WRITE_BYTES)
        try:
            ahead = memoryview(b"")
            for whole in self._share(state, number):
                view = whole
                while view.nbytes:
                    if not ahead.nbytes:
                        received = os.preadv(file, [buffer], at)
                        if not received:
                            raise EOFError(f"{place}/{number} is too short")
                        at, ahead = at + received, memoryview(buffer)[:received]
                    taken = min(view.nbytes, ahead.nbytes)
                    view[:taken] = ahead[:taken]
                    view, ahead = view[taken:], ahead[taken:]
                self._check(whole)
        finally:
            os.close(file)

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
