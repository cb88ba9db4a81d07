"""Check `torch.save` archives (zip files): each is what its directory says, and no larger.

Sizes and offsets are asked of torch's own parser, which will load the archive: a second parser
could be shown something else.
"""

from __future__ import annotations

import itertools
import re
import sys
from typing import Any

import torch

from ckpt.errors import FormatError
from ckpt.stock.item_files import ItemFile
from ckpt.stock.pickle_limits import check_torch_pickle
from ckpt.torch_private import archive_reader

_LOCAL_HEADER_BYTES = 30
_MAX_RECORDS = 1 << 20
_STORAGE = re.compile(r"data/[0-9]+")
_LITTLE = (None, torch.serialization.LoadEndianness.LITTLE)


def check_archive(file: ItemFile) -> Any:
    """Return torch's reader of `file`, an archive whose records together are no larger than it.

    Raises FormatError if records are compressed, share bytes, or have names that torch never gives;
    UnsafeContent if its pickle names what pickling itself would call, or asks for far more than is
    stored; and any error of torch's if it is not an archive.
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
    # A compressed record that is larger than what is stored of it would reach into the next.
    places = [(0, 0), *sorted(places), (file.nbytes, file.nbytes)]
    if any(begin < stop for (_, stop), (begin, _) in itertools.pairwise(places)):
        raise FormatError("an archive whose records are compressed, or overlap")
    if reader.has_record("data.pkl"):
        data = reader.get_record("data.pkl")
        check_torch_pickle(data, lambda key: int(reader.get_record_size(f"data/{key}")))
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
