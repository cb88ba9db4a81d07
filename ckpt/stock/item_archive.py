"""`torch.save` archives (zip files) before anybody loads them: is each what its directory says, and no larger?

Sizes and places are asked of torch's own parser, the one that will load the archive: a second parser could be
shown something else.
"""

from __future__ import annotations

import io
import re
import sys
from typing import Any

import torch

from ckpt.errors import FormatError
from ckpt.stock.pickle_limits import check_torch_pickle
from ckpt.torch_private import archive_reader

_LOCAL_HEADER_BYTES = 30
_MAX_RECORDS = 1 << 20

_STORAGE = re.compile(r"data/[0-9]+")


def check_archive(file: Any, nbytes: int) -> Any:
    """torch's reader of `file`, an archive whose records together are no larger than it.

    Raises:
        FormatError: records are compressed, share bytes, or have names that torch never gives.
        UnsafeContent: its pickle names what pickling itself would call, or asks for far more than is stored.
        Exception: whatever torch says of something that is no archive.
    """
    reader = archive_reader(file)
    names = reader.get_all_records()
    if len(names) > _MAX_RECORDS:
        raise FormatError(f"an archive of {len(names)} records")
    places = []
    for name in names:
        # Names are found whatever their case, so one record could be loaded under many other names.
        if name.startswith("data/") and not _STORAGE.fullmatch(name):
            raise FormatError(f"an archive with a record {name[:80]!r}")
        begin = reader.get_record_header_offset(name)
        places.append((begin, begin + _LOCAL_HEADER_BYTES + reader.get_record_size(name)))
    places.sort()
    # A compressed record that is larger than what is stored of it would reach into the next.
    stops = [0, *(stop for _, stop in places)]
    if any(begin < stop for (begin, _), stop in zip([*places, (nbytes, 0)], stops, strict=True)):
        raise FormatError("an archive whose records are compressed, or overlap")
    if reader.has_record("data.pkl"):
        data = reader.get_record("data.pkl")
        check_torch_pickle(data, lambda key: int(reader.get_record_size(f"data/{key}")))
    return reader


def is_stored_as_it_is(reader: Any, file: io.RawIOBase, name: str) -> bool:
    """Whether the bytes of a storage lie in the archive as they will be in this machine's memory."""
    native = sys.byteorder.encode()
    if reader.has_record("byteorder"):
        if reader.get_record("byteorder") != native:
            return False
    elif native != b"little" or torch.serialization.get_default_load_endianness() not in _LITTLE:
        return False
    file.seek(reader.get_record_header_offset(name) + 8)
    return file.read(2) == b"\0\0"  # the method: stored


_LITTLE = (None, torch.serialization.LoadEndianness.LITTLE)


class MemoryFile(io.RawIOBase):
    """A file over bytes in memory that copies none of them before they are read."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        super().__init__()
        self._view = memoryview(data).cast("B").toreadonly()
        self._position = 0

    @property
    def nbytes(self) -> int:
        return self._view.nbytes

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = max(0, offset + (0, self._position, self.nbytes)[whence])
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        stop = self.nbytes if size is None or size < 0 else self._position + size
        found = bytes(self._view[self._position : stop])
        self._position += len(found)
        return found

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")
        found = self._view[self._position : self._position + view.nbytes]
        view[: found.nbytes] = found
        self._position += found.nbytes
        return found.nbytes
