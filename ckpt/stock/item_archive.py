"""Check `torch.save` archives (zip files): each is what its directory says, and no larger.

Sizes and offsets are asked of torch's own parser, which will load the archive: a second parser could be shown something
else. Before torch 2.13 it does not tell sizes; then Python's parser does, of archives that end as torch lets them end.
"""

from __future__ import annotations

import itertools
import re
import sys
import zipfile
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

import torch

from ckpt.errors import FormatError
from ckpt.stock.item_files import ItemFile
from ckpt.stock.pickle_limits import Hash, check_torch_pickle
from ckpt.torch_private import archive_reader

_LOCAL_HEADER_BYTES = 30
_MAX_RECORDS = 1 << 20
_STORAGE = re.compile(r"data/[0-9]+")
_END_BYTES, _LOCATOR_BYTES, _END64_BYTES = 22, 20, 56
_TAIL_BYTES = _END64_BYTES + _LOCATOR_BYTES + _END_BYTES
_END, _LOCATOR, _END64 = b"PK\5\6", b"PK\6\7", b"PK\6\6"
_LITTLE = (None, torch.serialization.LoadEndianness.LITTLE)


def check_archive(
    file: ItemFile, made: Mapping[str, Hash] = MappingProxyType({}), filled: dict[str, type] | None = None
) -> Any:
    """Return torch's reader of `file`, an archive whose records together are no larger than it.

    `made`, `filled`: as for `check_torch_pickle`.

    Raises FormatError if records are compressed, share bytes, or have names that torch never gives;
    UnsafeContent if its pickle names what pickling itself would call, or asks for far more than is
    stored; and any error of torch's if it is not an archive.
    """
    reader = archive_reader(file)
    names = reader.get_all_records()
    if len(names) > _MAX_RECORDS:
        raise FormatError(f"an archive of {len(names)} records")
    size_of = sizes_of(reader, file)
    places = []
    for name in names:
        # Names are found whatever their case, so one record could be loaded under many other names.
        if name.startswith("data/") and not _STORAGE.fullmatch(name):
            raise FormatError(f"an archive with a record {name[:80]!r}")
        begin = reader.get_record_header_offset(name)
        places.append((begin, begin + _LOCAL_HEADER_BYTES + size_of(name)))
    # A compressed record that is larger than what is stored of it would reach into the next.
    places = [(0, 0), *sorted(places), (file.nbytes, file.nbytes)]
    if any(begin < stop for (_, stop), (begin, _) in itertools.pairwise(places)):
        raise FormatError("an archive whose records are compressed, or overlap")
    if reader.has_record("data.pkl"):
        data = reader.get_record("data.pkl")
        check_torch_pickle(data, lambda key: size_of(f"data/{key}"), made, {} if filled is None else filled)
    return reader


def is_stored_as_it_is(reader: Any, file: ItemFile, name: str) -> bool:
    """Tell whether the bytes of a storage are in the archive as they will be in this machine's memory."""
    native = sys.byteorder.encode()
    if reader.has_record("byteorder"):
        if reader.get_record("byteorder") != native:
            return False
    elif native != b"little" or torch.serialization.get_default_load_endianness() not in _LITTLE:
        return False
    file.seek(reader.get_record_header_offset(name) + 8)
    return file.read(2) == b"\0\0"  # the method: stored


def sizes_of(reader: Any, file: ItemFile) -> Callable[[str], int]:
    """Return how to ask for the size of a record of `reader`, torch's for `file`; before 2.13 it tells none.

    Raises FormatError for an archive whose directory is not where torch writes it.
    """
    if hasattr(reader, "get_record_size"):
        return cast("Callable[[str], int]", reader.get_record_size)
    _check_end(file)
    try:
        with zipfile.ZipFile(cast("Any", file)) as archive:
            entries = archive.infolist()
    except Exception as error:  # it raises many kinds
        raise FormatError(f"an archive that torch reads and Python does not: {error}") from error
    sizes = {each.header_offset: each.file_size for each in entries}
    # The end states how many entries torch's parser reads; Python's reads on to the end of the directory.
    count = len(reader.get_all_records())
    if not len(entries) == len(sizes) == count or not all(_is_plain(each, file) for each in entries):
        raise FormatError("an archive whose records are compressed, share bytes, or are more than it states")

    def size_of(name: str) -> int:
        offset = reader.get_record_header_offset(name)
        if offset not in sizes:
            raise FormatError(f"an archive with a record {name[:80]!r} that its directory does not name")
        return sizes[offset]

    return size_of


def _is_plain(entry: zipfile.ZipInfo, file: ItemFile) -> bool:
    """Tell whether a record is stored as it is, and gives its size once: in its place, or in one field for large sizes."""
    extra = entry.extra
    is_single = not extra or (extra[:2] == b"\1\0" and len(extra) == 4 + _number(extra, 2, 2))
    is_stored = entry.compress_type == zipfile.ZIP_STORED
    return is_single and is_stored and entry.compress_size == entry.file_size <= file.nbytes


def _check_end(file: ItemFile) -> None:
    """See that a second parser finds the directory that torch's has found: there is one, right before the end."""
    begin = max(0, file.nbytes - _TAIL_BYTES)
    file.seek(begin)
    tail = file.read(_TAIL_BYTES)
    end = tail[-_END_BYTES:]
    if len(tail) < _TAIL_BYTES or end[:4] != _END or end[-2:] != b"\0\0":
        raise FormatError("an archive that does not end with its directory")
    nbytes, offset, stop = _number(end, 12, 4), _number(end, 16, 4), file.nbytes - _END_BYTES
    if tail[_END64_BYTES:][:4] == _LOCATOR:
        if tail[:4] != _END64 or _number(tail, _END64_BYTES + 8, 8) != begin:
            raise FormatError("an archive with a second directory")
        nbytes, offset, stop = _number(tail, 40, 8), _number(tail, 48, 8), begin
    if offset + nbytes != stop:
        raise FormatError("an archive whose directory is not before its end")


def _number(data: bytes, offset: int, nbytes: int) -> int:
    return int.from_bytes(data[offset : offset + nbytes], "little")
