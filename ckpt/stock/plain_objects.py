"""Read objects of numbers, texts, lists and dicts, as most are, from a `torch.save` archive without torch."""

from __future__ import annotations

import io
import pickle
import zipfile
from typing import Any

from ckpt.errors import UnsafeContent
from ckpt.stock.inert_unpickler import scan

_LOCAL_HEADER_BYTES = 30
_DIRECTORY_ENTRY, _MAX_RECORDS = b"PK\1\2", 16
_PROTOCOL_2 = b"\x80\x02"
"""How the pickles begin that a load accepts."""


def plain_value(data: bytes | bytearray) -> Any:
    """Load an object. Raises an Exception of any kind for all but plain values: torch has to load it."""
    # `zipfile` lists any number of records, in ten times their bytes, before one can look at them.
    if data.count(_DIRECTORY_ENTRY) > _MAX_RECORDS:
        raise UnsafeContent("an archive of many records")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = [(each.filename.lower(), each) for each in archive.infolist()]
    # No storage is there, and no second record that torch could take for this one, whatever the case.
    (record,) = (each for name, each in records if name.rpartition("/")[2] == "data.pkl")
    if any("/data/" in name for name, _ in records):
        raise UnsafeContent("an archive with tensors")
    if record.compress_type != zipfile.ZIP_STORED or record.file_size != record.compress_size:
        raise UnsafeContent("a compressed archive")
    # `zipfile` would compare a checksum that torch can leave out.
    lengths = record.header_offset + _LOCAL_HEADER_BYTES - 4
    start = lengths + 4 + sum(data[lengths + at] << (8 * (at % 2)) for at in range(4))
    pickled = bytes(data[start : start + record.file_size])
    if not pickled.startswith(_PROTOCOL_2):
        raise UnsafeContent("a pickle of another protocol")
    scan(pickled)
    return _PlainUnpickler(io.BytesIO(pickled)).load()


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise UnsafeContent(f"a pickle that asks for {module[:80]}.{name[:80]}")
