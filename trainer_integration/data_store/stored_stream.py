"""A file of a store as a file object, for libraries that read from one."""

from __future__ import annotations

import io
import os

from ckpt.trainer_integration.data_store.block_reader import BlockReader, StoredFile


class StoredStream(io.RawIOBase):
    """Read a file of a store through a `BlockReader`."""

    def __init__(self, reader: BlockReader, file: StoredFile) -> None:
        super().__init__()
        self._reader = reader
        self._file = file
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.size_bytes}[whence]
        self._at = max(0, begin + offset)
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        stop = self._file.size_bytes if size < 0 else min(self._at + size, self._file.size_bytes)
        data = self._reader.read(self._file, min(self._at, stop), stop)
        self._at += len(data)
        return data.tobytes()
