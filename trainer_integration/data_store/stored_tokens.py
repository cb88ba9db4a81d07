"""Flat files of tokens in stores, which are sliced as arrays are."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.lib import format as npy

from ckpt.errors import FormatError
from ckpt.trainer_integration.data_store.block_reader import BlockReader, StoredFile
from ckpt.trainer_integration.data_store.disk_cache import BLOCK_BYTES
from ckpt.trainer_integration.sources import Sliced, Tokens


class StoredTokens:
    """A one-dimensional array of tokens in a file of a store; slices of it are read.

    Raises FormatError if the file is not `.npy`, or its size is not that of whole tokens.

    Args:
        raw_dtype: of the tokens; None reads it from the head of a `.npy`.
    """

    def __init__(self, reader: BlockReader, file: StoredFile, raw_dtype: np.dtype[Any] | None) -> None:
        self._reader = reader
        self._file = file
        if raw_dtype is None:
            shape, self.dtype, self._head_bytes = _npy_head(
                file, reader.block(file, 0) if file.size_bytes else b""
            )
        else:
            shape = (file.size_bytes // raw_dtype.itemsize,)
            self.dtype = raw_dtype
            self._head_bytes = 0
        self.ndim = len(shape)
        self._itemsize = self.dtype.itemsize
        self._length = shape[0] if shape else 0
        if self.ndim == 1 and self._head_bytes + self._length * self._itemsize != file.size_bytes:
            raise FormatError(
                f"{file.url} has {file.size_bytes} bytes, which are not {self._length} of {self.dtype}"
            )

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, where: slice, /) -> Tokens:
        start, stop, _ = where.indices(self._length)
        first = self._head_bytes + start * self._itemsize
        count = max(0, stop - start)
        number, offset = divmod(first, BLOCK_BYTES)
        if offset + count * self._itemsize <= BLOCK_BYTES and count:
            return np.frombuffer(self._reader.block(self._file, number), self.dtype, count, offset)
        return self._reader.read(self._file, first, first + count * self._itemsize).view(self.dtype)

    @property
    def is_in_memory(self) -> bool:
        return self._reader.is_in_memory(self._file)

    def whole(self) -> Tokens:
        """Read all tokens into memory of their own."""
        return self._reader.whole(self._file)[self._head_bytes :].view(self.dtype)

    def part(self, start: int, stop: int) -> Sliced:
        """Return some tokens to take slices of: in more blocks than one they are not read as a whole."""
        first = (self._head_bytes + start * self._itemsize) // BLOCK_BYTES
        last = (self._head_bytes + stop * self._itemsize - 1) // BLOCK_BYTES
        return self[start:stop] if first == last else _Part(self, start, stop)

    def ahead(self, start: int, stop: int) -> None:
        """Begin to fetch tokens."""
        first = self._head_bytes + start * self._itemsize
        self._reader.ahead(self._file, first, first + max(0, stop - start) * self._itemsize)


class _Part:
    """Tokens `start` to `stop` of a file."""

    def __init__(self, tokens: StoredTokens, start: int, stop: int) -> None:
        self._tokens = tokens
        self._start = start
        self._stop = stop

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, where: slice, /) -> Tokens:
        start, stop, _ = where.indices(len(self))
        return self._tokens[self._start + start : self._start + max(start, stop)]


def _npy_head(file: StoredFile, begin: bytearray | bytes) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Return the shape and the type of a `.npy` file, and the size of its head."""
    stream = io.BytesIO(begin)
    try:
        is_first = npy.read_magic(stream) == (1, 0)
        read_header = npy.read_array_header_1_0 if is_first else npy.read_array_header_2_0
        shape, _, kind = read_header(stream)
    except ValueError as error:
        raise FormatError(f"{file.url}: {error}") from error
    if kind.hasobject or stream.tell() % max(1, kind.itemsize):
        raise FormatError(f"{file.url}: an array of {kind} cannot be read in parts")
    return shape, kind, stream.tell()
