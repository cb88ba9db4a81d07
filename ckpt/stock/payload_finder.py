"""Large tensors in checkpoints that stock PyTorch wrote: where in its item does a tensor's payload lie?

Stock items are whole zip archives. Only their frame is read, through a window that fetches what torch's own
parser asks for; the payload then is read like one of ours, in ranges and straight into the destination.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

import torch

from ckpt.format.stored_tensor import StoredTensor
from ckpt.stock.item_archive import check_archive, is_stored_as_it_is
from ckpt.torch_private import FakeTensor, FakeTensorMode, checkpoint_offset

_PAGE_BYTES = 4096
_MAX_FRAME_BYTES = 4 << 20

ReadAt = Callable[[int, memoryview], None]
"""Fills a buffer with the item's bytes from an offset on."""


def locate_payload(read_at: ReadAt, item_offset: int, item_bytes: int) -> StoredTensor | None:
    """The dense tensor in an item at `item_offset` of its file; None if it has to be read as a whole.

    Storage errors of `read_at` pass through.
    """
    window = ItemWindow(read_at, item_bytes)
    try:
        reader = check_archive(window, item_bytes)
        storages = [name for name in reader.get_all_records() if name.startswith("data/")]
        if not all(is_stored_as_it_is(reader, window, name) for name in storages):
            return None
        window.seek(0)
        with FakeTensorMode():
            found = torch.load(window, weights_only=True)  # type: ignore[arg-type]
            offset = checkpoint_offset(found) if type(found) is FakeTensor else None
            if offset is None or found.is_conj() or found.is_neg():
                return None
            shape, strides = tuple(found.shape), tuple(found.stride())
            dtype, first = found.dtype, found.storage_offset()
            storage_bytes = found.untyped_storage().nbytes()
    except Exception as error:
        if window.failure is not None:
            raise window.failure from error
        return None  # whatever it is, reading it whole will tell
    if not _is_dense(shape, strides):
        return None
    begin = offset + first * dtype.itemsize
    if offset < 0 or begin + math.prod(shape) * dtype.itemsize > min(item_bytes, offset + storage_bytes):
        return None
    return StoredTensor(item_offset + begin, dtype, shape, strides)


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the elements fill their memory without gap or overlap, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


class ItemWindow(io.RawIOBase):
    """A file over an item that fetches pages on demand, and refuses to fetch more than a frame can have."""

    def __init__(self, read_at: ReadAt, nbytes: int, *, max_bytes: int = _MAX_FRAME_BYTES) -> None:
        super().__init__()
        self._read_at = read_at
        self._nbytes = nbytes
        self._max_bytes = max_bytes
        self._position = 0
        self._pages: dict[int, bytes] = {}
        self.failure: Exception | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self._nbytes)[whence]
        return self._position

    def readinto(self, target: memoryview) -> int:  # type: ignore[override]
        view = memoryview(target).cast("B")
        total = 0
        while total < view.nbytes and 0 <= self._position < self._nbytes:
            number, skip = divmod(self._position, _PAGE_BYTES)
            piece = self._page(number)[skip : skip + view.nbytes - total]
            view[total : total + len(piece)] = piece
            total += len(piece)
            self._position += len(piece)
        return total

    def prefetch(self, places: Sequence[int], threads: Executor) -> None:
        """Fetch the pages of these places, many at a time, as far as they may be fetched at all."""
        numbers = sorted({place // _PAGE_BYTES for place in places if 0 <= place < self._nbytes})
        list(threads.map(self._page, numbers[: self._max_bytes // _PAGE_BYTES - len(self._pages)]))

    def _page(self, number: int) -> bytes:
        if number not in self._pages:
            if len(self._pages) * _PAGE_BYTES >= self._max_bytes:
                raise ValueError("the item's frame is too large")
            page = bytearray(min(_PAGE_BYTES, self._nbytes - number * _PAGE_BYTES))
            try:
                self._read_at(number * _PAGE_BYTES, memoryview(page))
            except Exception as error:
                self.failure = error
                raise
            self._pages[number] = bytes(page)
        return self._pages[number]
